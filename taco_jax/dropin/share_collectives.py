"""Equal collectives of one operand become one, whose result all of their readers read.

XLA shares equal instructions, but no collectives: their channels differ. Partitioners write such ones, as where several
products read one array: the input of q, k and v is gathered for q, and once more for k and v.

A result that is read later is kept longer. So these stay apart:
* what gathers the program's own arguments: FSDP gathers weights anew for each use of them to save memory;
* a collective of the forward pass and one of the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from taco_jax.dropin import collective_forms, dataflow
from taco_jax.dropin.collective_forms import Collective
from taco_jax.dropin.hlo_module import Computation, Module


def share(
    module: Module, wanted: Callable[[Collective], Hashable], partitions: int, meshes, groups: list | None = None
) -> int:  # fmt: skip
    """Lets the readers of equal collectives read the first of them.

    wanted: equal for those that may be one message, None for what stays as it is. groups: gets the ids of those that
    became one.
    Returns how many collectives are gone; where some are, the module is to be read anew.
    """
    first: dict[tuple, Collective] = {}
    waited_for: dict[int, set[int]] = {}
    gone = 0
    for collective in collective_forms.collectives(module, partitions, meshes):
        id = collective.computation.proto.id
        if id not in waited_for:
            waited_for[id] = _waited_for(collective.computation)
        if (want := wanted(collective)) is None or not _movable(collective, waited_for[id]):
            continue
        computation, instruction = collective.computation, collective.instruction
        key = id, want, _kind(collective)
        kept = first.setdefault(key, collective)
        if kept is not collective:
            if groups is not None:
                groups.append([kept.instruction.id, instruction.id])
            computation.replace_uses(instruction.id, kept.instruction.id)
            computation.delete(instruction)
            gone += 1
    return gone


def _kind(collective: Collective) -> tuple:
    """Equal for collectives whose results are."""
    instruction = collective.instruction
    direction = collective.parts[0].direction
    reducer = dataflow.reducer(collective.computation.module, instruction)
    return dataflow.attributes(instruction), tuple(instruction.operand_ids), reducer, direction


def _movable(collective: Collective, waited_for: set[int]) -> bool:
    """Returns whether a collective may be taken out, and its result be read from another."""
    computation, instruction = collective.computation, collective.instruction
    if instruction.control_predecessor_ids or instruction.id in waited_for:
        return False
    weights = collective.operation == "all_gather" and any(
        dataflow.is_argument(computation.module, computation, id) for id in instruction.operand_ids
    )
    return not weights


def _waited_for(computation: Computation) -> set[int]:
    """Ids of the instructions for which others wait without reading them."""
    return {id for i in computation.proto.instructions for id in i.control_predecessor_ids}
