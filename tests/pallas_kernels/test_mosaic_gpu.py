"""Mosaic kernels on a real GPU, against the jnp codec on the CPU: presets, dtypes, odd sizes, ranks, large arrays.

    TACO_TEST_GPU=1 python -m pytest -m gpu tests/pallas_kernels/test_mosaic_gpu.py

Each kernel compiles in about a second, so what does not change the program (the values, the rank, the exponent) is
tried on the same one.
"""

import dataclasses
import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import spelled_out
from covers import cover
from jax import lax
from mosaic_checks import (
    EXPONENTS,
    KINDS,
    SIZES,
    arguments,
    check_values,
    check_wide_sum,
    check_wires,
    reference,
    shares,
    skip_without_mosaic,
    values,
)
from mosaic_programs import DTYPES, FIELDS, OPERATIONS, PRESETS, why_unsupported
from rank_programs import check_gradients, on_every_rank
from spelled_out import every_size

import taco_jax
from pallas_kernels import Geometry, mosaic
from pallas_kernels.formats import ELEMENTS
from taco_jax import CODECS, UNCALIBRATED, Codec
from taco_jax.compression import dispatch

pytestmark = pytest.mark.gpu

ROUNDINGS = ("nearest", "stochastic")
GPU_SIZES = (*SIZES[:-1], 2**20 + 8)
# Every preset with every operation, and all pairs of the rest; a message has several tiles, the last moved back.
CASES = dict(name=PRESETS, operation=OPERATIONS, dtype=DTYPES, ranks=(2, 4, 8), rounding=ROUNDINGS)
RAGGED = dict(size=GPU_SIZES, operation=OPERATIONS, ranks=(1, 2, 4), name=("taco", "int6h", "mxfp4"), dtype=DTYPES)


@pytest.fixture(autouse=True, scope="module")
def hopper():
    skip_without_mosaic()


@functools.cache
def kernel(codec: Codec, geometry: Geometry, dtype: str, operation: str):
    """The jitted operation: (x, wires, exponent or None, key or None, rank) -> its results."""
    fmt = dispatch.to_format(codec, encodes="encode" in operation)

    @jax.jit
    def run(x, wires, exponent, key, rank):
        given = arguments(geometry, dtype, operation, x, wires, exponent, codec.seed(key), rank)
        return getattr(mosaic, operation)(fmt, *given)

    return run


def compare(codec, geometry, dtype, operation, x, exponent=None, rank=0, most=2e-4):
    key = jax.random.key(1) if codec.rounding == "stochastic" else None
    theirs, wires = reference(codec, geometry, dtype, operation, x, exponent, key, rank)
    exponent = None if exponent is None else jnp.int32(exponent)
    ours = kernel(codec, geometry, dtype, operation)(x, wires, exponent, key, jnp.int32(rank))
    if "encode" in operation:
        check_wires(codec, geometry.per_message, operation, ours, theirs, most)
    else:
        check_values(ours, theirs, codec.block)


def named(case) -> str:
    return "-".join(map(str, case))


@pytest.mark.parametrize("case", cover(2, **CASES), ids=named)
def test_presets(case):
    name, operation, dtype, ranks, rounding = case
    codec = dataclasses.replace(CODECS[name], rounding=rounding)
    geometry = Geometry(ranks * 200 * 128, ranks, 200 * 128)
    exponents = (EXPONENTS["ue5m3"], UNCALIBRATED) if codec.scale == "ue5m3" else (None,)
    for kind in ("gaussian", "mixed"):
        x = values(geometry.elements, kind, codec.block, dtype)
        for exponent in exponents:
            compare(codec, geometry, dtype, operation, x, exponent, rank=ranks - 1)


@pytest.mark.parametrize("case", cover(2, **RAGGED), ids=named)
def test_sizes(case):
    size, operation, ranks, name, dtype = case
    codec = CODECS[name]
    ranks = max(ranks, 2) if operation.startswith("reduce") else ranks
    geometry = shares(codec, size, ranks)
    # On the same program: an Inf or NaN, zeros, and values whose squares over- or underflow.
    for kind in ("mixed", *KINDS) if size < 1000 else ("mixed",):
        compare(codec, geometry, dtype, operation, values(size, kind, codec.block, dtype), rank=ranks - 1)


