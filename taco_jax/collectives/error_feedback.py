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

from taco_jax.collectives import comm_log
from taco_jax.collectives.api import new_spelling, psum
from taco_jax.collectives.async_collective import AsyncCollective, without_derivative
from taco_jax.collectives.call import DIRECTIONS, Call, check_call
from taco_jax.collectives.manual_region import AxisName, axis_tuple, to_varying
from taco_jax.collectives.message import Label, Message
from taco_jax.collectives.vjp import Operation, apply, probing, start_all_reduce
from taco_jax.compat import varying_axes
from taco_jax.compression.compression import Compression, check_feedback


@new_spelling
def psum_with_feedback(
    x, axis_name: AxisName, error=None, *, compression, scales=None, key=None, site="psum"
) -> tuple[jax.Array, jax.Array]:
    """(y, error'): the sum of x + error over the axis, as `psum` makes it, and this rank's part of what it lost.

    A message that is exact delivers the error and leaves none. Over hosts the sum is flat, and over NVLink it goes in
    kernels around NCCL's collectives: those that go otherwise keep no wires.

    Args:
      x: one float array.
      error: what the sum before this one returned, or None.
      compression, scales, key, site: as of `psum`.

    Returns:
      y of x's shape and dtype, varying -> invarying; error' of x's shape and dtype, varying.

    A value that is no number, or sums too large for the dtype, make y and the errors of their block NaN or Inf; from
    then on every sum that takes such an error is: start again with None.

    Gradients: of y as psum's. The errors have none: to a gradient, Q(u) is u.

    Raises:
      ValueError: as psum; an error of another shape; algorithm="hierarchical", between_hosts and link="nvlink".
      TypeError: as psum; a tree, or a dtype that is no float.
    """
    call = _check_call("psum_with_feedback", axis_name, compression, scales=scales, key=key)
    if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"psum_with_feedback: x is {getattr(x, 'dtype', type(x).__name__)}: must be one float array")
    if error is not None and not hasattr(error, "shape"):
        raise TypeError(f"psum_with_feedback: error is {type(error).__name__}: must be an array of x's shape, or None")
    if error is not None and error.shape != x.shape:
        raise ValueError(f"psum_with_feedback: error is of shape {error.shape}: must be x's, {x.shape}")
    x = to_varying(x, axis_name)
    if error is not None and not probing():
        # In x's dtype, so that XLA may add it in the product that x is.
        x = x + lax.stop_gradient(error).astype(x.dtype)
    forward, backward = (
        call.message(Label(site, direction, comm_log.current_calls(direction)), x.shape, x.nbytes, one_kernel=False)
        for direction in DIRECTIONS
    )
    if not _loses(forward):
        exact = Compression("none", backward=call.compression.backward)
        y = psum(x, axis_name, compression=exact, scales=scales, site=site)
        return y, jnp.zeros_like(x)
    operation = Operation("psum", dataclasses.replace(forward, feedback=True), backward)
    if probing() and call.scales.slot is not None:
        x = x, jnp.zeros_like(x) if error is None else error
    return apply(operation, x, call.scales.exponents, call.scales.slot, call.key)


def start_psum_with_feedback(
    x, axis_name: AxisName, error, *, compression, scales=None, calls=1, site="psum"
) -> AsyncCollective:
    """The message of `psum_with_feedback` under way, whose result is (y, error'). As `start_psum` it has no derivative.

    calls: how often it runs in a step.
    """
    call = _check_call("start_psum_with_feedback", axis_name, compression, scales=scales)
    # As there in x's dtype.
    x = to_varying(x + error.astype(x.dtype), axis_name)
    message = call.message(Label(site, "forward", calls), x.shape, x.nbytes)
    if not _loses(message):
        return start_all_reduce(message, x, None, None).then(lambda y: (y, jnp.zeros_like(x)))
    exponents = call.scales.exponents
    exponent = None if exponents is None else exponents[0]
    return start_all_reduce(dataclasses.replace(message, feedback=True), without_derivative(x), exponent, None)


@new_spelling
def copy_with_feedback(
    x, axis_name: AxisName, carrier, *, compression, scales=None, key=None, site="copy"
) -> tuple[jax.Array, jax.Array]:
    """(x as `copy` returns it, carrier): the gradient's sum takes along the errors of the sums before it.

        (c_l, e_l) = sum over the axis with feedback of (cotangent of x_l, e_{l+1})        e_l: cotangent of the carrier

    The carrier has no values of its own. Handed from one call to the next it is the path on which errors travel in the
    backward pass, from the last call to the first. Every call must be on one residual stream: x = the stream itself,
    with what is linear in the gradient, such as the derivative of a normalisation, behind it.

    Args:
      x: one float array, the same on all ranks of the axis.
      carrier: zeros of x's shape and dtype, varying over the axis, or what the call before returned.
      compression, scales, key, site: as of `copy`.

    Returns:
      x varying; the carrier as it was. Of the first call's carrier the cotangent is what the last sum lost.

    Second derivatives: to them Q(u) is u.

    Raises:
      ValueError: as copy; a carrier of another shape; algorithm="hierarchical", between_hosts and link="nvlink".
    """
    call = _check_call("copy_with_feedback", axis_name, compression, scales=scales, key=key)
    for name, value in (("x", x), ("carrier", carrier)):
        if not hasattr(value, "dtype") or not jnp.issubdtype(value.dtype, jnp.floating):
            given = getattr(value, "dtype", type(value).__name__)
            raise TypeError(f"copy_with_feedback: {name} is {given}: must be one float array")
    if carrier.shape != x.shape:
        raise ValueError(f"copy_with_feedback: carrier is of shape {carrier.shape}: must be x's, {x.shape}")
    forward, backward = (
        call.message(Label(site, direction, comm_log.current_calls(direction)), x.shape, x.nbytes, one_kernel=False)
        for direction in DIRECTIONS
    )
    operation = Operation("copy", forward, dataclasses.replace(backward, feedback=True))
    pair = x, to_varying(carrier.astype(x.dtype), varying_axes(x) | set(axis_tuple(axis_name)))
    return apply(operation, pair, call.scales.exponents, call.scales.slot, call.key)


def loses(shape: tuple[int, ...], dtype, axis_name: AxisName, *, compression) -> bool:
    """Returns whether `psum_with_feedback` of an x of this shape and dtype leaves an error."""
    call = _check_call("loses", axis_name, compression)
    return _loses(call.message(Label(), shape, math.prod(shape) * np.dtype(dtype).itemsize, one_kernel=False))


def _loses(message: Message) -> bool:
    return not message.codec.exact and message.ranks > 1


def _check_call(entry: str, axis_name: AxisName, compression, **others) -> Call:
    call = check_call(entry, axis_name, compression, **others)
    check_feedback(call.compression, f"{entry}: ")
    # Of all ranks on one host it stays known, so that a sum takes the algorithm that was measured there.
    local = call.local if call.local == lax.axis_size(axis_name) else 0
    return dataclasses.replace(call, local=local, compression=dataclasses.replace(call.compression, link="nccl"))
