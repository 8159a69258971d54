"""Experimental: a matmul and the all-reduce of its result in one Mosaic GPU kernel, over NVLink: see `api.py`.

Measured on one GPU that plays all ranks, not over a link. `why_unsupported` answers without a GPU. The functions are
imported when they are first used, since importing Mosaic sets environment variables.
"""

from pallas_kernels.matmul_all_reduce.support import RANKS, why_unsupported

_LAZY = ("frame_bytes", "matmul_all_reduce", "matmul_all_reduce_loopback")


def __getattr__(name: str):
    if name in _LAZY:
        from pallas_kernels.matmul_all_reduce import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["RANKS", "why_unsupported", *_LAZY]
