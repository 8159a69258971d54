"""Collectives in a region that is manual over some mesh axes only: values, gradients, what is sent, what is refused."""

import functools
import math
import re

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covers import in_turn
from helpers import make_mesh
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import taco_jax
from taco_jax import Compression, SiteScales
from taco_jax.codec import as_codec
from taco_jax.collectives import comm_log

DP, TP, BATCH, ROWS, COLUMNS = 2, 4, 6, 8, 512
EXACT = {"compression": None}
# f(module, x, **options) of x [BATCH, ROWS, COLUMNS], and whether its result is the same on all ranks.
COLLECTIVES = {
    "psum": (lambda m, x, **kw: m.psum(x, "tp", **kw), True),
    "psum_scatter": (lambda m, x, **kw: m.psum_scatter(x, "tp", scatter_dimension=1, tiled=True, **kw), False),
    "psum_scatter_untiled": (
        lambda m, x, **kw: m.psum_scatter(x[:, :TP], "tp", scatter_dimension=1, **kw),
        False,
    ),
    "all_gather": (lambda m, x, **kw: m.all_gather(x, "tp", axis=2, tiled=True, **kw), False),
    "all_gather_untiled": (lambda m, x, **kw: m.all_gather(x, "tp", axis=0, **kw), False),
    "all_gather_invarying": (lambda m, x, **kw: m.all_gather(x, "tp", axis=1, to="invarying", **kw), True),
    "all_to_all": (lambda m, x, **kw: m.all_to_all(x, "tp", 2, 1, tiled=True, **kw), False),
    "all_to_all_untiled": (lambda m, x, **kw: m.all_to_all(x[..., :TP], "tp", 2, 0, **kw), False),
    "ppermute": (lambda m, x, **kw: m.ppermute(x, "tp", [(0, 1), (1, 2)], **kw), False),
}


class _Lax:
    """jax.lax, whose functions take and ignore `compression`."""

    def all_to_all(self, x, axis, split, concat, tiled=False):
        # The transpose of jax.lax's untiled one has its dims in another order (jax 0.10 and 0.11).
        y = lax.all_to_all(x, axis, split, concat if tiled else split, tiled=True)
        return y if tiled else jnp.moveaxis(y, split, concat)

    def __getattr__(self, name):
        return lambda *args, compression=None, **kw: getattr(lax, name)(*args, **kw)


def x_of(mesh, *last):
    """A row for each rank, whose batch is split over dp, or the dims that are given."""
    x = np.random.default_rng(0).normal(size=(TP, BATCH, ROWS, COLUMNS)).astype(np.float32)
    return jax.device_put(x, NamedSharding(mesh, P("tp", *(last or ("dp",)))))


def region(f, mesh, invarying, axes=("tp",)):
    """f of every rank's row, in a region that is manual over `axes`."""

    def local(x):
        y = f(x[0])
        return y if invarying else y[None]

    out_specs = P() if invarying else P("tp")
    return jax.shard_map(local, mesh=mesh, in_specs=P("tp"), out_specs=out_specs, axis_names=set(axes))


def value_and_gradient(name, module, mesh, **options):
    call, invarying = COLLECTIVES[name]
    f = region(lambda x: call(module, x, **options), mesh, invarying)

    def loss(x):
        y = f(x)
        return jnp.sum(jnp.cos(jnp.arange(y.size) * 0.37).reshape(y.shape) * y), y

    return jax.jit(jax.grad(loss, has_aux=True))


def relative(got, want):
    got, want = np.float64(got), np.float64(want)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.parametrize("name,explicit", in_turn(COLLECTIVES))
