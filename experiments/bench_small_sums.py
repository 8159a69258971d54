"""Layers whose messages are small: as tuned, always compressed, and exact, in turn.

    python experiments/bench_small_sums.py --out experiments/results/small_sums
    NCCL_P2P_DISABLE=1 python experiments/bench_small_sums.py --out experiments/results/small_sums_host

What is timed is the gradient of LAYERS MLP layers in a scan: a normalisation, a column-parallel product, a row-parallel
one and the residual. So messages go in both directions beside products: all-reduces, or with `--sequence` gathers and
scatters along the sequence. `CODEC` leaves the decision to the tuned file (`TACO_JAX_TUNED`, or what is shipped for
these GPUs), `CODEC:all` compresses every message. Each variant takes its turn, many rounds of a few calls. Where a
codec's program is the exact one, to the letter, it is not run twice.

output    OUT/README.md (hardware, commit, command, table), OUT/summary.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import runs
import timing
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from taco_jax import Compression
from taco_jax import tensor_parallel as tp
from taco_jax.collectives import comm_log
from taco_jax.compression import tuned
from taco_jax.config import cli

LAYERS = 16
NOISE = 0.01  # of a layer: by less than this no variant is slower


def main(arguments: Sequence[str]) -> None:
    parser = cli.Parser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--codecs", default="int8h,int4h", help="name, as tuned, or name:all")
    parser.add_argument("--kibibytes", default="256,384,512,1024,1536,2048,3072,4096", help="of a message in bf16")
    parser.add_argument("--width", type=int, default=2048, help="of the layers")
    parser.add_argument("--sequence", action="store_true", help="activations are cut along the sequence")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--calls", type=int, default=4, help="calls of a variant in a round")
    parser.add_argument("--commit", default=None, help="commit to name where there is no git")
    args = parser.parse_args(arguments)
    cli.select_devices(None)
    variants = {"none": Compression("none")} | {text: compression(text) for text in args.codecs.split(",")}
    ranks = len(jax.devices())
    runs.require(ranks > 1, "devices", ranks, "a sum needs at least 2")
    runs.require(args.width % 512 == 0 < args.width, "--width", args.width, "must be a multiple of 512")
    least = 2 * args.width * ranks >> 10
    sizes = runs.numbers("--kibibytes", args.kibibytes, least)
    runs.require(all(n % least == 0 for n in sizes), "--kibibytes", args.kibibytes, f"must be multiples of {least}")
    for key in ("rounds", "calls"):
        runs.require(getattr(args, key) >= 1, f"--{key}", getattr(args, key), "must be at least 1")
    runs.folder("--out", args.out)
    mesh = jax.make_mesh((ranks,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    results: dict[str, dict] = {}
    for kibibytes in sizes:
        results[str(kibibytes)] = measure(args, mesh, variants, kibibytes << 10)
        for name, r in results[str(kibibytes)].items():
            print(
                f"{kibibytes:6} KiB {name:12} {r['us']:9.1f} us a layer, {r['speedup']:.3f}x  {r['messages']}",
                flush=True,
            )
        write(args, ranks, results)


def compression(text: str) -> Compression:
    name, _, every = text.partition(":")
    runs.codecs(name, pairs=False, exact=False)
    runs.require(every in ("", "all"), "--codecs", repr(text), "must be name or name:all")
    return Compression(name, min_bytes=0 if every else None)


def step(mesh, sequence: bool, how: Compression):
    """jit of (x [ranks, T, D], up [ranks, D, F], down [ranks, F, D]) -> gradients of the weights, of LAYERS layers.

    With `sequence` a rank's x is its T / ranks tokens, which it takes out of all.
    """
    how = None if how.is_exact else how

    def layer(up, down, x):
        z = (x * lax.rsqrt(jnp.square(x.astype(jnp.float32)).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)
        dim = 0 if sequence else None
        h = tp.column_dense(z, up, axis="tp", compression=how, sequence_dim=dim, site="up")
        return x + tp.row_dense(jax.nn.silu(h), down, axis="tp", compression=how, sequence_dim=dim, site="down")

    def loss(weights, x):
        body = lambda x, _: (layer(*weights, x), None)
        return lax.scan(body, x, None, length=LAYERS)[0].astype(jnp.float32).mean()

    def local(x_1TD, up, down):
        x_TD = x_1TD[0]
        if sequence:
            tokens = len(x_TD) // mesh.size
            x_TD = lax.dynamic_slice_in_dim(x_TD, lax.axis_index("tp") * tokens, tokens)
        else:
            x_TD = lax.pmax(x_TD, "tp")  # the same on every rank
        return jax.tree.map(lambda g: g[None], jax.grad(loss)((up[0], down[0]), x_TD))

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("tp"), out_specs=P("tp")))


def operands(mesh, nbytes: int, width: int):
    """x, up and down of `step`."""
    ranks, keys, inner = mesh.size, jax.random.split(jax.random.key(0), 3), 4 * width // mesh.size
    shapes = (ranks, nbytes // 2 // width, width), (ranks, width, inner), (ranks, inner, width)
    scales = (1.0, width**-0.5, (4 * width) ** -0.5)
    draw = lambda key, shape, scale: (scale * jax.random.normal(key, shape)).astype(jnp.bfloat16)
    make = lambda keys: tuple(draw(*each) for each in zip(keys, shapes, scales))
    return jax.jit(make, out_shardings=NamedSharding(mesh, P("tp")))(keys)


def measure(args, mesh, variants: dict[str, Compression], nbytes: int) -> dict[str, dict]:
    arguments, texts, messages = operands(mesh, nbytes, args.width), {}, {}
    lowered = {}
    for name, how in variants.items():
        with comm_log.record() as table:
            lowered[name] = step(mesh, args.sequence, how).lower(*arguments)
        texts[name] = lowered[name].as_text()
        messages[name] = said(table)
    own = {name: t for name, t in lowered.items() if name == "none" or texts[name] != texts["none"]}
    with ThreadPoolExecutor(8) as threads:
        functions = dict(zip(own, threads.map(lambda program: program.compile(), own.values())))
    times = timing.in_turn(functions, arguments, rounds=args.rounds, calls=args.calls)
    results = {}
    for name in variants:
        r = {key: value / LAYERS for key, value in times[name if name in own else "none"].items()}
        exact = times["none"]["us"] / LAYERS
        results[name] = r | {"speedup": exact / r["us"], "messages": messages[name], "exact_program": name not in own,
                             "slower": bool(r["us"] > (1 + NOISE) * exact)}  # fmt: skip
    return results


def said(table) -> dict[str, str]:
    """{operation, direction: codec and how} of a layer's messages."""
    return {f"{row.op} {row.direction}": " ".join((row.codec, row.how[0])).strip() for row in table.rows()}


