"""A row-parallel product and the sum of its result as one kernel, beside XLA's product and the sum after it.

    python experiments/bench_product.py --out experiments/results/product

On several GPUs: the product alone, with NCCL's sum of bf16 after it, with the codec's sum in one kernel over NVLink
after it, and both in one kernel. On one GPU that plays four ranks (`matmul_all_reduce_loopback`): the product alone
and the kernel, whose frames then go to its own memory, so that its time is that of everything but the link. Products
are those of a 7B model's layer at tp 4 with 16,384 tokens, where a sum follows.

Variants are measured in turn, many rounds of a few calls each: clocks fall by a fifth while a GPU multiplies, and so
does every time here.

output    OUT/README.md (hardware, commit, command, table), OUT/summary.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import runs
import timing
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import taco_jax
from pallas_kernels import matmul_all_reduce as kernels
from pallas_kernels.nvlink import hardware
from taco_jax import Compression
from taco_jax.codec import CODECS
from taco_jax.compression.dispatch import to_format
from taco_jax.config import cli

M, N, PLAYED = 16384, 3584, 4
# name: (inner dimension of a rank at tp 4, whether the weights are [N, K])
PRODUCTS = {
    "attn/out": (896, False),
    "mlp/down": (4736, False),
    "attn/in, backward": (1152, True),
    "mlp/in, backward": (9472, True),
}


def main(arguments: Sequence[str]) -> None:
    parser = cli.Parser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--codecs", default="taco,int4h", help="names of codecs")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--calls", type=int, default=4, help="calls of a variant in a round")
    parser.add_argument("--commit", default=None, help="commit to name where there is no git")
    args = parser.parse_args(arguments)
    cli.select_devices(None)
    codecs = runs.codecs(args.codecs, pairs=False, exact=False)
    runs.require(args.rounds >= 1, "--rounds", args.rounds, "must be at least 1")
    runs.require(args.calls >= 1, "--calls", args.calls, "must be at least 1")
    ranks = len(jax.devices())
    runs.require(ranks in (1, *kernels.RANKS), "devices", ranks, f"must be 1 or one of {kernels.RANKS}")
    for codec in codecs:
        fmt, asked = to_format(CODECS[codec]), {"dtype": "bfloat16", "ranks": PLAYED if ranks == 1 else ranks}
        reason = kernels.why_unsupported(fmt, M, 896, N, **asked)
        runs.require(reason is None, "--codecs", codec, reason)
    runs.folder("--out", args.out)
    results: dict[str, dict] = {}
    for name, (k, transposed) in PRODUCTS.items():
        results[name] = timing.in_turn(
            variants(codecs, ranks, transposed), operands(ranks, k, transposed), rounds=args.rounds, calls=args.calls
        )
        alone = results[name]["product"]["us"]
        for variant, r in results[name].items():
            print(f"{name:18} {variant:24} {r['us']:8.1f} us, {r['us'] - alone:+8.1f}", flush=True)
        write(args, ranks, results)


def operands(ranks: int, k: int, transposed: bool) -> tuple[jax.Array, jax.Array]:
    """x [ranks, M, K] and w, on one GPU with rows alike where the kernel wants them so."""
    keys = jax.random.split(jax.random.key(0))
    shape = (ranks, N, k) if transposed else (ranks, k, N)
    if ranks == 1:
        x = jax.random.normal(keys[0], (1, M // 256, 1, 64, k), jnp.bfloat16)
        x = jnp.broadcast_to(x, (1, M // 256, 4, 64, k)).reshape(1, M, k)
        return x, jax.random.normal(keys[1], shape, jnp.bfloat16)
    where = NamedSharding(mesh(), P("tp"))
    draw = lambda key, dims: jax.random.normal(key, dims, jnp.bfloat16)
    return tuple(
        jax.jit(draw, static_argnums=1, out_shardings=where)(key, dims)
        for key, dims in zip(keys, ((ranks, M, k), shape))
    )


def mesh():
    return jax.make_mesh((len(jax.devices()),), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))


def variants(codecs: Sequence[str], ranks: int, transposed: bool) -> dict:
    """{name: function of x [ranks, M, K] and w}"""
    contract = (((1,), (1 if transposed else 0,)), ((), ()))
    alone = lambda x, w: lax.dot_general(x, w, contract)

    def ours(codec):
        fmt, options = to_format(CODECS[codec]), {"transposed": transposed}
        if ranks == 1:
            return lambda x, w: kernels.matmul_all_reduce_loopback(fmt, x, w, PLAYED, **options)[0]
        return lambda x, w: kernels.matmul_all_reduce(fmt, x, w, "tp", **options)[0]

    def after(codec, link):
        return lambda x, w: taco_jax.psum(
            alone(x, w), "tp", compression=Compression(codec, link=link, min_bytes=0, chunks=1)
        )

    functions = {"product": alone}
    if ranks > 1:
        functions["product, NCCL's sum"] = lambda x, w: lax.psum(alone(x, w), "tp")
        functions |= {f"product, {codec} sum": after(codec, "nvlink") for codec in codecs}
    functions |= {f"one kernel, {codec}": ours(codec) for codec in codecs}
    return {name: on_all(f, ranks) for name, f in functions.items()}


def on_all(f, ranks: int):
    if ranks == 1:
        return jax.jit(lambda x, w: f(x[0], w[0]))
    own = lambda x, w: taco_jax.collectives.to_varying(f(x[0], w[0]), ("tp",))[None]
    return jax.jit(jax.shard_map(own, mesh=mesh(), in_specs=P("tp"), out_specs=P("tp")))


def write(args, ranks: int, results: dict) -> None:
    where = f"one GPU that plays {PLAYED} ranks" if ranks == 1 else f"{ranks} GPUs"
    linked = "its own memory" if ranks == 1 else hardware.missing(jax.devices()[0].device_kind) or "NVLink"
    lines = [
        *runs.header(f"Products and their sums in one kernel, {where}", args.commit),
        f"Link: {linked}. x [{M}, K] @ w [K, {N}], bfloat16. Microseconds (and how many more than the product alone), "
        f"medians of {args.rounds} rounds, variants in turn.",
        "",
        *timing.beside_product("product | K", {f"{name} | {PRODUCTS[name][0]}": row for name, row in results.items()}),
    ]
    (args.out / "README.md").write_text("\n".join(lines) + "\n")
    (args.out / "summary.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(cli.run(main))
