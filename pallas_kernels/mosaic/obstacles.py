"""What the Mosaic kernels cannot do. Importable, and answered, without a GPU."""

from __future__ import annotations

from pallas_kernels.formats import ELEMENTS, SCALE_BYTES, Format, Geometry, packing_parts

DTYPES = ("bfloat16", "float16", "float32")
BLOCKS = (32, 64, 128, 256)
# Wires of more peers do not fit the shared memory of a multiprocessor beside the rest.
MAX_RANKS = 16
MAX_MESSAGE_BYTES = 2**31 - 1


def obstacle(fmt: Format, operation: str, dtype: str, geometry: Geometry | int = 1) -> str | None:
    """Why `operation` (encode, reduce, decode) cannot run; None where it can. `geometry`: or a count of elements."""
    if fmt.element not in ELEMENTS or fmt.scale not in SCALE_BYTES:
        return f"mosaic has no element {fmt.element!r} with scale {fmt.scale!r}"
    if str(dtype) not in DTYPES:
        return f"mosaic kernels take {', '.join(DTYPES)}, not {dtype}"
    if fmt.block not in BLOCKS:
        return f"mosaic kernels have blocks of {', '.join(map(str, BLOCKS))}, not {fmt.block}"
    if fmt.block // packing_parts(fmt.bits) < 8:
        return f"mosaic packs parts of 8 elements and more, and a block of {fmt.block} in {fmt.bits} bits has smaller"
    if fmt.block == 256 and (fmt.rotation == "signed_hadamard" or dtype == "float32") and operation == "reduce":
        return f"a block of 256 with rotation {fmt.rotation!r} in {dtype} exceeds the shared memory of a reduction"
    if isinstance(geometry, Geometry):
        if operation == "reduce" and geometry.messages > MAX_RANKS:
            return f"mosaic reduces over at most {MAX_RANKS} ranks, not {geometry.messages}"
        if fmt.wire_bytes(geometry.per_message) > MAX_MESSAGE_BYTES:
            return f"a message of {geometry.per_message} elements is over 2 GiB; more ranks or chunks make it smaller"
    return None
