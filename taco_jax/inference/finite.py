"""Weights that are no numbers: found when they are read, by the bits of their exponents, in one pass over memory."""

from __future__ import annotations

import numpy as np

# Type -> (unsigned integers of its size, its exponent's bits: all ones in infinities and NaN).
_EXPONENTS = {
    "bfloat16": (np.uint16, 0x7F80),
    "float16": (np.uint16, 0x7C00),
    "float32": (np.uint32, 0x7F80_0000),
    "float64": (np.uint64, 0x7FF0_0000_0000_0000),
}

AT_ONCE = 1 << 20
"""Elements that are copied at a time: few enough for a cache."""


def finite(array: np.ndarray) -> bool:
    """Whether an array of floats holds neither NaN nor infinities."""
    if array.dtype.name not in _EXPONENTS:
        return bool(np.isfinite(array.astype(np.float32)).all())
    unsigned, exponent = _EXPONENTS[array.dtype.name]
    bits = np.atleast_1d(array.view(unsigned))
    rows = max(1, AT_ONCE * len(bits) // max(1, bits.size))
    parts = (bits[start : start + rows] & unsigned(exponent) for start in range(0, len(bits), rows))
    return all(part.max(initial=0) < exponent for part in parts)


def not_finite(array: np.ndarray, dtype: np.dtype) -> str:
    """What is wrong with an array, as the end of a sentence, that is not `finite` once it is of that type."""
    if finite(array):
        return f"holds numbers beyond what {np.dtype(dtype).name} reaches; use dtype bfloat16 or float32"
    return "holds NaN or infinities: the model is damaged, or was saved after its training had diverged"
