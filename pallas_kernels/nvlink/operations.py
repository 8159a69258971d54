"""Compressed collectives over NVLink as one kernel each, inside jax.shard_map, for one process that drives all GPUs.

Values are those of the same codec's separate kernels and NCCL collectives, bit for bit: the same codes, sums in float32
and in rank order, and in the same places the own term as it is. `obstacle` says what they cannot do.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.formats import Format, Geometry, check_operands
from pallas_kernels.mosaic import ragged
from pallas_kernels.mosaic.kernels import largest_scale as largest
from pallas_kernels.mosaic.tiling import Tiling
from pallas_kernels.nvlink import collective, programs
from pallas_kernels.nvlink.deal import Deal
from pallas_kernels.nvlink.frames import Frames
from pallas_kernels.nvlink.programs import ALL_GATHER, ONE_SHOT, REDUCE_SCATTER, TWO_SHOT

_PROGRAMS = {"all_reduce": (TWO_SHOT, ONE_SHOT), "reduce_scatter": (REDUCE_SCATTER,), "all_gather": (ALL_GATHER,)}


def all_reduce(fmt: Format, geometry: Geometry, x_S: jax.Array, axis: str, exponent=None):
    """(the sum of x over the ranks of `axis`, dtype[geometry.elements]; largest block scale of all hops, float32[]).

    The scale is the one before rounding. geometry: of P messages, each its owner's: two-shot. Of one: one-shot, the
    exchange where there are two ranks. It covers the whole groups of 8 rows of x; what else x has is not in the result.
    """
    ranks = jax.lax.axis_size(axis)
    if geometry.messages not in (1, ranks):
        raise ValueError(f"{geometry}: must be one message, or one for each of the {ranks} ranks")
    two_shot = geometry.messages > 1
    if geometry.elements != ragged.whole_elements(fmt, x_S.size):
        raise ValueError(f"{geometry} is not of the whole groups of 8 rows of x, which has {x_S.size} elements")
    check_operands(fmt, geometry, dtype=x_S.dtype)
    x_RC, tiling = ragged.rows_of(fmt, x_S), _tiling(fmt, geometry)
    deal = Deal(tiling, ranks, axis)
    program = TWO_SHOT if two_shot else ONE_SHOT
    y, bits = collective.run(program, deal, x_RC, _exponent(fmt, exponent), x_RC.shape[0])
    return y.reshape(-1), largest(bits, tiling)


def reduce_scatter(fmt: Format, x_PN: jax.Array, axis: str, exponent=None):
    """(row r of the sum of x [P, N] for rank r, dtype[N]; largest block scale of what was sent, float32[])."""
    p, n = x_PN.shape
    geometry = Geometry(p * n, p, n)
    x_RC, tiling = _rows(fmt, geometry, x_PN.reshape(-1)), _tiling(fmt, geometry)
    y, bits = collective.run(REDUCE_SCATTER, Deal(tiling, p, axis), x_RC, _exponent(fmt, exponent), tiling.rows)
    return y.reshape(-1), largest(bits, tiling)


def all_gather(fmt: Format, x_N: jax.Array, axis: str, exponent=None):
    """(every rank's x, dtype[P, N]; largest block scale of what was sent, float32[]); the own one is quantised too."""
    p, n = jax.lax.axis_size(axis), x_N.size
    geometry = Geometry(n, 1, n)
    x_RC, tiling = _rows(fmt, geometry, x_N), _tiling(fmt, geometry)
    y, bits = collective.run(ALL_GATHER, Deal(tiling, p, axis), x_RC, _exponent(fmt, exponent), p * tiling.rows)
    return y.reshape(p, n), largest(bits, tiling)


def message_bytes(fmt: Format, geometry: Geometry) -> int:
    """Bytes of one message's frames, which is what crosses the link of it."""
    tiling = _tiling(fmt, geometry)
    return tiling.tiles_per_message * Frames(tiling).bytes


def fits(fmt: Format, operation: str, dtype: str, ranks: int) -> bool:
    """Whether a kernel's shared memory suffices."""
    row = ragged.row_elements(fmt)
    tiling = _tiling(fmt, Geometry(64 * row, 1, 64 * row))
    return all(programs.memory_of(program, tiling, ranks, jnp.dtype(dtype)) for program in _PROGRAMS[operation])


def _tiling(fmt, geometry):
    tiling = Tiling(fmt, geometry, any_order=True)
    tiling.check_alignment()
    if tiling.rows * tiling.row != geometry.per_message:
        raise ValueError(f"{geometry}: messages must be whole groups of 8 rows of {tiling.row} elements")
    return tiling


def _rows(fmt, geometry, x_S):
    check_operands(fmt, geometry, x_S)
    return ragged.rows_of(fmt, x_S)


def _exponent(fmt, exponent):
    return None if exponent is None or fmt.scale != "ue5m3" else jnp.asarray(exponent, jnp.int32)[None]


__all__ = ["all_gather", "all_reduce", "fits", "message_bytes", "reduce_scatter"]
