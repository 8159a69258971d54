"""One-shot all-reduce: all_gather(encode) -> local sum in f32, in rank order.

One hop; each rank sends P-1 messages' worth of bytes instead of 2 (P-1)/P. With two ranks it is the exchange: the
bytes of two-shot in one hop. The own term is quantised and decoded like every other, so all ranks sum the same values
and end bit-identical.
"""

from __future__ import annotations

import jax
from jax import lax

from taco_jax import backend
from taco_jax.collectives.message import Message
from taco_jax.collectives.region import to_varying


def all_reduce(message: Message, x: jax.Array, exponent, key) -> tuple[jax.Array, jax.Array]:
    """Sum of x over the axis: varying -> invarying, x's shape and dtype, with the measure of its hop."""
    x_1N = to_varying(x, message.axis).reshape(1, -1)
    wires, measure = backend.encode(message.codec, x_1N, exponent, message.key(key, 0), message.with_stats)
    gathered = lax.all_gather(wires[0], message.axis, to="invarying")
    message.record("psum", x.size, x.dtype, [("all-gather", gathered.size)])
    return backend.sum_decode(message.codec, gathered, x.size, x.dtype, exponent).reshape(x.shape), measure
