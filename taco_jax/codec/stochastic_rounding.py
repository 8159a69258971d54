"""The noise of stochastic rounding: a hash of a counter, so that kernels draw the same bits as the jnp reference.

    u = (h >> 8) 2^-24,   h = mix(mix(i ^ seed[0]) ^ (seed[1] + p * 0x9E3779B9))

i counts the elements of a message in block order, p the messages of a call; all of it is uint32, wrapping. mix is
Wellons' lowbias32.

Dim letters: M blocks of a message, B elements of a block; leading dims ("...") are separate messages.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats import GOLDEN, lowbias32


def seed_of(key: jax.Array) -> jax.Array:
    """A PRNG key -> the seed of one call, uint32[2]."""
    return jax.random.bits(key, (2,), jnp.uint32)


def uniform(seed: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Noise in [0, 1) for rotated blocks, float32[..., M, B]: the leading dims, flattened, are the messages p."""
    *leading, m, b = shape
    p = lax.iota(jnp.uint32, math.prod(leading)).reshape(*leading, 1, 1)
    # Not one iota of M * B elements: more than 2^32 would be no valid array.
    i = lax.broadcasted_iota(jnp.uint32, (m, b), 0) * jnp.uint32(b) + lax.broadcasted_iota(jnp.uint32, (m, b), 1)
    h = lowbias32(lowbias32(i ^ seed[0]) ^ (seed[1] + p * jnp.uint32(GOLDEN)))
    return (h >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)
