"""The codec's operations as kernels, beside a copy of the same card and the same codec in plain XLA.

    python experiments/bench_codec.py --out experiments/results/codec_kernels

Every row is one kernel: the bytes it must read and write (wire padding included, the own wire of a reduction not),
over the median time of several runs of many calls. The fastest of several copies, measured in the same process, is the
yardstick. Buffers are larger than the L2 cache and take turns, so nothing is read from there.

output    OUT/README.md (hardware, commit, command, table), OUT/summary.json, OUT/codec_kernels.png
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import runs
import timing

from pallas_kernels import Geometry
from taco_jax.codec import CODECS
from taco_jax.compression import dispatch
from taco_jax.config import cli

OPERATIONS = ("encode", "decode", "reduce")
RANKS = 4


def seconds(function, sets: list[tuple], programs: int = 8, repeats: int = 7) -> float:
    """Median time of one call. One program calls the function once on every set, so that starting it costs nothing."""
    program = jax.jit(lambda sets: [function(*arguments) for arguments in sets])
    jax.block_until_ready(program(sets))
    return timing.seconds(program, sets, calls=len(sets), programs=programs, repeats=repeats)


def copies(sets: list[tuple]) -> dict[str, float]:
    """GB/s, read plus written, of what moves an array of bf16 from one place to another."""
    candidates = {"negate (one XLA kernel)": lambda x: -x, "device to device (jnp copy)": jnp.copy}
    if dispatch.choose("taco", jax.devices()[0], "bfloat16")[0] == "mosaic":
        candidates["bulk copies (Mosaic kernel)"] = _bulk_copy
    moved = 2 * sets[0][0].nbytes
    return {name: moved / seconds(f, sets) / 1e9 for name, f in candidates.items()}


def _bulk_copy(x):
    """A kernel that only moves tiles through shared memory: what the codec's kernels do, without the codec."""
    from jax import lax
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    tile, stages, ctas = 8192, 4, 132
    n = x.size // tile

    def kernel(x_g, y_g, x_s, bars):
        cta = lax.axis_index("cta")
        steps = lax.div(n - cta + ctas - 1, jnp.int32(ctas))

        def load(k, slot):
            rows = pl.ds((cta + k * ctas) * 64, 64)
            plgpu.copy_gmem_to_smem(x_g.at[rows], x_s.at[slot], bars.at[slot])

        for s in range(stages // 2):
            pl.when(s < steps)(functools.partial(load, s, s))

        def body(k, carry):
            slot = lax.rem(k, jnp.int32(stages))
            plgpu.barrier_wait(bars.at[slot])
            plgpu.copy_smem_to_gmem(x_s.at[slot], y_g.at[pl.ds((cta + k * ctas) * 64, 64)])
            plgpu.wait_smem_to_gmem(stages // 2 - 1, wait_read_only=True)
            ahead = k + stages // 2
            pl.when(ahead < steps)(lambda: load(ahead, lax.rem(ahead, jnp.int32(stages))))
            return carry

        lax.fori_loop(0, steps, body, 0)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((n * 64, 128), x.dtype),
        scratch_types=[plgpu.SMEM((stages, 64, 128), x.dtype), plgpu.Barrier(num_barriers=stages)],
        grid=(ctas,),
        grid_names=("cta",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(x.reshape(-1, 128))


def measure(codec_name: str, implementation: str, sets, geometry: Geometry) -> dict[str, dict]:
    """{operation: {"us", "gb_s"}} of one codec."""
    codec, n = CODECS[codec_name], geometry.per_message
    exponent = jnp.int32(-4) if codec.scale == "ue5m3" else None
    wire = codec.wire_bytes(n)
    own = dict(backend=implementation)
    encode = lambda x: dispatch.encode(codec, geometry, x, exponent, **own)
    wires = [(jax.jit(encode)(x)[0],) for (x,) in sets]
    both = [(w, x) for (w,), (x,) in zip(wires, sets, strict=True)]
    x_bytes, itemsize = sets[0][0].nbytes, sets[0][0].dtype.itemsize
    programs = {
        "encode": (encode, sets, x_bytes + RANKS * wire),
        "decode": (
            lambda w: dispatch.decode(codec, geometry, w, jnp.bfloat16, exponent, **own), wires, x_bytes + RANKS * wire
        ),
        "reduce": (
            lambda w, x: dispatch.reduce_encode(codec, geometry, w, x, 1, exponent, **own),
            both, n * itemsize + (RANKS - 1) * wire + wire,
        ),
    }  # fmt: skip
    out = {}
    for operation in OPERATIONS:
        function, arguments, moved = programs[operation]
        t = seconds(function, arguments, programs=8 if implementation != "jnp" else 3)
        out[operation] = {"us": 1e6 * t, "gb_s": moved / t / 1e9}
    return out


def table(results: dict) -> str:
    lines = [
        "| codec | kernels | operation | us | GB/s | of the fastest copy | XLA us | XLA GB/s | kernel against XLA |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for codec, by_implementation in results.items():
        for name, operations in by_implementation.items():
            if name == "jnp":
                continue
            for operation, r in operations.items():
                line = f"| {codec} | {name} | {operation} | {r['us']:.1f} | {r['gb_s']:.0f} | {r['of_copy']:.3f} |"
                x = by_implementation.get("jnp", {}).get(operation)
                line += f" {x['us']:.1f} | {x['gb_s']:.0f} | {x['us'] / r['us']:.2f}x |" if x else " | | |"
                lines.append(line)
    return "\n".join(lines)


def plot(results: dict, fastest: float, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(OPERATIONS), figsize=(13, 4), sharey=True)
    for axis, operation in zip(axes, OPERATIONS, strict=True):
        series = {name for by in results.values() for name in by}
        for k, name in enumerate(sorted(series, key=lambda s: (s == "jnp", s))):
            values = [by.get(name, {}).get(operation, {}).get("gb_s", 0) for by in results.values()]
            label = "XLA" if name == "jnp" else name
            axis.bar([i + 0.28 * k for i in range(len(values))], values, 0.28, label=label)
        axis.axhline(fastest, color="black", linewidth=0.8, linestyle="--", label="fastest copy")
        axis.set_xticks(range(len(results)), list(results), rotation=60)
        axis.set_title(operation)
    axes[0].set_ylabel("GB/s read and written")
    axes[-1].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str]) -> None:
    parser = cli.Parser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--codecs", default=",".join(runs.WITH_KERNELS))
    parser.add_argument("--implementations", default="auto", help="mosaic,triton or auto: what the device takes")
    parser.add_argument("--elements", type=int, default=8192 * 132 * 16 * 16, help="bf16 elements of x")
    parser.add_argument("--no-xla", action="store_true", help="leave the XLA codec out")
    parser.add_argument("--commit", default=None, help="commit to name where there is no git")
    args = parser.parse_args(arguments)
    codecs = runs.codecs_with_kernels(args.codecs)
    implementations = runs.choices("--implementations", args.implementations, dispatch.BACKENDS)
    whole = args.elements > 0 and args.elements % (8192 * RANKS) == 0
    rule = f"must be a positive multiple of {8192 * RANKS}, whole tiles of {RANKS} messages"
    runs.require(whole, "--elements", args.elements, rule)
    runs.folder("--out", args.out)
    geometry = Geometry(args.elements, RANKS, args.elements // RANKS)
    make = jax.jit(lambda key: jax.random.normal(key, (args.elements,)).astype(jnp.bfloat16))
    sets = [(make(key),) for key in jax.random.split(jax.random.key(0), 3)]
    copied = copies(sets)
    fastest = max(copied.values())
    for name, rate in copied.items():
        print(f"{name:32} {rate:6.0f} GB/s", flush=True)
    results: dict[str, dict] = {}
    for codec in codecs:
        results[codec] = {}
        for name in [*implementations, *([] if args.no_xla else ["jnp"])]:
            if name == "auto":
                name = dispatch.choose(codec, jax.devices()[0], "bfloat16")[0]
            if name in results[codec]:
                continue
            try:
                measured = measure(codec, name, sets, geometry)
            except dispatch.KernelUnavailableError as error:
                print(f"{codec} {name}: {error}", flush=True)
                continue
            for operation, r in measured.items():
                r["of_copy"] = r["gb_s"] / fastest
                print(
                    f"{codec:8} {name:7} {operation:7} {r['us']:8.1f} us {r['gb_s']:6.0f} GB/s {r['of_copy']:.3f}",
                    flush=True,
                )
            results[codec][name] = measured
        for measured in results[codec].values():
            for operation, r in measured.items():
                if "jnp" in results[codec]:
                    r["against_xla"] = results[codec]["jnp"][operation]["us"] / r["us"]
        report = [
            *runs.header("Codec kernels", args.commit),
            f"x: {args.elements / 1e6:.1f}M elements of bf16 in {RANKS} messages; reductions over {RANKS} wires.",
            "",
            "| copy | GB/s |", "|---|---|", *(f"| {name} | {rate:.0f} |" for name, rate in copied.items()),
            "",
            table(results),
        ]  # fmt: skip
        runs.write(args.out, report, {"copies": copied, "codecs": results})
        plot(results, fastest, args.out / "codec_kernels.png")


if __name__ == "__main__":
    sys.exit(cli.run(main))
