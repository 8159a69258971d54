"""Whole collectives in one Mosaic GPU kernel each, over NVLink: see `operations.py`.

Both obstacles answer without a GPU; the operations are imported when they are first used, since importing Mosaic sets
environment variables.
"""

from pallas_kernels.nvlink.obstacles import OPERATIONS, device_obstacle, obstacle

_OPERATIONS = ("all_gather", "all_reduce", "message_bytes", "reduce_scatter")


def __getattr__(name: str):
    if name in _OPERATIONS:
        from pallas_kernels.nvlink import operations

        return getattr(operations, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["OPERATIONS", "device_obstacle", "obstacle", *_OPERATIONS]
