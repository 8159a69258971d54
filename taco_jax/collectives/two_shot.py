"""Two-shot all-reduce, and the reduce-scatter that is its first half.

    two-shot: all_to_all(encode) -> local sum in f32 -> encode -> all_gather -> decode

Two hops for any number of ranks P, 2 (P-1)/P of a message sent by each. The middle works on rotated values: the tensor
is rotated on entry and on exit, and 1/P of it (the own chunk) once more. The owner's own term is never quantised on
the first hop; on the second every rank, the owner too, decodes the same bytes, so all ranks end bit-identical.

Dim letters: P ranks (chunks), N elements of a chunk.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from taco_jax import backend
from taco_jax.collectives.message import Message, merge
from taco_jax.collectives.region import to_varying


def all_reduce(message: Message, x: jax.Array, exponent, key) -> tuple[jax.Array, jax.Array]:
    """Sum of x over the axis: varying -> invarying, x's shape and dtype, with the measure of both hops."""
    codec, p = message.codec, message.ranks
    n = codec.block * -(-codec.n_blocks(x.size) // p)  # elements of a chunk: whole blocks
    x_PN = _chunks(to_varying(x, message.axis), p, n)
    rank = lax.axis_index(message.axis)
    wires, first = backend.encode(codec, x_PN, exponent, message.key(key, 0), message.with_stats)
    received = lax.all_to_all(wires, message.axis, 0, 0, tiled=True)
    own_N = lax.dynamic_index_in_dim(x_PN, rank, keepdims=False)
    wire, second = backend.reduce_encode(
        codec, received, own_N, rank, exponent, message.key(key, 1), message.with_stats
    )
    gathered = lax.all_gather(wire, message.axis, to="invarying")
    size = codec.wire_bytes(n) * p
    message.record("psum", x.size, x.dtype, [("all-to-all", size), ("all-gather", size)])
    y = backend.decode(codec, gathered, n, x.dtype, exponent).reshape(-1)
    return (y if y.size == x.size else y[: x.size]).reshape(x.shape), merge(first, second)


def reduce_scatter(message: Message, x_PN: jax.Array, exponent, key) -> tuple[jax.Array, jax.Array]:
    """Row r of the summed [P, N] for rank r, x's dtype[N]: one hop, the own term unquantised."""
    codec, (p, n) = message.codec, x_PN.shape
    x_PN = to_varying(x_PN, message.axis)
    rank = lax.axis_index(message.axis)
    wires, measure = backend.encode(codec, x_PN, exponent, message.key(key, 0), message.with_stats)
    received = lax.all_to_all(wires, message.axis, 0, 0, tiled=True)
    message.record("psum_scatter", p * n, x_PN.dtype, [("all-to-all", p * codec.wire_bytes(n))])
    own_N = lax.dynamic_index_in_dim(x_PN, rank, keepdims=False)
    return backend.reduce_decode(codec, received, own_N, rank, x_PN.dtype, exponent), measure


def _chunks(x: jax.Array, p: int, n: int) -> jax.Array:
    x = x.reshape(-1)
    if x.size < p * n:
        x = jnp.concatenate([x, jnp.zeros_like(x, shape=(p * n - x.size,))])
    return x.reshape(p, n)
