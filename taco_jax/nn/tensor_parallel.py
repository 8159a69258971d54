"""Tensor parallelism inside a manual region: Megatron's conjugate pairs and the dense layers built on them.

| function | forward | backward | Megatron |
|---|---|---|---|
| copy_to_tp | identity | all-reduce | f, before a column-parallel matmul |
| reduce_from_tp | all-reduce | identity | g, after a row-parallel matmul |
| gather_from_sp | all-gather along the sequence | reduce-scatter | f with sequence parallelism |
| scatter_to_sp | reduce-scatter along the sequence | all-gather | g with sequence parallelism |

All work on local shards in a jax.shard_map(check_vma=True) that is manual over the axis. compression=None is jax.lax
exactly.

Dim letters: D features, F features sharded over tp, K slot width.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from taco_jax import collectives
from taco_jax.collectives import REMAT_NAMES, check_region, in_manual_region, matmul_psum, to_varying
from taco_jax.compression.compression import as_compression
from taco_jax.compression.site_scales import SiteScales

__all__ = [
    "REMAT_NAMES", "check_region", "column_dense", "column_product", "copy_to_tp", "copy_with_feedback",
    "gather_from_sp", "in_manual_region", "loses", "reduce_from_tp", "reduce_with_feedback", "row_dense", "row_product",
    "scatter_to_sp", "start_sum", "start_sum_with_feedback", "to_varying",
]  # fmt: skip


def copy_to_tp(x, axis: str, compression=None, scales: SiteScales | None = None, *, site: str = "") -> jax.Array:
    """f: x as it is (invarying -> varying over `axis`); its cotangent is summed over the ranks (backward codec)."""
    return collectives.copy(x, axis, compression=compression, scales=scales, site=site)


def copy_with_feedback(
    x, axis: str, carrier: jax.Array, compression=None, scales: SiteScales | None = None, *, site: str = ""
) -> tuple[jax.Array, jax.Array]:
    """(`copy_to_tp` of x, the carrier), on which the errors of the gradients' sums travel; see
    `collectives.error_feedback`."""
    return collectives.copy_with_feedback(x, axis, carrier, compression=compression, scales=scales, site=site)


def reduce_from_tp(x, axis: str, compression=None, scales: SiteScales | None = None, *, site: str = "") -> jax.Array:
    """g: the sum of x over the ranks with the forward codec (varying -> invarying); the cotangent passes unchanged."""
    return collectives.psum(x, axis, compression=compression, scales=scales, site=site)


def reduce_with_feedback(
    x, axis: str, error: jax.Array, compression=None, scales: SiteScales | None = None, *, site: str = ""
) -> tuple[jax.Array, jax.Array]:
    """(`reduce_from_tp` of x + error, what that lost of this rank's part); see `collectives.feedback`.

    A compression without error_feedback leaves the error for a later sum; an exact one delivers it.
    """
    compression = as_compression(compression)
    if compression is not None and not compression.error_feedback:
        return reduce_from_tp(x, axis, compression, scales, site=site), error
    return collectives.psum_with_feedback(x, axis, error, compression=compression, scales=scales, site=site)


def loses(shape: tuple[int, ...], dtype, axis: str, compression=None) -> bool:
    """Returns whether `reduce_with_feedback` of such an x leaves an error."""
    compression = as_compression(compression)
    if compression is None or not compression.error_feedback:
        return False
    return collectives.loses(shape, dtype, axis, compression=compression)


def start_sum(x, axis: str, compression, scales: SiteScales | None, direction: str, *, site: str, calls: int):
    """`reduce_from_tp`'s message ("forward"), or that of `copy_to_tp`'s cotangent ("backward"), with its first hop
    started: a `collectives.async_collective.AsyncCollective`. Nothing here has a derivative."""
    return collectives.start_psum(x, axis, direction, compression=compression, scales=scales, calls=calls, site=site)


def start_sum_with_feedback(
    x, axis: str, error: jax.Array, compression, scales: SiteScales | None, *, site: str, calls: int
):
    """`reduce_with_feedback`'s message with its first hop started: its result is (sum, error). It has no derivative."""
    compression = as_compression(compression)
    options = {"compression": compression, "scales": scales, "calls": calls, "site": site}
    if compression is not None and not compression.error_feedback:
        return collectives.start_psum(x, axis, "forward", **options).then(lambda y: (y, error))
    return collectives.start_psum_with_feedback(x, axis, error, **options)


def gather_from_sp(
    x, axis: str, compression=None, scales: SiteScales | None = None, *, dim: int, site: str = ""
) -> jax.Array:
    """The ranks' x concatenated along `dim` (forward codec); the cotangent is summed and scattered (backward codec)."""
    return collectives.all_gather(x, axis, compression=compression, axis=dim, tiled=True, scales=scales, site=site)


def scatter_to_sp(
    x, axis: str, compression=None, scales: SiteScales | None = None, *, dim: int, site: str = ""
) -> jax.Array:
    """The own slice along `dim` of the ranks' sum of x (forward codec); the cotangent is gathered (backward codec)."""
    options = {"compression": compression, "scales": scales, "site": site}
    return collectives.psum_scatter(x, axis, scatter_dimension=dim, tiled=True, **options)


def row_product(
    x, kernel, axis: str, compression=None, scales: SiteScales | None = None, *, precision=None, site: str = "",
    product: Callable | None = None,
) -> jax.Array:  # fmt: skip
    """`reduce_from_tp(x @ kernel)`, x [..., F/tp], kernel [F/tp, D]; one kernel where `Compression.with_product` is and
    it can be.

    product: computes another product of x and kernel in the place of x @ kernel, in a kernel of its own.
    """
    compression = as_compression(compression)
    options = {"compression": compression, "scales": scales, "site": site}
    if compression is None or not compression.knows_products or product is not None:
        return collectives.psum(_product(x, kernel, precision, product), axis, **options)
    return matmul_psum.product_psum(x, kernel, axis, precision=precision, **options)


def column_product(
    x, kernel, axis: str, compression=None, scales: SiteScales | None = None, *, precision=None, site: str = "",
    product: Callable | None = None,
) -> jax.Array:  # fmt: skip
    """`copy_to_tp(x) @ kernel`, x [..., D], kernel [D, F/tp]; x's gradient, a product and its sum, in one kernel where
    `Compression.with_product` is and it can be, or beside its weight's where the sum's wires are copied. product: as of
    `row_product`."""
    compression = as_compression(compression)
    options = {"compression": compression, "scales": scales, "site": site}
    if compression is None or not compression.knows_products or product is not None:
        return _product(collectives.copy(x, axis, **options), kernel, precision, product)
    return matmul_psum.copy_product(x, kernel, axis, precision=precision, **options)


def column_dense(
    x, kernel, bias=None, *, axis, compression=None, scales=None, sequence_dim=None, dtype=None, precision=None,
    site="", product=None,
) -> jax.Array:  # fmt: skip
    """y[..., F/tp] = f(x)[..., D] kernel[D, F/tp] + bias[F/tp]: the output features are sharded.

    Args:
      x: [..., D], the same on every rank of `axis` (sequence_dim: sharded along that dim, gathered here).
      kernel, bias: this rank's shards. dtype: of the computation, by default the promoted dtype of x and kernel.
      product: as of `row_product`.
    """
    x, kernel, bias = _promote(x, kernel, bias, dtype)
    if sequence_dim is None:
        y = column_product(x, kernel, axis, compression, scales, precision=precision, site=site, product=product)
    else:
        x = gather_from_sp(x, axis, compression, scales, dim=sequence_dim % x.ndim, site=site)
        y = _product(x, kernel, precision, product)
    return y if bias is None else y + bias


def row_dense(
    x, kernel, bias=None, *, axis, compression=None, scales=None, sequence_dim=None, dtype=None, precision=None,
    site="", product=None,
) -> jax.Array:  # fmt: skip
    """y[..., D] = g(x[..., F/tp] kernel[F/tp, D]) + bias[D]: the input features are sharded.

    The bias is added once, after the sum.

    Args:
      x: [..., F/tp], this rank's features. kernel: this rank's rows; bias: the whole bias, the same on every rank.
      sequence_dim: the sum is scattered along that dim instead of being the same on every rank.
      product: as of `row_product`.
    """
    x, kernel, bias = _promote(x, kernel, bias, dtype)
    if sequence_dim is None:
        y = row_product(x, kernel, axis, compression, scales, precision=precision, site=site, product=product)
    else:
        y = _product(x, kernel, precision, product)
        y = scatter_to_sp(y, axis, compression, scales, dim=sequence_dim % y.ndim, site=site)
    return y if bias is None else y + bias


def _product(x, kernel, precision, product: Callable | None) -> jax.Array:
    return jnp.matmul(x, kernel, precision=precision) if product is None else product(x, kernel)


def _promote(x, kernel, bias, dtype):
    dtype = jnp.result_type(x, kernel) if dtype is None else dtype
    return x.astype(dtype), kernel.astype(dtype), None if bias is None else bias.astype(dtype)
