"""A row-parallel product and its all-reduce in a codec, as one kernel over NVLink, inside jax.shard_map.

For one process that drives all GPUs, as the collectives of `pallas_kernels.nvlink`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.formats import Format
from pallas_kernels.mosaic.kernels import largest_scale as largest
from pallas_kernels.mosaic.tiling import TILE_ROWS as ROWS
from pallas_kernels.nvlink.frames import Frames
from pallas_kernels.product import all_reduce
from pallas_kernels.product.obstacles import obstacle
from pallas_kernels.product.plan import Plan, frame_tiling
from pallas_kernels.product.sizes import TILE_N


def matmul_all_reduce(
    fmt: Format, x_MK: jax.Array, w: jax.Array, axis: str, exponent=None, *, transposed: bool = False
):
    """(the sum of x @ w over the ranks of `axis`, bfloat16[M, N], alike on all; largest block scale, float32[]).

    w: bfloat16[K, N] or, `transposed`, [N, K]. A rank's term is x @ w rounded to bfloat16, its blocks are 128 columns
    of a row. Two hops, as of a two-shot all-reduce, the owner's own term unquantised; rank f mod P owns rows 64 f to
    64 f + 63. Frames on the link: (codes + scales) * 2 (P - 1) / P, as of `nvlink.all_reduce`. Raises ValueError where
    `obstacle` says why.
    """
    return _run(fmt, x_MK, w, exponent, transposed, ranks=jax.lax.axis_size(axis), axis=axis)


def played(fmt: Format, x_MK: jax.Array, w: jax.Array, ranks: int, exponent=None, *, transposed: bool = False):
    """`matmul_all_reduce` on one device that plays all ranks: they have its x and w, and its memory is the link.

    For tests and measurements where there is one GPU. Rows 64 f to 64 f + 63 of every 256 are to be alike.
    """
    return _run(fmt, x_MK, w, exponent, transposed, ranks=ranks, axis=None, loopback=True)


def frame_bytes(fmt: Format, elements: int) -> int:
    """Bytes of the frames of a result of so many elements."""
    return elements // (ROWS * TILE_N) * Frames(frame_tiling(fmt)).bytes


def _run(fmt, x_MK, w, exponent, transposed, **where):
    (m, k), (n, inner) = x_MK.shape, w.shape if transposed else w.shape[::-1]
    if inner != k or x_MK.dtype != w.dtype:
        raise ValueError(f"x {x_MK.dtype}{list(x_MK.shape)} and w {w.dtype}{list(w.shape)} have no product")
    if (reason := obstacle(fmt, m, k, n, dtype=str(x_MK.dtype), ranks=where["ranks"])) is not None:
        raise ValueError(reason)
    plan = Plan(fmt, m, k, n, transposed, **where)
    exponent = None if exponent is None or fmt.scale != "ue5m3" else jnp.asarray(exponent, jnp.int32)[None]
    y, bits = all_reduce.run(plan, x_MK, w, exponent)
    return y, largest(bits, plan.tiling)


__all__ = ["frame_bytes", "matmul_all_reduce", "played"]
