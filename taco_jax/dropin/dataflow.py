"""Where a value of a module comes from, through loops, tuples and fusions; integers that depend on the device.

And keys that are equal for instructions of one computation that say the same.
"""

from __future__ import annotations

import numpy as np

from taco_jax.dropin.hlo_module import Computation, Module
from taco_jax.dropin.hlo_proto import dtype_name

# What moves or converts its first operand and computes nothing.
MOVES = ("copy", "bitcast", "reshape", "transpose", "convert", "slice", "dynamic-slice", "opt-barrier", "all-gather")
LITERALS = {"bool": "preds", "int32": "s32s", "int64": "s64s", "uint32": "u32s", "uint64": "u64s"}
ARITHMETIC = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "divide": np.floor_divide, "and": np.bitwise_and,
    "remainder": np.remainder, "minimum": np.minimum, "maximum": np.maximum,
}  # fmt: skip
COMPARISONS = {
    "EQ": np.equal, "NE": np.not_equal, "LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal
}  # fmt: skip
# Functions of their operands and of the device alone, of which indices are made.
INDEX = {"constant", "partition-id", "copy", "bitcast", "reshape", "convert", "broadcast", "dynamic-slice"}
INDEX |= {"clamp", "select", "compare", *ARITHMETIC}
# What tells an instruction from others, and what a key has apart.
IDENTITY = ("name", "id", "metadata", "channel_id", "operand_ids", "called_computation_ids")


def source(module: Module, computation: Computation, id: int, path: tuple[int, ...] = ()):
    """One step back from element `path` of a value that is only handed on: (computation, id, path), else None.

    Handed on: elements of tuples, parameters of fusions, and what a loop leaves as it is.
    """
    instruction = computation.instructions[id]
    match instruction.opcode:
        case "get-tuple-element":
            return computation, instruction.operand_ids[0], (instruction.tuple_index, *path)
        case "tuple" if path:
            return computation, instruction.operand_ids[path[0]], path[1:]
        case "opt-barrier":
            return computation, instruction.operand_ids[0], path
        case "fusion" | "call":
            called = module.computation(instruction.called_computation_ids[0])
            return called, called.proto.root_id, path
        case "while" if path and _is_invariant(module, instruction, path[0]):
            return computation, instruction.operand_ids[0], path
        case "parameter":
            callers = module.callers.get(computation.proto.id, [])
            if len(callers) != 1:
                return None
            caller, caller_id = callers[0]
            by = caller.instructions[caller_id]
            if by.opcode in ("fusion", "call"):
                return caller, by.operand_ids[instruction.parameter_number], path
            if by.opcode == "while" and path and _is_invariant(module, by, path[0]):
                return caller, by.operand_ids[0], path
    return None


def _is_invariant(module: Module, loop, element: int) -> bool:
    """Returns whether every trip of a loop leaves an element of its state as it is."""
    return any(_hands_on(module.computation(id), element) for id in loop.called_computation_ids)


def _hands_on(body: Computation, element: int) -> bool:
    root = body.root
    if root.opcode != "tuple" or element >= len(root.operand_ids):
        return False
    last = body.instructions[root.operand_ids[element]]
    if last.opcode != "get-tuple-element" or last.tuple_index != element:
        return False
    return body.instructions[last.operand_ids[0]].opcode == "parameter"


def is_argument(module: Module, computation: Computation, id: int) -> bool:
    """Returns whether a value is an argument of the program, or a part of one, as it is or in another dtype."""
    at: tuple | None = (computation, id, ())
    while at is not None:
        computation, id, path = at
        instruction = computation.instructions[id]
        if instruction.opcode == "parameter" and computation.proto.id == module.proto.entry_computation_id:
            return True
        if instruction.opcode in MOVES and instruction.opcode != "opt-barrier":
            at = computation, instruction.operand_ids[0], ()
        else:
            at = source(module, computation, id, path)
    return False


def evaluate(module: Module, computation: Computation, id: int, partition: int, *, path=(), depth: int = 64):
    """A small integer value as numpy on one device, None where it is not a function of the device alone."""
    if depth == 0:
        return None
    instruction = computation.instructions[id]
    again = lambda operand: evaluate(module, computation, operand, partition, depth=depth - 1)
    dims = tuple(instruction.shape.dimensions)
    match opcode := instruction.opcode:
        case "partition-id":
            return np.int64(partition)
        case "constant":
            field = LITERALS.get(dtype_name(instruction.shape))
            return None if field is None else np.array(getattr(instruction.literal, field), np.int64).reshape(dims)
        case "copy" | "bitcast" | "reshape" | "convert":
            value = again(instruction.operand_ids[0])
            return None if value is None else np.reshape(value, dims)
        case "broadcast":
            value = again(instruction.operand_ids[0])
            return None if value is None or np.ndim(value) else np.broadcast_to(value, dims)
        case "dynamic-slice":
            values = [again(operand) for operand in instruction.operand_ids]
            if any(value is None for value in values):
                return None
            table, *starts = values
            sizes = instruction.dynamic_slice_sizes
            cut = [slice(min(max(int(s), 0), n - z), min(max(int(s), 0), n - z) + z)
                   for s, z, n in zip(starts, sizes, table.shape)]  # fmt: skip
            return table[tuple(cut)]
        case "clamp" | "select" | "compare" | _ if opcode in ("clamp", "select", "compare", *ARITHMETIC):
            values = [again(operand) for operand in instruction.operand_ids]
            if any(value is None for value in values):
                return None
            if opcode == "clamp":
                return np.minimum(np.maximum(values[1], values[0]), values[2])
            if opcode == "select":
                return np.where(*values)
            function = COMPARISONS[instruction.comparison_direction] if opcode == "compare" else ARITHMETIC[opcode]
            return function(*values)
    at = source(module, computation, id, path)
    return None if at is None else evaluate(module, *at[:2], partition, path=at[2], depth=depth - 1)


def attributes(instruction) -> bytes:
    """All that an instruction says but its identity and what it reads and calls: opcode, shape, layout, groups, fields
    that the hook does not know."""
    copy = type(instruction)()
    copy.CopyFrom(instruction)
    for field in IDENTITY:
        copy.ClearField(field)
    return copy.SerializeToString(deterministic=True)


def reducer(module: Module, instruction) -> tuple:
    """The key of a collective's reduction: equal for copies of one computation."""
    called = [module.computation(id).proto for id in instruction.called_computation_ids]
    return tuple((i.opcode, i.shape.SerializeToString()) for proto in called for i in proto.instructions)


def index(computation: Computation, id: int, depth: int = 8):
    """A key of a value, by what it is computed of where that is a function of the device, else by its instruction."""
    instruction = computation.instructions[id]
    if depth == 0 or instruction.opcode not in INDEX:
        return id
    return attributes(instruction), tuple(index(computation, i, depth - 1) for i in instruction.operand_ids)
