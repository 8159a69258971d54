"""Sums whose wires copy engines bring, on two GPUs: the bits of the separate kernels with NCCL between them.

TACO_TEST_GPU=1 python -m pytest -m gpu tests/collectives/test_peer_copy_gpu.py
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from mosaic_checks import skip_without_mosaic

import taco_jax
from pallas_kernels.nvlink import hardware
from taco_jax import Compression
from taco_jax.collectives.peer_copy import COMPILER_OPTIONS
from taco_jax.tensor_parallel import row_dense
from taco_jax.train.links import PIECE_OPTIONS

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def mesh():
    skip_without_mosaic()
    devices = jax.devices()
    if len(devices) != 2:
        pytest.skip("needs 2 GPUs")
    if reason := hardware.missing(devices[0].device_kind):
        pytest.skip(reason)
    return jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)


def run(mesh, codec, rows, link):
    """Returns the bits of six sums in a row, the same on both GPUs."""
    compression = Compression(codec, link=link, min_bytes=0)
    x, add = (jax.random.normal(jax.random.key(i), (2, rows, 3584), jnp.bfloat16) for i in range(2))
    x, add = jax.device_put(x, NamedSharding(mesh, P("tp"))), jax.device_put(add[0], NamedSharding(mesh, P()))

    def f(x, total):
        for i in range(6):
            total = total + taco_jax.psum(x[0] * (i + 1), "tp", compression=compression)
        return total

    lowered = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(P("tp"), P()), out_specs=P())).lower(x, add)
    compiled = lowered.compile(compiler_options=COMPILER_OPTIONS if link == "copy" else None)
    first, second = (np.asarray(shard.data).view(np.uint16) for shard in compiled(x, add).addressable_shards)
    assert (first == second).all()
    return first


def run_product(mesh, codec, link):
    """Returns the bits of two products of integers, which every kernel computes exactly, and their sums."""
    compression = Compression(codec, link=link, min_bytes=0)
    draw = lambda i, shape: jax.random.randint(jax.random.key(i), shape, -2, 3).astype(jnp.bfloat16)
    x = jax.device_put(draw(0, (16384, 2 * 4096)), NamedSharding(mesh, P(None, "tp")))
    w = jax.device_put(draw(1, (2 * 4096, 3584)), NamedSharding(mesh, P("tp")))

    def f(x, w):
        return sum(row_dense(x * (i + 1), w, axis="tp", compression=compression, site="down") for i in range(2))

    lowered = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(P(None, "tp"), P("tp")), out_specs=P())).lower(x, w)
    compiled = lowered.compile(compiler_options=dict(PIECE_OPTIONS) if link == "copy" else None)
    assert ("collective-permute" in compiled.as_text()) == (link == "copy")
    first, second = (np.asarray(shard.data).view(np.uint16) for shard in compiled(x, w).addressable_shards)
    assert (first == second).all()
    return first


@pytest.mark.parametrize("codec", ["taco", "int4h"])
def test_bits_of_products_in_pieces(mesh, codec):
    assert (run_product(mesh, codec, "copy") == run_product(mesh, codec, "nccl")).all()


@functools.cache
def wanted(mesh, codec, rows):
    return run(mesh, codec, rows, "nccl")


@pytest.mark.parametrize("rows", [1000, 16384])
@pytest.mark.parametrize("codec", ["taco", "int4h"])
@pytest.mark.parametrize("link", ["copy", "nvlink"])
def test_bits_of_many_sums_in_a_row(mesh, link, codec, rows):
    assert (run(mesh, codec, rows, link) == wanted(mesh, codec, rows)).all()
