"""Settings that follow from others (the schedule of the stages, codecs that were left open, sequence parallelism), and
the dotted keys of all."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from taco_jax.codec import AUTO
from taco_jax.compression import recommended
from taco_jax.compression.compression import codec_pair
from taco_jax.compression.plan_file import feeds_back, is_plan_path
from taco_jax.config.schedule import Schedule
from taco_jax.config.settings import AUTO_REMAT, TrainConfig, site_compression
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


def chains(config: TrainConfig, device: Any = None) -> tuple[int, str]:
    """Returns how many parts of a microbatch go through each layer side by side, and why.

    Of auto: two where the link of tp is slow, and the messages of two are large enough; else one. It asks the
    environment and the driver's library for the link, and starts no backend.

    Args:
      device: one of the mesh's, where they are known: chains keep messages above the size that was tuned for it.
    """
    if config.chains != AUTO:
        return config.chains, "as configured"
    from taco_jax.compression import chains as rule

    if config.mesh.tp == 1:
        return 1, "tp is 1"
    if rule.on_cpu(config.devices) if device is None else device.platform == "cpu":
        return 1, "on CPU nothing travels beside products"
    slow = rule.slow_link(getattr(device, "device_kind", ""))
    least = 0 if slow is None else rule.least_bytes([site_compression(config.compression)], config.mesh.tp, device)
    return auto_chains(config, slow, least)


def auto_chains(config: TrainConfig, slow: str | None, least: int) -> tuple[int, str]:
    """Returns the `chains` of auto over a link of GPUs, tp being above 1.

    Args:
      slow: why the link is slow; None where it is NVLink.
      least: bytes of a chain's message with which it pays.
    """
    from taco_jax.compression import chains as rule

    c, sequences = config.compression, microbatch(config)
    if slow is None:
        return 1, "over NVLink they lose more in their products than they hide"
    if config.mesh.pp > 1:
        return 1, "stages have microbatches already; --chains 2 was not measured with them"
    if c.with_product:
        return 1, "sums in the kernels of their products overlap with nothing else"
    if c.backward_error_feedback:
        return 1, "the gradients' sums of one chain take errors along"
    if _sequence_parallel(config, 1)[0]:
        return 1, "sequence parallelism is on"
    if sequences % rule.CHAINS:
        return 1, f"{rule.CHAINS} do not divide the {sequences} sequences of a device's microbatch"
    size = 4 if config.compute_dtype == "float32" else 2
    nbytes = sequences // rule.CHAINS * config.data.sequence_length * config.model.d_model * size
    if nbytes < least:
        return 1, f"a chain's messages would have {nbytes:,} bytes, below {least:,}"
    return rule.CHAINS, f"{slow}: messages of one travel beside products of the other"


def sequence_parallel(config: TrainConfig) -> tuple[bool, str]:
    """Returns whether activations between layers are cut along the sequence, and why.

    A psum_scatter and an all_gather then take the place of each all-reduce, with its bytes; what a rank sends to the
    next stage, and what the backward pass keeps of norms and residuals, is 1 / tp. With remat that is hardly anything:
    it keeps what messages brought, so that none is sent twice, and what an all_gather brings is whole. Where tp is 2 a
    value is quantised twice instead of once.
    """
    # Chains by themselves are never where this is on, so that auto decides nothing here.
    return _sequence_parallel(config, 1 if config.chains == AUTO else config.chains)


def _sequence_parallel(config: TrainConfig, chains: int) -> tuple[bool, str]:
    length, tp = config.data.sequence_length, config.mesh.tp
    if config.sequence_parallel is not None:
        return config.sequence_parallel, "as configured"
    if tp == 1:
        return False, "tp is 1"
    if length % tp:
        return False, f"tp {tp} does not divide the {length} tokens of a sequence"
    if chains > 1:
        return False, "chains put messages beside products for whole sequences only"
    if config.compression.with_product:
        return False, "sums in the kernels of their products are of whole sequences"
    fed = config.compression.error_feedback or config.compression.backward_error_feedback
    if fed or feeds_back(config.compression.plan):
        return False, "sums with error feedback are of whole sequences"
    if config.mesh.pp > 1:
        return True, f"each of the {tp} ranks of a stage sends 1/{tp} of its activations"
    if (mode := remat(config)[0]) != "none":
        return False, f"remat {mode} leaves little memory to save"
    if length < LONG_SEQUENCE:
        return False, f"{length} tokens a sequence, below {LONG_SEQUENCE}"
    return True, f"{length} tokens a sequence: what is kept between layers takes 1/{tp} of the memory"


def remat(config: TrainConfig) -> tuple[str, str]:
    """Returns what the backward pass recomputes, and why.

    With stages what is saved lies in memory for many microbatches, and to write and read it takes longer than to
    compute all but the products again (experiments/results/stages_2gpus). 1F1B runs a stage again in any case; what
    that saves is read at once.
    """
    if config.remat != AUTO_REMAT:
        return config.remat, "as configured"
    if config.mesh.pp > 1:
        return "dots", "with stages it takes less time, and less memory, than to keep everything"
    return "none", "no stages"


def overlap(config: TrainConfig) -> tuple[bool, str]:
    """Returns whether each layer's gradients are sent over dp beside the backward pass of the layer before, and why.

    By itself nothing does so yet: it was not measured.
    """
    if (key := why_no_overlap(config)) is not None:
        return False, key
    if config.data_parallel.overlap is not None:
        return config.data_parallel.overlap, "as configured"
    return False, "--data-parallel.overlap sends each layer's beside the one before it"


def why_no_overlap(config: TrainConfig) -> str | None:
    """Returns the setting with which no layer's gradients are whole before the backward pass ends, or with which an
    optimiser's shares are of whole layers; None where there is none."""
    if config.mesh.dp == 1:
        return "mesh.dp=1"
    if config.mesh.pp > 1:
        return f"mesh.pp={config.mesh.pp}"
    if config.accumulation > 1:
        return f"accumulation={config.accumulation}"
    if config.model.n_layers == 1:
        return "model.n_layers=1"
    if config.lora.rank is not None:
        return f"lora.rank={config.lora.rank}"
    if config.data_parallel.zero1 and config.optimizer.name == "muon":
        return "data_parallel.zero1 and optimizer.name='muon'"
    return None


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


