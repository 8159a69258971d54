"""Messages that move values without adding them: all_gather, all_to_all, ppermute. One hop each."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from taco_jax.collectives.manual_region import permute, to_varying
from taco_jax.collectives.message import Hops, Message, merge
from taco_jax.collectives.transport import cut, gather, send_chunks, swap
from taco_jax.compression import dispatch
from taco_jax.compression.dispatch import Geometry


def all_gather(message: Message, x: jax.Array, exponent, key, to: str) -> tuple[jax.Array, jax.Array]:
    """[...] -> [P, ...]; the own shard is quantised too, so all ranks hold the same values."""
    x_1N = to_varying(x, message.axis).reshape(1, -1)
    send = lambda wires: gather(message, wires[0], to)
    y_PN, measure, hops = _send(message, x_1N, exponent, key, send=send, received=message.ranks)
    message.record("all_gather", message.ranks * x.size, x.dtype, hops)
    return y_PN.reshape(-1, *x.shape), measure


def all_to_all(message: Message, x_PN: jax.Array, exponent, key) -> tuple[jax.Array, jax.Array]:
    """Row r of [P, N] goes to rank r; row r of the result came from rank r. The own row stays as it is."""
    p, n = x_PN.shape
    x_PN = to_varying(x_PN, message.axis)
    y_PN, measure, hops = _send(message, x_PN, exponent, key, send=lambda wires: swap(message, wires), received=p)
    message.record("all_to_all", p * n, x_PN.dtype, hops)
    own = jnp.arange(p)[:, None] == lax.axis_index(message.axis)
    return jnp.where(own, x_PN, y_PN), measure


def ppermute(message: Message, x: jax.Array, exponent, key, perm) -> tuple[jax.Array, jax.Array]:
    """x of the source rank; zeros on ranks that nobody sends to, as in jax.lax."""

    def send(wires):
        received = permute(wires, message.axis, perm)
        return received, [("collective-permute", received.size)]

    x_1N = to_varying(x, message.axis).reshape(1, -1)
    y_1N, measure, hops = _send(message, x_1N, exponent, key, send=send, received=1)
    message.record("ppermute", x.size, x.dtype, hops)
    receives = jnp.isin(lax.axis_index(message.axis), jnp.array([d for _, d in perm], jnp.int32))
    y = y_1N.reshape(x.shape)
    return jnp.where(receives, y, jnp.zeros_like(y)), measure


def _send(message: Message, x_QN, exponent, key, send, received: int) -> tuple[jax.Array, jax.Array, Hops]:
    """Q messages, sent in chunks by `send` (wires -> received wires, hops), and the `received` messages decoded."""
    codec, (q, n) = message.codec, x_QN.shape
    chunks = cut(Geometry(q * n, q, n), message.chunks, codec.block)
    wires, measures, hops = send_chunks(message, chunks, x_QN.reshape(-1), exponent, key=key, send=send)
    arrived = cut(Geometry(received * n, received, n), message.chunks, codec.block)
    y_S = dispatch.decode_chunks(codec, arrived, wires, x_QN.dtype, exponent, backend=message.backend)
    return y_S.reshape(received, n), merge(measures), hops
