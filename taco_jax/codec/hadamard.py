"""The orthonormal Hadamard rotation of a block.

H is the Sylvester matrix scaled by 1/sqrt(B): H = H^T = H^-1. With random signs D = diag(+-1) the rotation is z = H D
x and its inverse x = D H z. Both are linear, so a sum of rotated blocks is the rotated sum: an all-reduce rotates once
on entry and once on exit.

Dim letters: B block.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.formats import block_signs, hadamard_signs


def _transform(x: jax.Array) -> jax.Array:
    # One matrix product with +-1, exact but for the sum; the scale 1/sqrt(B) comes last. On a CPU it is faster than a
    # butterfly or H_a (x) H_b, which pass over memory more often.
    block = x.shape[-1]
    z = jnp.matmul(x, hadamard_signs(block), precision=jax.lax.Precision.HIGHEST)
    return z * np.float32(1.0 / np.sqrt(block))


def rotate(x: jax.Array, rotation: str) -> jax.Array:
    """z = H x (or H D x, or x) over the last dim. float32[..., B] -> float32[..., B]."""
    if rotation == "none":
        return x
    block = x.shape[-1]
    if rotation == "signed_hadamard":
        x = x * block_signs(block)
    return _transform(x)


def unrotate(z: jax.Array, rotation: str) -> jax.Array:
    """The inverse of `rotate`: x = H z (or D H z, or z)."""
    if rotation == "none":
        return z
    block = z.shape[-1]
    x = _transform(z)
    return x * block_signs(block) if rotation == "signed_hadamard" else x
