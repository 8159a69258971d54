"""Products with their all-reduce in one kernel, on real GPUs: against a model in numpy.

TACO_TEST_GPU=1 python -m pytest -m gpu tests/pallas_kernels/test_matmul_all_reduce_gpu.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covers import cover
from matmul_all_reduce_model import check, model, operands
from mosaic_checks import skip_without_mosaic
from rank_programs import on_every_rank

from pallas_kernels import compat, matmul_all_reduce
from pallas_kernels.nvlink import hardware
from taco_jax import CODECS
from taco_jax.compression.dispatch import to_format

pytestmark = pytest.mark.gpu

NAMES = ("taco", "e4m3h", "int8h", "int6h", "int5h", "int4h")
# One tile; fewer tiles than multiprocessors; several for each; of one step and of more than there are stages.
SHAPES = ((256, 64, 128), (512, 192, 384), (256 * 20, 64, 128 * 28), (256 * 13, 128 * 5, 128 * 21))
CASES = dict(name=NAMES, ranks=matmul_all_reduce.RANKS, shape=SHAPES, transposed=(False, True))


@pytest.fixture(scope="module", autouse=True)
def gpu():
    skip_without_mosaic()
    if not compat.WARPS_KNOW_THE_MESH:
        pytest.skip("needs jax 0.11")


@pytest.fixture(scope="module")
def mesh():
    devices = jax.devices()
    if len(devices) not in matmul_all_reduce.RANKS:
        pytest.skip("needs 2 or 4 GPUs")
    if reason := hardware.missing(devices[0].device_kind):
        pytest.skip(reason)
    return jax.make_mesh((len(devices),), ("tp",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)


def weights(w, transposed):
    return np.ascontiguousarray(w.swapaxes(-1, -2)) if transposed else w


@pytest.mark.parametrize("case", cover(2, **CASES), ids=lambda case: "-".join(map(str, case)))
def test_one_gpu_that_plays_all(case):
    name, ranks, shape, transposed = case
    fmt, (x, w) = to_format(CODECS[name]), operands(ranks, *shape, alike=True)
    run = jax.jit(lambda x, w: matmul_all_reduce.matmul_all_reduce_loopback(fmt, x, w, ranks, transposed=transposed)[0])
    check(name, run(x[0], weights(w[0], transposed)), model(name, x, w))


@pytest.mark.parametrize("exponent", [None, -2, -4])
def test_exponent_and_largest_scale(exponent):
    fmt, (x, w) = to_format(CODECS["taco"]), operands(4, 512, 192, 384, alike=True)
    y, scale = jax.jit(lambda x, w: matmul_all_reduce.matmul_all_reduce_loopback(fmt, x, w, 4, exponent=exponent))(
        x[0], w[0]
    )
    check("taco", y, model("taco", x, w, exponent))
    largest = np.abs(np.asarray(y, np.float32)).max() / 448
    assert largest / 16 < scale < largest * 2


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_block_that_is_not_finite(value):
    x, w = operands(4, 512, 192, 384, alike=True)
    x = np.array(x)
    x[:, 7::64, 3] = value
    fmt = to_format(CODECS["int6h"])
    y = np.asarray(
        jax.jit(lambda x, w: matmul_all_reduce.matmul_all_reduce_loopback(fmt, x, w, 4)[0])(x[0], w[0]), np.float32
    )
    bad = np.isnan(y).all(axis=1)
    assert bad[7::64].all() and bad.sum() == len(bad[7::64]) and np.isfinite(y[~bad]).all()


def test_repeats_are_identical():
    fmt, (x, w) = to_format(CODECS["taco"]), operands(4, 256 * 20, 512, 128 * 28, alike=True)
    run = jax.jit(lambda x, w: matmul_all_reduce.matmul_all_reduce_loopback(fmt, x, w, 4)[0])
    first = run(x[0], w[0])
    differ = jax.jit(lambda a, b: (a.view(jnp.uint16) != b.view(jnp.uint16)).any())
    assert not any(bool(differ(run(x[0], w[0]), first)) for _ in range(200))


@pytest.mark.parametrize("case", cover(2, **(CASES | {"ranks": (0,)})), ids=lambda case: "-".join(map(str, case)))
def test_ranks(case, mesh):
    name, _, shape, transposed = case
    fmt, (x, w) = to_format(CODECS[name]), operands(mesh.size, *shape)
    run = on_every_rank(
        lambda x, w: matmul_all_reduce.matmul_all_reduce(fmt, x, w, "tp", transposed=transposed)[0], mesh
    )
    y = np.asarray(run(x, weights(w, transposed)))
    assert (y.view(np.uint16) == y[:1].view(np.uint16)).all()
    check(name, y[0], model(name, x, w))


def test_ranks_repeat_each_other_in_a_loop(mesh):
    fmt, (x, w) = to_format(CODECS["taco"]), operands(mesh.size, 256 * 20, 64, 128 * 28)

    def run(x, w):
        one = lambda i, bad: bad | (matmul_all_reduce.matmul_all_reduce(fmt, x, w, "tp")[0] != first).any()
        first = matmul_all_reduce.matmul_all_reduce(fmt, x, w, "tp")[0]
        return jax.lax.fori_loop(0, 1000, one, jnp.bool(False))[None]

    assert not np.asarray(on_every_rank(run, mesh)(x, w)).any()
