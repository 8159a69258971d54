"""The codec's operations as Mosaic GPU kernels, for NVIDIA GPUs of compute capability 9.0.

Arrays are flat; a `Geometry` says which elements each of P messages holds; `exponent` is the site's int32 scalar or
None, `seed` uint32[2] where rounding is stochastic. Bytes are those of the jnp codec (`taco_jax/codec/codec.py`) but
where a value lies exactly on a rounding border and sums in another order fall on its other side. Each operation is
one kernel for messages of whole rows (128 elements, or a block of 256); see `ragged.py` for the others.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats import MAX_EXPONENT, Format, Geometry, check_operands, check_seed
from pallas_kernels.mosaic import kernels, ragged
from pallas_kernels.mosaic.tiling import TILE_ROWS, Tiling


def encode(fmt: Format, geometry: Geometry, x_S, exponent=None, seed=None, *, interpret=None):
    """Encodes dtype[S]: (wires uint8[P, wire_bytes(n)], largest block scale before rounding float32[])."""
    check_operands(fmt, geometry, x_S)
    check_seed(fmt, seed)
    if not ragged.tiles_fit(fmt, geometry):
        larger = ragged.padded(fmt, geometry)
        x_PN = ragged.messages_of(geometry, x_S, larger.per_message)
        wires, largest = encode(fmt, larger, x_PN.reshape(-1), exponent, seed, interpret=interpret)
        return ragged.relay(fmt, wires, larger.per_message, geometry.per_message), largest
    tiling = Tiling(fmt, geometry, interpret)
    wires, maxima = kernels.encode(tiling, ragged.rows_of(fmt, x_S), _exponents(tiling, exponent), seed)
    largest = kernels.largest_scale(maxima, tiling)
    where = ragged.tail(fmt, geometry)
    if where is None:
        return wires, largest
    tile = ragged.tile_tiling(fmt, 1, interpret)
    offsets = (where.message, where.block * fmt.block)
    small, maxima = kernels.encode(tile, _tile_of(fmt, x_S, where), _exponents(tile, exponent), seed, offsets)
    count = fmt.n_blocks(where.elements)
    wires = ragged.put_blocks(
        fmt, wires, geometry.per_message, where.message, first=where.block, count=count, tile_wire=small
    )
    return wires, jnp.maximum(largest, kernels.largest_scale(maxima, tile))


def encode_with_residual(fmt: Format, geometry: Geometry, x_S, exponent=None, seed=None, *, interpret=None):
    """Encodes dtype[S] as `encode`, and returns what the wires lost too, in one pass: (wires, largest, x - decoded).

    The residual is x's dtype[S] of whole geometries, else dtype[P * n] of the messages side by side, of which what lies
    beyond x has no meaning. It is that of `decode`, whose values are rounded to x's dtype. With a rotation, sums of
    8-bit floats are made of bfloat16 operands where `decode` takes float16; integers are exact in both.
    """
    check_operands(fmt, geometry, x_S)
    check_seed(fmt, seed)
    if not ragged.tiles_fit(fmt, geometry):
        larger = ragged.padded(fmt, geometry)
        x_PN = ragged.messages_of(geometry, x_S, larger.per_message)
        wires, largest, error = encode_with_residual(fmt, larger, x_PN.reshape(-1), exponent, seed, interpret=interpret)
        error_PN = error.reshape(geometry.messages, -1)[:, : geometry.per_message]
        wires = ragged.relay(fmt, wires, larger.per_message, geometry.per_message)
        return wires, largest, error_PN.reshape(-1)[: _residual_elements(geometry)]
    tiling = Tiling(fmt, geometry, interpret)
    x_RC = ragged.rows_of(fmt, x_S)
    rows = ragged.whole_elements(fmt, _residual_elements(geometry)) // tiling.row_elements
    wires, maxima, error_RC = kernels.encode(tiling, x_RC, _exponents(tiling, exponent), seed, error_rows=rows)
    largest, where = kernels.largest_scale(maxima, tiling), ragged.tail(fmt, geometry)
    if where is None:
        return wires, largest, error_RC.reshape(-1)
    tile = ragged.tile_tiling(fmt, 1, interpret)
    offsets = (where.message, where.block * fmt.block)
    own = _exponents(tile, exponent), seed, offsets
    small, maxima, error_t = kernels.encode(tile, _tile_of(fmt, x_S, where), *own, error_rows=TILE_ROWS)
    count = fmt.n_blocks(where.elements)
    wires = ragged.put_blocks(
        fmt, wires, geometry.per_message, where.message, first=where.block, count=count, tile_wire=small
    )
    largest, error_t = jnp.maximum(largest, kernels.largest_scale(maxima, tile)), error_t.reshape(-1)[: where.elements]
    if geometry.is_whole:
        return wires, largest, jnp.concatenate([error_RC.reshape(-1), error_t])
    start = where.message * geometry.per_message + where.block * fmt.block
    return wires, largest, lax.dynamic_update_slice(error_RC.reshape(-1), error_t, (start,))


def _residual_elements(geometry: Geometry) -> int:
    """Returns the elements of the residual of `encode_with_residual`."""
    return geometry.elements if geometry.is_whole else geometry.messages * geometry.per_message


def reduce_encode(fmt: Format, geometry: Geometry, wires, x_S, rank, exponent=None, seed=None, *, interpret=None):
    """Sums P wires and rank's own chunk of x: (wire uint8[wire_bytes(n)] of the sum, largest scale float32[])."""
    check_operands(fmt, geometry, x_S, wires, rank=rank)
    check_seed(fmt, seed)
    if geometry.messages == 1:
        wires, largest = encode(fmt, geometry, x_S, exponent, seed, interpret=interpret)
        return wires[0], largest
    if not ragged.tiles_fit(fmt, geometry):
        larger = ragged.padded(fmt, geometry)
        wires = ragged.relay(fmt, wires, geometry.per_message, larger.per_message)
        x_S = ragged.messages_of(geometry, x_S, larger.per_message).reshape(-1)
        wire, largest = reduce_encode(
            fmt, larger, wires, x_S, rank=rank, exponent=exponent, seed=seed, interpret=interpret
        )
        return ragged.relay(fmt, wire[None], larger.per_message, geometry.per_message)[0], largest
    tiling = Tiling(fmt, geometry, interpret)
    x_RC = ragged.rows_of(fmt, x_S)
    rank = jnp.asarray(rank, jnp.int32)
    wire, maxima = kernels.reduce(tiling, wires, x_RC, rank[None], exponents=_exponents(tiling, exponent), seed=seed)
    largest = kernels.largest_scale(maxima, tiling)
    where = ragged.tail(fmt, geometry)
    if where is None:
        return wire[0], largest
    count = fmt.n_blocks(where.elements)
    tile = ragged.tile_tiling(fmt, geometry.messages, interpret)
    small = ragged.take_blocks(fmt, wires, geometry.per_message, where.block, count)
    # Only the rank that owns the tail takes this result, so the tail stands where its own chunk would.
    x_PRC = jnp.zeros((geometry.messages, TILE_ROWS, tiling.row_elements), x_S.dtype)
    x_PRC = x_PRC.at[where.message].set(_tile_of(fmt, x_S, where))
    small, maxima = kernels.reduce(
        tile, small, x_PRC.reshape(-1, tiling.row_elements), rank[None], exponents=_exponents(tile, exponent),
        seed=seed, offsets=(0, where.block * fmt.block),
    )  # fmt: skip
    other = rank != where.message
    wire = ragged.put_blocks(
        fmt, wire, geometry.per_message, 0, first=where.block, count=count, tile_wire=small, keep=other
    )
    return wire[0], jnp.maximum(largest, jnp.where(other, 0.0, kernels.largest_scale(maxima, tile)))


