"""When instructions of one computation say the same: keys that are equal for those that do."""

from __future__ import annotations

from taco_jax.dropin.dataflow import ARITHMETIC
from taco_jax.dropin.hlo_module import Computation, Module

# Functions of their operands and of the device alone, of which indices are made.
INDEX = {"constant", "partition-id", "copy", "bitcast", "reshape", "convert", "broadcast", "dynamic-slice"}
INDEX |= {"clamp", "select", "compare", *ARITHMETIC}
# What tells an instruction from others, and what a key has apart.
IDENTITY = ("name", "id", "metadata", "channel_id", "operand_ids", "called_computation_ids")


def attributes(instruction) -> bytes:
    """All that an instruction says but its identity and what it reads and calls: opcode, shape, layout, groups, fields
    that the hook does not know."""
    copy = type(instruction)()
    copy.CopyFrom(instruction)
    for field in IDENTITY:
        copy.ClearField(field)
    return copy.SerializeToString(deterministic=True)


def reducer(module: Module, instruction) -> tuple:
    """What a collective computes: equal for copies of one computation."""
    called = [module.computation(id).proto for id in instruction.called_computation_ids]
    return tuple((i.opcode, i.shape.SerializeToString()) for proto in called for i in proto.instructions)


def index(computation: Computation, id: int, depth: int = 8):
    """A key of a value, by what it is computed of where that is a function of the device, else by its instruction."""
    instruction = computation.instructions[id]
    if depth == 0 or instruction.opcode not in INDEX:
        return id
    return attributes(instruction), tuple(index(computation, i, depth - 1) for i in instruction.operand_ids)
