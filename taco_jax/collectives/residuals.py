"""What the wires of an all-reduce lost of a rank's part, for `error_feedback.py`.

Nothing is sent for it: a rank has the wires that it sent, and in two-shot the owner of a share has the sum that it
encoded. It costs a decoding of the own wires, and in two-shot 1/P of a reduction.

Dim letters: P ranks (shares), N elements of a share, S elements of x.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from taco_jax.collectives.message import Message
from taco_jax.compression import dispatch


def of_wires(message: Message, chunks, own: list, x_S: jax.Array, exponent, share=None) -> jax.Array:
    """x - decode(own wires), x's dtype[S]. own: the wires of each chunk. share: (rank, errors of each of its chunks)
    where the own share of x did not go through the wires."""
    decoded_S = dispatch.decode_chunks(message.codec, chunks, own, x_S.dtype, exponent, backend=message.backend)
    error_S = (x_S.astype(jnp.float32) - decoded_S).astype(x_S.dtype)
    if share is None:
        return error_S
    (rank, lost), (p, n) = share, (chunks[0].messages, chunks[0].distance)
    lost_N = lost[0] if len(lost) == 1 else jnp.concatenate(lost)
    # Written where it belongs, so that no other share is copied; the last share may be longer than what is left of x.
    error_S = jnp.pad(error_S, (0, p * n - x_S.size)) if p * n > x_S.size else error_S
    return lax.dynamic_update_slice(error_S, lost_N, (rank * n,))[: x_S.size]


def of_share(message: Message, geometry, received, x_S: jax.Array, rank, exponent, wire) -> jax.Array:
    """The sum of a chunk of the own share less what its wire says, x's dtype[chunk]."""
    codec, options = message.codec, {"backend": message.backend}
    sum_N = dispatch.reduce_decode(codec, geometry, received, x_S, rank=rank, exponent=exponent, **options)
    said_N = dispatch.sum_decode(codec, wire[None], geometry.per_message, x_S.dtype, exponent, **options)
    return (sum_N.astype(jnp.float32) - said_N).astype(x_S.dtype)
