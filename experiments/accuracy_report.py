"""The tables and pictures of the accuracy record (accuracy.py), from the runs that are there."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

BOUND = 0.005
COMMAND = "python experiments/accuracy.py --tokens tokens/ --out experiments/results/accuracy"
# Student's t at 95 %, one-sided, by degrees of freedom from 1; beyond the last, the last, which is on the safe side.
T95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)
BASE = "none"
# Validation loss against bf16 in arXiv 2604.24088: its GPT-350M runs, and its ablation of the element format.
PAPER = {"taco": "+0.25 % (350M), +0.17 % (ablation)", "e5m2": "+24 %", "int8": "diverges"}
Runs = Mapping[str, Mapping[str, list[dict]]]
"""{row: {seed: records}}"""


def compare(losses: Mapping[str, float], reference: Mapping[str, float]) -> dict:
    """The equivalence test of `losses`, {seed: loss}, against those of the same seeds in `reference`.

    Returns {"pairs", "difference" (mean of the relative differences), "standard_error", "interval" (90 %), "verdict"};
    None for what the pairs do not give.
    """
    differences = [loss / reference[seed] - 1 for seed, loss in losses.items() if seed in reference]
    n = len(differences)
    out = {"pairs": n, "difference": None, "standard_error": None, "interval": None, "verdict": "no pair"}
    if n:
        out |= {"difference": statistics.mean(differences), "verdict": "one pair: no test"}
    if n > 1:
        error = statistics.stdev(differences) / math.sqrt(n)
        reach = T95[min(n - 1, len(T95)) - 1] * error
        low, high = out["difference"] - reach, out["difference"] + reach
        inside, beyond = -BOUND < low and high < BOUND, low > BOUND or high < -BOUND
        verdict = "equivalent" if inside else "not equivalent" if beyond else "open"
        out |= {"standard_error": error, "interval": [low, high], "verdict": verdict}
    return out


def summarise(found: Runs) -> dict:
    """{row: what the tables say of it} of one model's runs."""
    losses = {row: {s: r[-1]["validation_loss"] for s, r in by_seed.items()} for row, by_seed in found.items()}
    summary = {}
    for row, by_seed in found.items():
        last = list(by_seed.values())[-1][-1]
        of_row = list(losses[row].values())
        summary[row] = {
            "seeds": losses[row],
            "mean": statistics.mean(of_row),
            "std": statistics.stdev(of_row) if len(of_row) > 1 else None,
            **compare(losses[row], losses.get(BASE, {})),
            "ratio": last["comm_bytes_bf16"] / (last["comm_bytes"] or 1),
            "steps": last["step"],
            "tokens": last.get("run", {}).get("tokens"),
            "tokens_per_second": max(statistics.median(x["tokens_per_second"] for x in r) for r in by_seed.values()),
            "evaluated": _evaluated(by_seed),
            "snr_db": _snr(by_seed),
        }
    return summary


def _evaluated(by_seed: Mapping[str, list[dict]]) -> dict[str, dict]:
    """{other row: {"seeds": {seed: loss there}, "difference": mean relative to the run's own loss}}"""
    out: dict[str, dict] = {}
    for seed, records in by_seed.items():
        for other, loss in records[-1].get("evaluated", {}).items():
            out.setdefault(other, {"seeds": {}, "differences": []})["seeds"][seed] = loss
            out[other]["differences"].append(loss / records[-1]["validation_loss"] - 1)
    return {other: {"seeds": x["seeds"], "difference": statistics.mean(x["differences"])} for other, x in out.items()}


def _snr(by_seed: Mapping[str, list[dict]]) -> dict[str, list[tuple[int, float]]]:
    """{site/direction: [(step, mean SNR in dB over the seeds), ...]}"""
    values: dict[str, dict[int, list[float]]] = {}
    for records in by_seed.values():
        for record in records:
            for site, measured in record.get("sites", {}).items():
                if measured["snr_db"] is not None:  # where nothing was sent, there is none
                    values.setdefault(site, {}).setdefault(record["step"], []).append(measured["snr_db"])
    return {site: [(step, statistics.mean(v)) for step, v in sorted(by.items())] for site, by in values.items()}


def summaries(found: Mapping[str, Runs]) -> dict[str, dict]:
    """{model: summary} of the models that have an exact run."""
    return {model: summarise(of_model) for model, of_model in found.items() if BASE in of_model}


