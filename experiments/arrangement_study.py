"""Measures whether another order of a model's residual channels makes compressed sums lose less.

    python experiments/arrangement_study.py --model SmolLM2-135M-Instruct.Q4_1.gguf --text val.jsonl.xz \
        --learn enwiki.train.txt.xz manpages.train.txt.xz --out experiments/results/arrangement/smollm2

Orders (ORDERS, `arrangement.py`) are learned from windows of the --learn texts, folded into the weights, and judged on
those of --text, which are bench_perplexity.py's. A codec sees every order on the same windows, paired token by token
with its own result in the stored order. `_feedback` as in bench_perplexity.py. The exact model is run in each order
too, to see that it stays the same. What OUT has is kept, so a table is made in as many goes as there is time for.

output     OUT/README.md (hardware, commit, command, tables), OUT/summary.json, OUT/orders.json, OUT/arrangement.png
"""

from __future__ import annotations

import json
import lzma
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import arrangement
import bench_perplexity
import numpy as np
import runs

from taco_jax.codec import as_codec
from taco_jax.compression.compression import Compression
from taco_jax.config import ConfigError, cli

FEEDBACK = "_feedback"
CODECS = ("mxfp4_feedback", "int4h_feedback", "int4h,block=32_feedback", "int4h,rotation=none_feedback", "tah4",
          "mxfp4", "int4h", "taco")  # fmt: skip
ORDERS = {
    "stored": "as the model came",
    "random": "drawn",
    "sorted": "the largest first, by root mean square of what is sent",
    "clustered": "channels of more than three times the median's mean square first, the others as stored",
    "spread": "dealt out to the blocks in turn, the largest first: one large channel in each",
    "learned": "made for the least predicted cost, by exchanges of two channels (`arrangement.learn`)",
}
HEAD = "| codec | order | predicted cost | SNR (dB) attn/out | mlp/down | perplexity, change | standard error " \
       "| against stored | standard error | same token |"  # fmt: skip


def orders(sites: arrangement.Sites, block: int, fed: bool, seed: int) -> dict[str, np.ndarray]:
    """Returns the orders of ORDERS for codecs of these blocks, with or without error feedback."""
    pairs = sites.pairs_fed if fed else sites.pairs
    d_model = len(pairs)
    found = {
        "stored": np.arange(d_model),
        "random": np.random.default_rng(seed).permutation(d_model),
        "sorted": arrangement.by_size(sites),
        "clustered": arrangement.clustered(sites),
        "spread": arrangement.spread(sites, block),
    }
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


def scorer(checkpoint: Any, mesh: Any, ids: list[int], context: int) -> Callable:
    """Returns f(settings) -> g(params) -> `Score`, of a program that is compiled once for all orders."""
    import jax
    from jax.sharding import PartitionSpec as P

    from taco_jax.collectives import comm_log
    from taco_jax.inference import perplexity
    from taco_jax.models.params import param_specs

    tokens, targets, real = perplexity.windows(ids, context)

    def program(settings):
        config, layout = checkpoint.config, settings.layout(checkpoint.config, mesh.devices.flat[0], decoding=False)
        run = jax.jit(jax.shard_map(
            lambda params, tokens_BL, targets_BL: perplexity.measured(params, tokens_BL, targets_BL, config, layout),
            mesh=mesh, in_specs=(param_specs(config, settings.tp), P(), P()), out_specs=P(),
        ))  # fmt: skip

        def score(params):
            nll, best, power = [], [], {}
            with comm_log.record():
                for tokens_L, targets_L, real_L in zip(tokens, targets, real):
                    nll_BL, best_BL, squares = jax.device_get(run(params, tokens_L[None], targets_L[None]))
                    nll.append(nll_BL[0][real_L])
                    best.append(best_BL[0][real_L])
                    for site, sums_N2 in squares.items():
                        power[site] = power.get(site, 0.0) + sums_N2.astype(np.float64)
            return perplexity.Score(np.concatenate(nll), np.concatenate(best), power, {}, 0.0, 0.0)

        return score

    return program


