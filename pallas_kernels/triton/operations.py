"""The codec's operations as Triton kernels, for NVIDIA GPUs of compute capability 8.0 and newer.

Arrays are flat; a `Geometry` says which elements each of P messages holds; `exponent` is the site's int32 scalar or
None, `seed` uint32[2] where rounding is stochastic. Bytes are those of the jnp codec (`taco_jax/codec/codec.py`) but
where a rotated value lies so near a rounding border that sums in another order fall on its other side. Every
operation is one kernel over whatever sizes there are; with one scale for a message (scale "site") a first kernel
takes the maximum, which returns at once where the exponent is known.

Dim letters: P messages (ranks), S elements of x, n elements of a message, W bytes of a message.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.formats import (
    UNCALIBRATED,
    Format,
    Geometry,
    check_operands,
    check_seed,
    why_no_kernels,
)
from pallas_kernels.triton.launch import Launch, capability, launch, multiprocessors
from pallas_kernels.triton.recipe import Recipe, Tuning, alignment, recipe, tuning

# The operation of `encode_with_residual`, as `why_unsupported` takes it.
RESIDUAL = "encode"


def why_unsupported(fmt: Format, operation: str, dtype: str, geometry: Geometry | int = 1) -> str | None:
    """Returns why `operation` (encode, reduce, decode) cannot run on GPUs from capability 8.0 on; None where it can."""
    return why_no_kernels("triton", fmt, dtype)


def encode(fmt: Format, geometry: Geometry, x, exponent=None, seed=None) -> tuple[jax.Array, jax.Array]:
    """dtype[S] -> (wires uint8[P, W], largest block scale before rounding float32[], NaN where z is not finite)."""
    check_operands(fmt, geometry, x)
    check_seed(fmt, seed)
    call = _Call(fmt, "encode", geometry, x.dtype, exponent)
    wires, largest = call.encode(geometry.messages, x, call.nothing, call.nothing, seed)
    return wires.reshape(geometry.messages, -1), largest


def encode_with_residual(
    fmt: Format, geometry: Geometry, x, exponent=None, seed=None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dtype[S] -> (wires and largest scale of `encode`, x - decoded), in one pass.

    The residual is x's dtype[S] of whole geometries, else dtype[P * n] of the messages side by side.
    """
    check_operands(fmt, geometry, x)
    check_seed(fmt, seed)
    call = _Call(fmt, "encode", geometry, x.dtype, exponent, residual=True)
    size = geometry.elements if geometry.is_whole else geometry.messages * geometry.per_message
    out = jax.ShapeDtypeStruct((size,), x.dtype)
    wires, largest, error = call.encode(geometry.messages, x, call.nothing, call.nothing, seed, residual=out)
    return wires.reshape(geometry.messages, -1), largest, error


def reduce_encode(
    fmt: Format, geometry: Geometry, wires, x, rank, exponent=None, seed=None
) -> tuple[jax.Array, jax.Array]:
    """P wires and rank's own chunk of x, which is not quantised -> (wire uint8[W] of the sum, largest float32[])."""
    check_operands(fmt, geometry, x, wires, rank=rank)
    check_seed(fmt, seed)
    call = _Call(fmt, "reduce", geometry, x.dtype, exponent, ranks=wires.shape[0], own=True)
    return call.encode(1, x, wires, _scalar(rank), seed)


def reduce_decode(fmt: Format, geometry: Geometry, wires, x, rank, exponent=None, dtype=None) -> jax.Array:
    """P wires and rank's own chunk of x -> the sum dtype[n]; dtype: x's by default."""
    check_operands(fmt, geometry, x, wires, rank=rank, dtype=dtype)
    if dtype is not None:
        x = x.astype(dtype)
    call = _Call(fmt, "reduce", geometry, x.dtype, exponent, ranks=wires.shape[0], own=True)
    return call.decode(1, geometry.per_message, x.dtype, x, wires=wires, rank=_scalar(rank))


def sum_decode(fmt: Format, wires, n: int, dtype, exponent=None) -> jax.Array:
    """uint8[P, W] -> the sum of what all P wires say, dtype[n], in float32 and rank order."""
    ranks = wires.shape[0]
    check_operands(fmt, Geometry(n * ranks, ranks, n), wires=wires, dtype=dtype)
    geometry = Geometry(n, 1, n)
    call = _Call(fmt, "decode", geometry, dtype, exponent, ranks=ranks if ranks > 1 else 0)
    return call.decode(1, n, dtype, call.nothing, wires=wires, rank=call.nothing)


