"""Every collective of a varying x, and what tests of their gradients compare."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from shards import per_rank

from taco_jax import SiteScales


def ranks():
    return lax.axis_size("tp")


def cut(x):
    """[8, P, 48 / P]: a dim of one slice for each rank."""
    return x.reshape(8, ranks(), -1)


# Every collective of a varying x as f(module, x, **codec), and whether its result is the same on all ranks.
COLLECTIVES = {
    "psum": (lambda m, x, **kw: m.psum(x, "tp", **kw), True),
    "psum_scatter": (lambda m, x, **kw: m.psum_scatter(x, "tp", scatter_dimension=1, tiled=True, **kw), False),
    "psum_scatter_untiled": (lambda m, x, **kw: m.psum_scatter(cut(x), "tp", scatter_dimension=1, **kw), False),
    "all_gather": (lambda m, x, **kw: m.all_gather(x, "tp", axis=1, tiled=True, **kw), False),
    "all_gather_untiled": (lambda m, x, **kw: m.all_gather(x, "tp", axis=-1, **kw), False),
    "all_gather_invarying": (lambda m, x, **kw: m.all_gather(x, "tp", axis=1, to="invarying", **kw), True),
    "all_gather_tiled_invarying": (lambda m, x, **kw: m.all_gather(x, "tp", tiled=True, to="invarying", **kw), True),
    "all_to_all": (lambda m, x, **kw: m.all_to_all(x, "tp", 1, 0, tiled=True, **kw), False),
    "ppermute": (lambda m, x, **kw: m.ppermute(x, "tp", [(0, 1)], **kw), False),
}  # fmt: skip


def weights(y):
    """A cotangent that differs everywhere and, where y varies, on every rank."""
    w = jnp.cos(jnp.arange(y.size, dtype=jnp.float32) * 0.37).reshape(y.shape).astype(y.dtype)
    return w if not jax.typeof(y).manual_axis_type.varying else w * (1 + lax.axis_index("tp").astype(y.dtype))


def relative(g, expected):
    g, expected = np.float64(g), np.float64(expected)
    return np.linalg.norm(g - expected) / np.linalg.norm(expected)


def x_of(ranks, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).normal(size=(ranks, 8, 48)).astype(dtype)


def slots_of(f, ranks, x_P, exponents, width=1, **options):
    """The slot's cotangent on each rank of the sum of all losses f(x, scales), float32[P, 2, K], and x's."""

    def local(x, slot):
        g = jax.grad(lambda slot, x: f(x, SiteScales(exponents, slot)), argnums=(0, 1))(slot, x)
        return g

    slots = np.zeros((ranks, 2, width), np.float32)
    return jax.tree.map(np.asarray, per_rank(local, ranks, **options)(x_P, slots))
