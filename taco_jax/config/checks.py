"""The rules between the fields of a configuration: `check`, which everything that takes a TrainConfig has called."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from typing import Any

from taco_jax.codec import CODECS, as_codec
from taco_jax.compression.compression import (
    CHOICES,
    MAX_CHUNKS,
    Compression,
    without_key,
)
from taco_jax.config import (
    ConfigError,
    TrainConfig,
    codec_pair,
    get,
    keys,
    parse_devices,
    pipeline_schedule,
    site_compression,
    with_codecs,
)
from taco_jax.config.schedule import SCHEDULES
from taco_jax.errors import did_you_mean, listed

COMPUTE_DTYPES = ("bfloat16", "float32", "float16")
TOKEN_DTYPES = ("auto", "uint16", "uint32")
ATTENTION = (None, "xla", "cudnn")
DISTRIBUTED = ("auto", "slurm", "env", "off")
REMAT = ("none", "full", "dots")


def check(config: TrainConfig) -> TrainConfig:
    """Returns `config`, with all codecs named, if its fields fit together, else raises ConfigError with one line."""
    check_types(config)
    config = with_codecs(config)
    for key in keys(config):
        value = get(config, key)
        if isinstance(value, int) and key not in ("seed", "compression.min_bytes"):
            _require(value < 1 << 31, config, key, "must be below 2**31")
    for key in (
        "steps",
        "global_batch",
        "accumulation",
        "chains",
        "mesh.dp",
        "mesh.pp",
        "mesh.tp",
        "pipeline.microbatches",
        "pipeline.chunks",
        "data.sequence_length",
        "compression.history",
        "checkpoint.every",
        "metrics.every",
        "evaluation.every",
        "max_skipped_in_a_row",
        "distributed_timeout",
        "heartbeat_timeout",
    ):
        _require(get(config, key) >= 1, config, key, "must be at least 1")
    for key in (
        "seed",
        "optimizer.warmup_steps",
        "metrics.snr_every",
        "data.prefetch",
        "compression.calibration_steps",
    ):
        _require(get(config, key) >= 0, config, key, "must not be negative")
    for key, allowed in (
        ("compute_dtype", COMPUTE_DTYPES),
        *((f"compression.{field}", valid) for field, valid in CHOICES.items()),
        ("pipeline.schedule", SCHEDULES),
        ("data.token_dtype", TOKEN_DTYPES),
        ("remat", REMAT),
        ("attention_implementation", ATTENTION),
        ("distributed", DISTRIBUTED),
    ):
        value = get(config, key)
        _require(
            value in allowed,
            config,
            key,
            f"{did_you_mean(value, [a for a in allowed if a])} (one of {', '.join(str(a) for a in allowed)})",
        )
    hosts = config.mesh.devices_per_host
    rule = "must be at least 1, or None for what JAX says"
    _require(hosts is None or hosts >= 1, config, "mesh.devices_per_host", rule)
    size = config.mesh.size
    rule = f"must divide the {size} devices of the mesh (dp x pp x tp), else hosts' ranks are in no order; try "
    fits = hosts is None or hosts >= size or size % hosts == 0
    _require(fits, config, "mesh.devices_per_host", rule + listed(_divisors(size)))
    chunks = config.compression.chunks
    rule = f"must be from 1 to {MAX_CHUNKS}, or None for as tuned"
    _require(chunks is None or 1 <= chunks <= MAX_CHUNKS, config, "compression.chunks", rule)
    _require(config.stop_after is None or config.stop_after >= 1, config, "stop_after", "must be at least 1")
    _require(0 < config.data.validation_fraction < 1, config, "data.validation_fraction", "must be between 0 and 1")
    for key in (
        "optimizer.learning_rate",
        "optimizer.eps",
        "model.norm_eps",
        "model.rope_theta",
        "model.init_std",
        "gpu_memory_gb",
    ):
        _require(0 < get(config, key) < math.inf, config, key, "must be above 0 and finite")
    for key in ("optimizer.min_learning_rate", "optimizer.weight_decay"):
        value = get(config, key)
        _require(value is None or 0 <= value < math.inf, config, key, "must be 0 or more and finite")
    rule = "must be from 0 to 1, the share of learning_rate at the last step"
    key = "optimizer.min_learning_rate_ratio"
    _require(0 <= config.optimizer.min_learning_rate_ratio <= 1, config, key, rule)
    for key in ("optimizer.beta1", "optimizer.beta2"):
        _require(0 <= get(config, key) < 1, config, key, "must be at least 0 and below 1")
    _require(config.seed < 1 << 32, config, "seed", "must be below 2**32")
    _require(config.loss_chunk is None or config.loss_chunk >= 1, config, "loss_chunk", "must be at least 1, or None")
    _require(
        config.optimizer.floor <= config.optimizer.learning_rate,
        config,
        "optimizer.min_learning_rate",
        f"must not exceed learning_rate={config.optimizer.learning_rate}; None makes it a share of that, "
        f"min_learning_rate_ratio={config.optimizer.min_learning_rate_ratio}",
    )
    clip = config.optimizer.clip_norm
    _require(clip is None or clip > 0, config, "optimizer.clip_norm", "must be above 0, or None for no clipping")
    keep = config.checkpoint.keep
    _require(keep is None or keep >= 1, config, "checkpoint.keep", "must be at least 1, or None to keep all")
    batches = config.evaluation.batches
    _require(batches is None or batches >= 0, config, "evaluation.batches", "must be 0 or more, or None for all")
    _check_batch(config)
    _check_model(config)
    _check_stages(config)
    _check_codecs(config)
    _check_limits(config)
    _check_data_parallel(config)
    parse_devices(config.devices)
    return config


def check_types(config: Any, prefix: str = "") -> None:
    """Values that an experiment file set to something else than the field's type; the command line cannot."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        key, value, hint = f"{prefix}{field.name}", getattr(config, field.name), hints[field.name]
        kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        kinds = tuple(typing.get_origin(kind) or kind for kind in kinds)
        # A bool is an int to Python, and an int will do for a float.
        fits = isinstance(value, kinds) or (float in kinds and isinstance(value, int))
        if not fits or (isinstance(value, bool) and bool not in kinds):
            names = " or ".join("None" if kind is types.NoneType else kind.__name__ for kind in kinds)
            raise ConfigError(
                f"{key}={value!r}: must be of type {names}, is {type(value).__name__}{_instead(value, kinds)}"
            )
        if dataclasses.is_dataclass(value):
            check_types(value, f"{key}.")


