"""The orthonormal Hadamard rotation of a block.

H is the Sylvester matrix scaled by 1/sqrt(B): H = H^T = H^-1. With random signs D = diag(+-1) the rotation is z = H D
x and its inverse x = D H z. Both are linear, so a sum of rotated blocks is the rotated sum: an all-reduce rotates once
on entry and once on exit.

Dim letters: B block.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

ROTATIONS = ("none", "hadamard", "signed_hadamard")
PRODUCT_WIDTH = 64
"""Elements of a block that one matrix product takes; sums and differences combine the products."""


@functools.cache
def hadamard_signs(block: int) -> np.ndarray:
    """The +-1 Sylvester-Hadamard matrix, float32[B, B]; `block` is a power of two."""
    h = np.ones((1, 1), np.float32)
    while h.shape[0] < block:
        h = np.block([[h, h], [h, -h]])
    return h


@functools.cache
def block_signs(block: int) -> np.ndarray:
    """The fixed random signs of `signed_hadamard`, float32[B]: the same on every rank and in every version."""
    # A 32-bit mix of the index (Wellons' lowbias32) instead of a generator, so that a kernel can compute it too.
    i = np.arange(1, block + 1, dtype=np.uint64)
    mask = np.uint64(0xFFFFFFFF)
    i ^= i >> np.uint64(16)
    i = (i * np.uint64(0x7FEB352D)) & mask
    i ^= i >> np.uint64(15)
    i = (i * np.uint64(0x846CA68B)) & mask
    i ^= i >> np.uint64(16)
    return np.where(i & np.uint64(1), -1.0, 1.0).astype(np.float32)


# H is H_k (x) H_w, in either order: one product of parts of w elements with +-1; sums and differences of the k parts.
# Exact but for the sums; the scale 1/sqrt(B) comes last. With w = 64 in the place of w = B = 128 the product, most of a
# message's time on a CPU, has half the operations; a smaller w costs more in passes than it saves.


def _product(x: jax.Array) -> jax.Array:
    """H_w of each part of the last dim."""
    width = min(x.shape[-1], PRODUCT_WIDTH)
    parts = x.reshape(*x.shape[:-1], x.shape[-1] // width, width)
    return jnp.matmul(parts, hadamard_signs(width), precision=jax.lax.Precision.HIGHEST).reshape(x.shape)


def _across(x: jax.Array) -> jax.Array:
    """H_k over the k parts of the last dim."""
    parts = jnp.split(x, max(x.shape[-1] // PRODUCT_WIDTH, 1), axis=-1)
    distance = 1
    while distance < len(parts):
        for i in range(len(parts)):
            if not i & distance:
                a, b = parts[i], parts[i + distance]
                parts[i], parts[i + distance] = a + b, a - b
        distance *= 2
    return parts[0] if len(parts) == 1 else jnp.stack(parts, axis=-2).reshape(x.shape)


def _scale(block: int) -> np.float32:
    return np.float32(1.0 / np.sqrt(block))


def rotate(x: jax.Array, rotation: str) -> jax.Array:
    """z = H x (or H D x, or x) over the last dim. float32[..., B] -> float32[..., B]."""
    if rotation == "none":
        return x
    block = x.shape[-1]
    if rotation == "signed_hadamard":
        x = x * block_signs(block)
    # Sums and differences first: they join the pass that made x float32.
    return _product(_across(x)) * _scale(block)


def unrotate(z: jax.Array, rotation: str) -> jax.Array:
    """The inverse of `rotate`: x = H z (or D H z, or z)."""
    if rotation == "none":
        return z
    block = z.shape[-1]
    # And here last: they join the pass that rounds x to its dtype.
    x = _across(_product(z)) * _scale(block)
    return x * block_signs(block) if rotation == "signed_hadamard" else x
