"""Programs that every rank of a mesh runs on its own array, and layers whose sums they are for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from taco_jax.collectives import to_varying
from taco_jax.tensor_parallel import copy_to_tp, reduce_from_tp


def on_every_rank(f, mesh):
    """jit of f, which sees its rank's row; results are stacked."""
    own = lambda *xs: jax.tree.map(lambda y: to_varying(y, "tp")[None], f(*(x[0] for x in xs)))
    return jax.jit(jax.shard_map(own, mesh=mesh, in_specs=P("tp"), out_specs=P("tp")))


def layers(compression, x, ws):
    """Layers in a scan, each computed again in the backward pass: f before the column-parallel product, g after the
    row-parallel one, Megatron's pair."""

    def layer(x, ws):
        w_up, w_down = ws
        y = jax.nn.relu(copy_to_tp(x, "tp", compression) @ w_up) @ w_down
        return x + reduce_from_tp(y, "tp", compression), None

    return lax.scan(jax.checkpoint(layer), x, ws)[0].astype(jnp.float32)


def gradient_of_sum(compression, scale, *ws):
    """Of the sum of what `layers` make of 512 rows of `scale`, by the first weights."""
    x = jnp.ones((512, ws[0].shape[1]), ws[0].dtype) * lax.psum(scale, "tp")
    return jax.grad(lambda x, ws: layers(compression, x, ws).sum(), argnums=1)(x, ws)[0]


def check_gradients(compressions, mesh, most):
    """Value and gradients of three layers with either compression differ by less than `most` of their norms."""

    def gradient(compression, x, *ws):
        # The same on every rank, and typed so.
        first = lax.all_gather(x, "tp", to="invarying")[0]
        value, grads = jax.value_and_grad(lambda ws: layers(compression, first, ws).var())(ws)
        return value, *grads

    keys = jax.random.split(jax.random.key(0), 3)
    shape = lambda key, *dims: (jax.random.normal(key, (mesh.size, *dims)) / 16).astype(jnp.bfloat16)
    args = shape(keys[0], 256, 512), shape(keys[1], 3, 512, 256), shape(keys[2], 3, 256, 512)
    ours, theirs = (on_every_rank(functools.partial(gradient, c), mesh)(*args) for c in compressions)
    for a, b in zip(ours, theirs):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) < most * np.linalg.norm(b)
    assert len(set(np.asarray(ours[0]).tolist())) == 1
