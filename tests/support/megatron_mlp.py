"""A column- and a row-parallel layer, sharded by hand as a user's model would, and the same unsharded."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gradients import relative
from helpers import make_mesh
from jax import lax
from jax.sharding import PartitionSpec as P

from taco_jax.nn import tensor_parallel as tp

D, F, L = 32, 64, 24
EXACT = jax.lax.Precision.HIGHEST


def mlp_parameters(seed=0):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: (rng.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)
    return {"up": normal(D, F), "b_up": normal(F), "down": normal(F, D), "b_down": normal(D), "norm": 1 + normal(D)}


SPECS = {"up": P(None, "tp"), "b_up": P("tp"), "down": P("tp"), "b_down": P(), "norm": P()}


def mlp(w, x, compression, scales=None, sequence_dim=None):
    """Column- then row-parallel, with a replicated weight before it whose gradient must be whole."""
    norm = tp.to_varying(w["norm"], "tp") if sequence_dim is not None else w["norm"]
    scales = scales or {"up": None, "down": None}
    options = {"axis": "tp", "compression": compression, "sequence_dim": sequence_dim, "precision": EXACT}
    y = tp.column_dense(x * norm, w["up"], w["b_up"], scales=scales["up"], site="up", **options)
    b_down = tp.to_varying(w["b_down"], "tp") if sequence_dim is not None else w["b_down"]
    return x + tp.row_dense(jnp.tanh(y), w["down"], b_down, scales=scales["down"], site="down", **options)


def mlp_unsharded(w, x):
    y = jnp.tanh(jnp.matmul(x * w["norm"], w["up"], precision=EXACT) + w["b_up"])
    return x + jnp.matmul(y, w["down"], precision=EXACT) + w["b_down"]


def x_mlp():
    return np.random.default_rng(9).normal(size=(L, D)).astype(np.float32)


def mlp_program(ranks, compression, sequence_parallel):
    def local(w, x):
        y = mlp(w, x, compression, sequence_dim=0 if sequence_parallel else None)
        loss = jnp.mean(y**2)
        return lax.pmean(loss, "tp") if sequence_parallel else loss

    x_spec = P("tp") if sequence_parallel else P()
    step = jax.shard_map(
        jax.value_and_grad(local, argnums=(0, 1)), mesh=make_mesh(tp=ranks), in_specs=(SPECS, x_spec),
        out_specs=(P(), (SPECS, x_spec)),
    )  # fmt: skip
    return jax.jit(step)


@functools.cache
def unsharded_gradients():
    """(loss, its gradients by the parameters and x)."""
    f = jax.value_and_grad(lambda w, x: jnp.mean(mlp_unsharded(w, x) ** 2), argnums=(0, 1))
    return jax.jit(f)(mlp_parameters(), x_mlp())


def check_pair(codec, ranks, sequence_parallel):
    w, x = mlp_parameters(), x_mlp()
    expected_loss, expected = unsharded_gradients()
    loss, grads = mlp_program(ranks, codec, sequence_parallel)(w, x)
    names = [*w, "x"]
    leaves = dict(zip(names, [*(grads[0][k] for k in w), grads[1]]))
    wanted = dict(zip(names, [*(expected[0][k] for k in w), expected[1]]))
    norm = np.sqrt(sum(np.sum(np.float64(g) ** 2) for g in wanted.values()))
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-6 if codec is None else 0.01)
    for name in names:
        g, ref = np.float64(leaves[name]), np.float64(wanted[name])
        if codec is None:
            assert np.linalg.norm(g - ref) <= 1e-5 * max(np.linalg.norm(ref), 1e-4 * norm), name
        else:
            assert relative(g, ref) <= 0.15, name
            assert np.linalg.norm(g) / np.linalg.norm(ref) == pytest.approx(1, abs=0.05), name
