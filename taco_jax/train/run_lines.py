"""Lines that a run prints before its first step and after its last one: what it is, what it reached and moved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taco_jax.compression.plan_file import feeds_back
from taco_jax.config import ConfigError, TrainConfig, chains
from taco_jax.models.params import count_params
from taco_jax.train.step_record import SENT
from taco_jax.train.workdir import CHECKPOINTS, METRICS, PLOT

if TYPE_CHECKING:
    from taco_jax.train.guarded import GuardedPrograms
    from taco_jax.train.step import Program


def first_lines(
    config: TrainConfig, program: Program, guard: GuardedPrograms | None, *, mesh, data: str
) -> Iterator[str]:
    """Yields the lines that say what runs on what. data: of the tokens, in words."""
    parameters = count_params(config.model)
    device = mesh.devices.flat[0].device_kind
    tokens = config.global_batch * config.data.sequence_length
    forward = config.compression.error_feedback or feeds_back(config.compression.plan)
    ways = {"forward": forward, "backward": config.compression.backward_error_feedback}
    fed = ", ".join(way for way, is_fed in ways.items() if is_fed)
    fed = f"; error feedback in tp {fed}" if fed else ""
    yield (
        f"{parameters / 1e6:,.1f}M parameters on {mesh.devices.size} x {device} "
        f"(dp {config.mesh.dp}, pp {config.mesh.pp}, tp {config.mesh.tp})"
    )
    if (adapters := program.adapters) is not None:
        yield (
            f"adapters of rank {adapters.rank}, scale {adapters.scale:g}, on {', '.join(adapters.targets)}: "
            f"{adapters.count(config.model) / 1e6:,.2f}M parameters are trained"
        )
    yield f"codecs: {program.table.codecs()}{fed}"
    count, why = chains(config, mesh.devices.flat[0])
    if count > 1:
        yield f"chains: {count} ({why})"
    if program.overlapped:
        yield "gradients: each layer's are sent beside the backward pass of the layer before it"
    if guard is not None:
        yield guard.words()
    if config.mesh.pp > 1:
        schedule = program.schedule_of_stages
        yield f"pipeline {schedule.kind}: {schedule.microbatches} microbatches, bubble {schedule.bubble:.1%}"
    yield f"{data}; {tokens:,} tokens a step; workdir {config.workdir}"
    if config.data.sequence_length > config.model.max_length:
        yield (
            f"data.sequence_length={config.data.sequence_length} is longer than model.max_length="
            f"{config.model.max_length}, the longest that the model is meant for"
        )
    warmup = config.optimizer.warmup_steps
    if warmup > config.steps:
        yield (
            f"optimizer.warmup_steps={warmup} is longer than the run of {config.steps} steps: the learning rate "
            f"ends at {config.steps / warmup:.0%} of optimizer.learning_rate"
        )


def last_lines(
    config: TrainConfig, record: dict[str, Any], *, first_step: int, stopped_by: str | None
) -> Iterator[str]:
    """Yields what was reached, what this run moved since `first_step`, and where everything is.

    The picture of the losses is drawn before the last of them.
    """
    from taco_jax.train import plot

    workdir, step = Path(config.workdir), record["step"]
    if stopped_by:
        saved = "saved" if config.checkpoint.enabled else "not saved (checkpoint.enabled=False)"
        yield f"stopped at step {step} of {config.steps} by {stopped_by}, {saved}; the same command goes on"
    elif step < config.steps:
        yield f"stopped at step {step} of {config.steps}; the same command with a later --stop-after, or none, goes on"
    if "validation_loss" in record:
        loss, perplexity = record["validation_loss"], record["validation_perplexity"]
        yield f"validation loss {loss:.4f} nats per token, perplexity {perplexity:.2f} at step {step}"
    comm, bf16 = record["comm_bytes"], record["comm_bytes_bf16"]
    axes = "tensor-parallel" if config.mesh.pp == 1 else "tensor- and pipeline-parallel"
    if comm:
        steps = step - first_step
        yield (
            f"{axes} activation traffic: {comm / 1e6:.2f} MB per device and step, {bf16 / 1e6:.2f} MB as "
            f"bf16: ratio {bf16 / comm:.2f}; {steps * comm / 1e9:.2f} instead of {steps * bf16 / 1e9:.2f} GB in "
            f"the {steps} steps of this run"
        )
    else:
        yield f"{axes} activation traffic: none"
    everything = record["comm"] | {"together": {k: sum(x[k] for x in record["comm"].values()) for k in SENT}}
    shown = [(axis, *(x[key] / 1e6 for key in SENT)) for axis, x in everything.items() if axis != "several"]
    parts = [f"{axis} {mb:.2f} MB, {bf16:.2f} MB as bf16: ratio {bf16 / mb:.2f}" for axis, mb, bf16 in shown if mb]
    yield f"all messages per device and step: {'; '.join(parts) or 'none'}"
    places = []
    if (workdir / METRICS).exists() and (workdir / METRICS).stat().st_size:
        try:
            places.append(f"loss curve {plot.draw([workdir], workdir / PLOT)}")
        except (ImportError, OSError, ConfigError) as error:
            places.append(f"no loss curve ({error})")
        places.append(f"metrics {workdir / METRICS}")
    if config.checkpoint.enabled:
        places.append(f"checkpoint {workdir / CHECKPOINTS / str(step)}")
    yield "; ".join(places)