def table(results: dict[str, dict]) -> list[str]:
    lines = [HEAD, "|---" * 10 + "|"]
    for codec, by_order in results.items():
        for order, r in by_order.items():
            own = ["", ""] if order == "stored" else [f"{r['own_change']:+.2%}", f"{r['own_error']:.2%}"]
            snr = [f"{r['snr_db'][site]:.2f}" for site in ("layers/attn/out", "layers/mlp/down")]
            cells = [f"`{codec}`", order, f"{r['cost']:.2f}", *snr, f"{r['change']:+.2%}", f"{r['error']:.2%}", *own,
                     f"{r['agreement']:.1%}"]  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def report(out: Path, summary: dict, args) -> None:
    about = (
        f"`{Path(args.model).name}`, tp {args.tp}, float32, {summary['tokens']} tokens of held-out text in windows of "
        f"{args.context}. Orders were learned from {summary['learned_from']} tokens of other texts "
        f"({', '.join(summary['learn'])}). Predicted cost: of the learning texts, over that of the stored order. "
        "Change: of the perplexity against exact sums. Against stored: against the same codec in the stored order. "
        "Both have their standard errors over tokens, paired."
    )
    exact = summary["exact"]
    lines = [*runs.header("Orders of the residual channels, and what compressed sums lose", args.commit), about, ""]
    lines += [f"* {name}: {what}." for name, what in ORDERS.items()]
    lines += [
        "", f"Exact sums: perplexity {exact['perplexity']:.3f}; in other orders the logarithm of a token's probability "
        f"moves by at most {exact['largest_difference']:.1e}.", "", *table(summary["codecs"]),
        "", "![perplexity by order](arrangement.png)",
    ]  # fmt: skip
    (out / "README.md").write_text("\n".join(lines) + "\n")
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    draw(out / "arrangement.png", summary["codecs"])


def draw(path: Path, results: dict[str, dict]) -> None:
    """Writes the change of perplexity against the stored order, a panel of bars for each codec."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 1, figsize=(9, 1.2 + 0.55 * sum(len(r) for r in results.values()) / 2))
    names, place = [], 0
    for codec, by_order in results.items():
        for order, r in by_order.items():
            if order == "stored":
                continue
            colour = f"C{list(ORDERS).index(order)}"
            axes.errorbar(100 * r["own_change"], place, xerr=200 * r["own_error"], fmt="o", color=colour, capsize=3)
            names.append((place, f"{codec}: {order}"))
            place -= 1
        place -= 0.6
    axes.axvline(0, color="grey", linewidth=1)
    axes.set_yticks([at for at, _ in names], [name for _, name in names], fontsize=8)
    axes.set_xlabel("change of perplexity against the stored order (%), with two standard errors")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: Sequence[str]) -> int:
    parser = runs.parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--learn", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--codecs", nargs="+", default=list(CODECS))
    parser.add_argument("--orders", nargs="+", default=list(ORDERS), help="beside stored")
    parser.add_argument("--tp", type=int, default=3)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--sources", type=int, default=7)
    parser.add_argument("--learn-context", type=int, default=256)
    parser.add_argument("--learn-windows", type=int, default=2, help="of each text")
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
    checkpoint, mesh = bench_perplexity.opened(args)
    from taco_jax.inference.loading import load_params
    from taco_jax.inference.settings import Settings

    params = load_params(checkpoint, mesh, "float32")
    encode = checkpoint.tokenizer.encode
    tokens_WL = learn_windows(args.learn, args.learn_windows, args.learn_context, encode)
    sites = arrangement.measure(checkpoint.config, mesh, params, tokens_WL)
    ids = bench_perplexity.windows(args.text, args.sources, args.context, encode)
    program = scorer(checkpoint, mesh, ids, args.context)
    kept, kept_orders = args.out / "summary.json", args.out / "orders.json"
    summary = json.loads(kept.read_text()) if kept.is_file() else {"codecs": {}}
    named = json.loads(kept_orders.read_text()) if kept_orders.is_file() else {}
    exact = program(Settings(args.tp, dtype="float32"))
    base, moved = exact(params), [0.0]
    for codec, (text, fed) in codecs.items():
        block = as_codec(text).block
        found = orders(sites, block, fed, args.seed)
        pairs = sites.pairs_fed if fed else sites.pairs
        chosen = {name: found[name] for name in ORDERS if name == "stored" or name in args.orders}
        score = program(Settings(args.tp, Compression(text, min_bytes=0, error_feedback=fed), {}, "float32"))
        own, results = None, {}
        for name, order in chosen.items():
            folded = arrangement.fold(params, order, checkpoint.config)
            if name == "learned":
                moved.append(float(np.abs(exact(folded).nll - base.nll).max()))
                named[codec] = [int(channel) for channel in order]
            scored = score(folded)
            own = own or scored
            against = scored.against(own)
            results[name] = scored.against(base) | {
                "own_change": against["change"], "own_error": against["error"], "loss": scored.loss,
                "cost": arrangement.cost(order, pairs, block) / arrangement.cost(found["stored"], pairs, block),
                "snr_db": {site: scored.snr_db(site) for site in scored.power},
            }  # fmt: skip
            print(table({codec: {name: results[name]}})[-1], flush=True)
        summary["codecs"][codec] = results
        was = summary.get("exact", {}).get("largest_difference", 0.0)
        summary |= {
            "tokens": int(base.nll.size), "learned_from": int(tokens_WL[:, 1:].size),
            "learn": [str(path.name) for path in args.learn],
            "exact": {"perplexity": base.perplexity, "largest_difference": max(*moved, was)},
        }  # fmt: skip
        kept_orders.write_text(json.dumps(named) + "\n")
        report(args.out, summary, args)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
