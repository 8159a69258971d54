"""Triton kernels, through jax-triton, for NVIDIA GPUs of compute capability 8.0 and newer: see `operations.py`.

`why_unsupported` answers without a GPU and without triton. jax-triton (extra `triton`) is imported when a kernel is
first run.
"""

from pallas_kernels.triton.operations import (
    RESIDUAL,
    decode,
    decode_into,
    encode,
    encode_with_residual,
    reduce_decode,
    reduce_encode,
    sum_decode,
    why_unsupported,
)

__all__ = [
    "RESIDUAL", "decode", "decode_into", "encode", "encode_with_residual", "reduce_decode", "reduce_encode",
    "sum_decode", "why_unsupported",
]  # fmt: skip
