"""Stand-ins that the CPU interpreter runs for inlined MLIR, and for what it does not know, in plain jax.numpy.

It knows no register layouts, so that an array's columns are moved explicitly; no reshaped refs, so that values are
reshaped on their way; no left operand of a product in registers; and no atomic counters (`pipeline.Workers.dynamic`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu


def store_run(ref, run, start: int, order) -> None:
    """`registers.layout.store_run`; order: the position of each column."""
    ref[:, start : start + run.shape[1]] = jnp.stack([run[:, p] for p in order], axis=1)


def load_run(ref, start: int, width: int, columns) -> jax.Array:
    """`registers.layout.load_run`."""
    row = ref[:, start : start + width]
    return jnp.stack([row[:, c] for c in columns], axis=1)


def load_tile(ref, columns) -> jax.Array:
    """`registers.thread_blocks.load_tile`."""
    x = ref[...].astype(jnp.float32)
    return jnp.stack([x[:, c] for c in columns], axis=1)


def store_tile(ref, value: jax.Array, order) -> None:
    """`registers.thread_blocks.store_tile`; order: the position of each column."""
    ref[...] = jnp.stack([value[:, p] for p in order], axis=1)


def load_scales(ref) -> jax.Array:
    """`registers.thread_blocks.load_scales`."""
    return jnp.repeat(ref[...].astype(jnp.int32) & 0xFF, 2, axis=1)


def store_scales(ref, plane: jax.Array) -> None:
    """`registers.thread_blocks.store_scales`."""
    ref[...] = plane[:, ::2].astype(jnp.uint8).reshape(ref.shape)


def pair_maxima(run: jax.Array) -> jax.Array:
    """`registers.thread_blocks.block_maxima` of the largest of each thread's columns, as bits int32[64, 8]."""
    return jnp.repeat(run.reshape(run.shape[0], -1, 2).max(2), 2, axis=1)


def row_maxima(block: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """`tile_codec.block_max` by bits, among which NaN lies above Inf: XLA's maximum on a CPU drops NaN."""
    total = None
    for c in block:
        m = jnp.max(magnitude_bits(c), axis=1)
        total = m if total is None else jnp.maximum(total, m)
    return lax.bitcast_convert_type(total, jnp.float32), total


def magnitude_bits(x: jax.Array) -> jax.Array:
    """|x| as int32 bits, which have the order of the magnitudes."""
    return lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF


def store_bytes(tile_s, bytes_g) -> None:
    """`wire_io.store_bytes` and `wire_io.store_bytes_unaligned`."""
    bytes_g[...] = tile_s[...].reshape(bytes_g.shape)


def load_bytes(bytes_g, tile_s, barrier) -> None:
    """`wire_io.load_bytes`."""
    tile_s[...] = bytes_g[...].reshape(tile_s.shape)
    plgpu.barrier_arrive(barrier)


def put_largest(row_g, rows) -> None:
    """`wire_io.put_largest`: the same number for each warp."""
    row_g[...] = jnp.full(row_g.shape, jnp.max(rows))


def sum_of_products(terms) -> jax.Array:
    """The sum of a @ b, of arrays a and refs b, in float32."""
    return sum(jnp.dot(a.astype(jnp.float32), b[...].astype(jnp.float32)) for a, b in terms)