@pytest.mark.parametrize("case", cover(2, **FIELDS), ids=named)
def test_fields(case):
    element, block, rotation, scale, operation, dtype = case
    if scale == "site" and ELEMENTS[element].nan is None:
        scale = "e8m0"
    codec = Codec(element, block, rotation, scale)
    geometry = Geometry(2 * 72 * 256, 2, 72 * 256)
    reason = why_unsupported(dispatch.to_format(codec), operation, dtype, geometry.per_message, 2)
    if reason:
        pytest.skip(reason)
    x = values(geometry.elements, "mixed", block, dtype)
    # The last bits of a float32 scale are those of a sum, whose order differs.
    most = 2e-4 if scale != "float32" or rotation == "none" and operation == "encode" else 2e-2
    compare(codec, geometry, dtype, operation, x, EXPONENTS.get(scale), rank=1, most=most)


@pytest.mark.parametrize("name", ["taco", "int5h"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_rank_reduces(name, ranks):
    # The bytes of P wires, with each rank's own chunk in place of its wire, in rank order.
    codec, geometry = CODECS[name], Geometry(ranks * 64 * 128, ranks, 64 * 128)
    for rank in range(ranks):
        x = values(geometry.elements, "gaussian", codec.block, "bfloat16", seed=rank)
        for operation in ("reduce_encode", "reduce_decode"):
            compare(codec, geometry, "bfloat16", operation, x, rank=rank)


@pytest.mark.parametrize("cut", [(4 * 16384, 4, 8192, 8192, 16384), (2 * 16384 - 5, 2, 8192, 8192, 16384)])
@pytest.mark.parametrize("operation", ["encode", "reduce_encode", "reduce_decode"])
def test_chunks(cut, operation):
    geometry = Geometry(*cut)
    x = values(geometry.elements, "mixed", 128, "bfloat16")
    compare(CODECS["int6h"], geometry, "bfloat16", operation, x, rank=geometry.messages - 1)


@pytest.mark.parametrize("name,dtype", [("taco", "bfloat16"), ("int8h", "float16"), ("mxfp4", "bfloat16")])
@pytest.mark.parametrize("ranks", [2, 8])
def test_a_sum_may_be_wider_than_its_terms(name, dtype, ranks):
    check_wide_sum(CODECS[name], Geometry(ranks * 16384, ranks, 8192, 8192, 16384), dtype)


def test_wires_are_interchangeable():
    # What jnp wrote on the CPU is decoded by a kernel, and what a kernel wrote by jnp; both say the same.
    codec, geometry = CODECS["int6h"], Geometry(4 * 64 * 128, 4, 64 * 128)
    x = values(geometry.elements, "gaussian", 128, "bfloat16")
    theirs, wires = reference(codec, geometry, "bfloat16", "decode", x)
    ours, _ = kernel(codec, geometry, "bfloat16", "encode")(x, wires, None, None, 0)
    check_values(kernel(codec, geometry, "bfloat16", "decode")(x, wires, None, None, 0), theirs, 128)
    with jax.default_device(jax.devices("cpu")[0]):
        back = dispatch.decode(codec, geometry, np.asarray(ours), "bfloat16", backend="jnp")
    assert (np.asarray(back) != theirs).mean() < 1e-3


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_hundred_runs_are_identical(operation):
    # Enough tiles that every multiprocessor works on many, with all the warpgroups it can have.
    codec, n = CODECS["int6h"], 1 << 22
    geometry = Geometry(4 * n, 4, n)
    x = jax.random.normal(jax.random.key(0), (4 * n,), jnp.bfloat16)
    wires, _ = kernel(codec, geometry, "bfloat16", "encode")(x, None, None, None, jnp.int32(0))
    run = kernel(codec, geometry, "bfloat16", operation)
    first = run(x, wires, None, None, jnp.int32(2))
    same = jax.jit(lambda a, b: jnp.all(jnp.array([jnp.array_equal(x, y) for x, y in zip(a, b)])))
    results = [
        same(jax.tree.leaves(first), jax.tree.leaves(run(x, wires, None, None, jnp.int32(2)))) for _ in range(100)
    ]
    assert all(map(bool, results))


# Slices that XLA could hand to a kernel without a copy


def _encode(x):
    return mosaic.encode(dispatch.to_format(CODECS["int6h"]), Geometry(x.size, 1, x.size), x)[0]


def _decode(wires, n):
    return mosaic.decode(dispatch.to_format(CODECS["int6h"]), Geometry(n, 1, n), wires, jnp.bfloat16)


@pytest.mark.parametrize("n", [1 << 17, (1 << 17) + 37])
def test_slices_at_odd_offsets(n):
    x = jax.random.normal(jax.random.key(0), (n + 5000,), jnp.bfloat16)
    encode = jax.jit(_encode)
    for start in (5, 8, 1001):
        sliced = jax.jit(lambda x, start=start: _encode(x[start : start + n]))(x)
        np.testing.assert_array_equal(sliced, encode(jnp.array(np.asarray(x)[start : start + n])))

    def step(i, total):
        piece = lax.dynamic_slice(x, (i * 1001,), (n,), allow_negative_indices=False)
        return total + jnp.sum(_encode(piece).astype(jnp.uint32))

    total = jax.jit(lambda: lax.fori_loop(0, 4, step, jnp.uint32(0)))()
    pieces = [np.asarray(encode(jnp.array(np.asarray(x)[i * 1001 :][:n]))) for i in range(4)]
    assert int(total) == sum(int(p.sum(dtype=np.uint32)) for p in pieces) % 2**32


@pytest.mark.parametrize("n", [1 << 17, (1 << 17) + 37])
def test_updates_at_odd_offsets(n):
    x = jax.random.normal(jax.random.key(0), (n,), jnp.bfloat16)
    wires = jax.jit(_encode)(x)
    y = np.asarray(jax.jit(lambda w: _decode(w, n))(wires))
    z = jnp.ones((n + 5000,), jnp.bfloat16)
    updated = np.array(jax.jit(lambda z, w: lax.dynamic_update_slice(z * 2, _decode(w, n), (5,)))(z, wires))
    np.testing.assert_array_equal(updated[5 : 5 + n], y)
    assert (updated[:5] == 2).all() and (updated[5 + n :] == 2).all()

    def step(i, z):
        return lax.dynamic_update_slice(z, _decode(wires, n), (i * 1001,), allow_negative_indices=False)

    updated = np.array(jax.jit(lambda z: lax.fori_loop(0, 4, step, z))(z))
    np.testing.assert_array_equal(updated[3003 : 3003 + n], y)
    np.testing.assert_array_equal(updated[:1001], y[:1001])
    assert (updated[3003 + n :] == 1).all()


# More than 2^31 elements

ROW = 1 << 20


def _large(ranks: int, rows: int):
    """(ranks * rows * ROW bf16 elements that differ from row to row, the base row); skips where memory is short."""
    need = ranks * rows * ROW * 7  # x, wires of at most one byte, a result, and room
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    if limit < need:
        pytest.skip(f"needs {need / 1e9:.0f} GB of GPU memory, there are {limit / 1e9:.0f}")
    base = values(ROW, "gaussian", 128, "bfloat16")
    scale = (1 + jnp.arange(ranks * rows) % 7).astype(jnp.bfloat16)
    make = jax.jit(lambda base: (base[None, :] * scale[:, None]).reshape(-1))
    return make(base), base


def _row(base, r: int) -> np.ndarray:
    return (base.astype(np.float32) * (1 + r % 7)).astype(base.dtype)


@pytest.mark.parametrize("name", ["int4h", "taco"])
def test_more_than_2_31_elements(name):
    codec, ranks, rows = CODECS[name], 4, 513  # 2,151,677,952 elements; a message has 537,919,488
    n, small = rows * ROW, Geometry(ranks * ROW, ranks, ROW)
    geometry = Geometry(ranks * n, ranks, n)
    fmt = dispatch.to_format(codec)
    x, base = _large(ranks, rows)
    wires, largest = kernel(codec, geometry, "bfloat16", "encode")(x, None, None, None, jnp.int32(0))
    np.testing.assert_allclose(float(largest) * fmt.maximum, _largest_of(codec, base) * 7, rtol=1e-2)
    wire, _ = kernel(codec, geometry, "bfloat16", "reduce_encode")(x, wires, None, None, jnp.int32(3))
    y = kernel(codec, geometry, "bfloat16", "decode")(x, wires, None, None, jnp.int32(0))
    for row in (0, 1, 255, 511, 512):  # of each message: rows of the last one lie beyond 2^31
        x_rows = np.concatenate([_row(base, p * rows + row) for p in range(ranks)])
        (theirs, _), _ = reference(codec, small, "bfloat16", "encode", x_rows)
        (summed, _), _ = reference(codec, small, "bfloat16", "reduce_encode", x_rows, rank=3)
        # The row's part of each section is that section of a message of one row.
        own = np.zeros_like(theirs)
        for (start, length), (start_small, length_small) in zip(fmt.sections(n), fmt.sections(ROW)):
            part = slice(start + row * length_small, start + (row + 1) * length_small)
            wanted = slice(start_small, start_small + length_small)
            assert length == rows * length_small
            own[:, wanted] = np.asarray(wires[:, part])
            assert (np.asarray(wires[:, part]) != theirs[:, wanted]).mean() < 2e-4
            assert (np.asarray(wire[part]) != summed[wanted]).mean() < 2e-4
        # What these bytes say, in which a value on a rounding border may differ from the reference's.
        with jax.default_device(jax.devices("cpu")[0]):
            decoded = np.asarray(dispatch.decode(codec, small, jnp.asarray(own), jnp.bfloat16, backend="jnp"))
        for p in range(ranks):
            at = (p * rows + row) * ROW
            # jax's own indices are int32: a row of the reshaped array instead of elements of the flat one.
            ours = np.asarray(y.reshape(-1, ROW)[at // ROW])
            check_values(ours, decoded[p * ROW : (p + 1) * ROW], codec.block)
    del x, wires, wire, y
    gc.collect()


def _largest_of(codec, base) -> float:
    z = codec.to_blocks(jnp.asarray(base))
    return float(jnp.max(jnp.abs(z)))


# On several GPUs


@pytest.fixture(scope="module")
def mesh():
    if len(jax.devices()) < 2:
        pytest.skip("needs 2 GPUs or more")
    return jax.make_mesh((len(jax.devices()),), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))


def varying(y):
    return lax.pcast(y, "tp", to="varying")


@pytest.mark.parametrize("name", ["taco", "int6h", "mxfp4"])
@pytest.mark.parametrize("size", [1, 129, 8193, 2**20, 2**20 + 8])
def test_psum_is_the_same_on_every_rank(name, size, mesh):
    ranks = mesh.size
    x = np.asarray(jax.random.normal(jax.random.key(1), (ranks, size)).astype(jnp.bfloat16))
    psum = lambda x, **options: varying(spelled_out.psum(x, "tp", codec=name, link="nccl", **options))
    y = np.asarray(on_every_rank(functools.partial(psum, backend="mosaic"), mesh)(x), np.float32)
    np.testing.assert_array_equal(y, np.broadcast_to(y[0], y.shape))
    theirs = np.asarray(on_every_rank(functools.partial(psum, backend="jnp"), mesh)(x)[0], np.float32)
    # A code on a rounding border may differ on the way: hardly any value moves by more than the last bit.
    moved = np.abs(y[0] - theirs) > 2.0**-7 * np.abs(theirs) + 1e-6 * np.abs(theirs).max()
    assert moved.mean() <= 5e-3
    if size > 1000:
        exact = x.astype(np.float32).sum(0)
        ours, jnps = (np.linalg.norm(v - exact) for v in (y[0], theirs))
        assert ours < 1.02 * jnps


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_every_rank_sees_what_is_not_finite(dtype, mesh):
    x = np.ones((mesh.size, 1024), dtype)
    x[0, 130], x[1, 700] = np.inf, np.nan
    psum = lambda x: varying(taco_jax.psum(x, "tp", compression=every_size("taco", link="nccl", backend="mosaic")))
    y = np.asarray(on_every_rank(psum, mesh)(x))
    blocks = y.reshape(mesh.size, 8, 128)
    assert np.isnan(blocks[:, [1, 5]]).all() and np.isfinite(np.delete(blocks, [1, 5], axis=1)).all()


def test_layers_train_in_a_scan_with_remat(mesh):
    """Values and gradients of a small stack, with kernels and with jnp: both are one code away at most."""
    options = {"min_bytes": 0, "link": "nccl"}
    backends = (taco_jax.Compression("int8h", backend=name, **options) for name in ("mosaic", "jnp"))
    check_gradients(backends, mesh, 2e-2)