def write(args, ranks: int, results: dict) -> None:
    names = list(next(iter(results.values())))
    kind = jax.devices()[0].device_kind
    codecs = {name.partition(":")[0] for name in names} - {"none"}
    files = sorted({file.name for c in codecs if (file := tuned.origin(c, ranks, jax.devices()[0])) is not None})
    slower = [f"{kib} KiB {name}" for kib, row in results.items() for name, r in row.items()
              if r["slower"] and not name.endswith(":all")]  # fmt: skip
    found = "gathers and scatters along the sequence" if args.sequence else "all-reduces, forward and backward"
    head = [*(f"{n}, us" for n in names), *(f"{n}: times as fast" for n in names[1:])]
    lines = [
        *runs.header(f"Small messages in layers over {ranks} GPUs", args.commit),
        f"link: {tuned.link_label()}; tuned values: {', '.join(files) or 'none, the defaults'} for {kind}. Messages: "
        f"{found}. Microseconds of one of {LAYERS} layers of width {args.width}, its gradient, medians of "
        f"{args.rounds} rounds in turn; (e): the exact program.",
        "",
        f"| KiB | {' | '.join(head)} |",
        "|---" * (1 + len(head)) + "|",
    ]
    for kib, row in results.items():
        cells = [f"{row[n]['us']:.1f}" for n in names]
        cells += [f"{row[n]['speedup']:.3f}x{' (e)' if row[n]['exact_program'] else ''}" for n in names[1:]]
        lines.append(f"| {kib} | " + " | ".join(cells) + " |")
    lines += ["", f"As tuned, slower than exact by more than {NOISE:.0%}: {', '.join(slower) or 'nothing'}."]
    (args.out / "README.md").write_text("\n".join(lines) + "\n")
    (args.out / "summary.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(cli.run(main))