def _instead(value: Any, kinds: tuple) -> str:
    """A number that would do for what is none of the field's type."""
    for kind in (int, float):
        if kind in kinds and not isinstance(value, bool):
            try:
                return f"; {kind(value)!r} would do"
            except (TypeError, ValueError, OverflowError):
                break
    return ""


def _check_batch(config: TrainConfig) -> None:
    parts = config.mesh.dp * config.accumulation
    if config.global_batch % parts:
        near = max(1, round(config.global_batch / parts)) * parts
        raise ConfigError(
            f"global_batch={config.global_batch}: mesh.dp={config.mesh.dp} x accumulation="
            f"{config.accumulation} must divide it; try {near}"
        )
    sequences, rule = config.global_batch // parts, "global_batch / (mesh.dp x accumulation)"
    schedule = pipeline_schedule(config)
    if schedule is not None:
        if sequences % schedule.microbatches:
            raise ConfigError(
                f"pipeline.microbatches={schedule.microbatches}: must divide the {sequences} sequences of a device "
                f"({rule}); try {listed(_divisors(sequences))}"
            )
        sequences, rule = sequences // schedule.microbatches, f"{rule[:-1]} x pipeline.microbatches)"
    if sequences % config.chains:
        raise ConfigError(
            f"chains={config.chains}: must divide the {sequences} sequences of a device's microbatch ({rule}); "
            f"try {listed(_divisors(sequences))}"
        )


def _check_stages(config: TrainConfig) -> None:
    schedule, layers = pipeline_schedule(config), config.model.n_layers
    if schedule is None:
        return
    if layers % schedule.stages:
        raise ConfigError(
            f"mesh.pp={schedule.stages}: must divide the {layers} layers of the model (model.n_layers); "
            f"try {listed(_divisors(layers))}"
        )
    of_stage = layers // schedule.stages
    if of_stage % schedule.chunks:
        raise ConfigError(
            f"pipeline.chunks={schedule.chunks}: must divide the {of_stage} layers of a stage (model.n_layers / "
            f"mesh.pp); try {listed(_divisors(of_stage))}"
        )


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def _check_model(config: TrainConfig) -> None:
    from taco_jax.models.config import validate

    try:
        validate(config.model, config.mesh.tp)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"model: {error}") from error
    length, tp = config.data.sequence_length, config.mesh.tp
    if config.model.positions == "learned" and length > config.model.max_length:
        raise ConfigError(
            f"data.sequence_length={length}: the model has learned positions for model.max_length="
            f"{config.model.max_length} tokens; use at most that"
        )
    if config.sequence_parallel and length % tp:
        raise ConfigError(
            f"data.sequence_length={length}: sequence_parallel needs mesh.tp={tp} to divide it; "
            f"try {max(1, length // tp) * tp}"
        )


