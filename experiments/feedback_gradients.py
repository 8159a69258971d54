"""Errors of four bits in a pretrained model's gradients, with feedback forward, backward and in both directions.

    python experiments/feedback_gradients.py --model SmolLM2-135M-Instruct.Q4_1.gguf --text val.jsonl.xz \
        --out experiments/results/feedback_gradients

--text as in bench_perplexity.py: one window of --context tokens of each of the --sources. The gradient of their mean
loss with each of ROWS is compared with the exact one, computed in the same way: the relative error
||g - exact|| / ||exact|| and the slope <g, exact> / <exact, exact>, of all parameters and of each leaf. Rows are named
as in accuracy.py; parts of the method by themselves are in VARIANTS. What OUT has is kept.

output     OUT/README.md (hardware, commit, command, table), OUT/summary.json
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import accuracy
import bench_perplexity
import runs

from taco_jax.codec import CODECS
from taco_jax.compression.compression import Compression, Plan
from taco_jax.config import cli

ROWS = ("int8h", "int6h", "int4h", "int4h_fed:int4h", "int4h_fed:int4h_fed", "int4h_fed:int6h", "int4h_fed:none",
        "none:int4h", "none:int4h_fed", "none:int6h")  # fmt: skip
VARIANTS = {
    "none:int4h_moved": "as `none:int4h_fed`, gradients sent behind the normalisation, but errors are dropped",
    "none:int4h_fed_layers": "as `none:int4h_fed`, but the head's sum is as without",
    "none:int4h_fed_delivered": "as `none:int4h_fed`, and what the last sum lost is added exactly at the embedding",
}
HEAD = "| row | error of the gradient | slope | embedding | norms | attention | mlp | loss |"
GROUPS = {"embedding": ("embed", "head"), "norms": ("norm",), "attention": ("/attn/",), "mlp": ("/mlp/",)}


def compressions(row: str) -> tuple[Compression, Compression]:
    """(the compression of all sites but the head, the head's) of a row or variant."""
    of = row if row not in VARIANTS else "none:int4h_fed"
    forward, backward, fed, fed_backward = accuracy.parts(of)
    options = {"backward": backward, "min_bytes": 0, "error_feedback": fed and forward != "none"}
    every = Compression(forward, backward_error_feedback=fed_backward, **options)
    alone = dataclasses.replace(every, backward_error_feedback=False)
    return every, alone if row.endswith("_layers") else every


@contextlib.contextmanager
def variant(row: str) -> Iterator[None]:
    """Traces, inside of it, what VARIANTS has for the row, if it is one of them."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    from taco_jax.collectives import to_varying, vjp
    from taco_jax.models import decoder

    def without_errors(op, message, ct, error, exponent, key):
        return with_errors(op, message, ct, jnp.zeros_like(error), exponent, key)

    def delivered(x_BLD, par, *sites):
        """The stream whose gradient gets what the last sum lost, in one exact message."""

        @jax.custom_vjp
        def begin(x_BLD, carrier_BLD):
            return x_BLD, carrier_BLD

        def backward(_, cts):
            return cts[0] + lax.psum(cts[1], par.axis), to_varying(jnp.zeros_like(cts[0]), par.axis)

        begin.defvjp(lambda *operands: (operands, None), backward)
        stream = init_stream(x_BLD, par, *sites)
        x_BLD, carrier_BLD = begin(stream.x_BLD, stream.carrier_BLD)
        return stream._replace(x_BLD=x_BLD, carrier_BLD=carrier_BLD)

    with_errors, init_stream = vjp._sum_with_feedback, decoder.init_stream
    if row.endswith("_moved"):
        vjp._sum_with_feedback = without_errors
    if row.endswith("_delivered"):
        decoder.init_stream = delivered
    try:
        yield
    finally:
        vjp._sum_with_feedback, decoder.init_stream = with_errors, init_stream


def gradient(config: Any, mesh: Any, row: str | None, remat: str) -> Callable:
    """jitted (params, tokens int32[B, L + 1]) -> (mean loss, gradients); row None is exact."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    from taco_jax.models import decoder
    from taco_jax.models.run_config import Parallel

    specs, sites = decoder.param_specs(config, mesh.shape["tp"]), decoder.site_names(config, mesh.shape["tp"])
    plan = {}
    if row is not None:
        every, head = compressions(row)
        plan = Plan({"head": head}, every).resolve(sites)
    par = Parallel(plan=plan, remat=remat, dtype=jnp.float32, precision="highest")

    def step(params, tokens_BL):
        batch = tokens_BL[:, :-1], tokens_BL[:, 1:], jnp.ones(tokens_BL[:, 1:].shape)

        def loss(params):
            nll, count = decoder.loss(params, *batch, config, par, {})
            return nll / count

        return jax.value_and_grad(loss)(params)

    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(specs, P()), out_specs=(P(), specs)))


