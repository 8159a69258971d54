"""Messages under way: what `AsyncCollective` takes, what it gives back, and that nobody differentiates one by
mistake."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_mesh
from jax import lax
from jax.sharding import PartitionSpec as P
from model_helpers import QWEN2, Run

from taco_jax.collectives import psum, start_psum
from taco_jax.collectives.async_collective import encoded_before
from taco_jax.models import decoder
from taco_jax.models.run_config import Parallel


def over(f, ranks=2):
    return jax.jit(jax.shard_map(f, mesh=make_mesh(tp=ranks), in_specs=P("tp"), out_specs=P()))


@pytest.mark.parametrize("codec", ["none", "taco"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_message_that_has_arrived_waits_for_nothing(codec, ranks):
    x = jax.random.normal(jax.random.key(0), (ranks, 256))

    def f(x):
        message, value = start_psum(x, "tp", "forward", compression=codec), x
        for _ in range(4):  # more often than there are hops
            value = message.overlap_with(value)
        assert message.hops == 0
        return message.done()[0], message.done()[0], lax.psum(value, "tp")

    once, again, sum_ = over(f, ranks)(x)
    want = over(lambda x: psum(x, "tp", compression=codec), ranks)(x)
    np.testing.assert_array_equal(once, want)
    np.testing.assert_array_equal(again, want)
    np.testing.assert_allclose(sum_, x.sum(0, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize("codec, barriers", [("none", 0), ("taco", 1)])
def test_a_follower_waits_for_the_first_message_to_be_encoded(codec, barriers):
    def f(x):
        with encoded_before(x + 1) as follower:
            first, second = (start_psum(k * x, "tp", "forward", compression=codec) for k in (1, 2))
        return first.done()[0], second.done()[0], lax.psum(follower.value, "tp")

    x = jax.random.normal(jax.random.key(0), (2, 256))
    one, two, followed = over(f)(x)
    want = over(lambda x: psum(x, "tp", compression=codec))(x)
    np.testing.assert_array_equal(one, want)
    np.testing.assert_array_equal(two, 2 * want)
    np.testing.assert_allclose(followed, (x + 1).sum(0, keepdims=True), rtol=1e-5)
    # With the wires, before they are sent.
    found = re.findall(r"optimization_barrier .*: tensor<1x256xf32>, tensor<1x\d+xui8>", over(f).lower(x).as_text())
    assert len(found) == barriers


def test_a_compressed_message_has_no_derivative_and_says_so():
    # Bits have none: without the error it would be zero.
    def loss(x, codec):
        return jnp.sum(start_psum(x, "tp", "forward", compression=codec).done()[0])

    def gradient(codec):
        return jax.jit(
            jax.shard_map(jax.grad(lambda x: loss(x, codec)), mesh=make_mesh(tp=2), in_specs=P("tp"), out_specs=P("tp"))
        )

    np.testing.assert_array_equal(gradient("none")(jnp.ones((2, 128))), np.ones((2, 128)))
    with pytest.raises(NotImplementedError, match="start_psum: a compressed message under way has no derivative"):
        gradient("taco")(jnp.ones((2, 128)))


def second(codec, chains):
    """(a program for second derivatives of the loss, the run whose they are)."""
    run = Run(QWEN2, tp=2, batch=4, codec=codec, chains=chains)

    def step(params, *batch):
        params = jax.tree.map(lambda p: lax.pcast(p, "dp", to="varying"), params)
        loss = lambda p: decoder.loss(p, *batch, run.config, run.par, {})[0]
        squares = lambda p: jnp.sum(jax.grad(loss)(p)["layers"]["mlp_norm"]["scale"] ** 2)
        return jax.tree.map(lambda g: lax.psum(g, "dp"), jax.grad(squares)(params))

    specs = (run.specs, P("dp"), P("dp"), P("dp"))
    return jax.jit(jax.shard_map(step, mesh=run.mesh, in_specs=specs, out_specs=run.specs)), run


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["none", "int8h"])
def test_second_derivatives_of_chains(codec):
    """Exact ones are those of one chain; without chains compressed ones are finite."""
    values = lambda f, run: jax.tree.leaves(f(run.params(), *run.batch_arrays()))
    one = values(*second(codec, 1))
    assert all(np.isfinite(leaf).all() for leaf in one)
    if codec == "none":
        two = values(*second(codec, 2))
        whole = np.sqrt(sum(np.linalg.norm(leaf) ** 2 for leaf in one))
        assert whole > 0 and all(np.linalg.norm(a - b) <= 1e-5 * whole for a, b in zip(one, two))


def test_compressed_second_derivatives_of_chains_are_an_error():
    """Never zero; told when they are traced."""
    f, run = second("int8h", 2)
    params = jax.eval_shape(lambda: decoder.init_params(run.config, jax.random.key(0), run.tp))
    with pytest.raises(NotImplementedError, match="a layer of several chains no second one"):
        f.lower(params, *run.batch_arrays())


def test_what_is_no_direction_and_no_number_of_chains():
    with pytest.raises(ValueError, match="direction='sideways': must be one of forward, backward"):
        over(lambda x: start_psum(x, "tp", "sideways", compression="taco").done()[0])(jnp.ones((2, 128)))
    for chains in (0, 2.5, "2", None, True):
        with pytest.raises(ValueError, match="chains=.*: must be an int of at least 1, such as 2"):
            Parallel(chains=chains)
