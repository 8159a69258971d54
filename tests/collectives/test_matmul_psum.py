"""Sums in the kernels of their products: what is differentiated, listed and noted, with a stand-in for the kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import taco_jax
from pallas_kernels import compat
from pallas_kernels import matmul_all_reduce as kernels
from taco_jax.collectives import comm_log, matmul_psum, nvlink
from taco_jax.compression import dispatch
from taco_jax.compression.compression import Compression
from taco_jax.compression.site_scales import SiteScales
from taco_jax.tensor_parallel import column_dense, row_dense

pytestmark = pytest.mark.skipif(not compat.WARPS_KNOW_THE_MESH, reason="kernels over NVLink need jax 0.11")

TOKENS, D, F = 256, 128, 256  # of all ranks
CALLS = []


def stand_in(fmt, x, w, axis, exponent=None, *, transposed=False):
    """The exact sum, typed as a kernel's results are; its measure is 2."""
    CALLS.append((x.shape, w.shape, transposed))
    y = lax.psum(jnp.matmul(x, w.T if transposed else w), axis)
    return y, jnp.float32(2)


@pytest.fixture
def over_nvlink(monkeypatch):
    CALLS.clear()
    monkeypatch.setattr(nvlink, "why_unsupported", lambda *_: None)
    monkeypatch.setattr(kernels, "matmul_all_reduce", stand_in, raising=False)
    real = kernels.why_unsupported
    # On a CPU float32 shows more.
    as_bf16 = lambda *a, dtype, ranks: real(*a, dtype=dtype.replace("float32", "bfloat16"), ranks=ranks)
    monkeypatch.setattr(kernels, "why_unsupported", as_bf16)


def mlp(compression, x, w_up, w_down, scales=None):
    up, down = (None, None) if scales is None else scales
    h = column_dense(x, w_up, axis="tp", compression=compression, scales=up, site="up")
    return row_dense(jax.nn.relu(h), w_down, axis="tp", compression=compression, scales=down, site="down")


def run(f, *arguments, specs):
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs[0], out_specs=specs[1]))(*arguments)


def arguments():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (2 * TOKENS, D), (D, F), (F, D)
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes)]


WEIGHTS = P(None, "tp"), P("tp", None)
SPECS = ((P("dp"), *WEIGHTS), (P(), P("dp"), *WEIGHTS))


def gradients(compression, x, w_up, w_down):
    loss = lambda x, u, d: lax.psum((mlp(compression, x, u, d).astype(jnp.float32) ** 2).sum(), "dp")
    value, grads = jax.value_and_grad(loss, argnums=(0, 1, 2))(x, w_up, w_down)
    return value, *grads


def test_values_and_gradients_are_the_separate_ones(over_nvlink):
    fused = Compression("int8h", min_bytes=0, with_product=True)
    found = run(lambda *a: gradients(fused, *a), *arguments(), specs=SPECS)
    # A rank of tp has 64 columns of F: the product after w_down, and that of the gradient with w_up as it lies.
    assert CALLS == [((TOKENS, F // 4), (F // 4, D), False), ((TOKENS, F // 4), (D, F // 4), True)]
    expected = run(lambda *a: gradients(None, *a), *arguments(), specs=SPECS)
    for a, b in zip(found, expected):
        assert np.linalg.norm(a - b) <= 1e-6 * np.linalg.norm(b)


def test_second_derivatives_are_of_the_product(over_nvlink):
    def curvature(compression, x, w_up, w_down):
        def along(t):
            return (mlp(compression, x + t * x, w_up, w_down).astype(jnp.float32) ** 2).mean()

        return lax.pmean(jax.grad(jax.grad(along))(0.5), ("dp",))

    specs = SPECS[0], P()
    fused = Compression("int8h", min_bytes=0, with_product=True)
    found, expected = (run(lambda *a, c=c: curvature(c, *a), *arguments(), specs=specs) for c in (fused, None))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_both_directions_are_measured(over_nvlink):
    fused = Compression("taco", min_bytes=0, with_product=True)
    scales = lambda: SiteScales(jnp.zeros((2,), jnp.int32), jnp.zeros((2, 1), jnp.float32))

    def slots(x, w_up, w_down):
        def loss(slots):
            sites_ = [SiteScales(jnp.zeros((2,), jnp.int32), s) for s in slots]
            return mlp(fused, x, w_up, w_down, sites_).astype(jnp.float32).sum()

        zeros = [taco_jax.collectives.to_varying(scales().slot, ("dp", "tp")) for _ in range(2)]
        return [s[None] for s in jax.grad(loss)(zeros)]

    up, down = run(slots, *arguments(), specs=(SPECS[0], P(("dp", "tp"))))
    assert (np.asarray(up)[:, :, 0] == [0, 2]).all() and (np.asarray(down)[:, :, 0] == [2, 0]).all()


def test_the_site_table_and_the_notes_say_so(over_nvlink):
    fused = Compression("int8h", min_bytes=0, with_product=True)
    with comm_log.record() as table, dispatch.record() as choices:
        run(lambda *a: gradients(fused, *a), *arguments(), specs=SPECS)
    rows = {(r.site, r.direction): r for r in table.rows() if r.codec == "int8h"}
    assert set(rows) == {("down", "forward"), ("up", "backward")}
    frames = TOKENS * D // (64 * 128) * (64 * 128 + 128)
    assert all(r.hlo == (("custom-call", "uint8", frames),) * 2 for r in rows.values())
    assert choices[("int8h", "product and sum")] == [("nvlink", "a product and its sum are one kernel")]


@pytest.mark.parametrize("tokens,reason", [(192, "rows in multiples of 256"), (256, None)])
def test_what_the_kernel_cannot_do_is_separate(over_nvlink, monkeypatch, tokens, reason):
    sums = []
    monkeypatch.setattr(matmul_psum, "psum", lambda y, *_, **__: sums.append(y.shape) or lax.psum(y, "tp"))
    fused = Compression("int8h", min_bytes=0, with_product=True)
    x, w_up, w_down = arguments()
    with dispatch.record() as choices:
        run(lambda *a: mlp(fused, *a), x[: 2 * tokens], w_up, w_down, specs=(SPECS[0], P("dp")))
    found = choices[("int8h", "product and sum")]
    assert (reason is None) == (sums == []) and any(reason is None or reason in why for _, why in found)


def test_link_nccl_and_no_gpu_are_separate(monkeypatch):
    monkeypatch.setattr(kernels, "matmul_all_reduce", stand_in, raising=False)
    CALLS.clear()
    for link in ("nccl", "auto"):
        separate = Compression("int8h", min_bytes=0, link=link, with_product=True)
        found = run(lambda *a, c=separate: mlp(c, *a), *arguments(), specs=(SPECS[0], P("dp")))
        plain = Compression("int8h", min_bytes=0, link=link)
        expected = run(lambda *a, c=plain: mlp(c, *a), *arguments(), specs=(SPECS[0], P("dp")))
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(expected, np.float32))
    assert CALLS == []


def test_with_product_is_a_bool():
    with pytest.raises(TypeError, match="with_product='yes': must be True or False"):
        Compression(with_product="yes")