def write(out: Path, found: Mapping[str, Runs], missing: Sequence[tuple[str, str, int]]) -> None:
    """Writes README.md, and of models that have an exact run the tables, summary.json and the pictures."""
    models, text = summaries(found), readme(found, missing)
    (out / "README.md").write_text(text)
    if models:
        (out / "summary.json").write_text(json.dumps({"bound": BOUND} | models, indent=1) + "\n")
        draw_losses({model: found[model] for model in models}, out / "loss.png")
        draw_snr(models, out / "snr.png")
    print(text, flush=True)


def readme(found: Mapping[str, Runs], missing: Sequence[tuple[str, str, int]]) -> str:
    """The whole text of the results' README."""
    lines, models = header(found), summaries(found)
    for model, summary in models.items():
        lines += tables(model, summary)
    if models:
        lines += ["![validation loss](loss.png)", "", "![SNR](snr.png)", ""]
    if missing:
        lines += ["Still to be run, in this order (model, row, seed):", ""]
        lines += [f"{i}. {model}, `{row}`, {seed}" for i, (model, row, seed) in enumerate(missing, 1)]
    return "\n".join(lines).rstrip() + "\n"


MARKS = "<!-- begin: written by experiments/accuracy.py -->", "<!-- end -->"


def page(text: str, found: Mapping[str, Runs]) -> str:
    """A page's text with the tables of what there is between MARKS, instead of what was there.

    Raises ValueError where it has no such marks.
    """
    before, begin, rest = text.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not end:
        raise ValueError(f"has no line {MARKS[0]!r} with a line {MARKS[1]!r} after it")
    lines = []
    for model, summary in summaries(found).items():
        lines += ["", f"### {model}", "", *main_table(summary), "", *cross_table(summary)]
    return "\n".join([before + begin, *lines, "", end + after])


def header(found: Mapping[str, Runs]) -> list[str]:
    """The opening lines; date, hardware, commit and command are those of the runs."""
    made = [r[-1].get("run", {}) for of_model in found.values() for by in of_model.values() for r in by.values()]
    said = lambda key, none="no run yet": "; ".join(sorted({run[key] for run in made if key in run})) or none
    return [
        "# Accuracy with seeds: GPT-2 at tp 2",
        "",
        f"* date: {said('date')}",
        f"* hardware: {said('hardware')}",
        f"* commit: {said('commit')}",
        f"* command: `{said('command', COMMAND)}`",
        "",
        "Fixed before the first run: a row is equivalent to exact if the 90 % confidence interval of its mean relative",
        f"difference in validation loss, paired by seed, lies within +-{BOUND:.1%} (two one-sided t-tests at 5 %), not",
        "equivalent if it lies wholly beyond, else the test is open; one pair is no test. Rows and their order are",
        "those of PLAN in accuracy.py, whose first lines say what they mean. The 124M model sees its 32.6M training",
        "tokens three times over. Losses are nats per GPT-2 token on held-out text, of the same books and manuals in",
        "part: they compare methods and say nothing of other domains.",
        "",
    ]


def tables(model: str, summary: Mapping[str, dict]) -> list[str]:
    """The lines of a model: losses, evaluation in other rows, SNR."""
    steps, tokens = summary[BASE]["steps"], summary[BASE]["tokens"] or 0
    lines = [f"## {model}", "", f"{steps} steps, {tokens / 1e6:.1f}M tokens a run.", "", *main_table(summary)]
    lines += ["", "The last parameters evaluated another way, against the run's own validation loss:", ""]
    lines += cross_table(summary)
    sites = sorted({site for r in summary.values() for site in r["snr_db"]})
    if sites:
        lines += ["", "SNR in dB by site and direction: first and last measurement of a run", ""]
        lines += ["| row | " + " | ".join(sites) + " |", "|---" * (len(sites) + 1) + "|"]
        for row, r in summary.items():
            if r["snr_db"]:
                cell = lambda v: f"{v[0][1]:.1f}, {v[-1][1]:.1f}" if v else ""
                lines.append(f"| {row} | " + " | ".join(cell(r["snr_db"].get(s)) for s in sites) + " |")
    return [*lines, ""]


