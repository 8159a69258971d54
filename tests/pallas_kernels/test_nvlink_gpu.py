"""Collectives over NVLink in one kernel, on real GPUs: the bytes of the separate kernels with NCCL between them.

TACO_TEST_GPU=1 python -m pytest -m gpu tests/pallas_kernels/test_nvlink_gpu.py
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import spelled_out
from covers import cover
from jax import lax
from mosaic_checks import skip_without_mosaic, values
from rank_programs import check_gradients, on_every_rank
from spelled_out import every_size

import taco_jax
from pallas_kernels import KernelUnavailableError
from pallas_kernels.nvlink import hardware, shared_memory

pytestmark = pytest.mark.gpu

NAMES = ("taco", "e4m3h", "e4m3", "e5m2", "int8h", "int6h", "int5h", "int4h", "mxfp8", "mxfp6", "mxfp4", "mxint8")
TILE = 64 * 128
# For each rank: one tile for one CTA; less than a tile for the last; several for each of 132 and a few more.
SIZES = (TILE, 8 * 1024 + 3 * 1024, 132 * 3 * TILE + 5 * 1024)


@pytest.fixture(scope="module")
def mesh():
    skip_without_mosaic()
    devices = jax.devices()
    if len(devices) not in (2, 4, 8):
        pytest.skip("needs 2, 4 or 8 GPUs")
    if reason := hardware.missing(devices[0].device_kind):
        pytest.skip(reason)
    return jax.make_mesh((len(devices),), ("tp",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)


def varying(y):
    return y if "tp" in jax.typeof(y).manual_axis_type.varying else lax.pcast(y, "tp", to="varying")


def gaussian(mesh, size, dtype="bfloat16"):
    return np.asarray(jax.random.normal(jax.random.key(size), (mesh.size, size)).astype(dtype))


def bits(y):
    return np.asarray(y).view(np.uint8)


def operation(kind, codec, link, **options):
    options |= {"codec": codec, "link": link, "backend": "mosaic"}
    if kind in ("two_shot", "one_shot"):
        return lambda x: spelled_out.psum(x, "tp", algorithm=kind, **options)
    if kind == "psum_scatter":
        return lambda x: spelled_out.psum_scatter(x.reshape(lax.axis_size("tp"), -1), "tp", **options)
    return lambda x: spelled_out.all_gather(x, "tp", **options)


CASES = dict(
    kind=("two_shot", "one_shot", "psum_scatter", "all_gather"), name=NAMES, dtype=("bfloat16", "float16", "float32"),
    size=SIZES,
)  # fmt: skip


@pytest.mark.parametrize("case", cover(2, **CASES), ids=lambda case: "-".join(map(str, case)))
def test_bytes_are_those_of_separate_kernels(case, mesh):
    kind, name, dtype, size = case
    x = gaussian(mesh, size * (1 if kind in ("all_gather", "one_shot") else mesh.size), dtype)
    ours, theirs = (bits(on_every_rank(operation(kind, name, link), mesh)(x)) for link in ("nvlink", "nccl"))
    if kind != "psum_scatter":
        assert (ours == ours[0]).all()
    # The own term is a product, and a sum with it is rounded once or twice, by how the compiler meets them: then a
    # value that lies on a rounding border may fall on its other side.
    owned = kind in ("two_shot", "psum_scatter")
    assert (ours != theirs).mean() <= (1e-3 if dtype == "float32" else 1e-4 if owned else 0)


@pytest.mark.parametrize("exponent", [None, -4])
@pytest.mark.parametrize("kind", ["two_shot", "one_shot", "psum_scatter", "all_gather"])
def test_site_exponents_and_the_largest_scale(kind, exponent, mesh):
    x = gaussian(mesh, mesh.size * SIZES[1])

    def gradient(link, x):
        exponents = None if exponent is None else jnp.full((2,), exponent, jnp.int32)

        def loss(x, slot):
            scales = taco_jax.SiteScales(exponents, slot)
            y = operation(kind, "taco", link, scales=scales)(x)
            return varying(y).astype(jnp.float32).sum() * 2.0, y

        slot = varying(jnp.zeros((2, 1)))
        (dx, measure), y = jax.grad(loss, argnums=(0, 1), has_aux=True)(x, slot)
        return y, dx, measure

    ours, theirs = (on_every_rank(functools.partial(gradient, link), mesh)(x) for link in ("nvlink", "nccl"))
    for a, b in zip(ours[:2], theirs[:2]):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    a, b = np.asarray(ours[2]), np.asarray(theirs[2])
    assert (a[:, 0] > 0).all()
    if kind == "psum_scatter":  # the own chunk, which nobody sends, does not count
        assert (a <= b).all() and (a[:, 0] > 0.5 * b[:, 0]).all()
    else:
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["taco", "int6h", "mxfp4"])
@pytest.mark.parametrize("size", [1, 129, 8193, 2**18 + 8, 2**20 + 1023])
def test_any_size(name, size, mesh):
    x = gaussian(mesh, size)
    psum = lambda link: on_every_rank(lambda x: taco_jax.psum(x, "tp", compression=every_size(name, link=link)), mesh)
    y = np.asarray(psum("auto")(x), np.float64)
    assert (y == y[0]).all()
    exact = x.astype(np.float64).sum(0)
    error = [np.linalg.norm(v - exact) for v in (y[0], np.asarray(psum("nccl")(x)[0], np.float64))]
    assert error[0] <= 1.02 * error[1] + 1e-6


@pytest.mark.parametrize("kind", ["two_shot", "one_shot", "psum_scatter", "all_gather"])
@pytest.mark.parametrize("what", ["zero", "inf", "nan", "huge", "tiny", "mixed"])
def test_values_of_every_kind(kind, what, mesh):
    size = mesh.size * SIZES[0]
    x = np.stack([values(size, what, 128, "bfloat16", seed) for seed in range(mesh.size)])
    ours, theirs = (np.asarray(on_every_rank(operation(kind, "taco", link), mesh)(x)) for link in ("nvlink", "nccl"))
    np.testing.assert_array_equal(ours.astype(np.float32), theirs.astype(np.float32))  # NaN equals NaN


def test_a_thousand_calls_with_a_busy_rank(mesh):
    """Back to back, in one program, while one rank computes something else: every result is the first one's bytes."""
    x = gaussian(mesh, mesh.size * TILE * 7)

    def repeat(x):
        psum = lambda x: taco_jax.psum(x, "tp", compression=every_size("taco", link="nvlink"))
        first = psum(x)

        def step(i, state):
            different, w = state
            busy = (lax.axis_index("tp") == i % lax.axis_size("tp")) & (i % 7 == 0)
            w = lax.cond(busy, lambda w: lax.fori_loop(0, 20, lambda _, w: jnp.tanh(w @ w), w), lambda w: w, w)
            # The busy rank's operand waits for its work.
            x_, w = lax.optimization_barrier((x, w))
            y = psum(x_)
            return different + (y != first).sum(), w

        w = varying(jnp.eye(1024, dtype=jnp.float32) / 2)
        different, w = lax.fori_loop(0, 1000, step, (jnp.int32(0), w))
        return varying(different), w[0]

    different, _ = on_every_rank(repeat, mesh)(x)
    assert (np.asarray(different) == 0).all()


