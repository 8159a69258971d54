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

# 2^32 divided by the golden ratio: neighbouring messages get seeds that are far apart.
_GOLDEN = 0x9E3779B9


def seed_of(key: jax.Array) -> jax.Array:
    """A PRNG key -> the seed of one call, uint32[2]."""
    return jax.random.bits(key, (2,), jnp.uint32)


def mix(x: jax.Array) -> jax.Array:
    """lowbias32: uint32 -> uint32, one to one."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def uniform(seed: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Noise in [0, 1) for rotated blocks, float32[..., M, B]: the leading dims, flattened, are the messages p."""
    *leading, m, b = shape
    p = lax.iota(jnp.uint32, math.prod(leading)).reshape(*leading, 1, 1)
    # Not one iota of M * B elements: more than 2^32 would be no valid array.
    i = lax.broadcasted_iota(jnp.uint32, (m, b), 0) * jnp.uint32(b) + lax.broadcasted_iota(jnp.uint32, (m, b), 1)
    h = mix(mix(i ^ seed[0]) ^ (seed[1] + p * jnp.uint32(_GOLDEN)))
    return (h >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)
