"""Seconds of each message in each codec, by the forecast (`taco_jax.forecast`), for budgets of time.

A message's seconds are the difference that it makes to the whole forecast when it alone is compressed. Differences add
up but where messages hide beside products, or chains beside each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from taco_jax.calibration.measure import Statistics
from taco_jax.config import TrainConfig
from taco_jax.config.derived import with_codecs
from taco_jax.forecast import predict
from taco_jax.forecast.cost import Machine
from taco_jax.models.decoder import LAYER_SITES

PROMPT = 1024
"""Tokens of the prompt where --ttft does not say."""


def of(machine: Machine, config: TrainConfig, subject: Any, measured: Mapping[tuple[str, str], Statistics],
       codecs: Sequence[str], length: int | None) -> tuple[Callable[[str, str, str], float], float, float]:  # fmt: skip
    """Returns ((site, direction, codec) -> seconds of all its calls, seconds of all else, seconds of the exact run)."""
    if subject.use == "training":
        model = subject.model.config
        exact, changes = _steps(machine, dataclasses.replace(config, model=model), measured, codecs)
    else:
        exact, changes = _prompts(machine, subject, measured, codecs, length)
    # Sizes of a knapsack are not negative: each message is given what it can save at most.
    saved = {message: max(0.0, *(-change for change in of_codec.values())) for message, of_codec in changes.items()}
    size = lambda site, direction, codec: saved[site, direction] + changes[site, direction].get(codec, 0.0)
    return size, exact - sum(saved.values()), exact


def _steps(machine, config: TrainConfig, measured, codecs) -> tuple[float, dict]:
    """(seconds of the exact step, {(site, direction): {codec: seconds more}})."""
    config = with_codecs(config)

    def seconds(plan: dict[str, str]) -> float:
        exact = dataclasses.replace(config.compression, forward="none", backward="none", plan=plan)
        return predict.step(dataclasses.replace(config, compression=exact), machine).seconds

    exact, changes = seconds({}), {}
    for site, direction in measured:
        pair = (lambda codec: f"{codec}:none") if direction == "forward" else (lambda codec: f"none:{codec}")
        changes[site, direction] = {codec: seconds({site: pair(codec)}) - exact for codec in codecs}
    return exact, changes


def _prompts(machine, subject, measured, codecs, length: int | None) -> tuple[float, dict]:
    """The same of the time to the first token of one prompt."""
    model = subject.model.config
    given = {"tp": subject.model.tp, "length": min(length or PROMPT, model.max_length)}
    run = lambda codec: predict.first_token(model, machine, codec, feedback=subject.feedback, **given)
    exact, runs = run("none"), {codec: run(codec) for codec in codecs}
    changes: dict = {}
    for (site, direction), statistics in measured.items():
        kind = next(kind for kind in LAYER_SITES if site.endswith(kind.removeprefix("layers/")))
        calls = max(1, statistics.layers) / model.n_layers
        of_site = lambda forecast, kind=kind: forecast.sites[kind].codec + forecast.sites[kind].messages
        changes[site, direction] = {c: calls * (of_site(runs[c]) - of_site(exact)) for c in codecs}
    return exact.seconds, changes
