"""Triton kernels, through jax-triton, for NVIDIA GPUs of compute capability 8.0 and newer: see `operations.py`.

`why_unsupported` answers without a GPU and without triton. jax-triton (extra `triton`) is imported when a kernel is
first run.
"""

from pallas_kernels.triton.operations import (
    decode,
    decode_into,
    encode,
    reduce_decode,
    reduce_encode,
    sum_decode,
    why_unsupported,
)

__all__ = ["decode", "decode_into", "encode", "reduce_decode", "reduce_encode", "sum_decode", "why_unsupported"]
