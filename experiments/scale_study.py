"""The forecast of up to 8,192 GPUs: a 7B, a 70B and a 405B shape, links of 400, 100 and 25 Gb/s between hosts.

    python experiments/scale_study.py --out experiments/results/scale

Nothing is measured here, and nothing has been measured over several hosts: this is what the model of docs/forecast.md
says. 8 x H100 on a host over NVLink; a host has a network card for each GPU, or one for all. Each GPU has one sequence
of 4,096 tokens a step (weak scaling). Each number of GPUs and each way of sending has the fastest layout dp x pp x tp
that fits the memory (taco_jax/forecast/scale.py). The 405B shape has 128 layers instead of 126, so that stages of a
power of two have equally many.

output    OUT/README.md, OUT/summary.json, OUT/scale.png
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import runs

from taco_jax.config import DataConfig, MeshConfig, TrainConfig, cli
from taco_jax.forecast import hardware, links, plot, report, scale
from taco_jax.models.config import ModelConfig
from taco_jax.models.presets import preset

GPU, LINK, LENGTH = "H100", "nvlink", 4096
LLAMA = ModelConfig(vocab_size=128_256, d_model=8192, n_layers=80, n_heads=64, n_kv_heads=8, head_dim=128,
                    d_mlp=28_672, max_length=131_072)  # fmt: skip
SHAPES = {
    "7B": preset("qwen2p5_7b"),
    "70B": LLAMA,
    "405B": dataclasses.replace(LLAMA, d_model=16_384, n_layers=128, n_heads=128, d_mlp=53_248),
}
SPEEDS = {"400Gb/s": "400Gb/s,10us", "100Gb/s": "100Gb/s,10us", "25Gb/s": "25Gb/s,20us"}
CARDS = {8: "a card for each GPU", 1: "one card for a host"}


def config(model: ModelConfig) -> TrainConfig:
    data = DataConfig(sequence_length=LENGTH)
    return TrainConfig(model=model, mesh=MeshConfig(), data=data, global_batch=1)


def studies(gpus: list[int]) -> dict[tuple[str, str, int], list[scale.Point]]:
    gpu = hardware.gpu(GPU)
    inside = links.parse(LINK, gpu)
    return {
        (shape, speed, cards): scale.study(
            config(model), gpu, inside, links.parse(text, gpu, key="--between"), gpus=gpus, rails=cards
        )
        for shape, model in SHAPES.items()
        for speed, text in SPEEDS.items()
        for cards in CARDS
    }


def readme(go: dict, found: dict) -> str:
    lines = ["# Up to 8,192 GPUs, by the forecast", "", *(f"* {key}: {value}" for key, value in go.items()), ""]
    lines += [
        "A forecast, not a measurement: nothing has been measured over several hosts. What it supposes stands in",
        "experiments/scale_study.py and docs/forecast.md. Exact is float32 for gradients and bfloat16 for weights, as",
        "the trainer has them. `tp` and `dp`: one axis alone is compressed, in int8h. `taco` and `int6h`: these over",
        "tp, gradients and weights over dp in int8h. `int4h`: that over tp, sdp4 for gradients, int4h for weights.", "",
        "## Times as fast as exact on 8,192 GPUs (the most), and on how many a way pays where that is not on all", "",
        "| shape | between hosts | cards of a host | exact: dp x pp x tp | of it messages | empty | "
        + " | ".join(f"`{way}`" for way in scale.WAYS if way != "none") + " |", "|" + "---|" * (5 + len(scale.WAYS)),
    ]  # fmt: skip
    for (shape, speed, cards), points in found.items():
        last = max(p.gpus for p in points)
        exact = next(p for p in points if p.gpus == last and p.way == "none")
        cells = []
        for way in scale.WAYS:
            if way != "none":
                gain = next(p.tokens for p in points if p.gpus == last and p.way == way) / exact.tokens
                where = report.where(points, way)
                cells.append(f"{gain:.2f}x" + ("" if where == report.EVERYWHERE else f" ({where})"))
        lines.append(
            f"| {shape} | {speed} | {cards} | {exact.dp} x {exact.pp} x {exact.tp} | {100 * exact.messages:.0f} % | "
            f"{100 * exact.bubble:.0f} % | {' | '.join(cells)} |"
        )
    lines += ["", *findings(found), "", "![speed-ups over GPUs](scale.png)", "", "The picture has a card for each GPU."]
    lines += ["", "## Every number of GPUs", ""]
    for (shape, speed, cards), points in found.items():
        lines += [
            f"### {shape}, {speed}, {CARDS[cards]}",
            "",
            "```",
            report.scale_text("", points).strip("\n"),
            "```",
            "",
        ]
    return "\n".join(lines)


def findings(found: dict) -> list[str]:
    """Returns what the tables say, in sentences that are computed from them."""
    lines = ["## What it says", ""]
    for speed in SPEEDS:
        gains = {}
        for (shape, s, cards), points in found.items():
            if s == speed and cards == 8:
                last = max(p.gpus for p in points)
                of = {p.way: p.tokens for p in points if p.gpus == last}
                best = max((w for w in of if w != "none"), key=of.get)
                gains[shape] = f"{shape} {of[best] / of['none']:.2f}x ({best})"
        lines.append(f"* {speed}, a card for each GPU, on the most GPUs: the best is {', '.join(gains.values())}.")
    for way in scale.WAYS:
        if way != "none":
            never = [key for key, points in found.items() if scale.stops(points, way)[0] is None]
            partly = [key for key, points in found.items() if report.where(points, way) != report.EVERYWHERE]
            lines.append(
                f"* `{way}` is less than 2 % faster than exact on every number of GPUs in {len(never)} of {len(found)} "
                f"studies, on some in {len(partly) - len(never)}."
            )
    changed = []
    for points in found.values():
        last = max(p.gpus for p in points)
        p, q = (next(x for x in points if x.gpus == last and x.way == way) for way in ("none", "int4h"))
        changed += [q.pp < p.pp] if (p.pp, p.tp) != (q.pp, q.tp) else []
    lines.append(
        f"* On the most GPUs the fastest layout is another with `int4h` than exactly in {len(changed)} of {len(found)} "
        f"studies; it has fewer stages in {sum(changed)}."
    )
    return lines


def main(arguments: Sequence[str]) -> None:
    parser = runs.parser(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", default="8..8192", help="numbers of GPUs, powers of two of the first")
    parser.add_argument("--commit", default=None, help="commit to name where there is no git")
    args = parser.parse_args(arguments)
    gpus = scale.counts(args.gpus)
    runs.folder("--out", args.out)
    found = {key: points for key, points in studies(gpus).items() if points}
    go = {
        "date": datetime.date.today(), "hardware": "none: a CPU computes the forecasts",
        "commit": args.commit or runs.commit(), "command": f"`python {' '.join(sys.argv)}`",
    }  # fmt: skip
    (args.out / "README.md").write_text(readme(go, found))
    content: dict = {}
    for (shape, speed, cards), points in found.items():
        of = content.setdefault(shape, {}).setdefault(speed, {})
        of[str(cards)] = [dataclasses.asdict(p) for p in points]
    (args.out / "summary.json").write_text(json.dumps(content) + "\n")
    shown = {f"{shape}, {speed}": points for (shape, speed, cards), points in found.items() if cards == 8}
    plot.draw_scale(args.out / "scale.png", shown, columns=len(SPEEDS))
    print("\n".join(findings(found)))


if __name__ == "__main__":
    sys.exit(cli.run(main))
