"""What compiled programs send: collectives counted in XLA's own text."""

import collections
import math
import re

import numpy as np

OPCODES = ("all-to-all", "all-gather", "all-reduce", "reduce-scatter", "collective-permute")
DTYPES = {
    "u8": "uint8", "u16": "uint16", "bf16": "bfloat16", "f16": "float16", "f32": "float32", "s32": "int32",
    "s8": "int8",
}  # fmt: skip
_LINE = re.compile(rf"^\s*(?:ROOT )?%?\S+ = (.*?) ({'|'.join(OPCODES)})(?:-start)?\(")
_SHAPE = re.compile(r"\b([a-z]+\d+)\[([\d,]*)\]")


def collectives(compiled) -> list[tuple[str, str, int]]:
    """(opcode, dtype, elements of the output on one device) of every collective of a compiled program, sorted."""
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    found = []
    for line in text.splitlines():
        match = _LINE.match(line)
        if match:
            # A tuple, as XLA writes an all-to-all on CPU, is one message in several arrays.
            shapes = _SHAPE.findall(match.group(1))
            elements = sum(math.prod(int(n) for n in dims.split(",") if n) for _, dims in shapes)
            found.append((match.group(2), DTYPES[shapes[0][0]], elements))
    return sorted(found)


def groups(compiled) -> list[tuple[str, str, int, tuple[tuple[int, ...], ...]]]:
    """`collectives`, each with the groups of devices that exchange it."""
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    found = []
    for line in filter(_LINE.match, text.splitlines()):
        ((opcode, dtype, elements),) = collectives(line)
        found.append((opcode, dtype, elements, tuple(map(tuple, groups_of(line)))))
    return sorted(found)


def groups_of(text):
    """Groups of devices, in XLA's three ways to write them: lists, a rearranged iota, axes of a mesh."""
    if match := re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", text):
        return [numbers(group) for group in re.findall(r"\{([\d,]+)\}", match[1])] or [list(range(8))]
    if match := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        return _devices(match[2], match[3]).reshape(numbers(match[1])).tolist()
    mesh = re.search(
        r"replica_groups=mesh\[(.*?)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? ?\{(.*?)\}", text
    )
    assert mesh and ":" not in mesh[4], text[:400]
    names, sizes = zip(*(axis.split("=") for axis in mesh[1].split(",")), strict=True)
    devices = _devices(mesh[2] or ",".join(sizes), mesh[3]).reshape([int(n) for n in sizes])
    inner = [names.index(name) for name in mesh[4].split(",")]
    outer = [d for d in range(len(names)) if d not in inner]
    return devices.transpose(outer + inner).reshape(-1, np.prod([devices.shape[d] for d in inner])).tolist()


def _devices(dims, order):
    ids = np.arange(np.prod(numbers(dims))).reshape(numbers(dims))
    return ids.transpose(numbers(order)) if order else ids


def numbers(text):
    return [int(n) for n in text.split(",") if n]


def counts(compiled) -> dict[str, int]:
    """How often each opcode stands in the program; the body of a loop counts once."""
    return dict(collections.Counter(opcode for opcode, _, _ in collectives(compiled)))


def program(lowered) -> str:
    """The compiled text without what names the source: equal for equal programs."""
    text = re.sub(r", metadata=\{[^}]*\}", "", lowered.compile().as_text())
    return text[text.index("ENTRY") :]