def _check_codecs(config: TrainConfig) -> None:
    c, keys = (
        config.compression,
        ("compression.forward", "compression.backward", "pipeline.forward", "pipeline.backward"),
    )
    names = {key: get(config, key) for key in keys}
    for pattern, pair in c.plan.items():
        if not (isinstance(pattern, str) and isinstance(pair, str)):
            raise ConfigError(
                f"compression.plan {pattern!r}: {pair!r}: both must be texts, such as 'layers/*': 'taco:int8h'"
            )
        forward, backward = codec_pair(pair)
        names[f"compression.plan {pattern!r} (forward)"] = forward
        names[f"compression.plan {pattern!r} (backward)"] = backward
    if c.between_hosts is not None:
        names["compression.between_hosts"] = c.between_hosts
    for key, name in names.items():
        _check_codec(key, name)
    try:
        for pair in (None, *c.plan.values()):
            without_key(site_compression(c, pair))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"compression.{error}") from None
    try:
        without_key(Compression(config.pipeline.forward, backward=config.pipeline.backward))
    except ValueError as error:
        raise ConfigError(f"pipeline.{error}") from None


def _check_codec(key: str, text: str, others: tuple[str, ...] = ()) -> None:
    """Raises ConfigError for a text that is no codec, nor one of the `others`."""
    if "," not in text and text not in (*CODECS, *others):
        raise ConfigError(f"{key}={text!r}: no such codec preset; {did_you_mean(text, [*CODECS, *others])}")
    if text not in others:
        try:
            as_codec(text, key)
        except ValueError as error:
            raise ConfigError(str(error)) from None


# Setting -> (key, its limit, why the setting is never used beyond).
LIMITS = {
    "with_product": (
        ("chains", 1, "sums of chains travel beside other products"),
        ("sequence_parallel", False, "layers scatter and gather, and no product has a sum of its own"),
        ("mesh.pp", 1, "stages run no kernel over NVLink"),
    ),
    "error_feedback": (
        ("chains", 1, "the sums of one chain take errors along"),
        ("sequence_parallel", False, "a sum that is scattered leaves no whole error"),
    ),
}


def _check_limits(config: TrainConfig) -> None:
    """Layers that send otherwise would leave a setting unused, without a word."""
    for setting, limits in LIMITS.items():
        if not getattr(config.compression, setting):
            continue
        if setting == "error_feedback" and config.compression.forward == "none" and not config.compression.plan:
            raise ConfigError(
                "compression.error_feedback=True: sums of compression.forward='none' lose nothing; set a codec, or "
                "leave compression.error_feedback out"
            )
        for key, limit, why in limits:
            value = get(config, key)
            if value not in (limit, None):  # None: left to `config.sequence_parallel`, which says no
                raise ConfigError(
                    f"compression.{setting}=True: is never used with {key}={value} ({why}); set {key}={limit}, or "
                    f"leave compression.{setting} out"
                )


def _check_data_parallel(config: TrainConfig) -> None:
    d = config.data_parallel
    for key, other in (("gradients", "sdp4"), ("parameters", "bfloat16")):
        value = getattr(d, key)
        _check_codec(f"data_parallel.{key}", value, (other,))
        codec = None if value == other else as_codec(value)
        rule = "has one scale a token, and gradients and weights have no tokens; use 'int8h'"
        _require(codec is None or not codec.per_token, config, f"data_parallel.{key}", rule)
        rule = "gradients and weights have no key to draw noise with; use rounding=nearest"
        _require(codec is None or codec.rounding == "nearest", config, f"data_parallel.{key}", rule)
    if d.parameters != "none" and not d.zero1:
        raise ConfigError(
            f"data_parallel.parameters={d.parameters!r}: without data_parallel.zero1 no weights are sent; set "
            "data_parallel.zero1, or leave it at 'none'"
        )
    rule = "must be above 0 and finite, for example 256"
    _require(0 < d.bucket_mb < math.inf, config, "data_parallel.bucket_mb", rule)


def _require(holds: bool, config: TrainConfig, key: str, rule: str) -> None:
    if not holds:
        raise ConfigError(f"{key}={get(config, key)!r}: {rule}")
