"""Says what the Mosaic kernels cannot do. Importable, and answered, without a GPU."""

from __future__ import annotations

from pallas_kernels.formats import BLOCKS, DTYPES, ELEMENTS, SCALE_BYTES, Format, Geometry, packing_parts

# Wires of more peers do not fit the shared memory of a multiprocessor beside the rest.
MAX_RANKS = 16
MAX_MESSAGE_BYTES = 2**31 - 1
ROWS = 64
# What a kernel may use of 227 KiB, less barriers and the scratch of reductions.
SHARED_BYTES = 232448 - 4096


def why_unsupported(fmt: Format, operation: str, dtype: str, geometry: Geometry | int = 1) -> str | None:
    """Why `operation` (encode, reduce, decode) cannot run; None where it can. `geometry`: or a count of elements."""
    if fmt.element not in ELEMENTS or fmt.scale not in SCALE_BYTES:
        return f"mosaic has no element {fmt.element!r} with scale {fmt.scale!r}"
    if str(dtype) not in DTYPES:
        return f"mosaic kernels take {', '.join(DTYPES)}, not {dtype}"
    if fmt.block not in BLOCKS:
        return f"mosaic kernels have blocks of {', '.join(map(str, BLOCKS))}, not {fmt.block}"
    if fmt.block // packing_parts(fmt.bits) < 8:
        return f"mosaic packs parts of 8 elements and more, and a block of {fmt.block} in {fmt.bits} bits has smaller"
    need = _shared_bytes(fmt, operation, dtype, geometry.messages if isinstance(geometry, Geometry) else 1)
    if need > SHARED_BYTES:
        return (
            f"blocks of {fmt.block} of {dtype} with rotation {fmt.rotation!r} need {need} bytes of shared memory "
            f"to {operation}, and a multiprocessor has {SHARED_BYTES}"
        )
    if isinstance(geometry, Geometry):
        if operation == "reduce" and geometry.messages > MAX_RANKS:
            return f"mosaic reduces over at most {MAX_RANKS} ranks, not {geometry.messages}"
        if fmt.wire_bytes(geometry.per_message) > MAX_MESSAGE_BYTES:
            return f"a message of {geometry.per_message} elements is over 2 GiB; more ranks or chunks make it smaller"
    return None


def _shared_bytes(fmt: Format, operation: str, dtype: str, messages: int) -> int:
    """Of the smallest kernel, with one warpgroup: the matrices, tiles of codes, tiles of x or y, and scales."""
    row = max(128, fmt.block)
    tile, codes = ROWS * row * (4 if dtype == "float32" else 2), ROWS * row * fmt.bits // 8
    scales = ROWS * max(1, SCALE_BYTES[fmt.scale]) * (row // fmt.block)
    # A block of 256 is two halves: of its four matrices three are alike, or with signs two.
    distinct = {"none": 0, "hadamard": 2, "signed_hadamard": 3}[fmt.rotation] if fmt.block == 256 else 1
    matrices = (distinct * min(fmt.block, 128) ** 2 if fmt.rotation != "none" else 64 * 64) * 2
    if operation == "encode":
        return matrices + 2 * tile + 2 * codes + scales
    if operation == "decode":
        return matrices + 2 * codes + 2 * tile
    return matrices + max(1, messages - 1) * codes + 2 * tile + scales
