"""The text that the command prints: the table of ways, the split by site, the recommendation; the same as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from taco_jax.forecast.advice import Advice, Choice
from taco_jax.forecast.cost import Machine
from taco_jax.forecast.predict import Forecast, Part
from taco_jax.forecast.scale import Point, stops
from taco_jax.models.decoder import LAYER_SITES

EVERYWHERE = "pays on all of these numbers of GPUs"
PARTS = ("products", "memory", "codec", "messages")


def text(title: str, machine: Machine, exact: Forecast, ceiling: Forecast, choices: Sequence[Choice],
         advice: Advice, notes: Sequence[str] = (), one_chain: Forecast | None = None) -> str:  # fmt: skip
    """Everything that the command prints. notes: lines below the table. one_chain: exact, where that has several."""
    shown = (
        next((c.forecast for c in choices if c is advice.best), None)
        or max(choices, key=lambda c: c.speedup, default=Choice("none", exact, 1.0, None)).forecast
    )
    blocks = [
        title,
        machine_text(machine),
        "\n".join([ways(exact, ceiling, choices, one_chain), *programs(exact, choices), *notes]),
        sites(exact),
        *([sites(shown)] if shown is not exact else []),
        f"recommendation: {advice.text}",
        "\n".join(["how sure", *(f"  {line}" for line in advice.sure)]),
    ]
    return "\n\n".join(blocks)


def machine_text(machine: Machine) -> str:
    gpu, link = machine.gpu, machine.link
    lines = [
        f"{machine.devices} x {gpu.name}: {gpu.flops / 1e12:.4g} TFLOP/s bf16, {gpu.memory_gb_s:.4g} GB/s memory, "
        f"codecs by {machine.kernels}",
        f"link {link.name}: {link.gb_s(2):.3g} GB/s from a GPU ({link.source})",
    ]
    if machine.hosts > 1:
        cards = f"{machine.rails} x " if machine.rails > 1 else ""
        lines.append(f"{machine.hosts} hosts: {cards}{machine.between.gb_s(2):.3g} GB/s from a host")
    return "\n".join(lines)


def ways(exact: Forecast, ceiling: Forecast, choices: Sequence[Choice], one_chain: Forecast | None = None) -> str:
    head = f"{'':18}{'ms':>9}{'speed':>8}{'fewer bytes':>13}  loss by the record"
    rows = [head, _way("exact", exact, exact, "")]
    if one_chain is not None:
        rows.append(_way("exact, one chain", one_chain, exact, "as in a program without chains"))
    for c in choices:
        loss = "no record" if c.loss is None else f"{c.loss}, {c.loss.source.partition(':')[0]}"
        rows.append(_way(c.codecs, c.forecast, exact, loss))
        if set(LAYER_SITES) & set(c.forecast.exactly):
            rows[-1] += "; layers' messages are too small and go exactly"
    speed = f"{exact.seconds / ceiling.seconds:.2f}x"
    return "\n".join([*rows, f"{'nothing sent':18}{1e3 * ceiling.seconds:9.1f}{speed:>8}{'':13}  the ceiling"])


def programs(exact: Forecast, choices: Sequence[Choice]) -> list[str]:
    """Returns how many chains each way has, and which sums copy engines bring, with the reasons; nothing where tp is
    1."""
    lines: list[str] = []
    by_way = {"exact": exact} | {c.codecs: c.forecast for c in choices}
    for key, said in (
        ("chains", lambda f: f"{f.chains} ({f.chains_why})" if f.chains_why else ""),
        ("copied", lambda f: f.copied if f.chains_why else ""),
    ):
        ways_of: dict[str, list[str]] = {}
        for name, forecast in by_way.items():
            if key == "chains" or forecast is not exact or len(by_way) == 1:
                ways_of.setdefault(said(forecast), []).append(name)
        ways_of.pop("", None)
        one = len(ways_of) == 1
        lines += [f"{key}: {text}" + ("" if one else f" of {', '.join(names)}") for text, names in ways_of.items()]
    return lines


def _way(name: str, forecast: Forecast, exact: Forecast, loss: str) -> str:
    speed = f"{exact.seconds / forecast.seconds:.2f}x"
    return f"{name:18}{1e3 * forecast.seconds:9.1f}{speed:>8}{forecast.ratio:12.2f}x  {loss}".rstrip()


def sites(forecast: Forecast) -> str:
    """The split of one way by site, in milliseconds."""
    name = "exact" if forecast.codecs == "none" else forecast.codecs
    rows = [f"{name + ', ms by site':24}{'products':>10}{'memory':>9}{'codec':>8}{'messages':>10}{'beside':>9}"]
    total = Part()
    for site, part in sorted(forecast.sites.items(), key=lambda pair: -pair[1].seconds):
        total.plus(part)
        if part.seconds + part.hidden > 5e-6:
            rows.append(_row(site, part))
    rows.append(_row("all", total))
    if forecast.bubble:
        rows.append(f"{'empty ticks of stages':24}{1e3 * forecast.bubble:10.2f}")
    return "\n".join(rows)


def _row(name: str, part: Part) -> str:
    p = part
    ms = [1e3 * value for value in (p.products, p.memory, p.codec, p.messages, p.hidden)]
    return f"{name:24}{ms[0]:10.2f}{ms[1]:9.2f}{ms[2]:8.2f}{ms[3]:10.2f}{ms[4]:9.2f}"


def as_json(title: str, machine: Machine, exact: Forecast, ceiling: Forecast, choices: Sequence[Choice],
            advice: Advice, notes: Sequence[str] = (),
            one_chain: Forecast | None = None) -> dict[str, Any]:  # fmt: skip
    """The figures of `text`. Times are milliseconds."""
    found = {
        "what": title, "notes": list(notes),
        "gpu": machine.gpu.name, "devices": machine.devices, "hosts": machine.hosts, "kernels": machine.kernels,
        "link": {"name": machine.link.name, "gb_s": machine.link.gb_s(2), "source": machine.link.source},
        "exact": _forecast(exact, exact), "ceiling": _forecast(ceiling, exact),
        "codecs": {c.codecs: _forecast(c.forecast, exact) | {"loss": _loss(c)} for c in choices},
        "recommendation": {
            "codec": None if advice.best is None else advice.best.codecs, "text": advice.text,
            "least_bytes": advice.least_bytes, "most_gb_s": None if math.isinf(advice.most_gb_s) else advice.most_gb_s,
            "pays_at_every_speed": math.isinf(advice.most_gb_s),
        },
        "sure": list(advice.sure),
    }  # fmt: skip
    if one_chain is not None:
        found["exact_one_chain"] = _forecast(one_chain, exact)
    if machine.between is not None:
        found["between"] = {"name": machine.between.name, "gb_s": machine.between.gb_s(2), "rails": machine.rails}
    return found


def _forecast(forecast: Forecast, exact: Forecast) -> dict[str, Any]:
    return {
        "ms": 1e3 * forecast.seconds,
        "speedup": exact.seconds / forecast.seconds,
        "fewer_bytes": forecast.ratio,
        "bytes_sent": forecast.sent,
        "empty_ticks_ms": 1e3 * forecast.bubble,
        "chains": forecast.chains,
        "chains_why": forecast.chains_why,
        "copied": forecast.copied,
        "sites": {
            site: {name: 1e3 * getattr(part, name) for name in (*PARTS, "hidden")}
            for site, part in forecast.sites.items()
        },
        "sent_exactly": list(forecast.exactly),
    }


def _loss(choice: Choice) -> dict[str, Any] | None:
    loss = choice.loss
    if loss is None:
        return None
    return {"change": loss.change, "standard_error": loss.error, "runs": loss.runs, "source": loss.source}


def scale_text(title: str, points: Sequence[Point]) -> str:
    """The table of a study of many GPUs, and where each way stops paying."""
    ways_ = list(dict.fromkeys(p.way for p in points))
    exact = {p.gpus: p for p in points if p.way == "none"}
    rows = [f"{'GPUs':>6}  {'exact: dp x pp x tp':20}{'tokens/s':>12}{'messages':>10}{'empty':>7}"
            + "".join(f"{way:>9}" for way in ways_ if way != "none")]  # fmt: skip
    for n, p in exact.items():
        speeds = {q.way: q.tokens / p.tokens for q in points if q.gpus == n}
        rows.append(
            f"{n:6}  {f'{p.dp} x {p.pp} x {p.tp}':20}{p.tokens:12,.0f}{100 * p.messages:9.0f}%{100 * p.bubble:6.0f}%"
            + "".join(f"{speeds[way]:8.2f}x" for way in ways_ if way != "none")
        )
    return "\n".join([title, *rows, *(f"{way}: {where(points, way)}" for way in ways_ if way != "none")])


def where(points: Sequence[Point], way: str) -> str:
    """On how many GPUs a way pays, in words."""
    first, last = stops(list(points), way)
    most = max(p.gpus for p in points)
    least = min(p.gpus for p in points)
    if first is None:
        return "nowhere 2 % faster"
    if (first, last) == (least, most):
        return EVERYWHERE
    if last == most:
        return f"pays from {first:,} GPUs on"
    return f"pays up to {last:,} GPUs" if first == least else f"pays from {first:,} to {last:,} GPUs"
