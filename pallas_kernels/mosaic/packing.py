"""Sub-byte packing of a block in registers: parts of the block share bytes, element j of all parts makes b g / 8 bytes.

The parts are runs of columns of one thread's own registers, so that nothing moves between threads.
"""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.formats import Format, packing_parts


def pack(fmt: Format, parts: list) -> list:
    """int32 codes of each part -> uint8 byte planes."""
    planes = []
    for k in range(len(parts) * fmt.bits // 8):
        byte = None
        for i, part in enumerate(parts):
            shift = i * fmt.bits - 8 * k
            if -fmt.bits < shift < 8:
                moved = part << shift if shift > 0 else part >> -shift if shift < 0 else part
                byte = moved if byte is None else byte | moved
        planes.append((byte & 0xFF).astype(jnp.uint8))
    return planes


def unpack(fmt: Format, planes: list) -> list:
    """uint8 byte planes -> int32 codes of each part, high bits zero."""
    words = [plane.astype(jnp.int32) & 0xFF for plane in planes]
    parts = []
    for i in range(packing_parts(fmt.bits)):
        code = None
        for k, word in enumerate(words):
            shift = i * fmt.bits - 8 * k
            if -fmt.bits < shift < 8:
                moved = word >> shift if shift > 0 else word << -shift if shift < 0 else word
                code = moved if code is None else code | moved
        parts.append(code & ((1 << fmt.bits) - 1))
    return parts
