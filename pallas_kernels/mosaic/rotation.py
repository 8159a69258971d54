"""The Hadamard rotation of a tile as matrix products on the tensor cores: exact products with +-1, float32 sums.

A block of 256 is two halves, so its matrix is four of 128 by 128. Blocks of one row are rotated one by one: with a
block-diagonal matrix an Inf would become NaN in its neighbours too (0 * Inf). float32 values go in as three bfloat16
parts, which add up to them exactly.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.formats import Format, block_signs, hadamard_signs
from pallas_kernels.mosaic import interpreter, tile_codec
from pallas_kernels.mosaic.registers import layout
from pallas_kernels.mosaic.tiling import TILE_ROWS, Tiling

# bfloat16 parts that hold a value of a dtype exactly.
BFLOAT16_PARTS = {"bfloat16": 1, "float16": 2, "float32": 3}


@functools.cache
def matrices(fmt: Format) -> tuple[np.ndarray, tuple]:
    """Returns the distinct +-1 matrices of a rotation, and where they are used.

    (float32[K, chunk, chunk], table): chunk j of a rotated block is the sum over i of x_i @ matrices[table[i][j]], its
    columns in the order of `registers/layout.py`. Rotating back takes the transposed matrices: x_i is the sum over j of
    z_j @ matrices[table[i][j]].T.
    """
    chunk = min(fmt.block, 128)
    n = fmt.block // chunk
    found: list[np.ndarray] = []

    def index(h, i, j):
        part = h[i * chunk : (i + 1) * chunk, j * chunk : (j + 1) * chunk]
        for k, other in enumerate(found):
            if (part == other).all():
                return k
        found.append(part)
        return len(found) - 1

    h = hadamard_signs(fmt.block)
    if fmt.rotation == "signed_hadamard":
        h = h * block_signs(fmt.block)[:, None]  # of rows: z = x D H
    h = h[:, layout.columns(fmt.block, layout.run_columns(fmt))]
    table = tuple(tuple(index(h, i, j) for j in range(n)) for i in range(n))
    return np.stack(found), table


@dataclass(frozen=True)
class Rotator:
    """The rotations that one kernel does, its matrices in `dtype`."""

    tiling: Tiling
    dtype: Any

    @property
    def active(self) -> bool:
        return self.tiling.fmt.rotation != "none"

    @property
    def operand(self) -> jax.Array:
        """The matrices as a kernel's input; a small placeholder where nothing is rotated."""
        values = matrices(self.tiling.fmt)[0] if self.active else np.zeros(self.shape)
        return jnp.asarray(values, self.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return matrices(self.tiling.fmt)[0].shape if self.active else (1, 64, 64)

    @property
    def scratch(self):
        """Shared memory for the matrices."""
        return plgpu.SMEM(self.shape, self.dtype, transforms=transforms(self.dtype, self.shape[-1]))

    @property
    def bytes(self) -> int:
        """Bytes of that shared memory."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

    def load(self, m_g, m_s, barrier, warpgroup) -> None:
        """Starts the copy of the matrices, in the first warpgroup; `wait` before they are used."""
        if self.active:

            @pl.when(warpgroup == 0)
            def _():
                plgpu.copy_gmem_to_smem(m_g, m_s, barrier)

    def wait(self, barrier) -> None:
        if self.active:
            plgpu.barrier_wait(barrier)

    def rotate(self, x_s, m_s) -> list[jax.Array]:
        """Returns the rotated blocks of a tile [64, row] in shared memory, float32[64, chunk] each, in order."""
        width, n = self.tiling.chunk, self.tiling.row_elements // self.tiling.chunk
        if self.active and x_s.dtype == m_s.dtype:
            return self._product([(x_s.at[:, pl.ds(i * width, width)], 0) for i in range(n)], m_s)
        chunks = tile_codec.load_values(self.tiling, x_s)
        return self._product([(c, BFLOAT16_PARTS[x_s.dtype.name]) for c in chunks], m_s) if self.active else chunks

    def unrotate(self, z: list[jax.Array], m_s, dtype) -> list[jax.Array]:
        """Rotates chunks, sums in float32, back: exact to 2^-17 of the largest where the output has 16 bits."""
        parts = 3 if dtype == jnp.float32 else 2
        return self._product([(c, parts) for c in z], m_s, back=True) if self.active else z

    def unrotate_codes(self, codes: list[jax.Array], m_s) -> list[jax.Array]:
        """Rotates values of codes (exact in 16 bits), chunk by chunk, back, without their block's scale."""
        return self._product([(c.astype(self.dtype), 0) for c in codes], m_s, back=True) if self.active else codes

    def _product(self, chunks: list[tuple], m_s, back: bool = False) -> list[jax.Array]:
        """chunks: (left operand, number of bfloat16 parts that stand for it, 0: none are needed)."""
        t = self.tiling
        table, n = matrices(t.fmt)[1], t.chunks_per_block
        matrix = lambda i, j: m_s.at[table[j][i]].transpose((1, 0)) if back else m_s.at[table[i][j]]
        scale = np.float32(1.0 / np.sqrt(t.fmt.block))
        out = []
        for start in range(0, len(chunks), n):
            for j in range(n):
                terms = [(*chunks[start + i], matrix(i, j)) for i in range(n)]
                out.append(_sum_of_products(t, terms) * scale)
        return out


def operand_dtype(dtype) -> jnp.dtype:
    """Returns the dtype of the matrix that rotates values of `dtype`."""
    return jnp.dtype(jnp.float16 if dtype == jnp.float16 else jnp.bfloat16)


def transforms(dtype, chunk: int) -> tuple:
    """Returns the shared-memory layout of values or matrices whose rows are read in runs of `chunk` elements."""
    swizzle = min(128, chunk * jnp.dtype(dtype).itemsize)
    return plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(swizzle)


def _sum_of_products(tiling: Tiling, terms) -> jax.Array:
    if tiling.interpret is not None and isinstance(terms[0][0], jax.Array):
        return interpreter.sum_of_products((part, b) for a, n, b in terms for part in _parts(a, n))

    def multiply(acc):
        for a, n, b in terms:
            for part in _parts(a, n):
                plgpu.wgmma(acc, part, b)
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((TILE_ROWS, tiling.chunk), jnp.float32))


def _parts(x, n: int):
    """Yields n bfloat16 arrays whose sum is x. Each is truncated, since rounding up could overflow, and the last one
    rounded."""
    if n == 0:
        yield x
        return
    for _ in range(n - 1):
        head = lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & np.int32(-65536), jnp.float32)
        yield head.astype(jnp.bfloat16)
        x = x - head
    yield x.astype(jnp.bfloat16)
