"""`Split`: a function's passes apart give the values and gradients of `jax.vjp`, and save no more than they must."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from taco_jax.pipeline.residuals import Split

C = jnp.linspace(-1, 1, 32, dtype=jnp.bfloat16).reshape(4, 8)
W = {"kernel": jnp.linspace(-0.5, 0.5, 64).reshape(8, 8), "scale": jnp.linspace(1, 2, 8)}
K = jnp.bfloat16(0.5)


@jax.jit
def masked(c, kernel, seen):
    """A function in a function, with a mask that is made of what is closed over."""
    return jnp.where((jnp.arange(8) < seen)[None], c @ kernel, 0)


def layer(seen):
    def run(c, w, k):
        h = jnp.tanh(masked(c, w["kernel"].astype(c.dtype), seen)) * w["scale"]
        return c + h.astype(c.dtype) * k

    return run


def passes(f, hoist):
    """jit of (y, cotangents of c and w, what is saved, what rounds share) by Split, and of (y, cotangents) by jax."""
    types = {}

    def split(c, w, k, seen, ct):
        own = Split(f(seen), c, w, k, hoist=hoist)
        fixed = own.fixed(w, k)
        y, saved = own.forward(c, w, k, fixed)
        types["saved"] = [(a.shape, str(a.dtype)) for a in own.saved]
        types["fixed"] = [(a.shape, str(a.dtype)) for a in fixed]
        assert types["saved"] == [(a.shape, str(a.dtype)) for a in saved]
        return y, own.backward(saved, w, k, fixed, ct)

    def whole(c, w, k, seen, ct):
        y, pull = jax.vjp(lambda c, w: f(seen)(c, w, k), c, w)
        return y, pull(ct)

    arguments = C, W, K, jnp.int32(6), jnp.ones_like(C)
    return jax.jit(split)(*arguments), jax.jit(whole)(*arguments), types


@pytest.mark.parametrize("hoist", [True, False])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["plain", "checkpoint"])
def test_values_and_gradients_are_those_of_vjp(wrap, hoist):
    got, want, types = passes(lambda seen: wrap(layer(seen)), hoist)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    # A weight as cast is in no array of the rounds if they share it; a mask never is, nor a weight as it is.
    assert (((8, 8), "bfloat16") in types["fixed"]) is hoist
    assert not any(dtype == "bool" for _, dtype in types["saved"])
    assert ((8, 8), "float32") not in types["saved"] and ((8,), "float32") not in types["saved"]
    if wrap is jax.checkpoint:
        assert types["saved"] == [((4, 8), "bfloat16")]  # its own input


def test_rounds_of_a_loop_share_what_depends_on_weights_alone():
    """The cast is an equation of `fixed`, not of a round."""

    def forward(c, w, k, seen):
        own = Split(layer(seen), c, w, k, hoist=True)
        fixed = own.fixed(w, k)
        casts = lambda f, *x: str(jax.make_jaxpr(f)(*x)).count("new_dtype=bfloat16")
        whole = casts(layer(seen), c, w, k)
        return casts(lambda *x: own.forward(*x, fixed)[0], c, w, k), whole

    in_round, whole = forward(C, W, K, jnp.int32(6))
    assert in_round < whole
