"""One-shot all-reduce: all_gather(encode) -> local sum in f32, in rank order.

One hop; each rank sends P-1 messages' worth of bytes instead of 2 (P-1)/P. With two ranks it is the exchange: the
bytes of two-shot in one hop. The own term is quantised and decoded like every other, so all ranks sum the same values
and end bit-identical.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from taco_jax.collectives import residuals
from taco_jax.collectives.async_collective import Hopping
from taco_jax.collectives.chunks import cut
from taco_jax.collectives.manual_region import to_varying
from taco_jax.collectives.message import Message, merge
from taco_jax.collectives.transport import gather, send_chunks
from taco_jax.compression import dispatch

HOPS = 1


def all_reduce(message: Message, x: jax.Array, exponent, key) -> Hopping:
    """Sum of x over the axis: varying -> invarying, x's shape and dtype, with the measure of its hop. With
    `message.feedback` the result is (sum, error)."""
    codec = message.codec
    x_S = to_varying(x, message.axis).reshape(-1)
    chunks = cut(dispatch.Geometry(x.size, 1, x.size), message.chunks, codec.block)
    send = lambda wires: gather(message, wires[0], "invarying")
    own = [] if message.feedback else None
    gathered, measures, hops = send_chunks(message, chunks, x_S, exponent, key, send, own)
    gathered = yield gathered
    pieces = [
        dispatch.sum_decode(codec, wires, geometry.per_message, x.dtype, exponent, backend=message.backend)
        for geometry, wires in zip(chunks, gathered)
    ]
    message.record("psum", x.size, x.dtype, hops)
    y = (pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)).reshape(x.shape)
    if message.feedback:
        error_S = residuals.of_wires(message, chunks, own, x_S, exponent)
        return (y, error_S.reshape(x.shape)), merge(measures)
    return y, merge(measures)
