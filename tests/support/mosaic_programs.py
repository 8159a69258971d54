"""The kernels' five operations as functions of one signature, with the shapes of their arguments, for tests that lower
or compile them."""

import jax
import jax.numpy as jnp

from pallas_kernels import Format, Geometry, mosaic
from pallas_kernels.formats import KERNEL_ELEMENTS
from taco_jax import CODECS
from taco_jax.compression.dispatch import without_format

OPERATIONS = ("encode", "reduce_encode", "reduce_decode", "sum_decode", "decode")
# A sum wider than its terms, as between the levels of a sum over several hosts.
WIDE = "reduce_decode in float32"
RESIDUAL, RESIDUAL_OF_SUM = "encode_with_residual", "reduce_encode_with_residual"
DTYPES = ("bfloat16", "float16", "float32")
PRESETS = tuple(name for name, codec in CODECS.items() if not (codec.exact or without_format(codec)))
FIELDS = dict(
    element=KERNEL_ELEMENTS,
    block=(32, 64, 128, 256),
    rotation=("hadamard", "none", "signed_hadamard"),
    scale=("ue5m3", "bfloat16", "e8m0", "float32", "site"),
    operation=OPERATIONS,
    dtype=DTYPES,
)


# For covers: rotations as two factors, whether there is one and whether it has signs, since code goes by the first.
ROTATED = dict(rotation=("hadamard", "none"), signs=(False, True))


def with_signs(cases) -> list[tuple]:
    """Cases of (element, block, rotation, ..., signs) as (element, block, one of the three rotations, ...)."""
    return [
        (element, block, "signed_hadamard" if signs and rotation == "hadamard" else rotation, *rest)
        for element, block, rotation, *rest, signs in cases
    ]


def operation_program(fmt: Format, operation: str, dtype: str, n: int, messages: int):
    """(function, shapes of x, wires, rank, exponent or None, seed or None) for messages of n elements each."""
    geometry = Geometry(n * messages, messages, n)
    shapes = (
        jax.ShapeDtypeStruct((geometry.elements,), dtype),
        jax.ShapeDtypeStruct((messages, fmt.wire_bytes(n)), jnp.uint8),
        jax.ShapeDtypeStruct((), jnp.int32),
        jax.ShapeDtypeStruct((), jnp.int32) if fmt.scale in ("ue5m3", "site") else None,
        jax.ShapeDtypeStruct((2,), jnp.uint32) if fmt.rounding == "stochastic" else None,
    )
    run = {
        "encode": lambda x, w, r, e, s: mosaic.encode(fmt, geometry, x, e, s),
        RESIDUAL: lambda x, w, r, e, s: mosaic.encode_with_residual(fmt, geometry, x, e, s),
        RESIDUAL_OF_SUM: lambda x, w, r, e, s: mosaic.reduce_encode_with_residual(fmt, geometry, w, x, r, e, s),
        "reduce_encode": lambda x, w, r, e, s: mosaic.reduce_encode(fmt, geometry, w, x, r, e, s),
        "reduce_decode": lambda x, w, r, e, s: mosaic.reduce_decode(fmt, geometry, w, x, r, e),
        WIDE: lambda x, w, r, e, s: mosaic.reduce_decode(fmt, geometry, w, x, r, e, jnp.float32),
        "sum_decode": lambda x, w, r, e, s: mosaic.sum_decode(fmt, w, n, dtype, e),
        "decode": lambda x, w, r, e, s: mosaic.decode(fmt, geometry, w, dtype, e),
    }[operation]
    return run, shapes


def why_unsupported(fmt: Format, operation: str, dtype: str, n: int, messages: int) -> str | None:
    """Why the kernels cannot do it; a sum of wires asks what a reduction asks, as `taco_jax.compression.dispatch`
    does."""
    kind = operation if operation in ("encode", "decode") else "reduce"
    return mosaic.why_unsupported(fmt, kind, dtype, Geometry(n * messages, messages, n))
