"""Where a run begins: at a checkpoint of its workdir, at weights that exist (`taco_jax.train.init_from`), or anew."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax

from taco_jax.config import TrainConfig
from taco_jax.data import Batches
from taco_jax.train import base, init_from
from taco_jax.train.checkpoint import Checkpoints
from taco_jax.train.log_file import say

if TYPE_CHECKING:
    from taco_jax.train.state import TrainState
    from taco_jax.train.step import Program


@dataclasses.dataclass
class Beginning:
    """The first state of a run and what belongs to it.

    step: steps taken before. start: where its weights were read now. lineage: where the first weights are from, as
    checkpoints' records have it. base_digest: of the weights to which adapters belong. guard: the state of the
    checkpoint's guard. keeps_later: checkpoints of later steps were set aside. remarks: to be printed.
    """

    state: TrainState
    step: int = 0
    start: init_from.Start | None = None
    lineage: dict[str, Any] | None = None
    base_digest: int | None = None
    guard: dict[str, Any] | None = None
    keeps_later: bool = False
    remarks: list[str] = dataclasses.field(default_factory=list)


def begin(config: TrainConfig, program: Program, checkpoints: Checkpoints, batches: Batches, *, stop: int) -> Beginning:
    """Restores the checkpoint that the config asks for, and the position of `batches`; else makes the first state.

    stop: the run's last step. Checkpoints after the restored one are set aside where there is something to train.
    """
    chosen = checkpoints.choose(config.checkpoint.resume_step)
    if chosen is not None:
        return _restored(config, program, checkpoints, batches, step=chosen, stop=stop)
    if config.init_from is not None:
        state, start = init_from.first_state(config, program)
        beginning = Beginning(state, start=start, lineage=init_from.lineage(start.origin))
        say(f"weights of {init_from.described(start.origin)}")
    else:
        beginning = Beginning(program.init(jax.random.key(config.seed)))
        if program.base is not None:
            remark = f"lora.rank={config.lora.rank} without init_from: the weights that stay are random"
            beginning.remarks.append(remark)
    if program.base is not None:
        beginning.base_digest = program.base.keep(beginning.state.base, config)
    return beginning


def _restored(
    config: TrainConfig, program: Program, checkpoints: Checkpoints, batches: Batches, *, step: int, stop: int
) -> Beginning:
    stored, run, remarks = checkpoints.restore(
        step,
        program.stored.shapes,
        config.model.vocab_size,
        lambda: program.init(jax.random.key(config.seed)).scales,
    )
    state, base_digest = program.stored.unpack(stored), None
    if program.base is not None:
        base_digest = run.get(base.DIGEST)
        state = dataclasses.replace(state, base=program.base.read(config, base_digest))
    batches.restore(run["data"])
    moved = checkpoints.set_aside_after(step) if step < stop else []
    if moved:
        remarks.append(f"checkpoints of later steps are kept in {moved[0].parent}")
    say(f"resumed from step {step}")
    if config.init_from is not None:
        remarks.append(f"init_from={config.init_from} is not read again: the workdir has checkpoints")
    return Beginning(
        state,
        step,
        lineage=run.get("started_from"),
        base_digest=base_digest,
        guard=run.get("guard"),
        keeps_later=bool(moved),
        remarks=remarks,
    )
