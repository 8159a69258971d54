"""Says what the Triton kernels cannot do. Importable, and answered, without triton and without a GPU."""

from __future__ import annotations

from pallas_kernels.formats import BLOCKS, DTYPES, ELEMENTS, SCALE_BYTES, Format


def why_unsupported(fmt: Format, operation: str, dtype: str) -> str | None:
    """Returns why `operation` (encode, reduce, decode) cannot run on GPUs from capability 8.0 on; None where it can."""
    if fmt.element not in ELEMENTS or fmt.scale not in SCALE_BYTES:
        return f"triton has no element {fmt.element!r} with scale {fmt.scale!r}"
    if str(dtype) not in DTYPES:
        return f"triton kernels take {', '.join(DTYPES)}, not {dtype}"
    if fmt.block not in BLOCKS:
        return f"triton kernels have blocks of {', '.join(map(str, BLOCKS))}, not {fmt.block}"
    return None
