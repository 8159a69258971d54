"""Memory traffic of a compiled GPU program, read off XLA's own text: bytes and kernels, loops as often as they run.

Products, attention and collectives are left out. A fusion reads of an operand what its slices take, and writes of a
result in place what it updates.
"""

import math
import re
from typing import NamedTuple

from aot.instructions import _CALLS, _COMPUTATION, _INSTRUCTION, _SHAPE, COLLECTIVES, ITEM_BYTES

MOVES_NOTHING = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "partition-id", "iota"}
SLICES = ("dynamic-slice", "slice")
TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


class Line(NamedTuple):
    name: str
    shape: str
    opcode: str
    operands: list[str]
    rest: str

    @property
    def nbytes(self) -> int:
        shapes = _SHAPE.findall(self.shape)
        return sum(
            ITEM_BYTES.get(dtype, 0) * math.prod(map(int, filter(None, dims.split(",")))) for dtype, dims in shapes
        )


def program(text: str) -> tuple[dict[str, list[Line]], str]:
    """(computations, the name of the entry)."""
    found, entry, current = {}, "", []
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            current = found.setdefault(match[1], [])
            entry = match[1] if line.startswith("ENTRY") else entry
        elif match := _INSTRUCTION.match(line):
            operands = re.findall(r"%([\w.-]+)", match[5].split("), ")[0])
            current.append(Line(match[2], match[3], match[4], operands, match[5]))
    return found, entry


def traffic(text: str) -> tuple[float, float]:
    """(bytes, kernels) of a run."""
    found, entry = program(text)
    return _of(found, entry)


def _of(found: dict[str, list[Line]], name: str) -> tuple[float, float]:
    nbytes, kernels, by_name = 0.0, 0.0, {line.name: line for line in found[name]}
    for line in found[name]:
        opcode = line.opcode.removesuffix("-start")
        if opcode in MOVES_NOTHING | COLLECTIVES or opcode.endswith("-done") or opcode == "custom-call":
            continue
        if opcode in ("while", "call"):
            body = re.search(r"(?:body|to_apply)=%?([\w.-]+)", line.rest)[1]
            times = int(TRIP_COUNT.search(line.rest)[1]) if opcode == "while" else 1
            more, of_body = _of(found, body)
            nbytes, kernels = nbytes + times * more, kernels + times * of_body
            continue
        match = _CALLS.search(line.rest)
        body = found.get(match[1], []) if match else []
        if inner := [i for i in body if i.opcode == "fusion"]:  # one that goes beside others
            body = found[_CALLS.search(inner[0].rest)[1]]
        if "gemm" in line.name or any(i.opcode == "dot" for i in body):
            continue
        kernels += 1
        nbytes += _fused(body) if body else line.nbytes + sum(by_name[o].nbytes for o in line.operands if o in by_name)
    return nbytes, kernels


def _fused(body: list[Line]) -> float:
    users, by_name = {}, {line.name: line for line in body}
    for line in body:
        for operand in line.operands:
            users.setdefault(operand, []).append(line)

    def read(line: Line) -> float:
        """Bytes of a parameter, or of what only changes its shape."""
        total = 0.0
        for user in users.get(line.name, []):
            if user.opcode in SLICES or user.opcode == "gather" and user.operands[0] == line.name:
                total += user.nbytes
            elif user.opcode == "bitcast":
                total += read(user)
            elif user.opcode != "dynamic-update-slice" or user.operands[0] != line.name:
                return line.nbytes
        return min(total, line.nbytes)

    def written(line: Line) -> float:
        if line.opcode == "tuple":
            return sum(written(by_name[o]) for o in line.operands)
        if line.opcode == "bitcast" and by_name[line.operands[0]].opcode == "dynamic-update-slice":
            line = by_name[line.operands[0]]
        return by_name[line.operands[1]].nbytes if line.opcode == "dynamic-update-slice" else line.nbytes

    return sum(read(line) for line in body if line.opcode == "parameter") + written(body[-1])