def reduce_encode_with_residual(
    fmt: Format, geometry: Geometry, wires, x_S, rank, exponent=None, seed=None, *, interpret=None
):
    """Sums as `reduce_encode`: (wire, largest, the sum less what the wire says of it, x's dtype[n]), in one pass.

    For messages of whole groups of rows, and x of bfloat16 or float32 (`RESIDUAL_OF_SUM` of `why_unsupported`).
    """
    check_operands(fmt, geometry, x_S, wires, rank=rank)
    check_seed(fmt, seed)
    tiling = Tiling(fmt, geometry, interpret)
    rank = jnp.asarray(rank, jnp.int32)[None]
    own = {"exponents": _exponents(tiling, exponent), "seed": seed, "residual": True}
    wire, maxima, error_RC = kernels.reduce(tiling, wires, ragged.rows_of(fmt, x_S), rank, **own)
    return wire[0], kernels.largest_scale(maxima, tiling), error_RC.reshape(-1)


def reduce_decode(fmt: Format, geometry: Geometry, wires, x_S, rank, exponent=None, dtype=None, *, interpret=None):
    """Sums P wires and rank's own chunk of x: dtype[n]; dtype: x's by default."""
    check_operands(fmt, geometry, x_S, wires, rank=rank, dtype=dtype)
    dtype = x_S.dtype if dtype is None else dtype
    if geometry.messages == 1:
        return ragged.messages_of(geometry, x_S, geometry.per_message).reshape(-1).astype(dtype)
    if not ragged.tiles_fit(fmt, geometry) or ragged.tail(fmt, geometry) is not None:
        larger = ragged.padded(fmt, geometry)
        wires = ragged.relay(fmt, wires, geometry.per_message, larger.per_message)
        x_S = ragged.messages_of(geometry, x_S, larger.per_message).reshape(-1)
        y = reduce_decode(fmt, larger, wires, x_S, rank=rank, exponent=exponent, dtype=dtype, interpret=interpret)
        return y[: geometry.per_message]
    tiling = Tiling(fmt, geometry, interpret)
    rank = jnp.asarray(rank, jnp.int32)[None]
    x_RC = ragged.rows_of(fmt, x_S)
    own = {"exponents": _exponents(tiling, exponent), "seed": None, "dtype": dtype}
    return kernels.reduce(tiling, wires, x_RC, rank, **own).reshape(-1)