@pytest.mark.parametrize("fewer", range(len(shared_memory.BUFFER_COUNTS)))
@pytest.mark.parametrize("kind", ["two_shot", "one_shot", "psum_scatter", "all_gather"])
def test_every_way_to_use_shared_memory(kind, fewer, mesh, monkeypatch):
    """Many steps in little memory, which only wide values and many ranks need."""
    x = gaussian(mesh, SIZES[2] * (1 if kind in ("all_gather", "one_shot") else mesh.size))
    theirs = bits(on_every_rank(operation(kind, "int6h", "nccl"), mesh)(x))
    monkeypatch.setattr(shared_memory, "BUFFER_COUNTS", shared_memory.BUFFER_COUNTS[fewer:])
    ours = bits(on_every_rank(operation(kind, "int6h", "nvlink"), mesh)(x))
    assert (ours != theirs).mean() <= 1e-4


def test_beside_other_collectives_in_one_program(mesh):
    x = gaussian(mesh, mesh.size * SIZES[1])

    def several(link, x):
        a = taco_jax.psum(x, "tp", compression=every_size("taco", link=link))
        b = lax.psum(x.astype(jnp.float32) * 3, "tp")
        c = taco_jax.psum(x * 2, "tp", compression=every_size("int4h", link=link, algorithm="one_shot"))
        d = lax.all_gather(x[:1000], "tp")
        e = taco_jax.psum_scatter(x.reshape(lax.axis_size("tp"), -1), "tp", compression=every_size("mxfp8", link=link))
        return a, b, c, d, e

    ours, theirs = (on_every_rank(functools.partial(several, link), mesh)(x) for link in ("nvlink", "nccl"))
    for a, b in zip(ours, theirs):
        np.testing.assert_array_equal(bits(a), bits(b))


