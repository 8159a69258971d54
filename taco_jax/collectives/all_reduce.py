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

A residual, for `error_feedback.py`, is what the wires lost of this rank's part. Nothing is sent for it: the encoder
leaves it behind, and in two-shot the encoder of the sum that of the own share.

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
    lost = [] if message.feedback else None
    gathered, measures, hops = send_chunks(message, chunks, x_S, exponent, key=key, send=send, lost=lost)
    gathered = yield gathered
    pieces = [
        dispatch.sum_decode(codec, wires, geometry.per_message, x.dtype, exponent, backend=message.backend)
        for geometry, wires in zip(chunks, gathered)
    ]
    message.record("psum", x.size, x.dtype, hops)
    y = (pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)).reshape(x.shape)
    if message.feedback:
        error_S = join_residuals(chunks, lost)
        return (y, error_S.reshape(x.shape)), merge(measures)
    return y, merge(measures)


def _two_shot(message: Message, x: jax.Array, exponent, key) -> Hopping:
    """Sum of x over the axis: varying -> invarying, x's shape and dtype, with the measure of both hops. With
    `message.feedback` the result is (sum, error): the owner of a share answers for the second hop's part of it."""
    codec, p = message.codec, message.ranks
    share = dispatch.Geometry(x.size, p, chunk_elements(codec, x.size, p))
    x_S, rank = to_varying(x, message.axis).reshape(-1), lax.axis_index(message.axis)
    chunks = cut(share, message.chunks, codec.block)
    lost = [] if message.feedback else None
    swapped = lambda wires: swap(message, wires)
    arrived, measures, hops = send_chunks(message, chunks, x_S, exponent, key=key, send=swapped, lost=lost)
    arrived = yield arrived
    gathered, of_sums = [], []
    encode = dispatch.reduce_encode_with_residual if message.feedback else dispatch.reduce_encode
    for k, (geometry, received) in enumerate(zip(chunks, arrived)):
        wire, measure, *residual = encode(
            codec, geometry, received, x_S, rank=rank, exponent=exponent, key=message.key(key, 1, k),
            with_stats=message.with_stats, backend=message.backend,
        )  # fmt: skip
        of_sums += residual
        wires, sent = gather(message, after(gathered, wire), "invarying")
        gathered.append(wires)
        measures.append(measure)
        hops += sent
    message.record("psum", x.size, x.dtype, hops)
    gathered = yield gathered
    y = dispatch.decode_chunks(codec, chunks, gathered, x.dtype, exponent, backend=message.backend).reshape(x.shape)
    if message.feedback:
        error_S = join_residuals(chunks, lost, share=(rank, of_sums))
        return (y, error_S.reshape(x.shape)), merge(measures)
    return y, merge(measures)


def start_reduce_scatter(message: Message, x_PN: jax.Array, exponent, key) -> AsyncCollective:
    """Row r of the summed [P, N] for rank r, x's dtype[N], and the measure of its hop, which has been started; the own
    term unquantised."""
    return AsyncCollective(_scatter(message, x_PN, exponent, key), 1)


def reduce_scatter(message: Message, x_PN: jax.Array, exponent, key) -> tuple[jax.Array, jax.Array]:
    """The result of `start_reduce_scatter`."""
    return start_reduce_scatter(message, x_PN, exponent, key).done()


def _scatter(message: Message, x_PN: jax.Array, exponent, key) -> Hopping:
    codec, (p, n) = message.codec, x_PN.shape
    x_S, rank = to_varying(x_PN, message.axis).reshape(-1), lax.axis_index(message.axis)
    chunks = cut(dispatch.Geometry(p * n, p, n), message.chunks, codec.block)
    arrived, measures, hops = send_chunks(
        message, chunks, x_S, exponent, key=key, send=lambda wires: swap(message, wires)
    )
    arrived = yield arrived
    pieces = [
        dispatch.reduce_decode(codec, geometry, received, x_S, rank=rank, exponent=exponent, backend=message.backend)
        for geometry, received in zip(chunks, arrived)
    ]
    message.record("psum_scatter", p * n, x_PN.dtype, hops)
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces), merge(measures)


def join_residuals(chunks, lost: list[jax.Array], share=None) -> jax.Array:
    """Returns the residual dtype[S] of a message from those of its chunks (`dispatch.encode_with_residual`).

    share: (rank, residuals of each of its chunks) where the own share of x did not go through the wires.
    """
    (p, n), size = (chunks[0].messages, chunks[0].distance), chunks[0].elements
    error_S = lost[0]
    if len(chunks) > 1:
        error_S = jnp.concatenate([piece.reshape(p, -1) for piece in lost], axis=1).reshape(-1)[:size]
    if share is None:
        return error_S
    rank, of_sums = share
    own_N = of_sums[0] if len(of_sums) == 1 else jnp.concatenate(of_sums)
    # Written where it belongs, so that no other share is copied; the last share may be longer than what is left of x.
    error_S = jnp.pad(error_S, (0, p * n - size)) if p * n > size else error_S
    return lax.dynamic_update_slice(error_S, own_N, (rank * n,))[:size]