def decode(fmt: Format, geometry: Geometry, wires, dtype, exponent=None) -> jax.Array:
    """uint8[P, W] -> dtype[S]; zeros where the geometry's messages do not reach."""
    if not geometry.is_whole:
        return decode_into(fmt, geometry, wires, jnp.zeros((geometry.elements,), dtype), exponent)
    check_operands(fmt, geometry, wires=wires, dtype=dtype)
    call = _Call(fmt, "decode", geometry, dtype, exponent)
    return call.decode(geometry.messages, geometry.elements, dtype, call.nothing, wires=wires, rank=call.nothing)


def decode_into(fmt: Format, geometry: Geometry, wires, into, exponent=None) -> jax.Array:
    """Decodes as `decode`, over the elements of `into`, dtype[S], that the messages hold; the others stay."""
    check_operands(fmt, geometry, into, wires)
    call = _Call(fmt, "decode", geometry, into.dtype, exponent)
    return call.decode(
        geometry.messages, geometry.elements, into.dtype, into, wires=wires, rank=call.nothing, aliases={0: 0}
    )


class _Call:
    """The arguments that the kernels of one operation share."""

    def __init__(self, fmt: Format, operation: str, geometry: Geometry, dtype, exponent, **options):
        self.fmt, self.geometry = fmt, geometry
        dtype = str(jnp.dtype(dtype))
        self.tuning: Tuning = tuning(fmt, operation, dtype, capability())
        lengths = (geometry.elements, geometry.per_message, geometry.offset, geometry.distance)
        self.recipe: Recipe = recipe(fmt, self.tuning, dtype, capability(), align=alignment(*lengths), **options)
        # Negated: jax-triton compiles a kernel anew for an argument of 1.
        self.sizes = tuple(-length for length in lengths)
        self.exponent = _scalar(UNCALIBRATED if exponent is None else exponent)
        # Stands for arrays that a kernel has no use for.
        self.nothing = jnp.zeros((1,), jnp.int32)
        self.tiles = -(-fmt.n_blocks(geometry.per_message) // self.tuning.rows)

    def programs(self, messages: int) -> int:
        return min(messages * self.tiles, self.tuning.programs * multiprocessors())

    def encode(self, messages: int, x, wires, rank, seed, residual=None):
        """Returns (wires, largest scale), and the residual where its shape is given."""
        maxima = self.nothing
        if self.fmt.scale == "site":
            maxima = self._message_maxima(messages, x, wires, rank)
        grid = (self.programs(messages),)
        wires, largest, *error = self._launch(
            "encode_kernel" if residual is None else "encode_with_residual_kernel",
            [x, wires, rank, self.exponent, self.nothing if seed is None else seed, maxima],
            (*self.sizes, -messages),
            [
                jax.ShapeDtypeStruct((messages * self.fmt.wire_bytes(self.geometry.per_message),), jnp.uint8),
                jax.ShapeDtypeStruct(grid, jnp.int32),
                *([] if residual is None else [residual]),
            ],
            grid,
        )
        amax = jax.lax.bitcast_convert_type(jnp.max(largest), jnp.float32)
        largest = jnp.where(amax < jnp.inf, amax * self.fmt.reciprocal_maximum, jnp.nan)
        return wires, largest, *error

    def decode(self, messages: int, n_out: int, dtype, x, wires, rank, aliases=None):
        y = jax.ShapeDtypeStruct((n_out,), dtype)
        arrays = [x, wires, rank, self.exponent]
        grid = (self.programs(messages),)
        return self._launch("decode_kernel", arrays, (*self.sizes, -messages), [y], grid=grid, aliases=aliases)[0]

    def _message_maxima(self, messages, x, wires, rank):
        """Bits of each message's largest finite block maximum, int32[P]; zeros where the exponent is known."""
        grid = (min(self.tiles, -(-self.tuning.programs * multiprocessors() // messages)), messages)
        out = jax.ShapeDtypeStruct((messages, grid[0]), jnp.int32)
        maxima = self._launch("maxima_kernel", [x, wires, rank, self.exponent], self.sizes, [out], grid)[0]
        return jnp.max(maxima, axis=1)

    def _launch(self, kernel, arrays, sizes, outputs, grid, aliases=None):
        return launch(
            Launch(
                kernel,
                arrays,
                sizes,
                outputs,
                grid=grid,
                recipe=self.recipe,
                warps=self.tuning.warps,
                aliases=aliases or {},
            )
        )


def _scalar(value) -> jax.Array:
    return jnp.asarray(value, jnp.int32).reshape(1)


__all__ = ["decode", "decode_into", "encode", "encode_with_residual", "reduce_decode", "reduce_encode", "sum_decode"]