def compare(got: dict, exact: dict) -> dict[str, Any]:
    """Relative errors and the slope of gradients by path, of all and of each leaf and group of leaves."""
    import numpy as np

    square = lambda a: float(np.vdot(a, a))
    sums = {p: (square(got[p] - exact[p]), square(exact[p]), float(np.vdot(got[p], exact[p]))) for p in exact}

    def of(paths):
        lost, whole, product = (sum(sums[p][i] for p in paths) for i in range(3))
        return {"error": (lost / whole) ** 0.5, "slope": product / whole}

    there = [p for p in exact if sums[p][1]]
    group = {name: [p for p in there if any(part in p for part in parts)] for name, parts in GROUPS.items()}
    group["attention"] = [p for p in group["attention"] if "norm" not in p]
    group["embedding"] = [p for p in group["embedding"] if "norm" not in p]
    return of(exact) | {"groups": {g: of(paths) for g, paths in group.items() if paths}} | {
        "leaves": {p: of([p]) for p in there}
    }  # fmt: skip


def table(results: dict[str, dict]) -> list[str]:
    lines = [HEAD, "|---" * 8 + "|"]
    for row, r in results.items():
        groups = [f"{r['groups'][g]['error']:.1%}" for g in GROUPS]
        lines.append(f"| {row} | {r['error']:.2%} | {r['slope']:.4f} | {' | '.join(groups)} | {r['loss']:+.2%} |")
    return lines


def report(out: Path, results: dict[str, dict], args) -> None:
    notes = [f"* `{name}`: {what}." for name, what in VARIANTS.items() if name in results]
    about = (
        f"{args.sources} windows of {args.context} tokens at tp {args.tp}, float32. Errors are relative to the exact "
        "gradient; a slope of 1 is no bias. The last column is the change of the loss."
    )
    lines = [*runs.header("Errors of gradients with four bits, and feedback in both directions", args.commit), about]
    (out / "README.md").write_text("\n".join([*lines, "", *table(results), "", *notes]) + "\n")
    (out / "summary.json").write_text(json.dumps(results, indent=1) + "\n")


def main(arguments: Sequence[str]) -> int:
    parser = runs.parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", default=",".join([*ROWS, *VARIANTS]))
    parser.add_argument("--tp", type=int, default=3)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--sources", type=int, default=4)
    parser.add_argument("--remat", default="full")
    parser.add_argument("--devices", default="cpu:3")
    parser.add_argument("--commit", default=None, help="commit to name where there is no git")
    args = parser.parse_args(arguments)
    rows = args.rows.split(",")
    for row in rows:
        codecs = ("none",) if row in VARIANTS else accuracy.parts(row)[:2]
        for codec in codecs:
            runs.choices("--rows", codec, [*CODECS, *VARIANTS])
    checkpoint, mesh = bench_perplexity.opened(args)
    import jax
    import numpy as np

    from taco_jax.inference.loading import load_params

    ids = bench_perplexity.windows(args.text, args.sources, args.context + 1, checkpoint.tokenizer.encode)
    tokens = np.asarray(ids[: args.sources * (args.context + 1)], np.int32).reshape(args.sources, -1)
    params = load_params(checkpoint, mesh, "float32")

    def run(row):
        with variant(row or ""):
            loss, grads = gradient(checkpoint.config, mesh, row, args.remat)(params, tokens)
        named = jax.tree_util.tree_leaves_with_path(grads)
        return float(loss), {"/".join(key.key for key in path): np.asarray(leaf) for path, leaf in named}

    kept = args.out / "summary.json"
    results = json.loads(kept.read_text()) if kept.is_file() else {}
    exact = None
    for row in rows:
        if row in results:
            continue
        exact = exact or run(None)
        loss, grads = run(row)
        results[row] = {"loss": loss / exact[0] - 1} | compare(grads, exact[1])
        print(table({row: results[row]})[-1], flush=True)
        report(args.out, {r: results[r] for r in [*rows, *results] if r in results}, args)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
