"""What the kernels' operations say to arrays that are not what the geometry says, and to geometries at the edge."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import Geometry, compat, mosaic
from pallas_kernels.triton import operations as triton
from taco_jax import CODECS
from taco_jax.compression import dispatch

CODEC, N = CODECS["mxint8"], 8192
FMT = dispatch.to_format(CODEC)
interpreted = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="the interpreter of jax 0.10 knows no register layouts"
)


def random(n):
    return jnp.asarray(np.random.default_rng(0).standard_normal(n, np.float32))


@pytest.mark.parametrize("operations", [mosaic, triton], ids=["mosaic", "triton"])
def test_arrays_of_another_size_are_refused(operations):
    # Kernels would read and write beyond their ends.
    g = Geometry(2 * N, 2, N)
    wires = jnp.zeros((2, FMT.wire_bytes(N)), jnp.uint8)
    calls = {
        "x has 8192 elements": lambda: operations.encode(FMT, g, random(N)),
        "shape (2, 4608)": lambda: operations.decode(FMT, g, wires[:, :4608], jnp.float32),
        "shape (1, 9216)": lambda: operations.reduce_decode(FMT, g, wires[:1], random(2 * N), 0),
        "shape (2, 9216)": lambda: operations.sum_decode(FMT, wires, N // 2, jnp.float32),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError) as refused:
            call()
        assert message in str(refused.value)


@pytest.mark.parametrize("operations", [mosaic, triton], ids=["mosaic", "triton"])
def test_operands_of_another_kind_are_refused(operations):
    g, x = Geometry(2 * N, 2, N), random(2 * N)
    wires = jnp.zeros((2, FMT.wire_bytes(N)), jnp.uint8)
    stochastic = dataclasses.replace(FMT, rounding="stochastic")
    small = dataclasses.replace(FMT, block=16)
    calls = {
        "rank=2: must be from 0 to 1": lambda: operations.reduce_decode(FMT, g, wires, x, 2),
        "rank=-1: must be from 0 to 1": lambda: operations.reduce_encode(FMT, g, wires, x, -1),
        "rank=0.5: must be an integer": lambda: operations.reduce_encode(FMT, g, wires, x, 0.5),
        "x is int32: kernels take bfloat16, float16, float32": lambda: operations.encode(FMT, g, x.astype(int)),
        "wires are int8: must be uint8": lambda: operations.decode(FMT, g, wires.astype(jnp.int8), jnp.float32),
        "dtype is int8: kernels take": lambda: operations.decode(FMT, g, wires, jnp.int8),
        "dtype is int32: kernels take": lambda: operations.sum_decode(FMT, wires, N, "int32"),
        "seed=None: rounding 'stochastic' needs uint32[2]": lambda: operations.encode(stochastic, g, x),
        "seed is int32[2]: must be": lambda: operations.encode(stochastic, g, x, None, jnp.zeros(2, int)),
        "seed is uint32[3]: must be": lambda: operations.reduce_encode(
            stochastic, g, wires, x, 0, None, jnp.zeros(3, jnp.uint32)
        ),
        "block=16: kernels have blocks of 32, 64, 128, 256": lambda: operations.encode(small, g, x),
    }
    for message, call in calls.items():
        with pytest.raises((ValueError, TypeError)) as refused:
            call()
        assert str(refused.value).startswith(message)


@interpreted
# A tile and a tail of x in a message of more tiles; a longer tail, and whole tiles, every night.
@pytest.mark.parametrize(
    "elements,per_message",
    [(9000, 20000), (8192, 8200), (8192, 16384)],
)
@pytest.mark.slow
def test_a_message_longer_than_x_ends_in_zeros(elements, per_message):
    g, x = Geometry(elements, 1, per_message), random(elements)
    options = {"interpret": compat.interpret_params()}
    wires, _ = mosaic.encode(FMT, g, x, **options)
    np.testing.assert_array_equal(wires, dispatch.encode(CODEC, g, x, None, backend="jnp")[0])
    y = mosaic.decode(FMT, g, wires, jnp.float32, **options)
    np.testing.assert_array_equal(y, dispatch.decode(CODEC, g, wires, jnp.float32, None, backend="jnp"))


@interpreted
def test_a_reduction_of_one_message_is_its_own_term():
    g, x = Geometry(N, 1, N), random(N)
    options = {"interpret": compat.interpret_params()}
    wires, largest = mosaic.encode(FMT, g, x, **options)
    wire, of_sum = mosaic.reduce_encode(FMT, g, jnp.zeros_like(wires), x, 0, **options)
    np.testing.assert_array_equal(wire, wires[0])
    assert of_sum == largest
    np.testing.assert_array_equal(mosaic.reduce_decode(FMT, g, wires, x, 0, **options), x)


@pytest.mark.skipif(importlib.util.find_spec("jax_triton") is None, reason="jax-triton is not installed")
def test_triton_kernels_can_be_mapped_over(monkeypatch):
    monkeypatch.setattr(triton, "capability", lambda: (9, 0))
    monkeypatch.setattr("pallas_kernels.triton.launch.compute_capability", lambda device: (9, 0))
    encode = lambda x: triton.encode(FMT, Geometry(N, 1, N), x)[0]
    assert jax.eval_shape(jax.vmap(encode), jnp.zeros((3, N))).shape == (3, 1, FMT.wire_bytes(N))
