"""Which implementation runs a codec operation, and the jnp one.

The three operations are the ones that a fused kernel implements, each one pass over memory:

* encode: values of P messages -> P wires (rotate, scale, cast, pack)
* reduce: P wires and the owner's own values -> their sum in f32, in rank order, own term unquantised (decode,
  rotate own, add) and encoded again, or rotated back
* decode: wires -> values

Dim letters: P messages (ranks), N elements of a message, M blocks, B block.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from taco_jax.codec import Codec, as_codec


def encode(
    codec: Codec, x_PN: jax.Array, exponent=None, key=None, with_stats: bool = False
) -> tuple[jax.Array, jax.Array]:
    """[P, N] values -> (uint8[P, wire_bytes(N)], measure float32[1 or 6]: largest scale, then `Codec.measure`)."""
    return _encode_blocks(codec, codec.to_blocks(x_PN), exponent, key, with_stats)


def reduce_encode(codec, wires, own_N, rank, exponent=None, key=None, with_stats=False) -> tuple[jax.Array, jax.Array]:
    """Wires of P ranks and rank `rank`'s own values -> (the sum's wire uint8[wire_bytes(N)], measure)."""
    return _encode_blocks(codec, _sum_blocks(codec, wires, own_N, rank, exponent), exponent, key, with_stats)


def reduce_decode(codec, wires, own_N, rank, dtype, exponent=None) -> jax.Array:
    """Wires of P ranks and the own values -> the sum, dtype[N]."""
    n = own_N.shape[-1]
    return codec.from_blocks(_sum_blocks(codec, wires, own_N, rank, exponent), n, dtype)


def sum_decode(codec: Codec, wires: jax.Array, n: int, dtype, exponent=None) -> jax.Array:
    """Wires of P ranks -> the sum of what they say, dtype[N], in f32 and rank order (one-shot: own wire too)."""
    z_PMB = codec.decode_blocks(wires, codec.n_blocks(n), exponent=exponent)
    return codec.from_blocks(_in_rank_order(list(z_PMB)), n, dtype)


def decode(codec: Codec, wires: jax.Array, n: int, dtype, exponent=None) -> jax.Array:
    """uint8[..., wire_bytes(N)] -> dtype[..., N]."""
    return codec.from_blocks(codec.decode_blocks(wires, codec.n_blocks(n), exponent=exponent), n, dtype)


def _encode_blocks(codec, z, exponent, key, with_stats):
    wires, largest = codec.encode_blocks(z, exponent=exponent, key=key)
    measure = largest[None]
    if with_stats:
        measure = jnp.concatenate([measure, codec.measure(z, wires, exponent=exponent)])
    return wires, measure


def _sum_blocks(codec, wires, own_N, rank, exponent):
    own_MB = codec.to_blocks(own_N)
    z_PMB = codec.decode_blocks(wires, own_MB.shape[0], exponent=exponent)
    return _in_rank_order([lax.select(rank == p, own_MB, z_MB) for p, z_MB in enumerate(z_PMB)])


def _in_rank_order(terms):
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def default_min_bytes() -> int:
    """The message size from which a layer compresses when its `min_bytes` is None.

    On GPUs small messages are bound by launch latency, where compressing only adds kernels; the crossover of each link
    is to be measured by `taco_jax.tune`. The CPU emulator compresses everything, so that what is trained there is what
    is asked for.
    """
    return 0 if jax.default_backend() == "cpu" else 1 << 20


def choose(codec: str | Codec, device, dtype: str, elements: int = 1 << 26) -> tuple[str, str]:
    """(implementation, reason) that encodes messages of `codec` on `device`: "mosaic", "triton" or "jnp"."""
    from pallas_kernels import KernelSpec
    from pallas_kernels import choose as choose_kernel

    codec = as_codec(codec)
    if codec.exact:
        return "jax.lax", "codec none sends values as they are"
    return choose_kernel(
        KernelSpec("encode", codec.name, codec.element, codec.block, codec.rotation, codec.scale, dtype, elements),
        device,
    )
