"""All-reduces within one level, and the reduce-scatter that is the first half of a two-shot one.

    two-shot: all_to_all(encode) -> local sum in f32 -> encode -> all_gather -> decode
    one-shot: all_gather(encode) -> local sum in f32, in rank order

Two-shot has two hops for any number of ranks P, 2 (P-1)/P of a message sent by each. The middle works on rotated
values: the tensor is rotated on entry and on exit, and 1/P of it (the own chunk) once more. The owner's own term is
never quantised on the first hop. On the second every rank, the owner too, decodes the same bytes, so all ranks end
bit-identical.

One-shot has one hop, and each rank sends P-1 messages' worth of bytes. With two ranks it is the exchange: the bytes of
two-shot in one hop. The own term is quantised and decoded like every other, so all ranks sum the same values and end
bit-identical.

A residual, for `error_feedback.py`, is what the wires lost of this rank's part. Nothing is sent for it: a rank has the
wires that it sent, and in two-shot the owner of a share has the sum that it encoded. It costs a decoding of the own
wires, and in two-shot 1/P of a reduction.

Dim letters: P ranks (shares), N elements of a share, S elements of x.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from taco_jax.collectives.async_collective import AsyncCollective, Hopping
from taco_jax.collectives.manual_region import to_varying
from taco_jax.collectives.message import Message, merge
from taco_jax.collectives.transport import after, chunk_elements, cut, gather, send_chunks, swap
from taco_jax.compression import dispatch


def start(message: Message, x: jax.Array, exponent, key) -> AsyncCollective:
    """The sum of x over the ranks, its first hop started: varying -> invarying, x's shape and dtype, and the measure of
    its hops. With `message.feedback` the result is (sum, error)."""
    if message.in_one_shot:
        return AsyncCollective(_one_shot(message, x, exponent, key), 1)
    return AsyncCollective(_two_shot(message, x, exponent, key), 2)


def _one_shot(message: Message, x: jax.Array, exponent, key) -> Hopping:
    """Sum of x over the axis: varying -> invarying, x's shape and dtype, with the measure of its hop. With
    `message.feedback` the result is (sum, error)."""
    codec = message.codec
    x_S = to_varying(x, message.axis).reshape(-1)
    chunks = cut(dispatch.Geometry(x.size, 1, x.size), message.chunks, codec.block)
    send = lambda wires: gather(message, wires[0], "invarying")
    own = [] if message.feedback else None
    gathered, measures, hops = send_chunks(message, chunks, x_S, exponent, key=key, send=send, own=own)
    gathered = yield gathered
    pieces = [
        dispatch.sum_decode(codec, wires, geometry.per_message, x.dtype, exponent, backend=message.backend)
        for geometry, wires in zip(chunks, gathered)
    ]
    message.record("psum", x.size, x.dtype, hops)
    y = (pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)).reshape(x.shape)
    if message.feedback:
        error_S = residual_of_wires(message, chunks, own, x_S, exponent)
        return (y, error_S.reshape(x.shape)), merge(measures)
    return y, merge(measures)


def _two_shot(message: Message, x: jax.Array, exponent, key) -> Hopping:
    """Sum of x over the axis: varying -> invarying, x's shape and dtype, with the measure of both hops. With
    `message.feedback` the result is (sum, error): the owner of a share answers for the second hop's part of it."""
    codec, p = message.codec, message.ranks
    share = dispatch.Geometry(x.size, p, chunk_elements(codec, x.size, p))
    x_S, rank = to_varying(x, message.axis).reshape(-1), lax.axis_index(message.axis)
    chunks = cut(share, message.chunks, codec.block)
    own = [] if message.feedback else None
    swapped = lambda wires: swap(message, wires)
    arrived, measures, hops = send_chunks(message, chunks, x_S, exponent, key=key, send=swapped, own=own)
    arrived = yield arrived
    gathered, lost = [], []
    for k, (geometry, received) in enumerate(zip(chunks, arrived)):
        wire, measure = dispatch.reduce_encode(
            codec, geometry, received, x_S, rank=rank, exponent=exponent, key=message.key(key, 1, k),
            with_stats=message.with_stats, backend=message.backend,
        )  # fmt: skip
        if message.feedback:
            lost.append(residual_of_share(message, geometry, received, x_S, rank=rank, exponent=exponent, wire=wire))
        wires, sent = gather(message, after(gathered, wire), "invarying")
        gathered.append(wires)
        measures.append(measure)
        hops += sent
    message.record("psum", x.size, x.dtype, hops)
    gathered = yield gathered
    y = dispatch.decode_chunks(codec, chunks, gathered, x.dtype, exponent, backend=message.backend).reshape(x.shape)
    if message.feedback:
        error_S = residual_of_wires(message, chunks, own, x_S, exponent=exponent, share=(rank, lost))
        return (y, error_S.reshape(x.shape)), merge(measures)
    return y, merge(measures)


def reduce_scatter(message: Message, x_PN: jax.Array, exponent, key) -> tuple[jax.Array, jax.Array]:
    """Row r of the summed [P, N] for rank r, x's dtype[N]: one hop, the own term unquantised."""
    codec, (p, n) = message.codec, x_PN.shape
    x_S, rank = to_varying(x_PN, message.axis).reshape(-1), lax.axis_index(message.axis)
    chunks = cut(dispatch.Geometry(p * n, p, n), message.chunks, codec.block)
    arrived, measures, hops = send_chunks(
        message, chunks, x_S, exponent, key=key, send=lambda wires: swap(message, wires)
    )
    pieces = [
        dispatch.reduce_decode(codec, geometry, received, x_S, rank=rank, exponent=exponent, backend=message.backend)
        for geometry, received in zip(chunks, arrived)
    ]
    message.record("psum_scatter", p * n, x_PN.dtype, hops)
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces), merge(measures)


def residual_of_wires(message: Message, chunks, own: list, x_S: jax.Array, exponent, share=None) -> jax.Array:
    """Returns x - decode(own wires), x's dtype[S].

    own: the wires of each chunk. share: (rank, residuals of each of its chunks) where the own share of x did not go
    through the wires.
    """
    decoded_S = dispatch.decode_chunks(message.codec, chunks, own, x_S.dtype, exponent, backend=message.backend)
    error_S = (x_S.astype(jnp.float32) - decoded_S).astype(x_S.dtype)
    if share is None:
        return error_S
    (rank, lost), (p, n) = share, (chunks[0].messages, chunks[0].distance)
    lost_N = lost[0] if len(lost) == 1 else jnp.concatenate(lost)
    # Written where it belongs, so that no other share is copied; the last share may be longer than what is left of x.
    error_S = jnp.pad(error_S, (0, p * n - x_S.size)) if p * n > x_S.size else error_S
    return lax.dynamic_update_slice(error_S, lost_N, (rank * n,))[: x_S.size]


def residual_of_share(message: Message, geometry, received, x_S: jax.Array, rank, exponent, wire) -> jax.Array:
    """Returns the sum of a chunk of the own share less what its wire says, x's dtype[chunk]."""
    codec, options = message.codec, {"backend": message.backend}
    sum_N = dispatch.reduce_decode(codec, geometry, received, x_S, rank=rank, exponent=exponent, **options)
    said_N = dispatch.sum_decode(codec, wire[None], geometry.per_message, x_S.dtype, exponent, **options)
    return (sum_N.astype(jnp.float32) - said_N).astype(x_S.dtype)
