"""Sums of small arrays over the same axes become one all-reduce of several operands, which is sent as one message.

XLA does it too (its pass all-reduce-combiner), but on CUDA after the hook: a small model's gradients would be replaced
one by one, each with kernels and launches of its own, where the exact program sends a few messages.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from taco_jax.dropin import collective_forms
from taco_jax.dropin.hlo_module import Computation, Module
from taco_jax.dropin.hlo_proto import TUPLE, nbytes

# Over NVLink a message takes 14 us and 2.7 us a MiB (taco, experiments/results/psum_small_2gpus). To put it together
# and to take it apart reads and writes it twice, an estimated 1 us a MiB. So from 14 MiB on nothing is gained, and
# little at 8: a larger sum had better start before the others' operands are there.
ALONE_BYTES = 8 << 20
# XLA's own limits: xla_gpu_all_reduce_combine_threshold_bytes, and the operands of a combined instruction.
MESSAGE_BYTES, MESSAGE_SUMS = 30 << 20, 256


def combine(module: Module, key: Callable[[collective_forms.Collective], Hashable], partitions: int, meshes) -> int:
    """Combines sums of an equal `key`, None where a sum stays alone, that do not depend on each other.

    Returns how many are gone; then the module is to be read anew.
    """
    found: dict[int, dict[Hashable, list]] = {}
    for c in collective_forms.collectives(module, partitions, meshes):
        alone = c.operation == "all_reduce" and not c.instruction.shape.tuple_shapes
        if not alone or c.instruction.control_predecessor_ids or nbytes(c.instruction.shape) > ALONE_BYTES:
            continue
        if (of := key(c)) is not None:
            found.setdefault(c.computation.proto.id, {}).setdefault(of, []).append(c.instruction)
    gone = 0
    for id, by_key in found.items():
        computation = module.computation(id)
        for sums in by_key.values():
            for group in _groups(computation, sums) if len(sums) > 1 else ():
                _join(computation, group)
                gone += len(group) - 1
    return gone


def _groups(computation: Computation, sums: list) -> list[list]:
    """Sums that become one, in the computation's order: independent of each other and within the limits."""
    at = {instruction.id: n for n, instruction in enumerate(sums)}
    # Bits of the sums that an instruction is computed from.
    needs: dict[int, int] = {}
    groups: list[list] = []
    bits = size = 0
    for instruction in computation.in_order():
        before = 0
        for operand in (*instruction.operand_ids, *instruction.control_predecessor_ids):
            before |= needs[operand]
        needs[instruction.id] = before
        if instruction.id not in at:
            continue
        needs[instruction.id] |= 1 << at[instruction.id]
        size += nbytes(instruction.shape)
        if before & bits or not bits or size > MESSAGE_BYTES or len(groups[-1]) == MESSAGE_SUMS:
            # All of a group come before all of the next: what waits for one another never goes round.
            groups.append([])
            bits, size = 0, nbytes(instruction.shape)
        groups[-1].append(instruction)
        bits |= 1 << at[instruction.id]
    return [group for group in groups if len(group) > 1]


def _join(computation: Computation, sums: list) -> None:
    """Puts one all-reduce and its elements in the place of several."""
    first = sums[0]
    whole = computation.add(first, first)
    whole.name = computation.module.fresh_name(first.name)
    whole.operand_ids[:] = [instruction.operand_ids[0] for instruction in sums]
    whole.ClearField("shape")
    whole.shape.element_type = TUPLE
    whole.shape.tuple_shapes.extend(instruction.shape for instruction in sums)
    for n, instruction in enumerate(sums):
        element = computation.make(instruction, "get-tuple-element", instruction.shape, [whole.id], like=instruction)
        element.tuple_index = n
        element.metadata.CopyFrom(instruction.metadata)
        computation.take_over(instruction, element)
    computation.reorder()
