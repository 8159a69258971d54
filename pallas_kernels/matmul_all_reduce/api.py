"""A row-parallel matmul and its all-reduce in a codec, as one kernel over NVLink, inside jax.shard_map.

For one process that drives all GPUs, as the collectives of `pallas_kernels.nvlink`.

Dim letters: M rows, K inner dimension, N columns.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.formats import Format
from pallas_kernels.matmul_all_reduce import kernel
from pallas_kernels.matmul_all_reduce.plan import FRAME_ROWS, Plan, frame_tiling
from pallas_kernels.matmul_all_reduce.support import TILE_N, why_unsupported
from pallas_kernels.mosaic.kernels import largest_scale
from pallas_kernels.nvlink.frame_transport import FrameCodec


def matmul_all_reduce(
    fmt: Format, x_MK: jax.Array, w: jax.Array, axis: str, exponent=None, *, transposed: bool = False
):
    """Returns (the sum of x @ w over the ranks of `axis`, bfloat16[M, N], alike on all; largest block scale,
    float32[]).

    w: bfloat16[K, N] or, `transposed`, [N, K]. A rank's term is x @ w rounded to bfloat16. Its blocks are 128 columns
    of a row. There are two hops, as in a two-shot all-reduce, with the owner's own term unquantised; rank f mod P owns
    rows 64 f to 64 f + 63. Bytes of frames on the link: (codes + scales) * 2 (P - 1) / P, as of `nvlink.all_reduce`.
    Raises ValueError where `why_unsupported` says why.
    """
    where = {"ranks": jax.lax.axis_size(axis), "axis": axis}
    return _run(fmt, x_MK, w, exponent=exponent, transposed=transposed, **where)


def matmul_all_reduce_loopback(
    fmt: Format, x_MK: jax.Array, w: jax.Array, ranks: int, exponent=None, *, transposed: bool = False
):
    """Returns `matmul_all_reduce` of one device that plays all ranks: its x and w are theirs, its memory is the link.

    For tests and measurements where there is one GPU. Rows 64 f to 64 f + 63 of every 256 must be alike.
    """
    where = {"ranks": ranks, "axis": None, "loopback": True}
    return _run(fmt, x_MK, w, exponent=exponent, transposed=transposed, **where)


def frame_bytes(fmt: Format, elements: int) -> int:
    """Returns the bytes of the frames of a result of so many elements."""
    return elements // (FRAME_ROWS * TILE_N) * FrameCodec(frame_tiling(fmt)).frame_bytes


def _run(fmt, x_MK, w, *, exponent, transposed, **where):
    (m, k), (n, inner) = x_MK.shape, w.shape if transposed else w.shape[::-1]
    if inner != k or x_MK.dtype != w.dtype:
        raise ValueError(f"x {x_MK.dtype}{list(x_MK.shape)} and w {w.dtype}{list(w.shape)} have no product")
    if (reason := why_unsupported(fmt, m, k, n, dtype=str(x_MK.dtype), ranks=where["ranks"])) is not None:
        raise ValueError(reason)
    plan = Plan(fmt, m=m, k=k, n=n, transposed=transposed, **where)
    exponent = None if exponent is None or fmt.scale != "ue5m3" else jnp.asarray(exponent, jnp.int32)[None]
    y, bits = kernel.run(plan, x_MK, w, exponent=exponent)
    return y, largest_scale(bits, plan.frame_tiling)


__all__ = ["frame_bytes", "matmul_all_reduce", "matmul_all_reduce_loopback"]
