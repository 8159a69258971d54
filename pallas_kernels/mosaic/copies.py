"""Copies between flat bytes in global memory and tiles of rows in shared memory.

The CPU interpreter knows no reshaped refs: there the value is reshaped on its way through registers.
"""

from __future__ import annotations

import math

from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.mosaic.tickets import barrier


def store(tile_s, bytes_g, interpret: bool) -> None:
    """Starts the copy of a tile [64, row_bytes] to as many consecutive bytes; see `plgpu.wait_smem_to_gmem`."""
    if interpret:
        bytes_g[...] = tile_s[...].reshape(bytes_g.shape)
    else:
        plgpu.copy_smem_to_gmem(tile_s.reshape(math.prod(tile_s.shape)), bytes_g)


def load(bytes_g, tile_s, barrier, interpret: bool) -> None:
    """Starts the copy of consecutive bytes into a tile [64, row_bytes]; the barrier sees its end."""
    if interpret:
        tile_s[...] = bytes_g[...].reshape(tile_s.shape)
        plgpu.barrier_arrive(barrier)
    else:
        flat = tile_s.reshape(math.prod(tile_s.shape))
        # All of it is inside the message: one bulk copy, without a tensor map whose sides end at 256.
        plgpu.copy_gmem_to_smem(bytes_g, flat, barrier, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)


def store_through_registers(tile_s, bytes_g, interpret: bool) -> None:
    """Copies a small tile to bytes at any offset, where a bulk copy would need multiples of 16."""
    shape = bytes_g.shape
    if interpret:
        bytes_g[...] = tile_s[...].reshape(shape)
    else:
        barrier()  # other threads wrote what this one reads
        layout = plgpu.Layout.WG_STRIDED(shape, max(1, math.prod(shape) // 128))
        bytes_g[...] = compat.load(tile_s.reshape(*shape), layout)