def test_layers_in_a_scan_with_remat(mesh):
    links = (taco_jax.Compression("int8h", min_bytes=0, link=link) for link in ("nvlink", "nccl"))
    check_gradients(links, mesh, 1e-2)


def test_a_mesh_in_another_order(mesh):
    backwards = jax.sharding.Mesh(mesh.devices[::-1], ("tp",), axis_types=mesh.axis_types)
    x = gaussian(mesh, mesh.size * SIZES[0])
    psum = lambda link, mesh: on_every_rank(
        lambda x: taco_jax.psum(x, "tp", compression=every_size("taco", link=link)), mesh
    )
    np.testing.assert_array_equal(bits(psum("auto", backwards)(x)), bits(psum("nccl", backwards)(x)))
    with pytest.raises(ValueError, match="link='nvlink': the mesh has devices"):
        psum("nvlink", backwards)(x)


def test_the_environment_asks_for_another_link(mesh, monkeypatch):
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    x = jax.ShapeDtypeStruct((mesh.size, mesh.size * SIZES[0]), jnp.bfloat16)
    text = lambda link: (
        on_every_rank(lambda x: taco_jax.psum(x, "tp", compression=every_size("taco", link=link)), mesh)
        .lower(x)
        .as_text()
    )
    assert "all_to_all" in text("auto") or "all_gather" in text("auto")
    assert "all_to_all" not in text("nvlink") and "all_gather" not in text("nvlink")


def test_what_has_no_kernel_raises(mesh):
    x = gaussian(mesh, 1024)
    with pytest.raises(KernelUnavailableError, match="link 'nvlink' cannot all_reduce codec 'taco': a message of"):
        on_every_rank(lambda x: taco_jax.psum(x, "tp", compression=every_size("taco", link="nvlink")), mesh)(x)


def test_more_than_two_gigaelements(mesh):
    """The same tile over and over, so that what comes out is known: y is one tile's sum."""
    repeats = 2**31 // TILE + mesh.size * 132
    tile = gaussian(mesh, TILE)

    def run(x):
        y = taco_jax.psum(
            jnp.tile(x, repeats), "tp", compression=every_size("taco", link="nvlink", algorithm="one_shot")
        )
        rows = y.reshape(repeats, TILE)
        return rows[-1], (rows != rows[:1]).sum(dtype=jnp.int32)

    if jax.devices()[0].memory_stats()["bytes_limit"] < 40e9:
        pytest.skip("needs 40 GB a GPU")
    last, different = on_every_rank(run, mesh)(tile)
    one = on_every_rank(
        lambda x: taco_jax.psum(x, "tp", compression=every_size("taco", link="nccl", algorithm="one_shot")), mesh
    )(tile)
    assert (np.asarray(different) == 0).all()
    np.testing.assert_array_equal(bits(last), bits(one))
