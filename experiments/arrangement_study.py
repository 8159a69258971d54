"""Measures whether another order of a model's residual channels makes compressed sums lose less.

    python experiments/arrangement_study.py --model SmolLM2-135M-Instruct.Q4_1.gguf --text val.jsonl.xz \
        --learn enwiki.train.txt.xz manpages.train.txt.xz --out experiments/results/arrangement/smollm2

Orders (ORDERS) are learned from windows of the --learn texts, folded into the weights, and judged on
those of --text, which are bench_perplexity.py's. A codec sees every order on the same windows, paired token by token
with its own result in the stored order. `_feedback` as in bench_perplexity.py. The exact model is run in each order
too, to see that it stays the same. What OUT has is kept, so a table is made in as many goes as there is time for.

output     OUT/README.md (hardware, commit, command, tables), OUT/summary.json, OUT/arrangement.png
"""

from __future__ import annotations

import json
import lzma
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import bench_perplexity
import numpy as np
import runs

from taco_jax.calibration import arrangement
from taco_jax.codec import as_codec
from taco_jax.compression import plan_file
from taco_jax.compression.compression import Compression
from taco_jax.config import ConfigError, cli
from taco_jax.models.arrangement import fold

if TYPE_CHECKING:
    from taco_jax.inference.perplexity import Score

FEEDBACK = "_feedback"
CHUNK = 256  # tokens
CODECS = ("mxfp4_feedback", "int4h_feedback", "int4h,block=32_feedback", "int4h,rotation=none_feedback", "tah4",
          "mxfp4", "int4h", "taco")  # fmt: skip
ORDERS = {
    "stored": "as the model came",
    "random": "drawn, as are random_2 and random_3: how far apart orders are that know nothing",
    "random_2": "",
    "random_3": "",
    "sorted": "the largest first, by root mean square of what is sent",
    "clustered": "channels of more than three times the median's mean square first, the others as stored",
    "spread": "dealt out to the blocks in turn, the largest first: one large channel in each",
    "learned": "made for the least predicted cost, by exchanges of two channels (`arrangement.learn`)",
    "plan": "as `calibrate --arrange` wrote it into the plan of --plan: made for blocks of 32 and 128 alike",
}
HEAD = (
    "| codec | order | predicted cost | SNR (dB) attn/out | mlp/down | perplexity | standard error "
    "| against stored | standard error | divergence (nats) | against stored | standard error | same token |"
)


def by_size(sites: arrangement.Sites) -> np.ndarray:
    """Returns the channels, the largest first: by the root of their mean squares, each site's over its own mean."""
    squares_SD = sites.terms + sites.sums
    return np.argsort(-np.mean(squares_SD / squares_SD.mean(1, keepdims=True), 0), kind="stable")


def clustered(sites: arrangement.Sites, times: float = 3.0) -> np.ndarray:
    """Returns the channels with more than `times` the median's mean square first, the others as they are."""
    squares_SD = sites.terms + sites.sums
    mean_D = np.mean(squares_SD / squares_SD.mean(1, keepdims=True), 0)
    return np.argsort(mean_D <= times * np.median(mean_D), kind="stable")


