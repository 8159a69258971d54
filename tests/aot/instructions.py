"""What a compiled GPU program does to large arrays: instructions of XLA's own text, with their shapes.

Instructions inside of a fusion are not listed: a fusion is one instruction. A dynamic-slice fusion round a kernel is
that kernel, on a part of an array that is not copied; `slices_of_kernels` says on which.
"""

import math
import re
from typing import NamedTuple

ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
KERNEL = "mosaic_gpu"
COLLECTIVES = {"all-to-all", "all-gather", "all-reduce", "reduce-scatter", "collective-permute"}
# What moves no data.
NAMES = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "while", "conditional", "call", "after-all"}
NAMES |= {f"{name}-done" for name in COLLECTIVES | {"fusion", "copy", "async"}}

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)$")
_SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_CALLS = re.compile(r"calls=%?([\w.-]+)")


class Instruction(NamedTuple):
    name: str
    opcode: str  # without -start
    dtype: str
    elements: int  # of its largest result
    text: str
    is_root: bool


def computations(compiled) -> dict[str, list[Instruction]]:
    found, current = {}, None
    for line in compiled.as_text().splitlines():
        if match := _COMPUTATION.match(line):
            current = found.setdefault(match[1], [])
        elif current is not None and (match := _INSTRUCTION.match(line)):
            sizes = [(math.prod(map(int, filter(None, d.split(",")))), dtype) for dtype, d in _SHAPE.findall(match[3])]
            elements, dtype = max(sizes, default=(0, ""))
            opcode = match[4].removesuffix("-start")
            current.append(Instruction(match[2], opcode, dtype, elements, line.strip(), match[1] is not None))
    return found


def _callee(instruction, found) -> list[Instruction]:
    match = _CALLS.search(instruction.text)
    return found.get(match[1], []) if match else []


def _is_kernel(instruction) -> bool:
    return instruction.opcode == "custom-call" and KERNEL in instruction.text


def kernels(compiled) -> int:
    """How many Mosaic kernels the program calls; the body of a loop counts once."""
    return sum(_is_kernel(i) for body in computations(compiled).values() for i in body)


def collectives(compiled) -> list[tuple[str, str, int]]:
    """(opcode, dtype, elements of its result) of every collective, sorted."""
    found = [i for body in computations(compiled).values() for i in body if i.opcode in COLLECTIVES]
    return sorted((i.opcode, i.dtype, i.elements) for i in found)


def copies(compiled, elements: int) -> list[Instruction]:
    """The instructions, neither kernels nor collectives, that write an array of `elements` or more.

    An update in place writes only what it updates.
    """
    found = computations(compiled)
    fused = {m[1] for body in found.values() for i in body if i.opcode == "fusion" and (m := _CALLS.search(i.text))}
    out = []
    for name, body in found.items():
        for i in body if name not in fused else ():
            if i.elements < elements or i.opcode in NAMES | COLLECTIVES or _is_kernel(i):
                continue
            inside = _callee(i, found)
            root = next((j for j in inside if j.is_root), i)
            if any(map(_is_kernel, inside)) or root.opcode == "dynamic-update-slice":
                continue
            out.append(i)
    return out


def beside_collectives(compiled, elements: int) -> list[tuple[Instruction, int]]:
    """(collective of `elements` or more, how many matrix products are scheduled between its start and its end)."""
    out = []
    for body in computations(compiled).values():
        for k, i in enumerate(body):
            if i.opcode not in COLLECTIVES or i.elements < elements:
                continue
            end = next((n for n, j in enumerate(body) if f"{i.opcode}-done(%{i.name})" in j.text), k)
            out.append((i, sum("gemm" in j.name or "$gemm" in j.text for j in body[k + 1 : end])))
    return out


def counters(compiled) -> list[tuple[str, str]]:
    """(opcode, name) of what each kernel that changes an operand is given for it."""
    out = []
    for body in computations(compiled).values():
        by_name = {i.name: i for i in body}
        for i in filter(_is_kernel, body):
            if match := re.search(r"output_to_operand_aliasing=\{\{\d+\}: \((\d+), \{\}\)\}", i.text):
                operands = re.search(r"custom-call\((.*?)\), custom_call_target", i.text)[1].split(", ")
                given = by_name[operands[int(match[1])].rpartition("%")[2]]
                out.append((given.opcode, given.name))
    return out


def slices_of_kernels(compiled) -> list[tuple[str, int | None]]:
    """(instruction, where it starts in bytes) of the slices that are fused with a kernel; None: known when it runs."""
    out = []
    for body in computations(compiled).values():
        if not any(map(_is_kernel, body)) or len(body) > 20 and not any("slice" in i.opcode for i in body):
            continue
        for i in body:
            if i.opcode in ("dynamic-slice", "dynamic-update-slice"):
                out.append((i.text, None))
            elif i.opcode == "slice":
                out.append((i.text, _start(i, body)))
    return out


def _start(slice_, body) -> int:
    operand = re.search(r"slice\(%?([\w.-]+)\)", slice_.text)[1]
    source = next(i for i in body if i.name == operand)
    dtype, dims = _SHAPE.search(source.text.partition("=")[2]).groups()
    dims = [int(n) for n in dims.split(",")]
    starts = [int(n) for n in re.findall(r"\[(\d+):", re.search(r"slice=\{(.*?)\}", slice_.text)[1])]
    flat = 0
    for start, dim in zip(starts, dims):
        flat = flat * dim + start
    return flat * ITEM_BYTES[dtype]
