"""`check`: the rules between the dataclasses of a configuration. Everything that takes a TrainConfig has called it."""

from __future__ import annotations

import math

from taco_jax.codec import AUTO
from taco_jax.config.derived import get, pipeline_schedule, why_no_overlap, with_codecs
from taco_jax.config.device_selection import parse_devices
from taco_jax.config.lora import matrices
from taco_jax.config.settings import REMAT, TrainConfig, divisors
from taco_jax.errors import ConfigError, listed
from taco_jax.models.config import validate

__all__ = ["REMAT", "check"]


def check(config: TrainConfig) -> TrainConfig:
    """Returns `config`, with all codecs named, if its fields fit together, else raises ConfigError with one line."""
    config = with_codecs(config)
    _check_batch(config)
    _check_model(config)
    _check_stages(config)
    _check_overlap(config)
    _check_documents(config)
    _check_adapters(config)
    _check_limits(config)
    _check_copies(config)
    parse_devices(config.devices)
    return config


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
                f"({rule}); try {listed(divisors(sequences))}"
            )
        sequences, rule = sequences // schedule.microbatches, f"{rule[:-1]} x pipeline.microbatches)"
    if config.chains != AUTO and sequences % config.chains:
        raise ConfigError(
            f"chains={config.chains}: must divide the {sequences} sequences of a device's microbatch ({rule}); "
            f"try {listed(divisors(sequences))}"
        )


def _check_stages(config: TrainConfig) -> None:
    schedule, layers = pipeline_schedule(config), config.model.n_layers
    if schedule is None:
        return
    if layers % schedule.stages:
        raise ConfigError(
            f"mesh.pp={schedule.stages}: must divide the {layers} layers of the model (model.n_layers); "
            f"try {listed(divisors(layers))}"
        )
    of_stage = layers // schedule.stages
    if of_stage % schedule.chunks:
        raise ConfigError(
            f"pipeline.chunks={schedule.chunks}: must divide the {of_stage} layers of a stage (model.n_layers / "
            f"mesh.pp); try {listed(divisors(of_stage))}"
        )


def _check_overlap(config: TrainConfig) -> None:
    # With one rank there is nothing to send, as for all of data_parallel.
    if config.data_parallel.overlap and config.mesh.dp > 1 and (key := why_no_overlap(config)) is not None:
        raise ConfigError(
            f"data_parallel.overlap=True: must be False with {key}, where no layer's gradients are whole, or shares "
            "are of whole layers; leave it out"
        )


def _check_model(config: TrainConfig) -> None:
    for key in ("norm_eps", "rope_theta", "init_std"):
        value = getattr(config.model, key)
        if not 0 < value < math.inf:
            raise ConfigError(f"model.{key}={value!r}: must be above 0 and finite")
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


def _check_documents(config: TrainConfig) -> None:
    token, vocabulary = config.data.end_token_id, config.model.vocab_size
    if token is None:
        return
    if not config.data.document_mask:
        raise ConfigError(
            f"data.end_token_id={token}: is used with data.document_mask alone; set that too, or leave it out"
        )
    if token >= vocabulary:
        rule = f"must be below model.vocab_size={vocabulary}, else no document ends"
        raise ConfigError(f"data.end_token_id={token}: {rule}")


def _check_adapters(config: TrainConfig) -> None:
    rank, sizes = config.lora.rank, matrices(config.model)
    if rank is None:
        return
    for name in config.lora.named:
        if name not in sizes:
            if not config.lora.targets:
                continue
            raise ConfigError(f"lora.targets={name!r}: the model has no such matrix; try {listed(sizes)}")
        if rank > min(sizes[name]):
            raise ConfigError(
                f"lora.rank={rank}: is above that of {name}, a matrix of {sizes[name][0]} x {sizes[name][1]}; use at "
                f"most {min(min(sizes[n]) for n in config.lora.named if n in sizes)}, or leave it out of lora.targets"
            )


# Setting -> (key, its limit, why the setting is never used beyond).
LIMITS = {
    "with_product": (
        ("chains", 1, "sums of chains travel beside other products"),
        ("sequence_parallel", False, "layers scatter and gather, and no product has a sum of its own"),
        ("mesh.pp", 1, "stages run no kernel over NVLink"),
        ("lora.rank", None, "adapters join a product before its sum"),
    ),
    "error_feedback": (
        ("sequence_parallel", False, "a sum that is scattered leaves no whole error"),
        ("model.post_norms", False, "the error of a sum does not pass the normalisation behind it"),
    ),
    "backward_error_feedback": (
        ("chains", 1, "the gradients' sums of one chain take errors along"),
        ("sequence_parallel", False, "a sum that is scattered leaves no whole error"),
        ("mesh.pp", 1, "stages hand no errors on"),
    ),
}
# Setting of error feedback -> the codec of the sums that it is about.
FED_BACK = {"error_feedback": "forward", "backward_error_feedback": "backward"}


def _check_limits(config: TrainConfig) -> None:
    """Layers that send otherwise would leave a setting unused, without a word."""
    for setting, limits in LIMITS.items():
        if not getattr(config.compression, setting):
            continue
        codec = FED_BACK.get(setting)
        if codec and getattr(config.compression, codec) == "none" and not config.compression.plan:
            raise ConfigError(
                f"compression.{setting}=True: sums of compression.{codec}='none' lose nothing; set a codec, or "
                f"leave compression.{setting} out"
            )
        for key, limit, why in limits:
            value = get(config, key)
            if value not in (limit, None, AUTO):  # left to `sequence_parallel` and `chains`, which say no
                raise ConfigError(
                    f"compression.{setting}=True: is never used with {key}={value} ({why}); set {key}={limit}, or "
                    f"leave compression.{setting} out"
                )


def _check_copies(config: TrainConfig) -> None:
    """All devices of a program wait for each other at a copy: stages, which take branches of their own, would hang."""
    for key in ("link", "backward_link"):
        if getattr(config.compression, key) != "copy":
            continue
        for name, ok, why in (("tp", (1, 2), "sums of two GPUs"), ("pp", (1,), "programs without stages")):
            if (count := getattr(config.mesh, name)) not in ok:
                raise ConfigError(
                    f"compression.{key}='copy': is for {why}, not mesh.{name}={count}; use 'auto' or 'nccl'"
                )