def spread(sites: arrangement.Sites, block: int) -> np.ndarray:
    """Returns an order whose blocks get a channel in turn, the largest first: one that is large in each."""
    largest = by_size(sites)
    blocks = -(-len(largest) // block)
    dealt: list[list[int]] = [[] for _ in range(blocks)]
    room = [min(block, len(largest) - block * i) for i in range(blocks)]
    turn = 0
    for channel in largest:
        while len(dealt[turn % blocks]) == room[turn % blocks]:
            turn += 1
        dealt[turn % blocks].append(channel)
        turn += 1
    return np.concatenate(dealt)


def orders(
    sites: arrangement.Sites, block: int, fed: bool, seed: int, plan: Sequence[int] | None = None
) -> dict[str, np.ndarray]:
    """Returns the orders of ORDERS for codecs of these blocks, with or without error feedback; `plan` is given."""
    pairs = sites.pairs_fed if fed else sites.pairs
    d_model = len(pairs)
    drawn = [name for name in ORDERS if name.startswith("random")]
    found = {name: np.random.default_rng(seed + i).permutation(d_model) for i, name in enumerate(drawn)} | {
        "stored": np.arange(d_model),
        "sorted": by_size(sites),
        "clustered": clustered(sites),
        "spread": spread(sites, block),
    }
    if plan is not None:
        found["plan"] = np.asarray(plan)
    ends = [arrangement.learn(pairs, block, found[start]) for start in ("stored", "sorted")]
    return found | {"learned": min(ends, key=lambda order: arrangement.cost(order, pairs, block))}


def parts(name: str) -> tuple[str, bool]:
    """(codec, whether its errors are fed back) of a name in CODECS. Raises ConfigError."""
    codec = name.removesuffix(FEEDBACK)
    try:
        as_codec(codec, "--codecs")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return codec, name != codec


def learn_windows(paths: Sequence[Path], count: int, context: int, encode: Callable) -> np.ndarray:
    """int32[W, context + 1]: `count` windows of each text, evenly spread over it."""
    rows = []
    for path in paths:
        with (lzma.open if path.suffix == ".xz" else open)(path, "rt", encoding="utf-8") as file:
            text = file.read()
        for i in range(count):
            at = len(text) * (2 * i + 1) // (2 * count)
            ids = encode(text[at : at + 20 * context])[: context + 1]
            runs.require(len(ids) == context + 1, "--learn", path, f"has fewer than {context + 1} tokens at one place")
            rows.append(ids)
    return np.asarray(rows, np.int32)


class Scored(NamedTuple):
    """A `Score`, and what the exact model's distributions lose: kl float64[tokens], nats; 0 of the exact model."""

    score: Score
    kl: np.ndarray


class Windows:
    """The model, and windows of held-out text; `program(settings)` is compiled once for all orders."""

    def __init__(self, checkpoint: Any, mesh: Any, ids: list[int], context: int):
        from taco_jax.inference import perplexity

        self.config, self.mesh = checkpoint.config, mesh
        self.tokens, self.targets, self.real = perplexity.windows(ids, context)
        self.exact: list[np.ndarray] = []
        """The final normalisation's output of each window, of the exact model in the stored order."""

    def program(self, settings: Any) -> Callable:
        """Returns f(params, order) -> `Scored`, of parameters that are folded into this order."""
        import jax
        import jax.numpy as jnp
        from jax.sharding import PartitionSpec as P

        from taco_jax.inference import perplexity
        from taco_jax.models import decoder
        from taco_jax.models.params import param_specs

        config, layout = self.config, settings.layout(self.config, self.mesh.devices.flat[0], decoding=False)

        def run(params, tokens_BL, targets_BL, exact_BLD):
            x_BLD, power = perplexity.measured_stream(params, tokens_BL, config, layout)
            nll, best = decoder.head_score(params, x_BLD, targets_BL, config, layout.par)
            log_of = lambda x: jax.nn.log_softmax(decoder.head_logits(params, x, config, layout.par, {}))
            kl = []
            for start in range(0, x_BLD.shape[1], CHUNK):  # the logits of all tokens at once would take gigabytes
                own, exact = (log_of(x[:, start : start + CHUNK]) for x in (x_BLD, exact_BLD))
                kl.append(jnp.sum(jnp.exp(exact) * (exact - own), -1))
            return nll, best, jnp.concatenate(kl, 1), power, x_BLD

        specs = param_specs(config, settings.tp), P(), P(), P()
        compiled = jax.jit(jax.shard_map(run, mesh=self.mesh, in_specs=specs, out_specs=P()))

        def score(params, order):
            found: list[list[np.ndarray]] = [[], [], []]
            power, streams = {}, []
            for i, (tokens_L, targets_L, real_L) in enumerate(zip(self.tokens, self.targets, self.real)):
                exact = self.exact[i] if self.exact else np.zeros((1, len(tokens_L), config.d_model), np.float32)
                *values, squares, x_BLD = jax.device_get(
                    compiled(params, tokens_L[None], targets_L[None], exact[..., order])
                )
                for kept, value in zip(found, values):
                    kept.append(value[0][real_L])
                streams.append(x_BLD)
                for site, sums_N2 in squares.items():
                    power[site] = power.get(site, 0.0) + sums_N2.astype(np.float64)
            nll, best, kl = map(np.concatenate, found)
            self.exact = self.exact or streams
            return Scored(perplexity.Score(nll, best, power, {}, 0.0, 0.0), kl.astype(np.float64))

        return score


def paired(own: np.ndarray, other: np.ndarray) -> dict[str, float]:
    """Returns the ratio of two means over the same tokens less 1, and its standard error (a quotient's, linearised)."""
    ratio = own.mean() / other.mean()
    return {"change": ratio - 1, "error": float(np.std(own - ratio * other) / other.mean() / np.sqrt(own.size))}


def table(results: dict[str, dict]) -> list[str]:
    lines = [HEAD, "|---" * 13 + "|"]
    for codec, by_order in results.items():
        for order, r in by_order.items():
            beside = lambda values: ["", ""] if order == "stored" else [f"{v:+.2%}" for v in values]  # noqa: B023
            snr = [f"{r['snr_db'][site]:.2f}" for site in ("layers/attn/out", "layers/mlp/down")]
            cells = [
                f"`{codec}`", order, f"{r['cost']:.2f}", *snr, f"{r['change']:+.2%}", f"{r['error']:.2%}",
                *beside((r["own_change"], r["own_error"])), f"{r['kl']:.5f}",
                *beside((r["kl_change"], r["kl_error"])), f"{r['agreement']:.1%}",
            ]  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def report(out: Path, summary: dict, args) -> None:
    about = (
        f"`{Path(args.model).name}`, tp {args.tp}, float32, {summary['tokens']} tokens of held-out text in windows of "
        f"{args.context}. Orders were learned from {summary['learned_from']} tokens of other texts "
        f"({', '.join(summary['learn'])}). Predicted cost: of the learning texts, over that of the stored order. "
        "Change: of the perplexity against exact sums. Against stored: against the same codec in the stored order. "
        "Divergence: Kullback and Leibler's of the exact model's distribution of the next token from the codec's, a "
        "mean over tokens; it is what the loss is expected to grow by where the exact model is right. Standard errors "
        "are over tokens, paired."
    )
    exact = summary["exact"]
    moves = "; in other orders the logarithm of a token's probability moves by at most "
    moves = f"{moves}{exact['largest_difference']:.1e}" if exact["largest_difference"] else ""
    lines = [*runs.header("Orders of the residual channels, and what compressed sums lose", args.commit), about, ""]
    lines += [f"* {name}: {what}." for name, what in ORDERS.items() if what]
    lines += [
        "", f"Exact sums: perplexity {exact['perplexity']:.3f}{moves}.", "", *table(summary["codecs"]),
        "", "![perplexity by order](arrangement.png)",
        "", "Predicted cost of all orders, by block size:",
        "", f"| block | {' | '.join(ORDERS)} |", "|---" * (1 + len(ORDERS)) + "|",
        *(" | ".join([f"| {block.replace(FEEDBACK, ', with feedback')}",
                      *(f"{costs[order]:.2f}" if order in costs else "" for order in ORDERS)]) + " |"
          for block, costs in summary["predicted"].items()),
    ]  # fmt: skip
    (out / "README.md").write_text("\n".join(lines) + "\n")
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    draw(out / "arrangement.png", summary["codecs"])


def draw(path: Path, results: dict[str, dict]) -> None:
    """Writes how perplexity and divergence change against the stored order, with two standard errors."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [(c, o, r) for c, by_order in results.items() for o, r in by_order.items() if o != "stored"]
    figure, axes = plt.subplots(1, 2, figsize=(11, 1 + 0.24 * len(rows)), sharey=True)
    for axis, key, what in zip(axes, ("own", "kl"), ("perplexity", "divergence from the exact model")):
        for place, (_, order, r) in enumerate(rows):
            value, error = 100 * r[f"{key}_change"], 200 * r[f"{key}_error"]
            axis.errorbar(value, -place, xerr=error, fmt="o", color=f"C{list(ORDERS).index(order)}", capsize=3)
        axis.axvline(0, color="grey", linewidth=1)
        axis.set_xlabel(f"{what}, change against the stored order (%)", fontsize=9)
    axes[0].set_yticks([-i for i in range(len(rows))], [f"{codec}: {order}" for codec, order, _ in rows], fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def learned_sites(path: Path | None, *model_and_tokens: Any) -> arrangement.Sites:
    """`arrangement.measure` of the learning texts, or what it left in the file."""
    if path is not None and path.is_file():
        with np.load(path) as arrays:
            return arrangement.Sites(**arrays)
    checkpoint, *others = model_and_tokens
    sites = arrangement.measure(checkpoint.config, *others)
    if path is not None:
        np.savez(path, **sites._asdict())
    return sites


def arranged(path: Path) -> plan_file.PlanFile:
    """Returns a plan that has an order. Raises ConfigError where it has none."""
    plan = plan_file.read(runs.file("--plan", path, "a plan that calibrate --arrange wrote"))
    runs.require(plan.arrangement is not None, "--plan", path, "has no arrangement; write it with calibrate --arrange")
    return plan


def main(arguments: Sequence[str]) -> int:
    parser = runs.parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--learn", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--codecs", nargs="+", default=list(CODECS))
    parser.add_argument("--orders", nargs="+", default=list(ORDERS), help="beside stored")
    parser.add_argument("--plan", type=Path, default=None, help="a plan with an arrangement: one more order, `plan`")
    parser.add_argument("--tp", type=int, default=3)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--sources", type=int, default=7)
    parser.add_argument("--learn-context", type=int, default=256)
    parser.add_argument("--learn-windows", type=int, default=2, help="of each text")
    parser.add_argument("--sites", type=Path, default=None, help=".npz for what is measured on them; read where it is")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn order")
    parser.add_argument("--devices", default="cpu:3")
    parser.add_argument("--commit", default=None, help="commit to name where there is no git")
    args = parser.parse_args(arguments)
    for path in args.learn:
        runs.file("--learn", path, "a text to learn the orders from (UTF-8, xz or plain)")
    for key in ("learn_context", "learn_windows"):
        runs.require(getattr(args, key) > 0, f"--{key.replace('_', '-')}", getattr(args, key), "must be above 0")
    for order in args.orders:
        runs.choices("--orders", order, ORDERS)
    codecs = {name: parts(name) for name in args.codecs}
    planned = None if args.plan is None else arranged(args.plan)
    checkpoint, mesh = bench_perplexity.opened(args)
    if planned is not None:
        planned.check_model(plan_file.shape_of(checkpoint.config))
    from taco_jax.inference.loading import load_params
    from taco_jax.inference.settings import Settings

    params = load_params(checkpoint, mesh, "float32")
    encode = checkpoint.tokenizer.encode
    tokens_WL = learn_windows(args.learn, args.learn_windows, args.learn_context, encode)
    sites = learned_sites(args.sites, checkpoint, mesh, params, tokens_WL)
    windows = Windows(
        checkpoint, mesh, bench_perplexity.windows(args.text, args.sources, args.context, encode), args.context
    )
    kept = args.out / "summary.json"
    summary = json.loads(kept.read_text()) if kept.is_file() else {"codecs": {}}
    exact = windows.program(Settings(args.tp, dtype="float32"))
    stored = np.arange(checkpoint.config.d_model)
    base, moved = exact(params, stored).score, [summary.get("exact", {}).get("largest_difference", 0.0)]
    for codec, (text, fed) in codecs.items():
        block = as_codec(text).block
        found = orders(sites, block, fed, args.seed, planned and planned.arrangement["order"])
        pairs = sites.pairs_fed if fed else sites.pairs
        costs = {name: arrangement.cost(order, pairs, block) for name, order in found.items()}
        costs = {name: costs[name] / costs["stored"] for name in ORDERS if name in costs}
        summary.setdefault("predicted", {})[f"{block}{FEEDBACK * fed}"] = costs
        program = windows.program(Settings(args.tp, Compression(text, min_bytes=0, error_feedback=fed), {}, "float32"))
        results = summary["codecs"].setdefault(codec, {})
        own = program(params, stored)
        for name in ORDERS:
            if name not in found or (name != "stored" and name not in args.orders):
                continue
            order = found[name]
            folded = fold(params, order, checkpoint.config)
            if name in ("learned", "plan") and codec == next(iter(codecs)):
                moved.append(float(np.abs(exact(folded, order).score.nll - base.nll).max()))
            score, kl = own if name == "stored" else program(folded, order)
            against, divergence = score.against(own.score), paired(kl, own.kl)
            results[name] = score.against(base) | {
                "own_change": against["change"], "own_error": against["error"], "loss": score.loss,
                "kl": float(kl.mean()), "kl_change": divergence["change"], "kl_error": divergence["error"],
                "cost": costs[name],
                "snr_db": {site: score.snr_db(site) for site in score.power},
            }  # fmt: skip
            print(table({codec: {name: results[name]}})[-1], flush=True)
            summary |= {
                "tokens": int(base.nll.size), "learned_from": int(tokens_WL[:, 1:].size),
                "learn": [path.name for path in args.learn],
                "exact": {"perplexity": base.perplexity, "largest_difference": max(moved)},
            }  # fmt: skip
            report(args.out, summary, args)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
