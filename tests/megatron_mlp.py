"""A column- and a row-parallel layer, sharded by hand as a user's model would, and the same unsharded."""

import jax
import jax.numpy as jnp
import numpy as np
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
