"""Compressed collectives over NVLink as one kernel each, inside jax.shard_map, for one process that drives all GPUs.

Values are those of the same codec's separate kernels and NCCL collectives, bit for bit: the same codes, the same
float32 sums in rank order, the own term unquantised in the same places. `why_unsupported` says what they cannot do.

Dim letters: P ranks, S elements of x, N elements of a message, R rows, C elements of a row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.formats import Format, Geometry, check_operands
from pallas_kernels.mosaic import ragged
from pallas_kernels.mosaic.kernels import largest_scale
from pallas_kernels.mosaic.tiling import TILE_ROWS, Tiling
from pallas_kernels.nvlink import collective
from pallas_kernels.nvlink.frame_transport import FrameCodec
from pallas_kernels.nvlink.shared_memory import ALL_GATHER, ONE_SHOT, REDUCE_SCATTER, TWO_SHOT, fit_buffers
from pallas_kernels.nvlink.tile_schedule import TileSchedule

_ROLES = {"all_reduce": (TWO_SHOT, ONE_SHOT), "reduce_scatter": (REDUCE_SCATTER,), "all_gather": (ALL_GATHER,)}


def all_reduce(fmt: Format, geometry: Geometry, x_S: jax.Array, axis: str, exponent=None):
    """Returns (the sum of x over the ranks of `axis`, dtype[geometry.elements]; largest block scale of all hops before
    rounding, float32[]).

    geometry: of P messages, each its owner's, for two-shot; of one for one-shot, which is the exchange of two ranks. It
    covers the whole groups of 8 rows of x. Elements of x after those are not in the result.
    """
    ranks = jax.lax.axis_size(axis)
    if geometry.messages not in (1, ranks):
        raise ValueError(f"{geometry}: must be one message, or one for each of the {ranks} ranks")
    two_shot = geometry.messages > 1
    if geometry.elements != ragged.whole_elements(fmt, x_S.size):
        raise ValueError(f"{geometry} is not of the whole groups of 8 rows of x, which has {x_S.size} elements")
    check_operands(fmt, geometry, dtype=x_S.dtype)
    x_RC, tiling = ragged.rows_of(fmt, x_S), _tiling(fmt, geometry)
    schedule = TileSchedule(tiling, ranks, axis)
    roles = TWO_SHOT if two_shot else ONE_SHOT
    y, bits = collective.run(roles, schedule, x_RC, exponent=_exponent(fmt, exponent), out_rows=x_RC.shape[0])
    return y.reshape(-1), largest_scale(bits, tiling)


def reduce_scatter(fmt: Format, x_PN: jax.Array, axis: str, exponent=None):
    """Returns (row r of the sum of x [P, N] for rank r, dtype[N]; largest block scale that was sent, float32[])."""
    p, n = x_PN.shape
    geometry = Geometry(p * n, p, n)
    x_RC, tiling = _rows(fmt, geometry, x_PN.reshape(-1)), _tiling(fmt, geometry)
    schedule = TileSchedule(tiling, p, axis)
    y, bits = collective.run(REDUCE_SCATTER, schedule, x_RC, exponent=_exponent(fmt, exponent), out_rows=tiling.rows)
    return y.reshape(-1), largest_scale(bits, tiling)


def all_gather(fmt: Format, x_N: jax.Array, axis: str, exponent=None):
    """Returns (every rank's x, this one's quantised too, dtype[P, N]; largest block scale that was sent, float32[])."""
    p, n = jax.lax.axis_size(axis), x_N.size
    geometry = Geometry(n, 1, n)
    x_RC, tiling = _rows(fmt, geometry, x_N), _tiling(fmt, geometry)
    schedule = TileSchedule(tiling, p, axis)
    y, bits = collective.run(ALL_GATHER, schedule, x_RC, exponent=_exponent(fmt, exponent), out_rows=p * tiling.rows)
    return y.reshape(p, n), largest_scale(bits, tiling)


def message_bytes(fmt: Format, geometry: Geometry) -> int:
    """Returns the bytes of one message's frames, which cross the link."""
    tiling = _tiling(fmt, geometry)
    return tiling.tiles_per_message * FrameCodec(tiling).frame_bytes


def fits(fmt: Format, operation: str, dtype: str, ranks: int) -> bool:
    """Returns whether the shared memory of a kernel suffices."""
    tile_elements = TILE_ROWS * ragged.row_elements(fmt)
    tiling = _tiling(fmt, Geometry(tile_elements, 1, tile_elements))
    return all(fit_buffers(roles, tiling, ranks, jnp.dtype(dtype)) for roles in _ROLES[operation])


def _tiling(fmt, geometry):
    tiling = Tiling(fmt, geometry, any_order=True)
    tiling.check_alignment()
    if tiling.rows * tiling.row_elements != geometry.per_message:
        raise ValueError(f"{geometry}: messages must be whole groups of 8 rows of {tiling.row_elements} elements")
    return tiling


def _rows(fmt, geometry, x_S):
    check_operands(fmt, geometry, x_S)
    return ragged.rows_of(fmt, x_S)


def _exponent(fmt, exponent):
    return None if exponent is None or fmt.scale != "ue5m3" else jnp.asarray(exponent, jnp.int32)[None]


__all__ = ["all_gather", "all_reduce", "fits", "message_bytes", "reduce_scatter"]
