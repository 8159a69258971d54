"""Reads and writes wires in kernels: codes as tiles by bulk or tensor copies, and scale bytes beside them; and the
exponents and seeds that these take."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels import compat
from pallas_kernels.mosaic import interpreter, tile_codec
from pallas_kernels.mosaic.pipeline import Workers, warpgroup_barrier
from pallas_kernels.mosaic.registers import thread_blocks
from pallas_kernels.mosaic.tiling import TILE_ROWS, Tiling

GMEM_ALIGN_BYTES = 16  # bulk copies start at multiples of it
BULK_COPY_BYTES = 128  # Mosaic makes bulk copies of multiples of it
WARPS_PER_WARPGROUP = 4


def codes_scratch(tiling: Tiling, swizzle_bytes: int | None, *slots: int):
    """Returns shared memory for tiles of codes, uint8[*slots, 64, row_bytes]."""
    shape = (*slots, TILE_ROWS, tiling.row_bytes)
    if not swizzle_bytes:
        return plgpu.SMEM(shape, jnp.uint8)
    transforms = plgpu.TilingTransform((8, swizzle_bytes)), plgpu.SwizzleTransform(swizzle_bytes)
    return plgpu.SMEM(shape, jnp.uint8, transforms=transforms)


class CodecInputs:
    """The small arrays that kernels read: exponents and seed; there is always one of each, used or not."""

    def __init__(self, tiling: Tiling, exponents, seed):
        self.tiling = tiling
        self.has_exponent = exponents is not None
        self.has_seed = tiling.fmt.rounding == "stochastic" and seed is not None
        exponents = jnp.zeros((1,), jnp.int32) if exponents is None else exponents
        seed = lax.bitcast_convert_type(seed, jnp.int32) if self.has_seed else jnp.zeros((2,), jnp.int32)
        self.arrays = [exponents, seed]

    def noise(self, seed_g, message, row, offsets) -> list | None:
        """Returns the noise of a tile's elements, None where they are rounded to nearest."""
        if not self.has_seed:
            return None
        seed = (seed_g[0].astype(jnp.uint32), seed_g[1].astype(jnp.uint32))
        return tile_codec.rounding_noise(self.tiling, message, row, seed, offsets)


