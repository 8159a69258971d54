"""The collectives of a compiled program: how often each kind runs in one call, and whether it is asynchronous."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

OPERATIONS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute", "ragged-all-to-all")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)$")
_SHAPE = re.compile(r"\b([a-z]+\d+)\[([\d,]*)\]")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.-]+)"
    r"|(?:branch_computations|called_computations)=\{([^}]*)\}"
)
_OPERANDS = re.compile(r"\(\((.*?)\), ")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "s64": 8, "u64": 8, "f64": 8}


class Collective(NamedTuple):
    """Instructions of a program that are alike.

    operation: HLO's name. shapes: of its result on one device, "bf16[16384,3584]". asynchronous: whether it has a start
    and a done. elements: of its result. count: of instructions; runs: of each in one call, as far as trips of loops are
    known. op_name: JAX's name stack of the first of them.
    """

    operation: str
    shapes: str
    asynchronous: bool
    elements: int
    nbytes: int
    count: int
    runs: int
    op_name: str


def collectives(text: str) -> list[Collective]:
    """All collectives of a compiled program's text, those with the most bytes first."""
    bodies, entry = _computations(text)
    runs, wrapped = _runs(bodies, entry)
    found: dict[tuple, list] = {}
    for name, body in bodies.items():
        for shape, opcode, rest in body:
            operation = opcode.removesuffix("-start")
            if operation not in OPERATIONS:
                continue
            arrays = _SHAPE.findall(shape)
            if opcode.endswith("-start"):
                arrays = _results(operation, shape, arrays)
            sizes = [math.prod(int(n) for n in dims.split(",") if n) for _, dims in arrays]
            nbytes = sum(size * _BYTES.get(dtype, 4) for size, (dtype, _) in zip(sizes, arrays))
            shapes = ", ".join(dict.fromkeys(f"{dtype}[{dims}]" for dtype, dims in arrays))
            shapes += f" x{len(arrays)}" if len(arrays) > 1 else ""
            op_name = _OP_NAME.search(rest)
            key = (operation, shapes, opcode.endswith("-start") or name in wrapped, sum(sizes), nbytes, runs[name])
            found.setdefault(key, [0, op_name[1] if op_name else ""])[0] += 1
    rows = [Collective(*key[:5], count, key[5], op_name) for key, (count, op_name) in found.items()]
    return sorted(rows, key=lambda c: -c.nbytes * c.count * c.runs)


def _results(operation: str, shape: str, arrays: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The results among the arrays in the type of a start: ((operands), results, ...), or (operand, result, ...).

    Some versions of XLA write an all-reduce's as its results alone.
    """
    if operands := _OPERANDS.match(shape):
        count = len(_SHAPE.findall(operands[1]))
        return arrays[count : 2 * count]
    return arrays if operation == "all-reduce" else arrays[1:2]


def _computations(text: str) -> tuple[dict[str, list[tuple[str, str, str]]], str]:
    """({computation: [(type, opcode, rest of the line)]}, the entry's name)."""
    bodies: dict[str, list] = {}
    entry, body = "", None
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            body = bodies.setdefault(match[2], [])
            entry = match[2] if match[1] else entry
        elif line.startswith("}"):
            body = None
        elif body is not None and (match := _INSTRUCTION.match(line)):
            body.append(match.groups()[1:])
    return bodies, entry


def _runs(bodies, entry: str) -> tuple[dict[str, int], set[str]]:
    """({computation: how often it runs in one call}, those that an async-start calls)."""
    calls: dict[str, list[tuple[str, int]]] = {name: [] for name in bodies}
    wrapped = set()
    for name, body in bodies.items():
        for _, opcode, rest in body:
            trips = _TRIPS.search(rest) if opcode == "while" else None
            for one, several in _CALLED.findall(rest):
                for callee in (one, *re.findall(r"[\w.-]+", several)):
                    if callee in bodies:
                        calls[name].append((callee, int(trips[1]) if trips else 1))
                        if opcode == "async-start":
                            wrapped.add(callee)
    runs = dict.fromkeys(bodies, 0)

    def visit(name: str, times: int) -> None:
        runs[name] += times
        for callee, trips in calls[name]:
            visit(callee, times * trips)

    visit(entry, 1)
    return runs, wrapped


def counts(found: list[Collective], least: int = 1024) -> str:
    """How often each operation runs in one call, of those of `least` elements or more: "36 all-reduce"."""
    totals: dict[str, int] = {}
    for c in found:
        if c.elements >= least:
            totals[c.operation] = totals.get(c.operation, 0) + c.count * c.runs
    return ", ".join(f"{n} {operation}" for operation, n in totals.items()) or "none"


def table(found: list[Collective]) -> list[str]:
    lines = [
        "| operation | result on one device | asynchronous | in the text | runs of each | from |",
        "|---" * 6 + "|",
    ]
    for c in found:
        op_name = c.op_name.replace("|", "/")
        shown = op_name if len(op_name) <= 90 else f"{op_name[:40]}...{op_name[-47:]}"
        lines.append(
            f"| {c.operation} | {c.shapes} | {'yes' if c.asynchronous else 'no'} | {c.count} | {c.runs} | `{shown}` |"
        )
    return lines
