"""How kernels write wires: codes as tiles by bulk copies, scale bytes straight from registers."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels import compat
from pallas_kernels.mosaic import blocks, copies, owned
from pallas_kernels.mosaic.pipeline import Workers
from pallas_kernels.mosaic.tiling import ROWS, Tiling

WARPS = 4  # of a warpgroup


class Inputs:
    """The small arrays that kernels read: exponents and seed; there is always one of each, used or not."""

    def __init__(self, tiling: Tiling, exponents, seed):
        self.tiling = tiling
        self.has_exponent = exponents is not None
        self.has_seed = tiling.fmt.rounding == "stochastic" and seed is not None
        exponents = jnp.zeros((1,), jnp.int32) if exponents is None else exponents
        seed = lax.bitcast_convert_type(seed, jnp.int32) if self.has_seed else jnp.zeros((2,), jnp.int32)
        self.arrays = [exponents, seed]

    def noise(self, n_g, message, row, offsets):
        if not self.has_seed:
            return None
        seed = (n_g[0].astype(jnp.uint32), n_g[1].astype(jnp.uint32))
        return blocks.noise(self.tiling, message, row, seed, offsets)


class Writer:
    """Writes tiles of rotated blocks into wires; one for each worker.

    codes_s [buffers, 64, row_bytes] and scales_s [planes, 64, blocks of a row] are the worker's own shared memory.
    Bulk copies take tiles as they lie, to wires uint8[P, W]. Tensor copies (`width`: bytes of a row, 64 or 128) take
    them from swizzled memory, which is written without bank conflicts, to wires [P, W / width, width]; they pay where
    the kernel reads much from shared memory too.
    """

    def __init__(
        self, tiling: Tiling, workers: Workers, o_g, codes_s, scales_s, exponents_g, buffers: int, width: int | None
    ):
        self.tiling, self.workers, self.o_g, self.buffers = tiling, workers, o_g, buffers
        self.codes_s, self.scales_s, self.exponents_g = codes_s, scales_s, exponents_g
        self.width = width

    @staticmethod
    def tensor_width(tiling: Tiling) -> int | None:
        """The `width` of tensor copies, None where a tile is moved back: it ends its scales anywhere."""
        return blocks.swizzle(tiling) if tiling.rows % ROWS == 0 else None

    @staticmethod
    def out_type(tiling: Tiling, width: int | None) -> jax.ShapeDtypeStruct:
        p, w = tiling.geometry.messages, tiling.message_bytes
        return jax.ShapeDtypeStruct((p, w // width, width) if width else (p, w), jnp.uint8)

    @staticmethod
    def scratch(tiling: Tiling, warpgroups: int, buffers: int, width: int | None) -> list:
        planes = max(1, tiling.scale_planes)
        return [
            blocks.codes_scratch(tiling, width, warpgroups, buffers),
            plgpu.SMEM((warpgroups, planes, ROWS, tiling.blocks_per_row), jnp.uint8),
        ]

    @staticmethod
    def scratch_bytes(tiling: Tiling, buffers: int) -> int:
        """Shared memory of one worker."""
        return ROWS * (buffers * tiling.row_bytes + max(1, tiling.scale_planes) * tiling.blocks_per_row)

    @staticmethod
    def nothing(tiling: Tiling):
        """The largest magnitudes of no tile, as `write` returns them."""
        if tiling.owned:
            return plgpu.layout_cast(jnp.zeros((ROWS, owned.COLUMNS), jnp.int32), plgpu.Layout.WGMMA)
        return plgpu.layout_cast(jnp.zeros((ROWS,), jnp.int32), plgpu.Layout.WGMMA.reduce(1))

    def put_largest(self, maxima_g, bits) -> None:
        """The largest of what `write` returned -> the worker's own row of int32[workers, 4], one for each warp."""
        put_largest(maxima_g.at[self.workers.index()], bits, self.tiling.interpret is not None)

    @staticmethod
    def maxima_type(workers: Workers) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((workers.count, WARPS), jnp.int32)

    def exponent(self, message):
        if self.exponents_g is None:
            return None
        return self.exponents_g[message if self.tiling.fmt.scale == "site" else 0]

    def fill(self) -> None:
        """Zeros the bytes between sections, and writes the one scale byte of a message with scale "site"."""
        t = self.tiling
        for offset, length in t.gaps():

            def zero(i, offset=offset, length=length):
                message = lax.div(i, jnp.int32(length))
                self._put_byte(message, offset + i - message * length, jnp.uint8(0))

            self.workers.for_each(length * t.geometry.messages, zero)
        if t.fmt.scale == "site":

            def scale(message):
                self._put_byte(message, t.plane_offset(0), (self.exponent(message) + 127).astype(jnp.uint8))

            self.workers.for_each(t.geometry.messages, scale)

    def write(self, message, row, parity, z: list, noise) -> jax.Array:
        """Encodes one tile; returns the largest |z| of its rows, or of its `owned` blocks, as bits."""
        t = self.tiling
        plgpu.wait_smem_to_gmem(self.buffers - 1, wait_read_only=True)  # the copy before has left the buffer
        buffer = self.codes_s.at[parity if self.buffers == 2 else 0]
        largest, planes = blocks.encode(t, z, self.exponent(message), noise, buffer)
        plgpu.commit_smem()
        if self.width:
            plgpu.copy_smem_to_gmem(buffer, self.o_g.at[message, pl.ds(row, ROWS)])
        else:
            size = ROWS * t.row_bytes
            copies.store(buffer, self.o_g.at[message, pl.ds(row * t.row_bytes, size)], t.interpret is not None)
        self._write_scales(message, row, planes)
        return largest

    def _write_scales(self, message, row, planes):
        t = self.tiling
        per_row = t.blocks_per_row
        for k in range(t.scale_planes):
            bytes_g = self._bytes(message, t.plane_offset(k) + row * per_row, ROWS * per_row)
            if t.owned:
                owned.store_scales(bytes_g, planes[0][k], t.interpret is not None)
                continue
            if per_row == 1:
                compat.store(bytes_g, planes[0][k].astype(jnp.uint8), optimized=False)
                continue
            for b in range(per_row):
                compat.store(self.scales_s.at[k, :, b], planes[b][k].astype(jnp.uint8), optimized=False)
            copies.store_through_registers(self.scales_s.at[k], bytes_g, t.interpret is not None)

    def _bytes(self, message, start, size: int):
        """The ref of some bytes of a message; where it has rows, of a part of one or of whole ones."""
        if not self.width:
            return self.o_g.at[message, pl.ds(start, size)]
        line = lax.div(start, jnp.int32(self.width))
        if size <= self.width:
            return self.o_g.at[message, line, pl.ds(start - line * self.width, size)]
        return self.o_g.at[message, pl.ds(line, size // self.width)]

    def _put_byte(self, message, offset, value):
        if self.width:
            line = lax.div(jnp.int32(offset), jnp.int32(self.width))
            self.o_g[message, line, offset - line * self.width] = value
        else:
            self.o_g[message, offset] = value


def put_largest(row_g, bits, interpret: bool) -> None:
    """The largest of a warpgroup's int32[64] or [64, 8] -> int32[4] in global memory, one for each warp.

    The maximum of all is left to XLA: Mosaic's own goes through shared memory that all warpgroups of a CTA have in
    common, and one overwrites there what another has not read.
    """
    rows = bits if bits.ndim == 1 else jnp.max(bits, axis=1)
    if interpret:
        row_g[...] = jnp.full((WARPS,), jnp.max(rows))
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA.reduce(1)))
    def store(ctx, row, array):
        i32, utils = ir.IntegerType.get_signless(32), mgpu.utils
        own = functools.reduce(arith.maxsi, array.registers.flat)
        text = "redux.sync.max.s32 $0, $1, 0xffffffff;"
        largest = llvm.inline_asm(i32, [own], text, "=r,r", has_side_effects=True)
        warp = arith.remui(utils.warp_idx(), arith.constant(i32, WARPS))
        pointer = utils.getelementptr(utils.memref_ptr(row), [warp], i32)
        with mgpu.when(utils.single_thread_predicate(utils.ThreadSubset.WARP)):
            llvm.StoreOp(largest, pointer)

    store(row_g, rows)
