"""Messages that move values without adding them: all_gather, all_to_all, ppermute. One hop each."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from taco_jax import backend
from taco_jax.collectives.message import Message
from taco_jax.collectives.region import to_varying


def all_gather(message: Message, x: jax.Array, exponent, key, to: str) -> tuple[jax.Array, jax.Array]:
    """[...] -> [P, ...]; the own shard is quantised too, so all ranks hold the same values."""
    x_1N = to_varying(x, message.axis).reshape(1, -1)
    wires, measure = backend.encode(message.codec, x_1N, exponent, message.key(key, 0), message.with_stats)
    gathered = lax.all_gather(wires[0], message.axis, to=to)
    message.record("all_gather", message.ranks * x.size, x.dtype, [("all-gather", gathered.size)])
    y_PN = backend.decode(message.codec, gathered, x.size, x.dtype, exponent)
    return y_PN.reshape(-1, *x.shape), measure


def all_to_all(message: Message, x_PN: jax.Array, exponent, key) -> tuple[jax.Array, jax.Array]:
    """Row r of [P, N] goes to rank r; row r of the result came from rank r. The own row stays as it is."""
    p, n = x_PN.shape
    x_PN = to_varying(x_PN, message.axis)
    wires, measure = backend.encode(message.codec, x_PN, exponent, message.key(key, 0), message.with_stats)
    received = lax.all_to_all(wires, message.axis, 0, 0, tiled=True)
    message.record("all_to_all", p * n, x_PN.dtype, [("all-to-all", received.size)])
    y_PN = backend.decode(message.codec, received, n, x_PN.dtype, exponent)
    own = jnp.arange(p)[:, None] == lax.axis_index(message.axis)
    return jnp.where(own, x_PN, y_PN), measure


def ppermute(message: Message, x: jax.Array, exponent, key, perm) -> tuple[jax.Array, jax.Array]:
    """x of the source rank; zeros on ranks that nobody sends to, as in jax.lax."""
    x_1N = to_varying(x, message.axis).reshape(1, -1)
    wires, measure = backend.encode(message.codec, x_1N, exponent, message.key(key, 0), message.with_stats)
    received = lax.ppermute(wires, message.axis, perm)
    message.record("ppermute", x.size, x.dtype, [("collective-permute", received.size)])
    y = backend.decode(message.codec, received, x.size, x.dtype, exponent).reshape(x.shape)
    receives = jnp.isin(lax.axis_index(message.axis), jnp.array([d for _, d in perm], jnp.int32))
    return jnp.where(receives, y, jnp.zeros_like(y)), measure
