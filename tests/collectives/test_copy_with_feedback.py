"""Error feedback of gradients' sums: what a backward sum lost reaches the one before it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import collectives
from jax import lax
from shards import per_rank

import taco_jax
from taco_jax.collectives import copy_with_feedback, to_varying

SLOW = pytest.mark.slow


def terms(ranks, shape=(6, 136)):
    rng = np.random.default_rng(ranks)
    return (rng.normal(size=(ranks, *shape)) * np.exp2(rng.integers(-3, 4, (ranks, shape[0], 1)))).astype(np.float32)


def backward(ranks, compression):
    """Each rank's (cotangent of x, of the carrier), of its cotangents of the results and of the carrier."""

    def f(ct, error):
        x = jnp.zeros(ct.shape, ct.dtype)
        call = lambda x, carrier: copy_with_feedback(x, "tp", carrier, compression=compression)
        g, left = jax.vjp(call, x, to_varying(x, "tp"))[1]((ct, error))
        return to_varying(g, "tp"), left

    return per_rank(f, ranks)


@pytest.mark.parametrize("ranks, codec", [(2, "int4h"), (4, "int4h"), pytest.param(4, "mxfp4", marks=SLOW)])
def test_sum_and_errors_are_what_went_in(ranks, codec):
    """The sum is psum's own of cotangent + error, bit for bit; with the errors left it is all that went in."""
    ct_P, e_P = terms(ranks), terms(ranks)[::-1] / 32
    g_P, left_P = (np.asarray(a, np.float64) for a in backward(ranks, codec)(ct_P, e_P))
    u_P = ct_P + e_P
    plain = per_rank(lambda u: taco_jax.psum(u, "tp", compression=codec), ranks, invarying_out=True)(u_P)
    for g in g_P:
        np.testing.assert_array_equal(g, np.asarray(plain))
    wanted = u_P.astype(np.float64).sum(0)
    assert np.abs(wanted - g_P[0]).max() > 1e-3  # so there is something to find
    np.testing.assert_allclose(g_P[0] + left_P.sum(0), wanted, atol=1e-5 * np.abs(u_P).max())


@pytest.mark.parametrize("compression", ["none", taco_jax.Compression("int4h", min_bytes=1 << 20)])
def test_an_exact_sum_delivers_the_error_and_leaves_none(compression):
    ct_P, e_P = terms(4), terms(4)[::-1]
    g_P, left_P = backward(4, compression)(ct_P, e_P)
    np.testing.assert_allclose(np.asarray(g_P[2]), (ct_P + e_P).sum(0), rtol=1e-5, atol=1e-5)
    assert not np.asarray(left_P).any()


def gradient(w_PN, fed):
    """The gradient of x under N layers x + sin(w x), each rank with its own w, in a scan; and what it sends."""

    def local(w_N):
        def layer(carry, w):
            x, carrier = carry
            if fed:
                own, carrier = copy_with_feedback(x, "tp", carrier, compression="none:int4h")
            else:
                own = taco_jax.collectives.copy(x, "tp", compression="none:int4h")
            return (x + lax.psum(jnp.sin(w * own), "tp"), carrier), None

        def loss(x):
            zeros = to_varying(jnp.zeros_like(x), "tp")
            return jnp.sum(jnp.cos(lax.scan(layer, (x, zeros), w_N)[0][0]))

        return jax.grad(loss)(jnp.linspace(-1, 1, w_N[0].size).reshape(w_N[0].shape))

    f = per_rank(local, len(w_PN), invarying_out=True)
    return np.asarray(f(w_PN)), [c for c in collectives(f.lower(w_PN).compile()) if c[1] == "uint8"]


def test_errors_do_not_pile_up_along_depth():
    w_PN = 1e-2 * np.random.default_rng(0).normal(size=(4, 16, 8, 128)).astype(np.float32)
    (without, sent), (fed, sent_fed) = (gradient(w_PN, fed) for fed in (False, True))
    wanted = fine_gradient(w_PN)
    lost, lost_fed = (np.linalg.norm(g - wanted) for g in (without, fed))
    assert lost_fed < 0.4 * lost  # sqrt(16) = 4 where errors are independent
    assert sent == sent_fed and len(sent) == 2


def fine_gradient(w_PN):
    def loss(x):
        for n in range(w_PN.shape[1]):
            x += jnp.sum(jnp.sin(w_PN[:, n] * x), 0)
        return jnp.sum(jnp.cos(x))

    return np.asarray(jax.grad(loss)(jnp.linspace(-1, 1, w_PN[0, 0].size).reshape(w_PN[0, 0].shape)))


@SLOW
def test_second_derivatives_are_those_of_copy():
    """Of exact messages to the bit of rounding: both cotangents are terms of the sum."""

    def local(fed):
        def loss(x, carrier):
            if fed:
                x, carrier = copy_with_feedback(x, "tp", carrier, compression="none")
            else:
                x = taco_jax.collectives.copy(x, "tp", compression="none")
            return lax.psum(jnp.sum(jnp.sin(x * (1 + lax.axis_index("tp"))) + 0 * carrier), "tp")

        def f(v):
            x = jnp.linspace(0, 1, v.size)
            zeros = to_varying(jnp.zeros_like(x), "tp")
            slope = lambda x: jnp.vdot(jax.grad(loss)(x, zeros), lax.psum(v, "tp"))
            return jax.grad(slope)(x)

        return per_rank(f, 4, invarying_out=True)

    v_P = np.random.default_rng(0).normal(size=(4, 24)).astype(np.float32)
    ours, theirs = (np.asarray(local(fed)(v_P)) for fed in (True, False))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_bad_arguments_are_named():
    call = lambda carrier, **options: per_rank(
        lambda x: copy_with_feedback(lax.psum(x, "tp"), "tp", carrier(x), **options), 4
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"carrier is of shape \(6, 128\): must be x's, \(6, 136\)"):
        call(lambda x: x[..., :128], compression="int4h")(terms(4))
    with pytest.raises(TypeError, match="carrier is float: must be one float array"):
        call(lambda x: 0.0, compression="int4h")(terms(4))
    with pytest.raises(ValueError, match="copy_with_feedback: link='nvlink' knows no errors; it must be 'auto' or"):
        call(lambda x: x, compression=taco_jax.Compression("int4h", link="nvlink"))(terms(4))
    with pytest.raises(ValueError, match="backward_error_feedback=True: link='nvlink' knows no errors"):
        taco_jax.Compression("int4h", link="nvlink", backward_error_feedback=True)
    with pytest.raises(ValueError, match="backward_error_feedback=True: with_product=True knows no errors"):
        taco_jax.Compression("int4h", backward_error_feedback=True, with_product=True)
    with pytest.raises(TypeError, match="backward_error_feedback=None: must be True or False"):
        taco_jax.Compression("int4h", backward_error_feedback=None)
