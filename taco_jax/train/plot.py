"""Loss and throughput of several runs on one picture.

    python -m taco_jax.plot runs/taco runs/none --out compare.png

A run is a workdir or a metrics.jsonl. The left panel has the training loss (a running mean over it where it has many
points) and the validation loss as dots, the right one tokens per second.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from taco_jax.config import ConfigError, cli
from taco_jax.train.metrics import read_records
from taco_jax.train.workdir import METRICS

# Okabe and Ito's palette: it stays apart under colour blindness.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def load(run: str | Path) -> list[dict[str, Any]]:
    """The records of a run; ConfigError if there are none."""
    path = Path(run)
    path = path / METRICS if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"{run}: no such run; give a workdir that holds {METRICS}, or that file")
    if path.suffix.lower() in (".json", ".yaml", ".yml", ".toml", ".py"):
        raise ConfigError(f"{run}: is a file of settings; give a workdir that holds {METRICS}, or that file")
    records = read_records(path)
    if not records:
        raise ConfigError(f"{path}: holds no records yet")
    return records


def labels(runs: Sequence[str | Path]) -> list[str]:
    """The shortest ends of the paths that tell the runs apart."""
    parts = [(p.parent if (p := Path(run).absolute()).name == METRICS else p).parts for run in runs]
    n = 1
    while n < max(map(len, parts)) and len({p[-n:] for p in parts}) < len({*parts}):
        n += 1
    return ["/".join(p[-n:]) for p in parts]


def draw(runs: Sequence[str | Path], out: str | Path, *, throughput: bool = True) -> Path:
    """Draws `runs` into the picture `out` (its suffix says the format) and returns its path.

    throughput: with the right panel, which says something where all runs had the machine alike.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    loaded = [load(run) for run in runs]
    figure = Figure(figsize=(12 if throughput else 7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    loss, *others = figure.subplots(1, 1 + throughput, squeeze=False)[0]
    speed = others[0] if others else None
    for i, (records, label) in enumerate(zip(loaded, labels(runs), strict=True)):
        _draw_run(loss, speed, records, label, COLOURS[i % len(COLOURS)])
    loss.set(xlabel="step", ylabel="loss (nats per token)", title="loss; dots: validation")
    if speed is not None:
        speed.set(xlabel="step", ylabel="tokens per second", title="throughput")
        speed.set_ylim(bottom=0)
    for axes in (loss, *others):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False)
    out = Path(out)
    if not out.suffix or out.is_dir():  # matplotlib would write a file of another name
        raise ConfigError(f"--out {out}: must be a picture's name, whose suffix says the format, such as runs.png")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--out {out}: cannot be written: {error}") from None
    return out


def _draw_run(loss, speed, records: list[dict[str, Any]], label: str, colour: str) -> None:
    steps, values = _series(records, "loss")
    width = len(values) // 50
    if width > 1:
        loss.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
        loss.plot(steps, _smooth(values, width), color=colour, label=label)
    else:
        loss.plot(steps, values, color=colour, label=label)
    loss.plot(*_series(records, "validation_loss"), "o", color=colour, markeredgecolor="white", markersize=6)
    if speed is not None:
        speed.plot(*_series(records, "tokens_per_second"), color=colour, label=label, linewidth=1)


def _series(records: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of the records that have one."""
    pairs = [(r["step"], r[key]) for r in records if r.get(key) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _smooth(values: Sequence[float], width: int) -> list[float]:
    """Mean over `width` points on either side, as many as there are on both: the ends are the values themselves."""
    means = []
    for i in range(len(values)):
        reach = min(width, i, len(values) - 1 - i)
        near = values[i - reach : i + reach + 1]
        means.append(sum(near) / len(near))
    return means


def main(args: Sequence[str]) -> int:
    parser = cli.Parser(prog="python -m taco_jax.plot", description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a workdir or its metrics.jsonl")
    parser.add_argument("--out", default="runs.png", help="the picture to write (default: runs.png)")
    options = parser.parse_args(args)
    cli.say(str(draw(options.runs, options.out)))
    return 0
