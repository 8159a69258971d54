"""Error feedback: what a compressed sum lost is added to the next one.

    u_r = x_r + e_r        y = sum_r Q(u_r)        sum_r e'_r = sum_r u_r - y

A decoder's row-parallel sums are all added to one residual stream. Without feedback each leaves its error there, and
the errors of all layers pile up; with it the stream is off by the last sum's error alone, whatever the depth (but for
the rounding of e and u to x's dtype). No more bytes are sent. It is the error feedback of 1-bit SGD (Seide et al.,
Interspeech 2014), in which the next sum is that of the next step, along depth instead of time.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from taco_jax import sites
from taco_jax.collectives.api import psum
from taco_jax.collectives.differentiable import Operation, apply
from taco_jax.collectives.message import Label, Message
from taco_jax.collectives.options import Options, check_options
from taco_jax.collectives.region import AxisName, to_varying
from taco_jax.plan import check_feedback


def psum_with_feedback(x, axis_name: AxisName, error=None, *, codec, backward_codec=None, scales=None,
                       algorithm="auto", ranks_per_host=None, between_hosts=None, link="auto", min_bytes=0,
                       backend="auto", chunks=1, exchange="auto", key=None,
                       site="psum") -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """(y, error'): the sum of x + error over the axis, as `psum` makes it, and this rank's part of what it lost.

    A message that is exact delivers the error and leaves none. Over hosts the sum is flat, and over NVLink it goes in
    kernels around NCCL's collectives: those that go otherwise keep no wires.

    Args:
      x: one float array. error: what the sum before this one returned, or None.
      Others as of `psum`.

    Returns:
      y of x's shape and dtype, varying -> invarying; error' of x's shape and dtype, varying.

    A value that is no number, or sums too large for the dtype, make y and the errors of their block NaN or Inf; from
    then on every sum that takes such an error is: start again with None.

    Gradients: of y as psum's. The errors have none: to a gradient, Q(u) is u.

    Raises:
      As psum; TypeError for a tree or a dtype that is no float; ValueError for an error of another shape, and for
      algorithm="hierarchical", between_hosts and link="nvlink".
    """
    options = _options("psum_with_feedback", axis_name, codec, backward_codec, scales, key, link, min_bytes, backend,
                       chunks, exchange, algorithm, ranks_per_host, between_hosts)  # fmt: skip
    if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"psum_with_feedback: x is {getattr(x, 'dtype', type(x).__name__)}: must be one float array")
    if error is not None and not hasattr(error, "shape"):
        raise TypeError(f"psum_with_feedback: error is {type(error).__name__}: must be an array of x's shape, or None")
    if error is not None and error.shape != x.shape:
        raise ValueError(f"psum_with_feedback: error is of shape {error.shape}: must be x's, {x.shape}")
    x = to_varying(x, axis_name)
    if error is not None:
        # In x's dtype, so that XLA may add it in the product that x is.
        x = x + lax.stop_gradient(error).astype(x.dtype)
    forward, backward = (
        options.message(c, x.shape, x.nbytes, Label(site, direction, sites.current_calls(direction)))
        for c, direction in zip(options.codecs, ("forward", "backward"), strict=True)
    )
    if not _loses(forward):
        y = psum(x, axis_name, codec="none", backward_codec=backward_codec, scales=scales, site=site)
        return y, jnp.zeros_like(x)
    operation = Operation("psum", dataclasses.replace(forward, feedback=True), backward)
    return apply(operation, x, options.scales.exponents, options.scales.slot, options.key)


def loses(shape: tuple[int, ...], dtype, axis_name: AxisName, *, codec, backward_codec=None, scales=None,
          algorithm="auto", ranks_per_host=None, between_hosts=None, link="auto", min_bytes=0, backend="auto",
          chunks=1, exchange="auto", key=None, site="psum") -> bool:  # fmt: skip
    """Whether `psum_with_feedback` of an x of this shape and dtype leaves an error; arguments as there."""
    options = _options("loses", axis_name, codec, backward_codec, scales, key, link, min_bytes, backend, chunks,
                       exchange, algorithm, ranks_per_host, between_hosts)  # fmt: skip
    return _loses(options.message(options.codecs[0], shape, math.prod(shape) * np.dtype(dtype).itemsize, Label(site)))


def _loses(message: Message) -> bool:
    return not message.codec.exact and message.ranks > 1


def _options(entry, axis_name, codec, backward_codec, scales, key, link, min_bytes, backend, chunks, exchange,
             algorithm, ranks_per_host, between_hosts) -> Options:  # fmt: skip
    options = check_options(entry, axis_name, codec, backward_codec, scales, key, None, link, min_bytes, backend,
                            chunks, exchange, algorithm, ranks_per_host, between_hosts)  # fmt: skip
    check_feedback(algorithm, link, between_hosts, f"{entry}: ")
    # Of all ranks on one host it stays known, so that a sum takes the algorithm that was measured there.
    ranks = lax.axis_size(axis_name)
    return dataclasses.replace(options, local=ranks if options.local == ranks else 0, link="nccl")
