"""Column-parallel products that share an input: one array of their kernels, one of their results' cotangents."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from taco_jax.models.lora import Adapted
from taco_jax.models.projections import FusedInput, column_parallel
from taco_jax.models.run_config import Parallel
from taco_jax.tensor_parallel import to_varying

BATCH, LENGTH, WIDTH = 2, 8, 16
WIDTHS = (24, 8, 40)


def arrays(n: int, adapters: bool = False, seed: int = 0):
    """(x, n denses with biases in float32, n cotangents), standard normal."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    adapted = lambda kernel: Adapted(kernel, draw(WIDTH, 4), draw(4, kernel.shape[1]))
    kernels = [draw(WIDTH, width) for width in WIDTHS[:n]]
    denses = [{"kernel": adapted(k) if adapters else k, "bias": draw(k.shape[1])} for k in kernels]
    return draw(BATCH, LENGTH, WIDTH), denses, [draw(BATCH, LENGTH, width) for width in WIDTHS[:n]]


def gradient(par, x, denses, cts, fused=False):
    """f(x, denses): the gradients of both, on one rank."""
    mesh = jax.make_mesh((1,), (par.axis,), axis_types=(AxisType.Auto,))

    def local(x, denses):
        def run(x, denses):
            x, denses = x.astype(par.dtype), jax.tree.map(lambda leaf: to_varying(leaf, par.axis), denses)
            x = FusedInput(x, None, "up") if fused else to_varying(x, par.axis)
            return column_parallel(x, denses, par)

        ys, vjp = jax.vjp(run, x, denses)
        return vjp([to_varying(ct.astype(y.dtype), par.axis) for ct, y in zip(cts, ys)])

    return jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P())(x, denses)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_gradients_of_every_leaf(n, fused):
    par = Parallel(dtype=jnp.float32, precision="highest")
    x, denses, cts = arrays(n)
    separate = lambda x, denses: [jnp.matmul(x, d["kernel"], precision="highest") + d["bias"] for d in denses]
    want = jax.vjp(separate, x, denses)[1](cts)
    got = gradient(par, x, denses, cts, fused)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5), got, want)


def test_gradients_of_adapters():
    """Of the input and the adapters; the kernels' are zero."""
    par = Parallel(dtype=jnp.float32, precision="highest", adapter_scale=0.5, frozen=True)
    x, denses, cts = arrays(2, adapters=True)
    kernel = lambda d: jax.lax.stop_gradient(d["kernel"].kernel) + 0.5 * d["kernel"].a @ d["kernel"].b
    merged = lambda x, denses: [x @ kernel(d) + d["bias"] for d in denses]
    with jax.default_matmul_precision("highest"):
        want = jax.vjp(merged, x, denses)[1](cts)
    got = gradient(par, x, denses, cts)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4), got, want)


def test_bfloat16_input_gradients_are_rounded_once():
    """They are of one product: a sum of two rounded ones would be another value."""
    par = Parallel(dtype=jnp.bfloat16)
    x, denses, cts = arrays(2)
    dx = gradient(par, x, denses, cts)[0]
    ct_BLF = jnp.concatenate(cts, -1).astype(jnp.bfloat16)
    kernel_DF = jnp.concatenate([d["kernel"] for d in denses], 1).astype(jnp.bfloat16)
    np.testing.assert_array_equal(dx, jnp.matmul(ct_BLF, kernel_DF.T).astype(jnp.float32))


def equations(jaxpr):
    """Those of all depths."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner)


@pytest.mark.parametrize("frozen", [False, True])
def test_products_read_joined_arrays_of_their_own(frozen):
    """Behind barriers, without which XLA joins anew for each product."""
    par = Parallel(dtype=jnp.bfloat16, frozen=frozen)
    x, denses, cts = arrays(2)
    of = lambda x, denses: gradient(par, x, denses, cts)[: 1 if frozen else 2]
    found = list(equations(jax.make_jaxpr(of)(x, denses).jaxpr))
    joined = {out for eqn in found if eqn.primitive.name == "concatenate" for out in eqn.outvars}
    barriers = [eqn for eqn in found if eqn.primitive.name == "optimization_barrier" and joined & set(eqn.invars)]
    stopped = {eqn.outvars[0]: eqn.invars[0] for eqn in found if eqn.primitive.name == "stop_gradient"}
    operands = [[stopped.get(v, v) for v in eqn.invars] for eqn in found if eqn.primitive.name == "dot_general"]
    readers = {eqn.outvars[0].aval.shape: sum(eqn.outvars[0] in of for of in operands) for eqn in barriers}
    wide = sum(WIDTHS[:2])
    # The kernel for y and for dx; the cotangent for dx and for the kernel's gradient, which frozen ones do not have.
    assert readers == {(WIDTH, wide): 2, (BATCH, LENGTH, wide): 1 if frozen else 2}
    assert not any(joined & set(of) for of in operands)


def test_inference_has_no_barrier():
    par = Parallel(dtype=jnp.bfloat16, frozen=True)
    x, denses, _ = arrays(2)
    jaxpr = jax.make_jaxpr(lambda x: column_parallel(x.astype(par.dtype), denses, par))(x)
    assert "optimization_barrier" not in str(jaxpr) and "dot_general" in str(jaxpr)