def test_values_gradients_and_what_is_sent(name, explicit):
    mesh = make_mesh(dp=DP, tp=TP)
    x = x_of(mesh)
    want = value_and_gradient(name, _Lax(), mesh)(x)
    mesh = make_mesh(dp=DP, tp=TP, explicit=explicit)
    x = x_of(mesh)
    with jax.set_mesh(mesh):
        run = value_and_gradient(name, taco_jax, mesh, compression="int8h")
        compiled = run.lower(x).compile()
        got = compiled(x)
    assert all(0 < relative(g, w) < 0.03 or g is w for g, w in zip(got[1:], want[1:], strict=True))
    gradient, exact = np.float64(got[0]), np.float64(want[0])
    assert relative(gradient, exact) < 0.03
    assert abs(np.vdot(gradient, exact) / np.vdot(exact, exact) - 1) < 0.02
    # Every device sends the messages of its own piece: nothing is gathered over dp.
    lines = compiled.as_text().splitlines()
    if explicit:
        # jax 0.10 gathers over Explicit axes at the border of the region, whatever is done inside.
        lines = [line for line in lines if not re.search(r'op_name="jit\(loss\)/[^/"]*jvp[^/"]*/shard_map"', line)]
    sent = hlo.collectives("\n".join(lines))
    assert sent and {dtype for _, dtype, _ in sent} == {"uint8"}, sent
    piece = as_codec("int8h").wire_bytes(BATCH // DP * ROWS * COLUMNS)
    largest = max(size for *_, size in sent)
    assert largest <= 1.5 * piece * (TP if "gather" in name or "scatter" in name else 1)


def test_the_bytes_of_a_partly_manual_sum_are_those_of_a_fully_manual_one():
    mesh = make_mesh(dp=DP, tp=TP)
    x = x_of(mesh)
    psum = lambda x: taco_jax.psum(x, "tp", compression="int8h")
    partly = jax.jit(region(psum, mesh, True)).lower(x).compile()
    everywhere = jax.jit(jax.shard_map(lambda x: psum(x[0]), mesh=mesh, in_specs=P("tp", "dp"), out_specs=P("dp")))
    whole = everywhere.lower(x).compile()
    assert hlo.collectives(partly) == hlo.collectives(whole)
    np.testing.assert_array_equal(partly(x), whole(x))


def test_a_region_in_the_region_says_how_an_operand_lies():
    mesh = make_mesh(dp=DP, tp=TP)
    x = x_of(mesh, None, None, "dp")
    psum = lambda x: taco_jax.psum(x, "tp", compression="int8h")
    spec = P(None, None, "dp")
    around = lambda x: jax.shard_map(psum, in_specs=spec, out_specs=spec, axis_names={"dp", "pp"})(x)
    moved, still = (jax.jit(region(f, mesh, True)).lower(x).compile() for f in (psum, around))
    assert {dtype for _, dtype, _ in hlo.collectives(still)} == {"uint8"}
    assert "float32" in {dtype for _, dtype, _ in hlo.collectives(moved)}
    want = np.asarray(x).sum(0)
    assert relative(moved(x), want) < 0.02 and relative(still(x), want) < 0.02


def test_copy_sums_the_gradient():
    mesh = make_mesh(dp=DP, tp=TP)
    x = jax.device_put(np.ones((BATCH, ROWS, COLUMNS), np.float32), NamedSharding(mesh, P("dp")))
    w = x_of(mesh)

    def loss(x, w, compression):
        f = lambda x, w: jnp.sum(taco_jax.copy(x, "tp", compression=compression) * w[0])[None]
        return jnp.sum(jax.shard_map(f, mesh=mesh, in_specs=(P(), P("tp")), out_specs=P("tp"), axis_names={"tp"})(x, w))

    run = jax.jit(jax.grad(functools.partial(loss, compression="int8h")))
    assert {d for o, d, n in hlo.collectives(run.lower(x, w).compile()) if n > 1} == {"uint8"}
    assert 0 < relative(run(x, w), np.asarray(w).sum(0)) < 0.02


@pytest.mark.parametrize(
    "wrap", [jax.checkpoint, pytest.param(lambda f: f, marks=pytest.mark.slow)], ids=["remat", "plain"]
)
def test_in_a_scan(wrap):
    mesh = make_mesh(dp=DP, tp=TP)
    x = x_of(mesh)

    def layers(x, compression):
        def layer(x, _):
            y = taco_jax.psum(x * 0.1, "tp", compression=compression)
            return x + lax.pcast(y, "tp", to="varying"), None

        return lax.scan(wrap(layer), x, None, length=3)[0]

    loss = lambda x, compression: jnp.sum(region(lambda x: layers(x, compression), mesh, False)(x) ** 2)
    got, want = (jax.jit(jax.grad(functools.partial(loss, compression=c)))(x) for c in ("int8h", None))
    assert 0 < relative(got, want) < 0.02


@pytest.mark.parametrize(
    "compression",
    [
        Compression("int8h", algorithm="hierarchical", ranks_per_host=2),
        Compression("int8h", algorithm="one_shot"),
        Compression("int8h", chunks=3, exchange="ring"),
        Compression("int8_token"),
    ],
    ids=["levels", "one_shot", "ring", "token"],
)
def test_every_way_of_sending(compression):
    mesh = make_mesh(dp=DP, tp=TP)
    x = x_of(mesh)
    compiled = jax.jit(region(lambda x: taco_jax.psum(x, "tp", compression=compression), mesh, True)).lower(x).compile()
    assert 0 < relative(compiled(x), np.asarray(x).sum(0)) < 0.02
    assert {dtype for _, dtype, _ in hlo.collectives(compiled)} == {"uint8"}


def test_a_batch():
    mesh = make_mesh(dp=DP, tp=TP)
    x = x_of(mesh)
    sums = jax.vmap(lambda x: taco_jax.psum(x, "tp", compression="int8h"), in_axes=1, out_axes=1)
    assert 0 < relative(jax.jit(region(sums, mesh, True))(x), np.asarray(x).sum(0)) < 0.02


def test_scales_and_noise():
    """The measure is the largest of all devices, and devices along dp draw noise of their own."""
    mesh = make_mesh(dp=DP, tp=TP)
    x = np.zeros((TP, BATCH, ROWS, COLUMNS), np.float32)
    x[1, -1] = 1016.0  # in the last piece

    def loss(slot, x):
        scales = SiteScales(jnp.zeros(2, jnp.int32), slot)
        f = lambda x: taco_jax.psum(x, "tp", compression="int8h", scales=scales)
        return jnp.sum(f(x))

    def local(x):
        slot = lax.pcast(jnp.zeros((2, 1)), "tp", to="varying")
        return lax.pmax(jax.grad(loss)(slot, x[0]), "tp")

    measure = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("tp"), out_specs=P(), axis_names={"tp"}))(x)
    # Rotated, an equal block of 1016 has one value, 1016 times the root of its length.
    assert measure[0, 0] >= 1016 / 127 and measure[1, 0] == 0
    codec = taco_jax.Codec(element="int4", block=64, rounding="stochastic")
    key = jax.random.key(3)
    f = lambda x: taco_jax.psum(x, "tp", compression=codec, key=key)
    same = np.broadcast_to(np.random.default_rng(1).normal(size=(ROWS, COLUMNS)), (TP, BATCH, ROWS, COLUMNS))
    y = np.asarray(jax.jit(region(f, mesh, True))(same.astype(np.float32)))
    assert (y[0] != y[BATCH // DP]).any()


def test_what_cannot_be_cut_goes_whole_and_an_explicit_split_is_refused():
    mesh = make_mesh(dp=DP, tp=TP)
    x = np.random.default_rng(0).normal(size=(TP, 5, 7)).astype(np.float32)
    got = jax.jit(region(lambda x: taco_jax.psum(x, "tp", compression="int8h"), mesh, True))(x)
    assert 0 < relative(got, x.sum(0)) < 0.02
    # dim 0 is joined and dim 1 has an odd size.
    joined = lambda x: taco_jax.all_gather(x, "tp", axis=0, tiled=True, compression="int8h")
    x = np.random.default_rng(0).normal(size=(TP, 6, 7)).astype(np.float32)
    assert 0 < relative(jax.jit(region(joined, mesh, False))(x)[0], x.reshape(-1, 7)) < 0.02
    mesh = make_mesh(dp=DP, tp=TP, explicit=True)
    f = lambda x: taco_jax.all_gather(x, "tp", axis=0, tiled=True, compression="int8h")
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"all_gather: dim 0 of x is split over \['dp'\]"):
        jax.jit(region(f, mesh, False))(x_of(mesh))


def test_min_bytes_and_the_table_count_a_devices_own_piece():
    mesh = make_mesh(dp=DP, tp=TP)
    x = x_of(mesh)
    own = math.prod(x.shape[1:]) * 4 // DP
    for min_bytes, codec in ((own, "int8h"), (own + 1, "none")):
        f = lambda x: taco_jax.psum(x, "tp", compression=Compression("int8h", min_bytes=min_bytes))  # noqa: B023
        with comm_log.record() as table:
            jax.jit(region(f, mesh, True)).lower(x)
        (row,) = table.rows()
        assert (row.codec, row.elements) == (codec, own // 4)