# Setting of a codec -> the use whose recommended codec auto is, and its direction.
USES = {
    "compression.forward": (recommended.TRAINING, "forward"),
    "compression.backward": (recommended.TRAINING, "backward"),
    "pipeline.forward": (recommended.STAGES, "forward"),
    "pipeline.backward": (recommended.STAGES, "backward"),
    "data_parallel.gradients": (recommended.GRADIENTS, "backward"),
    "data_parallel.parameters": (recommended.WEIGHTS, "forward"),
}


def with_codecs(config: TrainConfig, own: Mapping[str, Any] | None = None) -> TrainConfig:
    """The config with a codec in the place of each auto and None.

    Codecs none over tp alone would be no exact run, so None is none where both of compression are.

    Args:
      own: dotted keys with the codecs of the run that this one goes on with, which stay (`stored.own_codecs`).
    """
    own = own or {}

    def fill(part: Any, otherwise: str) -> Any:
        changes = {}
        for key, use in USES.items():
            name = key.removeprefix(part.PREFIX)
            if key.startswith(part.PREFIX):
                value = getattr(part, name)
                value = otherwise if value is None else value
                changes[name] = own.get(key, recommended.resolved(AUTO, *use)) if value == AUTO else value
        return dataclasses.replace(part, **changes)

    is_exact = lambda values: (values.get("compression.forward"), values.get("compression.backward")) == ("none",) * 2
    compression = fill(config.compression, AUTO)
    plan = {pattern: _plan_codecs(pattern, codecs, own) for pattern, codecs in compression.plan.items()}
    compression = dataclasses.replace(compression, plan=plan)
    exact = is_exact({f"compression.{key}": getattr(compression, key) for key in ("forward", "backward")})
    if is_exact(own) and not exact:
        own = {}  # its other axes were exact because it was
    otherwise, data_parallel = "none" if exact else AUTO, config.data_parallel
    if not data_parallel.zero1 and data_parallel.parameters == AUTO:
        data_parallel = dataclasses.replace(data_parallel, parameters="none")
    return dataclasses.replace(
        config,
        compression=compression,
        pipeline=fill(config.pipeline, otherwise),
        data_parallel=fill(data_parallel, otherwise),
    )


def _plan_codecs(pattern: str, codecs: str, own: Mapping[str, Any]) -> str:
    """The codecs FORWARD[:BACKWARD] of a pattern of compression.plan with those of a use in the place of auto.

    What a plan's file holds stays as it is.
    """
    if is_plan_path(pattern) or not isinstance(codecs, str) or AUTO not in (pair := codec_pair(codecs)):
        return codecs
    if (kept := own.get("compression.plan", {}).get(pattern)) is not None:
        return kept
    forward, backward = (
        recommended.resolved(c, recommended.TRAINING, d) for c, d in zip(pair, ("forward", "backward"))
    )
    return forward if forward == backward else f"{forward}:{backward}"


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
