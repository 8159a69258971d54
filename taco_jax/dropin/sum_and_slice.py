"""A sum of which every device keeps its own part: an all-reduce and a slice, which together are a reduce-scatter.

XLA makes a reduce-scatter of the two after the hook on CUDA, and never on CPU, where the slice is inside of a fusion.
"""

from __future__ import annotations

from typing import NamedTuple

from taco_jax.dropin import dataflow
from taco_jax.dropin.hlo_module import Computation, Module
from taco_jax.dropin.mesh_axes import Groups

CHAIN = ("convert", "copy", "bitcast")


class OwnSlice(NamedTuple):
    """The slice of a sum.

    computation, slice_id: where the dynamic-slice stands. fusion_id: of the fusion around it, None if there is none.
    chain: ids from the fusion's parameter to the slice's operand. dimension: that is cut.
    """

    computation: Computation
    slice_id: int
    fusion_id: int | None
    chain: tuple[int, ...]
    dimension: int


def find(module: Module, computation: Computation, value: int, groups: Groups) -> OwnSlice | None:
    """The slice that is all that is read of `value`, if every device takes its own part in the order of its group."""
    users = computation.users.get(value, [])
    if len(users) != 1 or value == computation.proto.root_id:
        return None
    user = computation.instructions.get(users[0])
    if user is None:
        return None
    if user.opcode == "dynamic-slice":
        return _checked(module, OwnSlice(computation, user.id, None, (), 0), groups)
    if user.opcode != "fusion" or list(user.operand_ids).count(value) != 1:
        return None
    inside = module.computation(user.called_computation_ids[0])
    at = inside.parameters[list(user.operand_ids).index(value)]
    chain = [at]
    while True:
        readers = inside.users[at]
        if len(readers) != 1 or at == inside.proto.root_id:
            return None
        reader = inside.instructions[readers[0]]
        if reader.opcode == "dynamic-slice" and reader.operand_ids[0] == at:
            return _checked(module, OwnSlice(inside, reader.id, user.id, tuple(chain), 0), groups)
        same = list(reader.shape.dimensions) == list(inside.instructions[at].shape.dimensions)
        if reader.opcode not in CHAIN or not same:
            return None
        chain.append(at := reader.id)


def _checked(module: Module, own: OwnSlice, groups: Groups) -> OwnSlice | None:
    """`own` with its dimension, None where a device takes another part than its own."""
    cut = own.computation.instructions[own.slice_id]
    shape = own.computation.instructions[cut.operand_ids[0]].shape
    whole, part = list(shape.dimensions), list(cut.shape.dimensions)
    dims = [d for d in range(len(whole)) if whole[d] != part[d]]
    if len(dims) != 1 or part[dims[0]] * len(groups[0]) != whole[dims[0]]:
        return None
    (dim,) = dims
    if list(shape.layout.minor_to_major) != list(cut.shape.layout.minor_to_major):
        return None
    for group in groups:
        for rank, partition in enumerate(group):
            start = dataflow.evaluate(module, own.computation, cut.operand_ids[1 + dim], partition)
            if start is None or int(start) != rank * part[dim]:
                return None
    return own._replace(dimension=dim)


def put(computation: Computation, own: OwnSlice, value: int, part) -> None:
    """Lets the readers of the slice read `part`, an instruction with each device's part, in the place of `value`."""
    cut = own.computation.instructions[own.slice_id]
    if own.fusion_id is None:
        computation.take_over(cut, part)
        return
    fusion = computation.instructions[own.fusion_id]
    fusion.operand_ids[:] = [part.id if i == value else i for i in fusion.operand_ids]
    # The slice stays, of all that there is now: one that would end outside begins at 0. (What computes where it would
    # begin must be read, inside of a fusion.)
    for id in own.chain:
        own.computation.instructions[id].shape.dimensions[:] = cut.shape.dimensions
