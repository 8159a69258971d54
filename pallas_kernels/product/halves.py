"""The Hadamard transform of 128 on the tensor cores, as two of 64: a matrix of 8 KB in shared memory instead of 32.

    H128 [a, b] = [H64 a + H64 b, H64 a - H64 b]

Products of +-1 with codes are exact, sums are float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.formats import hadamard_signs
from pallas_kernels.mosaic.rotation import transforms
from pallas_kernels.mosaic.tiling import TILE_ROWS as ROWS

HALF = 64


def operand() -> jax.Array:
    """The matrix as a kernel's input, bfloat16[64, 64]."""
    return jnp.asarray(hadamard_signs(HALF), jnp.bfloat16)


def scratch():
    return plgpu.SMEM((HALF, HALF), jnp.bfloat16, transforms=transforms(jnp.bfloat16, HALF))


def transform(x: jax.Array, matrix_s) -> list[jax.Array]:
    """bfloat16[64, 128] in registers -> both halves of H128 x without its factor, float32[64, 64] each."""

    def multiply(first, second):
        plgpu.wgmma(first, x[:, :HALF], matrix_s)
        plgpu.wgmma(second, x[:, HALF:], matrix_s)
        return first[...], second[...]

    accumulator = plgpu.ACC((ROWS, HALF), jnp.float32)
    a, b = pl.run_scoped(multiply, accumulator, accumulator)
    return [a + b, a - b]
