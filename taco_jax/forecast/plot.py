"""Pictures: the speed-up over the link's speed and the tokens, and over numbers of GPUs. Needs no display."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from taco_jax.errors import ConfigError
from taco_jax.forecast.scale import Point

SPEEDS = tuple(10 ** (k / 4) for k in range(13))
Speedup = Callable[[float, str, int], float]


def check_path(path: Path, key: str) -> None:
    """Raises ConfigError where no picture can be written."""
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"{key} {path}: must end with .png, .svg or .pdf")
    if not path.parent.is_dir():
        raise ConfigError(f"{key} {path}: there is no folder {path.parent}; make it first")


def _figure(columns: int, rows: int = 1):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * columns, 4.2 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False).reshape(-1)


def draw(path: Path, title: str, codecs: Sequence[str], speedup: Speedup, *, tokens: Sequence[int], here: float,
         at: int) -> None:  # fmt: skip
    """Left the speed-up of each codec over the link's speed, right that of the best over speed and tokens, with the
    user's point (here GB/s, at the index `at` of tokens).

    speedup: of (GB/s, codec, index of tokens).
    """
    figure, (left, right) = _figure(2)
    for codec in codecs:
        left.plot(SPEEDS, [speedup(s, codec, at) for s in SPEEDS], label=codec)
    left.axhline(1, color="grey", linewidth=0.8)
    left.axvline(here, color="black", linestyle=":", label="this link")
    left.set(xscale="log", xlabel="GB/s from one GPU", ylabel="times as fast as exact", title=title)
    left.legend(fontsize=8)
    best = [[max(speedup(s, codec, i) for codec in codecs) for s in SPEEDS] for i in range(len(tokens))]
    if len(tokens) > 1:
        mesh = right.pcolormesh(SPEEDS, tokens, best, shading="nearest", cmap="viridis")
        figure.colorbar(mesh, ax=right, label="best codec, times as fast as exact")
        right.set(yscale="log")
    right.plot([here], [tokens[at]], marker="*", markersize=14, color="red")
    right.set(xscale="log", xlabel="GB/s from one GPU", ylabel="tokens", title="the best codec")
    figure.savefig(path, dpi=110)


def draw_scale(path: Path, studies: dict[str, Sequence[Point]], columns: int = 1) -> None:
    """One panel a study: times as fast as exact over GPUs, each way a line."""
    figure, axes = _figure(columns, -(-len(studies) // columns))
    for axis, (title, points) in zip(axes, studies.items()):
        exact = {p.gpus: p.tokens for p in points if p.way == "none"}
        for way in dict.fromkeys(p.way for p in points if p.way != "none"):
            of_way = [p for p in points if p.way == way]
            axis.plot([p.gpus for p in of_way], [p.tokens / exact[p.gpus] for p in of_way], marker="o", label=way)
        axis.axhline(1, color="grey", linewidth=0.8)
        axis.set(xscale="log", xlabel="GPUs", ylabel="times as fast as exact", title=title)
        axis.set_xscale("log", base=2)
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)
