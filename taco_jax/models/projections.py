"""Column- and row-parallel products with a decoder's own parameters: cast at use, several kernels in one product.

Dims: B batch, L length, D model, F the products' local output widths, added up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from taco_jax.models.parallel import Parallel
from taco_jax.scales import SiteScales
from taco_jax.tensor_parallel import column_dense, reduce_from_tp, scatter_to_sp

Dense = Mapping[str, jax.Array]
"""{"kernel": [in, out]} and, if it has one, {"bias": [out]}; float32, local shards."""


def column(x_BLD: jax.Array, denses: Sequence[Dense], par: Parallel, state: Mapping[str, SiteScales | None],
           site: str) -> list[jax.Array]:  # fmt: skip
    """`[x @ d.kernel + d.bias for d in denses]` as one column-parallel product, hence one message in the backward pass.

    The kernels are joined while they are cast, which reads and writes them once either way.
    """
    kernel_DF = jnp.concatenate([dense["kernel"].astype(par.dtype) for dense in denses], axis=1)
    y_BLF = column_dense(
        x_BLD, kernel_DF, axis=par.axis, compression=par.compression(site), scales=state.get(site),
        sequence_dim=par.sequence_dim, dtype=par.dtype, precision=par.precision, site=site,
    )  # fmt: skip
    ends = [0]
    for dense in denses:
        ends.append(ends[-1] + dense["kernel"].shape[1])
    return [add_bias(y, dense) for y, dense in zip(jnp.split(y_BLF, ends[1:-1], axis=-1), denses)]


def row(x_BLF: jax.Array, dense: Dense, par: Parallel) -> jax.Array:
    """This rank's term of the row-parallel product `x @ dense.kernel`; `add_up` makes the layer's output of it."""
    return jnp.matmul(x_BLF.astype(par.dtype), dense["kernel"].astype(par.dtype), precision=par.precision)


def add_up(y_BLD: jax.Array, dense: Dense, par: Parallel, state: Mapping[str, SiteScales | None],
           site: str) -> jax.Array:  # fmt: skip
    """The sum of the ranks' terms, `+ dense.bias`: one message in the forward pass."""
    arguments = y_BLD, par.axis, par.compression(site), state.get(site)
    if par.sequence_dim is None:
        y_BLD = reduce_from_tp(*arguments, site=site)
    else:
        y_BLD = scatter_to_sp(*arguments, dim=par.sequence_dim, site=site)
    return add_bias(y_BLD, dense)


def add_bias(y: jax.Array, dense: Dense) -> jax.Array:
    """`y + dense.bias` if there is one. Added in float32, so that the bias's gradient is summed in float32 too."""
    return (y.astype(jnp.float32) + dense["bias"]).astype(y.dtype) if "bias" in dense else y
