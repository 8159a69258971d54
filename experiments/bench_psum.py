"""Compressed psum through NCCL against jax.lax.psum of bf16, over sizes, in turn on the same devices.

    NCCL_P2P_DISABLE=1 python experiments/bench_psum.py --out experiments/results/psum_host

Each time is the median over repeats of programs that are queued one after the other, so that launching them costs
nothing. A program is a chain of psums: each takes the result of the one before, as a layer does. Baseline and codecs
are measured in turn.

output    OUT/README.md (hardware, link, commit, command, table), OUT/summary.json, OUT/psum.png
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import runs
import timing
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import taco_jax
from taco_jax import Compression
from taco_jax.compression.compression import EXCHANGES, MAX_CHUNKS
from taco_jax.config import cli

CHAIN, PROGRAMS = 4, 6


def program(mesh, codec: str, chunks: int, exchange: str):
    """x [ranks, elements] -> CHAIN dependent psums of every rank's row."""

    compression = Compression(codec, chunks=chunks, exchange=exchange, link="nccl", min_bytes=0)

    def body(x):
        for _ in range(CHAIN):
            y = taco_jax.psum(x, "tp", compression=compression)
            x = lax.pcast(y, "tp", to="varying")
        return x

    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P("tp")))


def link() -> str:
    if os.environ.get("NCCL_SHM_DISABLE") == "1":
        return "sockets (NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1)"
    return "host memory (NCCL_P2P_DISABLE=1)" if os.environ.get("NCCL_P2P_DISABLE") == "1" else "as the machine is"


def parse(codecs: str) -> dict[str, tuple[str, int, str]]:
    """--codecs as {as given: (codec, chunks, exchange)}."""
    variants = {}
    for text in codecs.split(","):
        name, chunks, exchange, *more = [*text.split(":"), *("1", "auto")[text.count(":") :]]
        runs.codecs(name, pairs=False, exact=False)
        good = not more and chunks.isdecimal() and 1 <= int(chunks) <= MAX_CHUNKS
        runs.require(good, "--codecs", repr(text), f"must be name:chunks:exchange with 1 to {MAX_CHUNKS} chunks")
        runs.choices("--codecs (exchange)", exchange, EXCHANGES)
        variants[text] = (name, int(chunks), exchange)
    return variants


def main(arguments: Sequence[str]) -> None:
    parser = cli.Parser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--codecs", default="taco,int6h,int4h", help="name or name:chunks or name:chunks:exchange")
    parser.add_argument("--megaelements", default="1,4,16,64,128")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--commit", default=None, help="commit to name where there is no git")
    args = parser.parse_args(arguments)
    cli.select_devices(None)
    variants = {"none": ("none", 1, "auto")} | parse(args.codecs)
    sizes = runs.numbers("--megaelements", args.megaelements, 1)
    runs.require(args.repeats >= 1, "--repeats", args.repeats, "must be at least 1")
    ranks = len(jax.devices())
    runs.require(ranks > 1, "devices", ranks, "a sum needs at least 2")
    runs.folder("--out", args.out)
    mesh = jax.make_mesh((ranks,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    results: dict[str, dict] = {}
    for mega in sizes:
        sharding = NamedSharding(mesh, P("tp"))
        draw = functools.partial(jax.random.normal, shape=(ranks, mega << 20))
        x = jax.jit(lambda key, draw=draw: draw(key).astype(jnp.bfloat16), out_shardings=sharding)(jax.random.key(0))
        functions, errors = {}, {}
        for name, variant in variants.items():
            functions[name] = program(mesh, *variant)
            y = jax.block_until_ready(functions[name](x))
            errors[name] = np.asarray(y.addressable_shards[0].data[0, : 1 << 20], np.float32)
        reference = errors["none"]
        error = {n: float(np.linalg.norm(e - reference) / np.linalg.norm(reference)) for n, e in errors.items()}
        times: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(3):
            for name, function in functions.items():
                times[name].append(timing.seconds(function, x, calls=CHAIN, programs=PROGRAMS, repeats=args.repeats))
        medians = {name: statistics.median(t) for name, t in times.items()}
        results[str(mega)] = {
            name: {"us": 1e6 * t, "speedup": medians["none"] / t, "relative_error": error[name]}
            for name, t in medians.items()
        }
        for name, r in results[str(mega)].items():
            print(
                f"{mega:5}M {name:20} {r['us']:9.1f} us {r['speedup']:.2f}x error {r['relative_error']:.4f}", flush=True
            )
        del x, functions
        write(args, ranks, results)


def write(args, ranks: int, results: dict) -> None:
    names = list(next(iter(results.values())))
    lines = [
        *runs.header(f"Compressed psum over {ranks} GPUs", args.commit),
        f"link: {link()}. Speed-up against `none`, jax.lax.psum of bf16; relative error after {CHAIN} psums in a row.",
        "",
        "| elements | " + " | ".join(f"{n} us" for n in names) + " | " + " | ".join(f"{n}" for n in names[1:]) + " |",
        "|---" * (2 * len(names)) + "|",
    ]
    for mega, row in results.items():
        times = " | ".join(f"{row[n]['us']:.0f}" for n in names)
        ratios = " | ".join(f"{row[n]['speedup']:.2f}x ({row[n]['relative_error']:.4f})" for n in names[1:])
        lines.append(f"| {mega}M | {times} | {ratios} |")
    (args.out / "README.md").write_text("\n".join(lines) + "\n")
    (args.out / "summary.json").write_text(json.dumps(results, indent=1) + "\n")
    plot(results, args.out / "psum.png")


def plot(results: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 4))
    sizes = [int(m) for m in results]
    for name in list(next(iter(results.values())))[1:]:
        axis.plot(sizes, [results[str(m)][name]["speedup"] for m in sizes], marker="o", label=name)
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("million elements (2^20) of bf16")
    axis.set_ylabel("speed-up over jax.lax.psum")
    axis.set_title(link())
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(cli.run(main))
