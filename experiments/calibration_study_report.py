"""The tables of the study of plans from data (calibration_study.py), and the figures that they compare."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import runs


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Returns Spearman's coefficient."""
    ranks = lambda values: np.argsort(np.argsort(np.asarray(values))).astype(float)
    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def compared(results: dict[str, dict]) -> dict[str, dict[str, float]]:
    """Returns {way: mean relative difference to int6h, and its standard error, over paired seeds}."""
    out = {}
    for way, by_seed in results.items():
        shared = [seed for seed in by_seed if seed in results.get("int6h", {})]
        differences = [by_seed[seed]["loss"] / results["int6h"][seed]["loss"] - 1 for seed in shared]
        if differences:
            error = statistics.stdev(differences) / math.sqrt(len(shared)) if len(shared) > 1 else float("nan")
            out[way] = {"difference": statistics.mean(differences), "error": error, "seeds": len(shared)}
    return out


def write_report(folder: Path, summary: dict[str, Any], commit: str | None) -> None:
    """Writes FOLDER/README.md of what a summary has. commit: to name where there is no git."""
    lines = runs.header("Plans from data: what calibration predicts, and what its plans cost", commit)
    for part, write in (("measure", _of_model), ("perplexity", _of_plans), ("confirm", _confirmed),
                        ("quickstart", _of_quickstart), ("training", _of_training)):  # fmt: skip
        if part in summary:
            lines += [*write(summary), ""]
    (folder / "README.md").write_text("\n".join(lines))


def _of_model(summary: dict) -> list[str]:
    measured = summary["measure"]
    lines = [
        "## Sensitivities of a pretrained model",
        "",
        f"SmolLM2-135M at tp 3 (emulated), float32, {measured['tokens']} tokens a set, one window of each of several "
        f"sources. Rank correlation of the sums' sensitivities between two sets: {measured['rank_correlation']:.3f}, "
        f"with feedback {measured['rank_correlation_with_feedback']:.3f}.",
        "",
        "Predicted rise of the perplexity with one codec everywhere, beside the one that `perplexity_smollm2` has on "
        "other, held-out text:",
        "",
        "| codec | by element | by token | by element, the text's own labels | measured |",
        "|---|---|---|---|---|",
    ]
    for name, predicted in measured["predicted"].items():
        recorded = measured["record"].get(name)
        row = [*(f"{value:+.2%}" for value in predicted.values()), "" if recorded is None else f"{recorded:+.2%}"]
        lines.append(f"| `{name}` | " + " | ".join(row) + " |")
    names = [name for name in measured["predicted"] if name in measured["record"]]
    recorded = np.array([measured["record"][n] for n in names])
    of = lambda key: np.array([measured["predicted"][n][key] for n in names])
    clear = recorded > 0.002  # above their own standard errors
    wrong = lambda key: float(np.median(np.abs(np.log(of(key)[clear] / recorded[clear]))))
    quality = ", ".join(
        f"{text} {rank_correlation(of(key), recorded):.3f} and {math.exp(wrong(key)):.2f}"
        for key, text in (("element", "by element"), ("token", "by token"), ("text", "with the text's own labels"))
    )
    return [
        *lines,
        "",
        f"Rank correlation with the measured, and factor that the median prediction is wrong by: {quality}.",
    ]


def _of_plans(summary: dict) -> list[str]:
    lines = [
        "## Plans on held-out text",
        "",
        "With error feedback, paired with the exact model token by token, on the windows of `perplexity_smollm2`.",
        "",
        "| plan | tokens | times fewer bytes | predicted | perplexity | change | standard error | same token |",
        "|---|---|---|---|---|---|---|---|",
    ]
    planned = summary.get("measure", {}).get("plans", {})
    for name, r in summary["perplexity"].items():
        predicted = planned.get(name, {}).get("predicted")
        cells = [
            f"`{name}`", str(r["tokens"]), f"{r['ratio']:.2f}", "" if predicted is None else f"{predicted:+.2%}",
            f"{r['perplexity']:.2f}", f"{r['change']:+.2%}", f"{r['error']:.2%}", f"{r['agreement']:.1%}",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _confirmed(summary: dict) -> list[str]:
    lines = [
        "## The same plans on other held-out text",
        "",
        "Windows on which neither the plans nor the method were chosen. `next`: those that follow in the same sources. "
        "`others`: one window of each source that the first table does not have. Standard errors: over tokens, as "
        "there, and over windows, since an error reaches the tokens behind it.",
        "",
        "| plan or codec | windows | tokens | times fewer bytes | exact | perplexity | change | error, tokens | "
        "error, windows | same token |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, of in summary["confirm"].items():
        for windows_of, r in of.items():
            if windows_of == "ratio":
                continue
            cells = [
                f"`{name}`", f"{len(r['windows'])} `{windows_of}`", str(r["tokens"]), f"{of['ratio']:.2f}",
                f"{r['exact']:.2f}", f"{r['perplexity']:.2f}", f"{r['change']:+.2%}", f"{r['error']:.2%}",
                f"{r['error_of_windows']:.2%}", f"{r['agreement']:.1%}",
            ]  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def _of_quickstart(summary: dict) -> list[str]:
    q = summary["quickstart"]
    lines = [
        "## The quickstart's plan",
        "",
        f"After {q['steps']} steps, at tp 4. Rank correlation between two sets: {q['rank_correlation']:.3f} of forward "
        f"sensitivities by layer, {q['rank_correlation_gradient']:.3f} of the gradient's. The plan has {q['bits']:.3f} "
        "bits an element:",
        "",
        "| site | forward:backward |",
        "|---|---|",
    ]
    return lines + [f"| {site} | {codecs} |" for site, codecs in q["plan"].items()]


def _of_training(summary: dict) -> list[str]:
    lines = [
        "## The quickstart trained with it",
        "",
        "| way | times fewer bytes | validation loss by seed | against int6h | standard error |",
        "|---|---|---|---|---|",
    ]
    for way, by_seed in summary["training"].items():
        if not by_seed:
            continue
        losses = ", ".join(f"{seed}: {r['loss']:.4f}" for seed, r in by_seed.items())
        against = summary.get("compared", {}).get(way)
        cells = ["", ""] if against is None else [f"{against['difference']:+.3%}", f"{against['error']:.3%}"]
        ratio = next((f"{r['ratio']:.2f}" for r in by_seed.values()), "")
        lines.append(f"| {way} | {ratio} | {losses} | {' | '.join(cells)} |")
    return lines
