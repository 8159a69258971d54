"""The error that a decoder's row-parallel sums carry along the residual stream (`taco_jax.collectives.error_feedback`).

    x_0, e_0 = embedding, 0        (y_i, e_i) = sum with feedback of (u_i, e_{i-1})        x_i = x_{i-1} + y_i

Whatever the depth, x is then off by what the last sum lost, which `deliver` adds where it is worth a message.

Dims: B batch, L length, D model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from taco_jax.collectives import comm_log
from taco_jax.compat import varying_axes
from taco_jax.models.run_config import Parallel
from taco_jax.tensor_parallel import loses, to_varying


class Stream(NamedTuple):
    """x_BLD and this rank's error e_BLD in par.dtype, None where no sum leaves one."""

    x_BLD: jax.Array
    error_BLD: jax.Array | None = None


def start(x_BLD: jax.Array, par: Parallel, row_sites: Iterable[str]) -> Stream:
    """The stream before the sums of row_sites, which are of x's shape in par.dtype."""
    if not any(loses(x_BLD.shape, par.dtype, par.axis, par.compression(site)) for site in row_sites):
        return Stream(x_BLD)
    return Stream(x_BLD, to_varying(jnp.zeros(x_BLD.shape, par.dtype), varying_axes(x_BLD) | {par.axis}))


def deliver(stream: Stream, par: Parallel, site: str) -> jax.Array:
    """x with what the sums before it lost: one exact message of x's size, none where there is no error."""
    x_BLD, error_BLD = stream
    if error_BLD is None:
        return x_BLD
    comm_log.exact(site, "forward", "psum", par.axis, error_BLD, kind="activation")
    return (x_BLD.astype(jnp.float32) + lax.psum(error_BLD, par.axis)).astype(x_BLD.dtype)
