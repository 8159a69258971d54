"""Column- and row-parallel products with a decoder's own parameters, cast at use, and the messages at their ends.

Dims: B batch, L length, D model, F the products' local output widths, added up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from taco_jax.compression.site_scales import SiteScales
from taco_jax.models.run_config import Parallel
from taco_jax.tensor_parallel import (
    column_product,
    copy_to_tp,
    gather_from_sp,
    reduce_from_tp,
    reduce_with_feedback,
    row_product,
    scatter_to_sp,
)

Dense = Mapping[str, jax.Array]
"""{"kernel": [in, out]} and, if it has one, {"bias": [out]}; float32, local shards."""


class Entering(NamedTuple):
    """An x that enters with its column-parallel product, whose kernel sums its gradient: arguments of the product."""

    x_BLD: jax.Array
    scales: SiteScales | None
    site: str


def enter(x_BLD: jax.Array, par: Parallel, state: Mapping[str, SiteScales | None], site: str) -> jax.Array | Entering:
    """What column-parallel products take: x of all ranks' sequences. One message in the backward pass, and under
    sequence parallelism one in the forward pass too."""
    arguments = x_BLD.astype(par.dtype), par.axis, par.compression(site), state.get(site)
    if with_product(par, site):
        return Entering(arguments[0], state.get(site), site)
    if par.sequence_dim is None:
        return copy_to_tp(*arguments, site=site)
    return gather_from_sp(*arguments, dim=par.sequence_dim, site=site)


def with_product(par: Parallel, site: str) -> bool:
    """Whether a site's sums are to go into the kernels of the products before them."""
    compression = par.compression(site)
    return par.sequence_dim is None and compression is not None and compression.with_product


def column(x_BLD: jax.Array | Entering, denses: Sequence[Dense], par: Parallel) -> list[jax.Array]:
    """`[x @ d.kernel + d.bias for d in denses]` of an x that has entered, as one product.

    The kernels are joined while they are cast, which reads and writes them once either way.
    """
    kernel_DF = jnp.concatenate([dense["kernel"].astype(par.dtype) for dense in denses], axis=1)
    if isinstance(x_BLD, Entering):
        x, scales, site = x_BLD
        y_BLF = column_product(
            x, kernel_DF, par.axis, par.compression(site), scales, precision=par.precision, site=site
        )
    else:
        y_BLF = jnp.matmul(x_BLD, kernel_DF, precision=par.precision)
    ends = [0]
    for dense in denses:
        ends.append(ends[-1] + dense["kernel"].shape[1])
    return [add_bias(y, dense) for y, dense in zip(jnp.split(y_BLF, ends[1:-1], axis=-1), denses)]


def row(x_BLF: jax.Array, kernel_FD: jax.Array, par: Parallel) -> jax.Array:
    """This rank's term of the row-parallel product `x @ kernel`; `add_up` makes the layer's output of it."""
    return jnp.matmul(x_BLF.astype(par.dtype), kernel_FD.astype(par.dtype), precision=par.precision)


def row_sum(x_BLF: jax.Array, kernel_FD: jax.Array, error: jax.Array | None, par: Parallel, state: Mapping,
            site: str) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """(`add_up(row(x, kernel))`, None), in one kernel where that is asked for and can be; `fed_back` of an error that
    was carried here."""
    if error is not None:
        return fed_back(row(x_BLF, kernel_FD, par), error, par, state, site)
    if par.sequence_dim is not None:
        return add_up(row(x_BLF, kernel_FD, par), par, state, site), None
    operands = x_BLF.astype(par.dtype), kernel_FD.astype(par.dtype)
    arguments = par.axis, par.compression(site), state.get(site)
    return row_product(*operands, *arguments, precision=par.precision, site=site), None


def add_up(y_BLD: jax.Array, par: Parallel, state: Mapping[str, SiteScales | None], site: str) -> jax.Array:
    """The sum of the ranks' terms: one message in the forward pass, under sequence parallelism one in the backward
    pass too."""
    arguments = y_BLD, par.axis, par.compression(site), state.get(site)
    if par.sequence_dim is None:
        return reduce_from_tp(*arguments, site=site)
    return scatter_to_sp(*arguments, dim=par.sequence_dim, site=site)


def fed_back(y_BLD: jax.Array, error_BLD: jax.Array, par: Parallel, state: Mapping[str, SiteScales | None],
             site: str) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """(the sum of the ranks' terms and errors, the errors that it leaves), of whole sequences."""
    return reduce_with_feedback(y_BLD, par.axis, error_BLD, par.compression(site), state.get(site), site=site)


def add_bias(y: jax.Array, dense: Dense) -> jax.Array:
    """`y + dense.bias` if there is one. Added in float32, so that the bias's gradient is summed in float32 too."""
    return (y.astype(jnp.float32) + dense["bias"]).astype(y.dtype) if "bias" in dense else y
