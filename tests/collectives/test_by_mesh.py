"""What only the order of the mesh's devices decides."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from taco_jax.collectives.manual_region import Rest, over_rest
from taco_jax.collectives.nvlink import by_mesh
from taco_jax.compat import varying_axes

ORDERS = {"as they are": [0, 1, 2, 3], "backwards": [3, 2, 1, 0], "a part": [1, 2]}


def mesh(order):
    devices = np.array(jax.devices())[ORDERS[order]]
    return jax.sharding.Mesh(devices, ("tp",), axis_types=(AxisType.Auto,))


def sums(x, else_=True):
    """The sum, and 1 from the program for devices in order, 2 from the other; both as the same types."""
    one = lambda number: lambda x: (lax.psum(x, "tp"), x.max() * 0 + number)
    return by_mesh(one(1.0), one(2.0) if else_ else None, x)


def run(order, f):
    return jax.jit(jax.shard_map(f, mesh=mesh(order), in_specs=P("tp"), out_specs=P("tp")))


@pytest.mark.parametrize("order", ORDERS)
def test_the_order_decides(order):
    def f(x):
        total, which = sums(x)
        assert not varying_axes(total) and varying_axes(which) == {"tp"}
        return lax.pcast(total, "tp", to="varying") + 100 * which

    n = len(ORDERS[order])
    expected = np.full(n, n * (n - 1) / 2) + (100 if order == "as they are" else 200)
    eager = jax.shard_map(f, mesh=mesh(order), in_specs=P("tp"), out_specs=P("tp"))
    for function in (run(order, f), eager):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            np.testing.assert_array_equal(function(jnp.arange(float(n))), expected)
        # What was listed while tracing, a kernel over NVLink, is not what runs.
        said = [w for w in caught if "link='auto': the mesh has devices" in str(w.message)]
        assert bool(said) == (order != "as they are")


@pytest.mark.filterwarnings("ignore:link='auto'")
@pytest.mark.parametrize("order", ["as they are", "backwards"])
def test_in_a_scan_under_remat(order):
    def f(x):
        def step(x, _):
            total, which = sums(x)
            return x + lax.pcast(total, "tp", to="varying") * which, None

        return lax.scan(jax.checkpoint(step), x, length=3)[0]

    x, factor = np.arange(4.0), 1 if order == "as they are" else 2
    for _ in range(3):
        x = x + factor * x.sum()
    np.testing.assert_array_equal(run(order, f)(jnp.arange(4.0)), x)


def test_without_the_other_another_order_raises():
    f = lambda x: sums(x, else_=False)[1][None]
    np.testing.assert_array_equal(run("as they are", f)(jnp.arange(4.0)), np.ones(4))
    with pytest.raises(ValueError, match=r"link='nvlink': the mesh has devices \[3, 2, 1, 0\], and peer memory needs"):
        run("backwards", f)(jnp.arange(4.0))


@pytest.mark.filterwarnings("ignore:link='auto'")
def test_a_program_that_is_exported_knows_no_order():
    # It may run on a mesh in another order than the one that it was exported for.
    exported = jax.export.export(run("as they are", lambda x: sums(x)[1][None]))(jnp.arange(4.0))
    np.testing.assert_array_equal(exported.call(jax.device_put(jnp.arange(4.0), sharding())), np.full(4, 2.0))


def sharding():
    return jax.sharding.NamedSharding(mesh("as they are"), P("tp"))


@pytest.mark.filterwarnings("ignore:link='auto'")
def test_a_mesh_without_devices_knows_no_order():
    abstract = jax.sharding.AbstractMesh((4,), ("tp",), axis_types=(AxisType.Auto,))
    f = jax.jit(jax.shard_map(lambda x: sums(x)[1][None], mesh=abstract, in_specs=P("tp"), out_specs=P("tp")))
    np.testing.assert_array_equal(f(jax.device_put(jnp.arange(4.0), sharding())), np.full(4, 2.0))


@pytest.mark.filterwarnings("ignore:link='auto'")
@pytest.mark.parametrize("order", ["as they are", "backwards"])
def test_a_region_in_a_region_knows_the_order_of_the_outer_one(order):
    grid = np.array(jax.devices())[ORDERS[order]].reshape(2, 2)
    both = jax.sharding.Mesh(grid, ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    rest = Rest(("dp",), P("dp"), P("dp"))
    which = lambda x, exponents, key: (0 * x + sums(x)[1], None)
    f = lambda x: over_rest(rest, which, x, None, None, forward=True)[0]
    run = jax.jit(jax.shard_map(f, mesh=both, in_specs=P("tp"), out_specs=P("tp"), axis_names={"tp"}))
    np.testing.assert_array_equal(run(jnp.arange(8.0)), np.full(8, 1.0 if order == "as they are" else 2.0))


def test_a_batch_takes_the_other():
    f = lambda x: jax.vmap(lambda x: sums(x)[1])(jnp.stack([x, x]))[:, None].T
    np.testing.assert_array_equal(run("as they are", f)(jnp.arange(4.0)), np.full((4, 2), 2.0))


def test_results_of_other_types_are_refused():
    with pytest.raises(TypeError, match="by_mesh: results differ"):
        run("as they are", lambda x: by_mesh(lambda x: (x,), lambda x: (x.astype(jnp.int32),), x)[0])(jnp.arange(4.0))
