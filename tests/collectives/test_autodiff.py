"""Gradients of the collectives: values against jax.lax, second derivatives, and the codec of each direction."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covers import cover
from gradients import COLLECTIVES, relative, weights, x_of
from helpers import make_mesh
from hlo import collectives, counts
from jax import lax
from jax.sharding import PartitionSpec as P
from shards import per_rank

import taco_jax
from taco_jax import CODECS, Compression

# psum's and the invarying gather's backward pass sends nothing.
SENT_BACKWARD = ("psum_scatter", "psum_scatter_untiled", "all_gather", "all_gather_untiled", "all_to_all", "ppermute")


def gradient(name, module, **codec):
    f = COLLECTIVES[name][0]

    def loss(x):
        y = f(module, x, **codec)
        return jnp.sum(weights(y) * y)  # where y varies: the gradient of the sum of all ranks' losses

    return jax.grad(loss)


@functools.cache
def exact_gradients(name, ranks):
    """(those of jax.lax, those of ours without a codec), of x_of(ranks)."""
    grads = [gradient(name, lax), gradient(name, taco_jax, compression="none")]
    return jax.tree.map(np.asarray, per_rank(lambda x: [g(x) for g in grads], ranks)(x_of(ranks)))


RANKS = (2, 4, 8)
# Numbers of ranks and codecs go round.
FEW = [(name, ("taco", "int8h")[i % 2], RANKS[i % 3]) for i, name in enumerate(COLLECTIVES)]
REST = [case for case in cover(3, name=tuple(COLLECTIVES), codec=("taco", "int8h"), ranks=RANKS) if case not in FEW]


@pytest.mark.parametrize("name,codec,ranks", [*FEW, *(pytest.param(*case, marks=pytest.mark.slow) for case in REST)])
def test_gradient_values_of_every_collective(name, codec, ranks):
    x_P = x_of(ranks)
    expected, exact = exact_gradients(name, ranks)
    np.testing.assert_allclose(exact, expected, rtol=1e-6, atol=1e-6)
    program = per_rank(gradient(name, taco_jax, compression=codec), ranks)
    g = np.asarray(program(x_P))
    if name not in SENT_BACKWARD:
        np.testing.assert_allclose(g, expected, rtol=1e-6, atol=1e-6)
    else:
        assert 0 < relative(g, expected) < {"taco": 0.05, "int8h": 0.02}[codec]
        assert np.linalg.norm(g) / np.linalg.norm(expected) == pytest.approx(1, abs=0.03)
        found = collectives(program.lower(x_P).compile())
        assert found and {dtype for _, dtype, _ in found} == {"uint8"}


OTHERS = [pytest.param(2, "two_shot", marks=pytest.mark.slow), pytest.param(4, "one_shot", marks=pytest.mark.slow)]


@pytest.mark.parametrize("ranks,algorithm", [(2, "one_shot"), (4, "two_shot"), *OTHERS])
def test_gradient_of_copy(ranks, algorithm):
    """f: the cotangents of all ranks are added up, once."""
    w_P = x_of(ranks)
    x = x_of(1)[0]
    mesh = make_mesh(tp=ranks)

    def local(x, w):
        return jax.grad(
            lambda x: jnp.sum(w[0] * taco_jax.copy(x, "tp", compression=Compression("int8h", algorithm=algorithm)))
        )(x)

    f = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(), P("tp")), out_specs=P()))
    assert 0 < relative(f(x, w_P), w_P.sum(0)) < 0.015
    expected = {"one_shot": {"all-gather": 1}, "two_shot": {"all-gather": 1, "all-to-all": 1}}
    assert counts(f.lower(x, w_P).compile()) == expected[algorithm]


# Forms of a collective differ in the last step, which is jax's own.
FORMS = ("psum_scatter_untiled", "all_gather_untiled", "all_gather_tiled_invarying")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in FORMS else n for n in COLLECTIVES])
def test_second_derivatives(name):
    """Codes have no derivative of their own: differentiated as they are, parts of the gradient's gradient vanish."""
    f, x_P = COLLECTIVES[name][0], x_of(2)

    def second(module, **codec):
        square = lambda x: jnp.sum(f(module, x**2, **codec) ** 2)
        return jax.grad(lambda x: jnp.sum(jax.grad(square)(x) * jnp.cos(x)))

    all_three = second(lax), second(taco_jax, compression="none"), second(taco_jax, compression="int8h")
    expected, exact, compressed = map(np.asarray, per_rank(lambda x: [g(x) for g in all_three], 2)(x_P))
    np.testing.assert_allclose(exact, expected, rtol=1e-5, atol=1e-5)
    assert relative(compressed, expected) < 0.05


def test_copy_of_a_varying_value_raises():
    with pytest.raises(ValueError, match="copy: x already varies over 'tp'"):
        per_rank(lambda x: taco_jax.copy(x, "tp", compression="taco"), 2)(x_of(2))


def test_forward_and_backward_codec_are_told_apart():
    x_P = x_of(4)
    big = np.tile(x_P, (1, 40, 1))

    def f(x):
        loss = lambda x: jnp.sum(
            taco_jax.psum_scatter(x, "tp", tiled=True, compression=Compression("int4h", backward="int8h")) ** 2
        )
        return jax.grad(loss)(x)

    forward, backward = (CODECS[c].wire_bytes(big[0].size // 4) for c in ("int4h", "int8h"))
    assert forward != backward
    found = collectives(per_rank(f, 4).lower(big).compile())
    assert found == [("all-gather", "uint8", 4 * backward), ("all-to-all", "uint8", 4 * forward)]