def main_table(summary: Mapping[str, dict]) -> list[str]:
    lines = [
        "| row | traffic ratio | validation loss | by seed | std | against exact | standard error | 90 % interval | "
        "verdict | tokens/s | the paper |",
        "|---" * 11 + "|",
    ]
    percent = lambda x: "" if x is None else f"{x:+.2%}"
    for row, r in summary.items():
        seeds = ", ".join(f"{s}: {loss:.4f}" for s, loss in r["seeds"].items())
        std = "" if r["std"] is None else f"{r['std']:.4f}"
        error = "" if r["standard_error"] is None else f"{r['standard_error']:.2%}"
        interval = "" if r["interval"] is None else " to ".join(map(percent, r["interval"]))
        against = f"{percent(r['difference'])} | {error} | {interval} | {r['verdict']}"
        lines.append(
            f"| {row} | {r['ratio']:.2f} | {r['mean']:.4f} | {seeds} | {std} | {'| | |' if row == BASE else against} | "
            f"{r['tokens_per_second']:.0f} | {PAPER.get(row, '')} |"
        )
    return lines


def cross_table(summary: Mapping[str, dict]) -> list[str]:
    lines = ["| trained in | evaluated in | difference | by seed |", "|---|---|---|---|"]
    for row, r in summary.items():
        for other, x in r["evaluated"].items():
            seeds = ", ".join(f"{s}: {loss:.4f}" for s, loss in x["seeds"].items())
            lines.append(f"| {row} | {other} | {x['difference']:+.3%} | {seeds} |")
    return lines


# Okabe and Ito's palette, as taco_jax.plot has it, and three more.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999", "#882255", "#44AA99")


def figure(rows: int, columns: int):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(7 * columns, 4.2 * rows), layout="constrained")
    FigureCanvasAgg(drawn)
    return drawn, drawn.subplots(rows, columns, squeeze=False)


def draw_losses(models: Mapping[str, Runs], path: Path) -> None:
    """All curves of a model: validation loss over the run, and its difference to the exact run of the same seed."""
    drawn, axes = figure(len(models), 2)
    for (loss, difference), (model, found) in zip(axes, models.items(), strict=True):
        for colour, (row, by_seed) in zip(COLOURS * 2, found.items()):
            for k, (seed, records) in enumerate(by_seed.items()):
                label, curve = row if k == 0 else None, _validations(records)
                steps = [r["step"] for r in records if r.get("loss") is not None]
                training = [r["loss"] for r in records if r.get("loss") is not None]
                loss.plot(steps, training, color=colour, alpha=0.15, linewidth=0.6)
                loss.plot(*zip(*curve.items(), strict=True), "o-", color=colour, label=label, markersize=3, linewidth=1)
                base = _validations(found[BASE][seed]) if seed in found.get(BASE, {}) else {}
                paired = [(step, 100 * (v / base[step] - 1)) for step, v in curve.items() if step in base]
                if paired and row != BASE:
                    difference.plot(*zip(*paired, strict=True), "o-", color=colour, label=label, markersize=3)
        difference.axhspan(-100 * BOUND, 100 * BOUND, alpha=0.12, color="gray", label="the bound")
        loss.set(xlabel="step", ylabel="nats per token", title=f"{model}: validation (dots) and training loss")
        difference.set(xlabel="step", ylabel="%", title="validation loss against exact, same seed")
        for panel in (loss, difference):
            panel.grid(alpha=0.3)
            panel.legend(frameon=False, fontsize=8)
    drawn.savefig(path, dpi=110)


def _validations(records: list[dict]) -> dict[int, float]:
    return {r["step"]: r["validation_loss"] for r in records if r.get("validation_loss") is not None}


def draw_snr(models: Mapping[str, Mapping[str, dict]], path: Path) -> None:
    """SNR over the run, a panel a site and direction; all models, dashed from the second on."""
    sites = sorted({site for summary in models.values() for r in summary.values() for site in r["snr_db"]})
    columns = min(3, max(1, len(sites)))
    drawn, axes = figure(math.ceil(max(1, len(sites)) / columns), columns)
    for panel, site in zip(axes.flat, sites):
        for k, (model, summary) in enumerate(models.items()):
            measured = [(row, r["snr_db"][site]) for row, r in summary.items() if site in r["snr_db"]]
            for colour, (row, values) in zip(COLOURS[1:] * 2, measured):
                style = {"color": colour, "linestyle": "--" if k else "-", "marker": "o", "markersize": 3}
                panel.plot(*zip(*values, strict=True), **style, label=row if k == 0 else f"{row} ({model})")
        panel.set(xlabel="step", ylabel="dB", title=site)
        panel.grid(alpha=0.3)
        panel.legend(frameon=False, fontsize=7)
    drawn.savefig(path, dpi=110)
