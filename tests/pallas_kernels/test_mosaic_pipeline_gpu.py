"""Large arrays on a real GPU: the same bytes every time, in every program, whether the dynamic tile scheduler hands out
tiles (to encoders, and to what decodes 4 and 8 bits or adds 8) or their order is static.

TACO_TEST_GPU=1 python -m pytest -m gpu tests/pallas_kernels/test_mosaic_pipeline_gpu.py
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from mosaic_checks import skip_without_mosaic
from mosaic_programs import PRESETS, operation_program, why_unsupported

from pallas_kernels import compat
from pallas_kernels.mosaic import pipeline
from taco_jax import CODECS, UNCALIBRATED, Codec
from taco_jax.compression.dispatch import to_format

pytestmark = pytest.mark.gpu

TILES_PER_WORKER = pipeline.MIN_DYNAMIC_TILES_PER_WORKER
# Tiles for four warpgroups a multiprocessor, and more that are no multiple of anything; the last one is moved back.
TILES = 4 * 132 * TILES_PER_WORKER + 77
REPEATS = 20


@pytest.fixture(autouse=True, scope="module")
def hopper():
    skip_without_mosaic()
    if not compat.KERNELS_TAKE_REFS:
        pytest.skip("before jax 0.11 there is no dynamic tile scheduler")


def program(fmt, operation, dtype, n, messages, monkeypatch, tiles_per_worker):
    """The jitted operation, traced with that MIN_DYNAMIC_TILES_PER_WORKER."""
    run, _ = operation_program(fmt, operation, dtype, n, messages)
    monkeypatch.setattr(pipeline, "MIN_DYNAMIC_TILES_PER_WORKER", tiles_per_worker)
    return jax.jit(lambda *arguments: run(*arguments))


def inputs(fmt, n, messages, dtype, monkeypatch):
    x = jax.jit(lambda key: jax.random.normal(key, (n * messages,), dtype))(jax.random.key(0))
    exponent = jnp.int32(UNCALIBRATED) if fmt.scale == "ue5m3" else None
    seed = jnp.array([1, 2], jnp.uint32) if fmt.rounding == "stochastic" else None
    encode = program(fmt, "encode", dtype, n, messages, monkeypatch, 1 << 30)
    wires = encode(x, None, jnp.int32(0), exponent, seed)[0]
    return x, wires, jnp.int32(messages - 1), exponent, seed


def equal(ours, theirs):
    return jnp.all(jnp.array([jnp.array_equal(a, b) for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs))]))


def check(fmt, operation, dtype, monkeypatch):
    messages = 2 if operation == "reduce_encode" else 4
    row = max(128, fmt.block)
    n = (TILES if messages == 2 else TILES // 4) * 64 * row - 24 * row
    if why_unsupported(fmt, operation, dtype, n, messages):
        pytest.skip("not a kernel")
    arguments = inputs(fmt, n, messages, dtype, monkeypatch)
    static = program(fmt, operation, dtype, n, messages, monkeypatch, 1 << 30)
    theirs = static(*arguments)
    dynamic = program(fmt, operation, dtype, n, messages, monkeypatch, TILES_PER_WORKER)
    is_dynamic = {"encode": True, "decode": fmt.bits in (4, 8), "reduce_encode": fmt.bits == 8}[operation]
    assert ("output_to_operand_aliasing" in dynamic.lower(*arguments).compile().as_text()) == is_dynamic
    same = jax.jit(equal)
    results = [same(dynamic(*arguments), theirs) for _ in range(REPEATS)]
    assert all(map(bool, results))


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("operation", ["encode", "reduce_encode", "decode"])
def test_presets(name, operation, monkeypatch):
    check(to_format(CODECS[name], encodes="encode" in operation), operation, "bfloat16", monkeypatch)


@pytest.mark.parametrize("operation", ["encode", "reduce_encode", "decode"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_dtypes(operation, dtype, monkeypatch):
    codec = dataclasses.replace(CODECS["int8h"], rounding="stochastic") if operation == "encode" else CODECS["int8h"]
    check(to_format(codec, encodes="encode" in operation), operation, dtype, monkeypatch)


@pytest.mark.parametrize("block", [32, 64, 256])
@pytest.mark.parametrize("operation", ["encode", "reduce_encode", "decode"])
def test_blocks(block, operation, monkeypatch):
    check(to_format(Codec("int8", block, "hadamard", "bfloat16")), operation, "bfloat16", monkeypatch)


def test_in_a_scan_and_batched(monkeypatch):
    # Every launch begins with a counter of zero: in a loop, twice in one program, and for each of a batch.
    fmt, messages = to_format(CODECS["taco"]), 4
    n = TILES // 4 * 64 * 128
    x, wires, rank, exponent, seed = inputs(fmt, n, messages, "bfloat16", monkeypatch)
    decode = program(fmt, "decode", "bfloat16", n, messages, monkeypatch, 1 << 30)
    theirs = decode(x, wires, rank, exponent, seed)
    run, _ = operation_program(fmt, "decode", "bfloat16", n, messages)
    monkeypatch.setattr(pipeline, "MIN_DYNAMIC_TILES_PER_WORKER", TILES_PER_WORKER)

    @jax.jit
    def differences(wires):
        def body(total, _):
            return total + jnp.sum(run(x, wires, rank, exponent, seed) != theirs), None

        batch = jax.vmap(lambda w: jnp.sum(run(x, w, rank, exponent, seed) != theirs))(jnp.stack([wires, wires]))
        return lax.scan(body, jnp.sum(batch), length=8)[0]

    assert int(differences(wires)) == 0
