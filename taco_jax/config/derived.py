"""Settings that follow from others (the schedule of the stages, codecs that were left open, sequence parallelism), and
the dotted keys of all."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from taco_jax.compression.compression import codec_pair
from taco_jax.compression.plan_file import feeds_back
from taco_jax.config.schedule import Schedule
from taco_jax.config.settings import TrainConfig
from taco_jax.errors import ConfigError

LONG_SEQUENCE = 2048
"""Tokens of a sequence from which sequence parallelism is on by itself. It saves the same share of the memory at any
length (experiments/results/sequence_parallel), which is worth little where activations are small, and its messages are
more and smaller: what they cost GPUs in time has not been measured."""


def microbatch(config: TrainConfig) -> int:
    """Sequences that go through a layer at once on one device, all chains together."""
    schedule = pipeline_schedule(config)
    parts = config.mesh.dp * config.accumulation * (1 if schedule is None else schedule.microbatches)
    return config.global_batch // parts


def sequence_parallel(config: TrainConfig) -> tuple[bool, str]:
    """Returns whether activations between layers are cut along the sequence, and why.

    A psum_scatter and an all_gather then take the place of each all-reduce, with its bytes; what a rank sends to the
    next stage, and what the backward pass keeps of norms and residuals, is 1 / tp. With remat that is hardly anything:
    it keeps what messages brought, so that none is sent twice, and what an all_gather brings is whole. Where tp is 2 a
    value is quantised twice instead of once.
    """
    length, tp = config.data.sequence_length, config.mesh.tp
    if config.sequence_parallel is not None:
        return config.sequence_parallel, "as configured"
    if tp == 1:
        return False, "tp is 1"
    if length % tp:
        return False, f"tp {tp} does not divide the {length} tokens of a sequence"
    if config.chains > 1:
        return False, "chains put messages beside products for whole sequences only"
    if config.compression.with_product:
        return False, "sums in the kernels of their products are of whole sequences"
    fed = config.compression.error_feedback or config.compression.backward_error_feedback
    if fed or feeds_back(config.compression.plan):
        return False, "sums with error feedback are of whole sequences"
    if config.mesh.pp > 1:
        return True, f"each of the {tp} ranks of a stage sends 1/{tp} of its activations"
    if config.remat != "none":
        return False, f"remat {config.remat} leaves little memory to save"
    if length < LONG_SEQUENCE:
        return False, f"{length} tokens a sequence, below {LONG_SEQUENCE}"
    return True, f"{length} tokens a sequence: what is kept between layers takes 1/{tp} of the memory"


def pipeline_schedule(config: TrainConfig) -> Schedule | None:
    """The schedule of a run's pipeline; None where mesh.pp is 1. Only circular has several chunks."""
    p, stages = config.pipeline, config.mesh.pp
    chunks = p.chunks if p.schedule == "circular" else 1
    return None if stages == 1 else Schedule(p.schedule, stages, p.microbatches, chunks)


def with_compression(config: TrainConfig, codecs: str) -> TrainConfig:
    """The config with the tensor-parallel codecs FORWARD:BACKWARD (one name: both); none makes every axis exact.

    A plan, which gives single sites their own, stays unless the codecs are none.
    """
    try:
        forward, backward = codec_pair(codecs)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    compression = dataclasses.replace(config.compression, forward=forward, backward=backward)
    if (forward, backward) != ("none", "none"):
        return dataclasses.replace(config, compression=compression)
    return dataclasses.replace(
        config,
        compression=dataclasses.replace(
            compression, plan={}, between_hosts=None, error_feedback=False, backward_error_feedback=False
        ),
        pipeline=dataclasses.replace(config.pipeline, forward="none", backward="none"),
        data_parallel=dataclasses.replace(config.data_parallel, gradients="none", parameters="none"),
    )


def with_codecs(config: TrainConfig) -> TrainConfig:
    """The config with a codec in the place of each None. Codecs none over tp alone would be no exact run."""
    exact = (config.compression.forward, config.compression.backward) == ("none", "none")

    def fill(part: Any, **codecs: str) -> Any:
        left = {key: "none" if exact else codec for key, codec in codecs.items() if getattr(part, key) is None}
        return dataclasses.replace(part, **left)

    return dataclasses.replace(
        config,
        pipeline=fill(config.pipeline, forward="int8_token", backward="e4m3h"),
        data_parallel=fill(config.data_parallel, gradients="int8h"),
    )


def get(config: Any, key: str) -> Any:
    """The value of a dotted key, such as "mesh.tp"."""
    for part in key.split("."):
        config = getattr(config, part)
    return config


def to_dict(config: Any) -> dict[str, Any]:
    """The config as nested dicts of plain values, as `config.json` has it."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"mesh": {"tp": 4}} -> {"mesh.tp": 4}; a dict of free keys (a plan) stays one value."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        nested = isinstance(value, dict) and not name == "plan"
        flat |= flatten(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return flat


def keys(config: Any, prefix: str = "") -> list[str]:
    """Every dotted key of a config dataclass."""
    return list(flatten(to_dict(config)))
