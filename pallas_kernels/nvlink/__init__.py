"""Whole collectives in one Mosaic GPU kernel each, over NVLink: see `operations.py`.

`why_unsupported` and `why_device_unsupported` answer without a GPU. The operations are imported when they are first
used, since importing Mosaic sets environment variables.
"""

from pallas_kernels.nvlink.support import OPERATIONS, why_device_unsupported, why_unsupported

_LAZY = ("all_gather", "all_reduce", "message_bytes", "reduce_scatter")


def __getattr__(name: str):
    if name in _LAZY:
        from pallas_kernels.nvlink import operations

        return getattr(operations, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["OPERATIONS", "why_device_unsupported", "why_unsupported", *_LAZY]