def sum_decode(fmt: Format, wires, n: int, dtype, exponent=None, *, interpret=None):
    """Sums what P wires say, in float32 and rank order: dtype[n]."""

    def run(tiling, wires):
        own = {"exponents": _exponents(tiling, exponent), "seed": None, "dtype": dtype}
        return kernels.reduce(tiling, wires, None, None, **own).reshape(-1)

    messages = wires.shape[0]
    check_operands(fmt, Geometry(n * messages, messages, n), wires=wires, dtype=dtype)
    return _with_tail(fmt, Geometry(n * messages, messages, n), wires, n, run=run, interpret=interpret)


def sum_decode_apart(fmt: Format, own, received, rank, n: int, dtype, exponent=None, *, interpret=None) -> jax.Array:
    """Returns `sum_decode` of two ranks' wires uint8[W] that lie apart, this one's and the other one's."""
    geometry = Geometry(2 * n, 2, n)
    check_operands(fmt, geometry, wires=jax.ShapeDtypeStruct((2, *own.shape), own.dtype), dtype=dtype)
    if fmt.scale == "site" or n < TILE_ROWS * ragged.row_elements(fmt) or ragged.whole_elements(fmt, n) != n:
        pair = jnp.stack([own, received])
        return sum_decode(fmt, jnp.where(rank == 0, pair, pair[::-1]), n, dtype, exponent, interpret=interpret)
    tiling = Tiling(fmt, geometry, interpret)
    read = {"exponents": _exponents(tiling, exponent), "seed": None, "dtype": dtype}
    wires, rank = (own[None], received[None]), jnp.asarray(rank, jnp.int32)[None]
    return kernels.reduce(tiling, wires, None, rank, **read).reshape(-1)


def decode(fmt: Format, geometry: Geometry, wires, dtype, exponent=None, *, interpret=None):
    """Decodes P wires of messages that lie side by side: dtype[S]."""
    check_operands(fmt, geometry, wires=wires, dtype=dtype)
    if not ragged.tiles_fit(fmt, geometry):
        larger = ragged.padded(fmt, geometry)
        wires = ragged.relay(fmt, wires, geometry.per_message, larger.per_message)
        y = decode(fmt, larger, wires, dtype, exponent, interpret=interpret).reshape(geometry.messages, -1)
        return y[:, : geometry.per_message].reshape(-1)[: geometry.elements]

    def run(tiling, wires, rows):
        return kernels.decode(tiling, wires, rows, dtype, _exponents(tiling, exponent)).reshape(-1)

    tiling = Tiling(fmt, geometry, interpret)
    whole = run(tiling, wires, ragged.whole_elements(fmt, geometry.elements) // tiling.row_elements)
    where = ragged.tail(fmt, geometry)
    if where is None:
        return whole
    tile = ragged.tile_tiling(fmt, 1, interpret)
    count = fmt.n_blocks(where.elements)
    wire = wires[where.message : where.message + 1]
    small = ragged.take_blocks(fmt, wire, geometry.per_message, where.block, count)
    return jnp.concatenate([whole, run(tile, small, TILE_ROWS)[: where.elements]])


def _with_tail(fmt, geometry, wires, n, run, interpret):
    """Runs run(tiling, wires) over the whole rows of messages of n elements, and over the rest as a tile of its own."""
    whole = ragged.whole_elements(fmt, n)
    if n < TILE_ROWS * ragged.row_elements(fmt):
        larger = ragged.padded(fmt, geometry)
        return run(Tiling(fmt, larger, interpret), ragged.relay(fmt, wires, n, larger.per_message))[:n]
    y = run(Tiling(fmt, geometry, interpret), wires)
    if whole == n:
        return y
    tile = ragged.tile_tiling(fmt, geometry.messages, interpret)
    small = ragged.take_blocks(fmt, wires, n, whole // fmt.block, fmt.n_blocks(n - whole))
    return jnp.concatenate([y, run(tile, small)[: n - whole]])


def _tile_of(fmt, x_S, where):
    return ragged.tile_of(fmt, x_S[where.start : where.start + where.elements])


def _exponents(tiling: Tiling, exponent):
    """Returns the exponents that a kernel reads: one, or one for each message where the message has one scale."""
    if exponent is None or tiling.fmt.scale not in ("ue5m3", "site"):
        return None
    exponent = jnp.asarray(exponent, jnp.int32)
    if tiling.fmt.scale == "ue5m3":
        return exponent[None]
    clipped = jnp.clip(exponent, -MAX_EXPONENT, MAX_EXPONENT)
    return jnp.broadcast_to(clipped, (tiling.geometry.messages,))


__all__ = [
    "decode",
    "encode",
    "encode_with_residual",
    "reduce_decode",
    "reduce_encode",
    "reduce_encode_with_residual",
    "sum_decode",
    "sum_decode_apart",
]
