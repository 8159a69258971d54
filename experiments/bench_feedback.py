"""Measures what error feedback costs: a row-parallel product and its compressed sum, with and without it.

    python experiments/bench_feedback.py --out experiments/results/feedback

On several devices: the product alone, with the sum in kernels around NCCL's collectives after it, and with that sum
and its feedback. On one that plays four ranks: the same without the collectives, so that the difference is that of
everything but the link; feedback sends nothing. The product is mlp/down of a 7B model at tp 4.

Variants are measured in turn, many rounds of a few calls each.

output    OUT/README.md (hardware, commit, command, table), OUT/summary.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import runs
import timing
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import taco_jax
from taco_jax import Compression
from taco_jax.codec import CODECS
from taco_jax.collectives import all_reduce, to_varying
from taco_jax.collectives.transport import chunk_elements
from taco_jax.compression import dispatch
from taco_jax.config import cli

K, N, PLAYED = 4736, 3584, 4


def every_size(codec) -> Compression:
    return Compression(codec, link="nccl", min_bytes=0, chunks=1)


def main(arguments: Sequence[str]) -> None:
    parser = runs.parser(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--codecs", default="int4h,mxfp4,int6h,int8h", help="names of codecs")
    parser.add_argument("--rows", default="512,2048,8192", help="tokens of a message")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--calls", type=int, default=8, help="calls of a variant in a round")
    parser.add_argument("--devices", default=None, help="cpu:4 emulates four devices")
    parser.add_argument("--commit", default=None, help="commit to name where there is no git")
    args = parser.parse_args(arguments)
    codecs = runs.codecs(args.codecs, pairs=False, exact=False)
    rows = runs.numbers("--rows", args.rows, 1)
    for key in ("rounds", "calls"):
        runs.require(getattr(args, key) >= 1, f"--{key}", getattr(args, key), "must be at least 1")
    runs.folder("--out", args.out)
    cli.select_devices(args.devices)
    devices = cli.devices(args.devices)
    results: dict[str, dict] = {}
    for count in rows:
        results[str(count)] = timing.in_turn(
            variants(codecs, len(devices)), operands(count, devices), rounds=args.rounds, calls=args.calls
        )
        alone = results[str(count)]["product"]["us"]
        for variant, r in results[str(count)].items():
            print(f"{count:6} rows {variant:24} {r['us']:8.1f} us, {r['us'] - alone:+8.1f}", flush=True)
        write(args, len(devices), results)


def mesh(devices: int):
    return jax.make_mesh((devices,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))


def operands(rows: int, devices: list) -> tuple[jax.Array, ...]:
    """x [ranks, rows, K], w [ranks, K, N] and the error that comes in [ranks, rows, N], bfloat16."""
    where = NamedSharding(mesh(len(devices)), P("tp"))
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (rows, K), (K, N), (rows, N)
    draw = lambda key, shape: jax.random.normal(key, (len(devices), *shape), jnp.bfloat16)
    return tuple(jax.jit(draw, static_argnums=1, out_shardings=where)(key, s) for key, s in zip(keys, shapes))


def variants(codecs: Sequence[str], ranks: int) -> dict[str, Callable]:
    """{name: program of x, w and the error}"""
    functions = {"product": lambda x, w, error: x @ w}
    for codec in codecs:
        both = (played, played_with_feedback) if ranks == 1 else (summed, summed_with_feedback)
        for name, function in zip((f"{codec} sum", f"{codec} sum, feedback"), both):
            functions[name] = lambda x, w, error, f=function, c=codec: f(CODECS[c], x, w, error)
    own = lambda f: lambda *xs: jax.tree.map(lambda y: to_varying(y, "tp")[None], f(*(x[0] for x in xs)))
    mapped = lambda f: jax.shard_map(own(f), mesh=mesh(ranks), in_specs=P("tp"), out_specs=P("tp"))
    return {name: jax.jit(mapped(f)) for name, f in functions.items()}


def summed(codec, x, w, error):
    return taco_jax.psum(x @ w, "tp", compression=every_size(codec))


def summed_with_feedback(codec, x, w, error):
    return taco_jax.psum_with_feedback(x @ w, "tp", error, compression=every_size(codec))


def played(codec, x, w, error):
    """A rank's kernels in two-shot among PLAYED ranks that all send what this one does."""
    return _hops(codec, (x @ w).reshape(-1))[0]


def played_with_feedback(codec, x, w, error):
    x_S, rank = (x @ w + error).reshape(-1), jnp.int32(1)
    y_S, share, lost, of_sum = _hops(
        codec, x_S, dispatch.encode_with_residual, dispatch.reduce_encode_with_residual
    )  # fmt: skip
    return y_S, all_reduce.join_residuals([share], lost, (rank, of_sum))


def _hops(codec, x_S, encode=dispatch.encode, reduce_encode=dispatch.reduce_encode):
    share = dispatch.Geometry(x_S.size, PLAYED, chunk_elements(codec, x_S.size, PLAYED))
    wires, _, *lost = encode(codec, share, x_S)
    wire, _, *of_sum = reduce_encode(codec, share, wires, x_S, jnp.int32(1))
    gathered = jnp.broadcast_to(wire, (PLAYED, *wire.shape))
    return dispatch.decode_chunks(codec, [share], [gathered], x_S.dtype), share, lost, of_sum


def write(args, ranks: int, results: dict) -> None:
    where = f"one device that plays {PLAYED} ranks" if ranks == 1 else f"{ranks} devices"
    lines = [
        *runs.header(f"Compressed sums with error feedback, {where}", args.commit),
        f"x [rows, {K}] @ w [{K}, {N}], bfloat16, and the sum of its result. Microseconds (and how many more than the "
        f"product alone), medians of {args.rounds} rounds, variants in turn.",
        "",
        *timing.beside_product("rows", results),
    ]
    (args.out / "README.md").write_text("\n".join(lines) + "\n")
    (args.out / "summary.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(cli.run(main))