class WireReader:
    """Wires uint8[P, W] as the inputs of a kernel: one view for codes, one for scales, both without a copy."""

    def __init__(self, tiling: Tiling):
        self.tiling = tiling
        # Rows of 64 or 128 bytes can be swizzled in shared memory and are then read without bank conflicts.
        self.swizzle_bytes = tiling.swizzle_bytes
        # A scale plane of a tile, as much again as its start may lie behind a multiple of the alignment, and the rest.
        per_row = tiling.blocks_per_row
        self.scale_rows = -(-(TILE_ROWS * per_row + GMEM_ALIGN_BYTES) // BULK_COPY_BYTES) * BULK_COPY_BYTES // per_row

    def arrays(self, wires: jax.Array) -> list[jax.Array]:
        """Returns the kernel's operands: the wires as rows of codes where those are swizzled, and as they are."""
        # Else XLA may hand over the array that a caller cut them from, and copies would begin at any byte of it.
        wires = lax.optimization_barrier(wires)
        return [wires.reshape(-1, self.tiling.row_bytes) if self.swizzle_bytes else wires, wires]

    def scratch(self, *slots: int) -> tuple:
        """Returns shared memory for the codes and for the scales of tiles."""
        t = self.tiling
        shape = (*slots, max(1, t.scale_planes), self.scale_rows, t.blocks_per_row)
        return codes_scratch(t, self.swizzle_bytes, *slots), plgpu.SMEM(shape, jnp.uint8)

    def scratch_bytes(self) -> int:
        """Returns the bytes of one slot."""
        t = self.tiling
        return TILE_ROWS * t.row_bytes + max(1, t.scale_planes) * self.scale_rows * t.blocks_per_row

    def barrier(self, slots: int):
        """Returns a barrier for each slot, which the copies of its codes and scale planes arrive at."""
        return plgpu.Barrier(num_arrivals=1 + self.tiling.scale_planes, num_barriers=slots)

    def load(self, codes_g, scales_g, message, row, codes_s, scales_s, barrier) -> None:
        """Starts the copies of a tile's codes [64, row_bytes] and scales [planes, 64 and some, blocks of a row]."""
        t, interpret = self.tiling, self.tiling.interpret is not None
        if self.swizzle_bytes:
            start = message * (t.message_bytes // t.row_bytes) + row
            plgpu.copy_gmem_to_smem(codes_g.at[pl.ds(start, TILE_ROWS)], codes_s, barrier)
        else:
            bytes_g = codes_g.at[message, pl.ds(row * t.row_bytes, TILE_ROWS * t.row_bytes)]
            load_bytes(bytes_g, codes_s, barrier, interpret)
        for k in range(t.scale_planes):
            bytes_g = scales_g.at[message, pl.ds(self._start(k, row), self.scale_rows * t.blocks_per_row)]
            load_bytes(bytes_g, scales_s.at[k], barrier, interpret)

    def scales(self, scales_g, message, row, scales_s, exponent) -> list:
        """Returns the scale of each block of a tile's rows: float32[64], or one float32[] for scale "site"; with one
        thread per block one array float32[64, 8]."""
        t = self.tiling
        if t.fmt.scale == "site":
            byte = scales_g[message, t.plane_offset(0)].astype(jnp.int32) & 0xFF
            return [tile_codec.read_scales(t.fmt, [byte], None)] * t.blocks_per_row
        first = lambda k: lax.div(t.plane_offset(k) - self._start(k, row), jnp.int32(t.blocks_per_row)) + row
        rows = [scales_s.at[k, pl.ds(first(k), TILE_ROWS)] for k in range(t.scale_planes)]
        if t.one_thread_per_block:
            planes = [thread_blocks.load_scales(ref, t.interpret is not None) for ref in rows]
            return [tile_codec.read_scales(t.fmt, planes, exponent)]
        out = []
        for b in range(t.blocks_per_row):
            planes = []
            for k in range(t.scale_planes):
                ref = scales_s.at[k, pl.ds(first(k), TILE_ROWS), b]
                plane = compat.load(ref, plgpu.Layout.WGMMA.reduce(1), optimized=False)
                planes.append(plane.astype(jnp.int32) & 0xFF)
            out.append(tile_codec.read_scales(t.fmt, planes, exponent))
        return out

    def _start(self, plane: int, row):
        """Returns the byte of a message from which a tile's scale plane is copied: at or before its first."""
        t = self.tiling
        first = t.plane_offset(plane) + row * t.blocks_per_row
        last = t.message_bytes - self.scale_rows * t.blocks_per_row
        return jnp.minimum(lax.div(first, jnp.int32(GMEM_ALIGN_BYTES)) * GMEM_ALIGN_BYTES, last)


class WireWriter:
    """Writes tiles of codes and their scales into wires; one for each worker.

    codes_s [buffers, 64, row_bytes] and scales_s [planes, 64, blocks of a row] are the worker's own shared memory.
    Bulk copies take tiles as they lie, to wires uint8[P, W]. Tensor copies (`width`: bytes of a row, 64 or 128) take
    them from swizzled memory, which is written without bank conflicts, to wires [P, W / width, width]; they pay where
    the kernel reads much from shared memory too.
    """

    def __init__(
        self, tiling: Tiling, workers: Workers, wires_g, codes_s, scales_s, exponents_g, buffers: int, width: int | None
    ):
        self.tiling, self.workers, self.wires_g, self.buffers = tiling, workers, wires_g, buffers
        self.codes_s, self.scales_s, self.exponents_g = codes_s, scales_s, exponents_g
        self.width = width

    @staticmethod
    def tensor_width(tiling: Tiling) -> int | None:
        """Returns the `width` of tensor copies; None where a tile is moved back: it ends its scales anywhere."""
        return tiling.swizzle_bytes if tiling.rows % TILE_ROWS == 0 else None

    @staticmethod
    def out_type(tiling: Tiling, width: int | None) -> jax.ShapeDtypeStruct:
        p, w = tiling.geometry.messages, tiling.message_bytes
        return jax.ShapeDtypeStruct((p, w // width, width) if width else (p, w), jnp.uint8)

    @staticmethod
    def scratch(tiling: Tiling, warpgroups: int, buffers: int, width: int | None) -> tuple:
        """Returns shared memory for the codes and for the scales of tiles."""
        planes = max(1, tiling.scale_planes)
        scales_s = plgpu.SMEM((warpgroups, planes, TILE_ROWS, tiling.blocks_per_row), jnp.uint8)
        return codes_scratch(tiling, width, warpgroups, buffers), scales_s

    @staticmethod
    def scratch_bytes(tiling: Tiling, buffers: int) -> int:
        """Returns the bytes of shared memory of one worker."""
        return TILE_ROWS * (buffers * tiling.row_bytes + max(1, tiling.scale_planes) * tiling.blocks_per_row)

    @staticmethod
    def no_maxima(tiling: Tiling):
        """Returns the largest magnitudes of no tile, as `kernels.encode_tile` returns those of one."""
        if tiling.one_thread_per_block:
            zeros = jnp.zeros((TILE_ROWS, thread_blocks.BLOCK_COLUMNS), jnp.int32)
            return plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
        return plgpu.layout_cast(jnp.zeros((TILE_ROWS,), jnp.int32), plgpu.Layout.WGMMA.reduce(1))

    def put_largest(self, maxima_g, bits) -> None:
        """Writes the largest of all tiles' magnitudes to the worker's own row of int32[workers, 4], one a warp."""
        put_largest(maxima_g.at[self.workers.index()], bits, self.tiling.interpret is not None)

    @staticmethod
    def maxima_type(workers: Workers) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((workers.count, WARPS_PER_WARPGROUP), jnp.int32)

    def exponent(self, message):
        """Returns the exponent of a message's site, None where there is none."""
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

    def free_buffer(self, parity):
        """Returns the shared memory for a tile's codes, once the copy before has left it."""
        plgpu.wait_smem_to_gmem(self.buffers - 1, wait_read_only=True)
        return self.codes_s.at[parity if self.buffers == 2 else 0]

    def store(self, message, row, buffer, planes: list) -> None:
        """Starts the copy of a tile's codes from `buffer`, and writes its scale bytes. planes: blocks x byte planes."""
        t = self.tiling
        plgpu.commit_smem()
        if self.width:
            plgpu.copy_smem_to_gmem(buffer, self.wires_g.at[message, pl.ds(row, TILE_ROWS)])
        else:
            bytes_g = self.wires_g.at[message, pl.ds(row * t.row_bytes, TILE_ROWS * t.row_bytes)]
            store_bytes(buffer, bytes_g, t.interpret is not None)
        per_row = t.blocks_per_row
        for k in range(t.scale_planes):
            bytes_g = self._bytes(message, t.plane_offset(k) + row * per_row, TILE_ROWS * per_row)
            if t.one_thread_per_block:
                thread_blocks.store_scales(bytes_g, planes[0][k], t.interpret is not None)
                continue
            if per_row == 1:
                compat.store(bytes_g, planes[0][k].astype(jnp.uint8), optimized=False)
                continue
            for b in range(per_row):
                compat.store(self.scales_s.at[k, :, b], planes[b][k].astype(jnp.uint8), optimized=False)
            store_bytes_unaligned(self.scales_s.at[k], bytes_g, t.interpret is not None)

    def _bytes(self, message, start, size: int):
        """Returns the ref of some bytes of a message; where it has rows, of a part of one or of whole ones."""
        if not self.width:
            return self.wires_g.at[message, pl.ds(start, size)]
        line = lax.div(start, jnp.int32(self.width))
        if size <= self.width:
            return self.wires_g.at[message, line, pl.ds(start - line * self.width, size)]
        return self.wires_g.at[message, pl.ds(line, size // self.width)]

    def _put_byte(self, message, offset, value):
        if self.width:
            line = lax.div(jnp.int32(offset), jnp.int32(self.width))
            self.wires_g[message, line, offset - line * self.width] = value
        else:
            self.wires_g[message, offset] = value


def load_bytes(bytes_g, tile_s, barrier, interpret: bool) -> None:
    """Starts the copy of consecutive bytes into a tile [64, row_bytes]; the barrier sees its end."""
    if interpret:
        interpreter.load_bytes(bytes_g, tile_s, barrier)
    else:
        flat = tile_s.reshape(math.prod(tile_s.shape))
        # All of it is inside the message: one bulk copy, without a tensor map whose sides end at 256.
        plgpu.copy_gmem_to_smem(bytes_g, flat, barrier, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)


def store_bytes(tile_s, bytes_g, interpret: bool) -> None:
    """Starts the copy of a tile [64, row_bytes] to as many consecutive bytes; see `plgpu.wait_smem_to_gmem`."""
    if interpret:
        interpreter.store_bytes(tile_s, bytes_g)
    else:
        plgpu.copy_smem_to_gmem(tile_s.reshape(math.prod(tile_s.shape)), bytes_g)


def store_bytes_unaligned(tile_s, bytes_g, interpret: bool) -> None:
    """Copies a small tile to bytes at any offset through registers: a bulk copy would need multiples of 16."""
    shape = bytes_g.shape
    if interpret:
        interpreter.store_bytes(tile_s, bytes_g)
    else:
        warpgroup_barrier()  # other threads wrote what this one reads
        layout = plgpu.Layout.WG_STRIDED(shape, max(1, math.prod(shape) // 128))
        bytes_g[...] = compat.load(tile_s.reshape(*shape), layout)


def put_largest(row_g, bits, interpret: bool) -> None:
    """Writes the largest of a warpgroup's int32[64] or [64, 8] to int32[4] in global memory, one for each warp.

    The maximum of all is left to XLA: Mosaic's own goes through shared memory that all warpgroups of a CTA have in
    common, and one overwrites there what another has not read.
    """
    rows = bits if bits.ndim == 1 else jnp.max(bits, axis=1)
    if interpret:
        interpreter.put_largest(row_g, rows)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA.reduce(1)))
    def store(ctx, row, array):
        i32, utils = ir.IntegerType.get_signless(32), mgpu.utils
        own = functools.reduce(arith.maxsi, array.registers.flat)
        text = "redux.sync.max.s32 $0, $1, 0xffffffff;"
        largest = llvm.inline_asm(i32, [own], text, "=r,r", has_side_effects=True)
        warp = arith.remui(utils.warp_idx(), arith.constant(i32, WARPS_PER_WARPGROUP))
        pointer = utils.getelementptr(utils.memref_ptr(row), [warp], i32)
        with mgpu.when(utils.single_thread_predicate(utils.ThreadSubset.WARP)):
            llvm.StoreOp(largest, pointer)

    store(row_g, rows)
