"""Encoders that leave the residual, in Mosaic's interpreter: x less what `decode` reads from their own wires.

`test_triton_interpreter.py` has the same of Triton's.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from mosaic_checks import values

from pallas_kernels import Format, Geometry, compat, mosaic
from taco_jax import CODECS, Codec
from taco_jax.compression import dispatch

SLOW = pytest.mark.slow
INTERPRETED = [
    pytest.mark.skipif(not hasattr(plgpu, "InterpretGPUParams"), reason="the interpreter needs jax 0.11 and newer"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]
# Three tiles, the last one moved back, without and with a tail of less than a row; a chunk of every message; messages
# below a tile.
TILES, TAIL = (Geometry(n, 1, n) for n in (168 * 128, 168 * 128 + 5))
CHUNK, SHORT = Geometry(2 * 16384 - 5, 2, 8192, 8192, 16384), Geometry(129, 2, 96)


@pytest.mark.parametrize(
    "codec,geometry,dtype,exponent",
    [
        pytest.param(CODECS["int4h"], TILES, "bfloat16", None, marks=INTERPRETED),
        pytest.param(CODECS["mxfp4"], TAIL, "bfloat16", None, marks=[*INTERPRETED, SLOW]),
        pytest.param(CODECS["int6h"], CHUNK, "float16", -4, marks=[*INTERPRETED, SLOW]),
        pytest.param(Codec("e4m3", 64, "none", "site"), CHUNK, "bfloat16", -2, marks=[*INTERPRETED, SLOW]),
        pytest.param(Codec("e2m1", 32, "hadamard", "ue5m3"), SHORT, "bfloat16", None, marks=[*INTERPRETED, SLOW]),
        pytest.param(
            Codec("int4", 256, "signed_hadamard", "bfloat16", "stochastic"), TAIL, "bfloat16", None,
            marks=[*INTERPRETED, SLOW],
        ),
    ],
)  # fmt: skip
def test_mosaic_leaves_what_its_wires_lose(codec, geometry, dtype, exponent):
    fmt, options = dispatch.to_format(codec), {"interpret": compat.interpret_params()}
    x = jnp.asarray(values(geometry.elements, "mixed", codec.block, dtype))
    exponent = None if exponent is None else jnp.int32(exponent)
    seed = jnp.array([1, 2], jnp.uint32) if codec.rounding == "stochastic" else None
    given = fmt, geometry, x, exponent, seed
    wires, largest = mosaic.encode(*given, **options)
    *same, error = mosaic.encode_with_residual(*given, **options)
    np.testing.assert_array_equal(same[0], wires)
    np.testing.assert_array_equal(same[1], largest)
    p, n = geometry.messages, geometry.per_message
    reads = dataclasses.replace(fmt, rounding="nearest")
    decoded = mosaic.decode(reads, Geometry(p * n, p, n), wires, dtype, exponent, **options)
    pieces = lambda a: np.asarray(dispatch._messages(jnp.asarray(a), geometry)).reshape(-1)[: error.size]
    exists = pieces(np.ones(geometry.elements, bool))
    lost = (pieces(x).astype(np.float32) - np.asarray(decoded, np.float32)[: error.size]).astype(dtype)
    assert error.dtype == x.dtype and exists.sum() >= 0.6 * error.size
    np.testing.assert_array_equal(np.asarray(error, np.float32)[exists], lost.astype(np.float32)[exists])


@pytest.mark.parametrize(
    "codec,dtype,rank",
    [
        pytest.param(CODECS["int4h"], "bfloat16", 1, marks=INTERPRETED),
        pytest.param(CODECS["mxfp4"], "bfloat16", 0, marks=[*INTERPRETED, SLOW]),
        pytest.param(CODECS["int6h"], "bfloat16", 2, marks=[*INTERPRETED, SLOW]),
    ],
)
def test_mosaic_leaves_what_the_wire_of_a_sum_loses(codec, dtype, rank):
    fmt, options = dispatch.to_format(codec), {"interpret": compat.interpret_params()}
    geometry = Geometry(3 * 72 * 128, 3, 72 * 128)
    x = jnp.asarray(values(geometry.elements, "gaussian", codec.block, dtype))
    wires, _ = dispatch.encode(codec, geometry, x)
    given = fmt, geometry, wires, x, rank
    wire, largest, error = mosaic.reduce_encode_with_residual(*given, **options)
    same = mosaic.reduce_encode(*given, **options)
    np.testing.assert_array_equal(wire, same[0])
    np.testing.assert_array_equal(largest, same[1])
    total = mosaic.reduce_decode(*given, **options)
    said = mosaic.sum_decode(fmt, wire[None], geometry.per_message, dtype, **options)
    lost = (total.astype(jnp.float32) - said.astype(jnp.float32)).astype(dtype)
    np.testing.assert_array_equal(np.asarray(error, np.float32), np.asarray(lost, np.float32))


def test_sums_that_are_no_whole_rows_are_encoded_without():
    why = lambda geometry, dtype="bfloat16": mosaic.why_unsupported(
        dispatch.to_format(CODECS["int4h"]), mosaic.RESIDUAL_OF_SUM, dtype, geometry
    )
    whole = Geometry(2 * 8192, 2, 8192)
    assert why(whole) is None and "float16" in why(whole, "float16")
    for geometry in (Geometry(2 * 8192 - 5, 2, 8192), Geometry(2 * 8320, 2, 8320), Geometry(4096, 2, 2048)):
        assert "no whole groups of rows" in why(geometry)


def test_where_shared_memory_is_short_there_is_none():
    """A block of 256 with random signs has three matrices of rotation; beside them no third tile fits."""
    fmt = Format("int8", 256, "signed_hadamard", "e8m0", "nearest")
    why = lambda operation: mosaic.why_unsupported(fmt, operation, "bfloat16")
    assert why("encode") is None and "to encode with residual" in why(mosaic.RESIDUAL)
    assert mosaic.why_unsupported(dataclasses.replace(fmt, rotation="hadamard"), mosaic.RESIDUAL, "bfloat16") is None


@pytest.mark.parametrize("chunks", [1, 3])
def test_the_jnp_codec_leaves_it_too(chunks):
    from taco_jax.collectives.all_reduce import join_residuals
    from taco_jax.collectives.transport import cut

    codec, x = CODECS["int4h"], jnp.asarray(values(3000, "gaussian", 128, "bfloat16"))
    pieces = cut(Geometry(3000, 2, 1536), chunks, codec.block)
    found = [dispatch.encode_with_residual(codec, piece, x) for piece in pieces]
    assert len(pieces) == chunks
    decoded = dispatch.decode_chunks(codec, pieces, [wires for wires, _, _ in found], x.dtype)
    error = join_residuals(pieces, [error for _, _, error in found])
    np.testing.assert_array_equal(error, (x.astype(jnp.float32) - decoded).astype(x.dtype))
    for piece, (wires, measure, _) in zip(pieces, found):
        for a, b in zip((wires, measure), dispatch.encode(codec, piece, x)):
            np.testing.assert_array_equal(a, b)
