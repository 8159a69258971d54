"""A product and the all-reduce of its result in one Mosaic GPU kernel, over NVLink: see `operations.py`.

The obstacle answers without a GPU; the operations are imported when they are first used, since importing Mosaic sets
environment variables.
"""

from pallas_kernels.product.obstacles import RANKS, obstacle

_OPERATIONS = ("frame_bytes", "matmul_all_reduce", "played")


def __getattr__(name: str):
    if name in _OPERATIONS:
        from pallas_kernels.product import operations

        return getattr(operations, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["RANKS", "obstacle", *_OPERATIONS]
