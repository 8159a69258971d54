"""Mosaic GPU kernels for NVIDIA GPUs of compute capability 9.0: see `operations.py`.

`why_unsupported` answers without a GPU. The operations are imported when they are first used, since importing Mosaic
sets environment variables.
"""

from pallas_kernels.mosaic.tiling import RESIDUAL, RESIDUAL_OF_SUM, why_unsupported

_OPERATIONS = ("decode", "encode", "encode_with_residual", "reduce_decode", "reduce_encode",
               "reduce_encode_with_residual", "sum_decode", "sum_decode_apart")  # fmt: skip


def __getattr__(name: str):
    if name in _OPERATIONS:
        from pallas_kernels.mosaic import operations

        return getattr(operations, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [*_OPERATIONS, "RESIDUAL", "RESIDUAL_OF_SUM", "why_unsupported"]
