"""Collectives over GPUs joined by NVLink: one kernel against jax.lax's of bf16 and separate kernels with NCCL.

    python experiments/bench_allreduce.py --out experiments/results/allreduce

Each time is the median over repeats of programs of dependent collectives, as many as take a few milliseconds, queued
one after the other so that launching them costs nothing; baseline and codecs are measured in turn. Elements are those
of the whole array: what is summed, scattered, or gathered. Bus GB/s count what bf16 must move of it, 2 (P-1)/P for a
sum and half of that for the others, whatever is sent: they are NCCL's bus bandwidth for `none`, and what NCCL would
need to be as fast for a codec. Below the crossover, `min_bytes` of a layer keeps jax.lax's own program.

From jax 0.11 on XLA sums up to 4 MiB over NVLink by kernels of its own (one-shot, and two-shot from 256 KiB on) where
NCCL did before. `--exact xla,nccl` measures both beside what jax.lax takes by itself, neither with NCCL's symmetric
buffers nor with multicast; `times as fast` then also counts against the fastest of them. `--profile` lists the kernels
that ran.

output    OUT/README.md (hardware, commit, command, table), OUT/summary.json, OUT/<operation>.png
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import kernel_times
import numpy as np
import runs
import timing
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import taco_jax
from pallas_kernels.nvlink import hardware
from taco_jax import Compression
from taco_jax.compression.compression import LINKS
from taco_jax.config import cli

CHAIN, PROGRAMS, ROUNDS = 4, 6, 3
# Calls of a program of small arrays: to start one takes a few hundred microseconds.
MOST_CALLS, MEGAELEMENTS = 64, 256
# What sums exactly, as XLA is told: its own kernels where they can, or NCCL always.
KERNELS_OF_XLA = "xla_gpu_experimental_use_collective_kernels"
EXACT = {"xla": {KERNELS_OF_XLA: "COLLECTIVE_KERNEL_ALL_REDUCE"}, "nccl": {KERNELS_OF_XLA: ""}}


def psum(x, ranks: int, compression: Compression):
    y = taco_jax.psum(x, "tp", compression=compression)
    return y, lax.pcast(y, "tp", to="varying")


# The others change their argument's shape: of the result one value goes into the next argument, in its place.
def psum_scatter(x, ranks: int, compression: Compression):
    y = taco_jax.psum_scatter(x.reshape(ranks, -1), "tp", compression=compression)
    return y, x.at[0].set(y[0])


def all_gather(x, ranks: int, compression: Compression):
    y = taco_jax.all_gather(x, "tp", compression=compression).reshape(-1)
    return y, x.at[0].set(y[0])


OPERATIONS = {f.__name__: f for f in (psum, psum_scatter, all_gather)}


def program(mesh, operation: str, calls: int, codec: str, link: str, algorithm: str, options: dict | None = None):
    """x [ranks, n] -> (the next argument, the last result) of that many dependent calls on every rank's row, CHAIN of
    them at a time in a loop. options: of XLA, for this program alone."""
    compression = Compression(codec, link=link, algorithm=algorithm, min_bytes=0, chunks=1)
    call = functools.partial(OPERATIONS[operation], ranks=mesh.size, compression=compression)

    def chain(x):
        for _ in range(CHAIN):
            y, x = call(x)
        return y, x

    def again(x):
        # Values of sums grow by the ranks with each, and must stay finite.
        return chain(x)[1] * mesh.size**-CHAIN if operation == "psum" else chain(x)[1]

    def body(x):
        y, x = chain(lax.fori_loop(1, calls // CHAIN, lambda _, x: again(x), x[0]))
        return x[None], y[None]

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))
    return jax.jit(mapped, compiler_options=options)


def parse(text: str) -> dict[str, tuple[str, str, str]]:
    """--codecs as {as given: (codec, link, algorithm)}."""
    variants = {}
    for given in text.split(","):
        name, link, algorithm, *more = [*given.split(":"), *("nvlink", "auto")[given.count(":") :]]
        runs.codecs(name, pairs=False, exact=False)
        runs.choices("--codecs (link)", link, LINKS)
        runs.choices("--codecs (algorithm)", algorithm, ("auto", "one_shot", "two_shot"))
        runs.require(not more, "--codecs", repr(given), "must be name:link:algorithm")
        variants[given] = (name, link, algorithm)
    return variants


def main(arguments: Sequence[str]) -> None:
    parser = cli.Parser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--operation", default="psum", help=", ".join(OPERATIONS))
    parser.add_argument("--codecs", default="taco,taco:nccl,int8h,int6h,int4h", help="name or name:link:algorithm")
    parser.add_argument("--kiloelements", default="128,512,1024,4096,16384,65536,262144")
    parser.add_argument("--exact", default="", help=f"exact sums beside none, by {' and by '.join(EXACT)}")
    parser.add_argument("--profile", action="store_true", help="list the kernels of each program")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--commit", default=None, help="commit to name where there is no git")
    args = parser.parse_args(arguments)
    cli.select_devices(None)
    (operation,) = runs.choices("--operation", args.operation, OPERATIONS)
    exact = ("none", "nccl", "auto")
    variants = {"none": exact}
    for name in runs.choices("--exact", args.exact, EXACT) if args.exact else ():
        variants[f"none, {name}"] = (*exact, EXACT[name])
    variants |= parse(args.codecs)
    sizes = runs.numbers("--kiloelements", args.kiloelements, 8)
    runs.require(args.repeats >= 1, "--repeats", args.repeats, "must be at least 1")
    devices = jax.devices()
    runs.require(len(devices) > 1, "devices", len(devices), "a collective needs at least 2")
    runs.folder("--out", args.out)
    mesh = jax.make_mesh((len(devices),), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    results: dict[str, dict] = {}
    for kilo in sizes:
        results[str(kilo)] = measure(
            mesh, operation, variants, elements=kilo << 10, repeats=args.repeats, profile=args.profile
        )
        for name, r in results[str(kilo)].items():
            print(
                f"{kilo / 1024:8.3f}M {name:16} {r['us']:9.1f} us {r['bus_gb_s']:6.0f} GB/s {r['speedup']:.2f}x "
                f"error {r['relative_error']:.4f}", flush=True,
            )  # fmt: skip
        write(args, len(devices), {k: results[k] for k in sorted(results, key=int)})


def measure(
    mesh, operation: str, variants: dict, *, elements: int, repeats: int, profile: bool = False
) -> dict[str, dict]:
    ranks = mesh.size
    given = elements // ranks if operation == "all_gather" else elements
    draw = functools.partial(jax.random.normal, shape=(ranks, given))
    sharding = NamedSharding(mesh, P("tp"))
    x = jax.jit(lambda key: draw(key).astype(jnp.bfloat16), out_shardings=sharding)(jax.random.key(0))
    calls = CHAIN * max(1, min(MOST_CALLS, (MEGAELEMENTS << 20) // elements) // CHAIN)
    functions, results = {}, {}
    for name, variant in variants.items():
        functions[name] = program(mesh, operation, calls, *variant)
        _, y = jax.block_until_ready(functions[name](x))
        results[name] = np.asarray(y.addressable_shards[0].data[0, : 1 << 20], np.float32)
    reference = results["none"]
    error = {n: float(np.linalg.norm(y - reference) / np.linalg.norm(reference)) for n, y in results.items()}
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(ROUNDS):
        for name, function in functions.items():
            times[name].append(timing.seconds(function, x, calls=calls, programs=PROGRAMS, repeats=repeats))
    medians = {name: statistics.median(t) for name, t in times.items()}
    best = min(t for name, t in medians.items() if variants[name][0] == "none")
    kernels = {name: ran(function, x, calls) if profile else {} for name, function in functions.items()}
    moved = (2 if operation == "psum" else 1) * (ranks - 1) / ranks * elements * 2
    return {
        name: {
            "us": 1e6 * t, "bus_gb_s": moved / t / 1e9, "speedup": medians["none"] / t, "relative_error": error[name],
            "speedup_against_best_exact": best / t, "kernels": kernels[name],
            "slowest_us": 1e6 * max(times[name]), "fastest_us": 1e6 * min(times[name]), "calls": calls,
        }
        for name, t in medians.items()
    }  # fmt: skip


def ran(function, x, calls: int) -> dict[str, list[float]]:
    """{kernel: [launches, microseconds] of a call} of the kernels that took longest; {} on devices without kernels."""
    found = kernel_times.traced(lambda: jax.block_until_ready(function(x)), calls)
    longest = [] if found is None else list(found.kernels.items())[:4]
    return {name[:120]: [round(launches, 3), round(1e3 * ms, 2)] for name, (launches, ms) in longest}


def write(args, ranks: int, results: dict) -> None:
    names = list(next(iter(results.values())))
    linked = hardware.missing(jax.devices()[0].device_kind) or "NVLink"
    lines = [
        *runs.header(f"{args.operation} over {ranks} GPUs", args.commit),
        f"link: {linked}. `none` is jax.lax.{args.operation} of bf16, as XLA sends it by itself; `name:nccl` separate "
        f"kernels with NCCL between them, the others one kernel. A program is of up to {MOST_CALLS} dependent calls; "
        "relative error of the last one's result.",
        "",
        "| elements | " + " | ".join(f"{n}, us (bus GB/s)" for n in names) + " | "
        + " | ".join(f"{n}: times as fast (error)" for n in names[1:]) + " |",
        "|---" * (2 * len(names)) + "|",
    ]  # fmt: skip
    for kilo, row in results.items():
        size = f"{int(kilo) / 1024:g}M" if int(kilo) >= 1024 else f"{kilo}K"
        times = " | ".join(f"{row[n]['us']:.0f} ({row[n]['bus_gb_s']:.0f})" for n in names)
        ratios = " | ".join(f"{row[n]['speedup']:.2f}x ({row[n]['relative_error']:.4f})" for n in names[1:])
        lines.append(f"| {size} | {times} | {ratios} |")
    if any(name.startswith("none, ") for name in names):
        lines += ["", "Times as fast as the fastest exact one:", "", f"| elements | {' | '.join(names)} |"]
        lines += ["|---" * (1 + len(names)) + "|"]
        for kilo, row in results.items():
            cells = " | ".join(f"{row[n]['speedup_against_best_exact']:.2f}x" for n in names)
            lines.append(f"| {int(kilo) / 1024:g}M | {cells} |")
    if args.profile:
        lines += ["", "Kernels of a call, launches and microseconds while it was traced:", ""]
        for kilo, row in results.items():
            for name in names:
                kernels = "; ".join(f"`{k}` {n:g} x, {us:g} us" for k, (n, us) in row[name]["kernels"].items())
                lines.append(f"* {int(kilo) / 1024:g}M, {name}: {kernels or 'none seen'}")
    (args.out / "README.md").write_text("\n".join(lines) + "\n")
    (args.out / "summary.json").write_text(json.dumps(results, indent=1) + "\n")
    plot(f"{args.operation} over {ranks} GPUs", results, args.out / f"{args.operation}.png")


def plot(title: str, results: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 4))
    sizes = [int(kilo) / 1024 for kilo in results]
    for name in list(next(iter(results.values())))[1:]:
        style = "--" if ":nccl" in name else "-"
        axis.plot(sizes, [row[name]["speedup"] for row in results.values()], style, marker="o", label=name)
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("million elements (2^20) of bf16")
    axis.set_ylabel("times as fast as NCCL's of bf16")
    axis.set_title(title)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(cli.run(main))
