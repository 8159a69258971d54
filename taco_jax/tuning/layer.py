"""The layer that is timed: a product, a collective of its result, a normalisation.

Dim letters: T tokens, K inner dimension, D width.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from taco_jax.compression.compression import Compression
    from taco_jax.tuning.settings import TuneConfig

TARGET_BYTES = 1 << 28  # sent by one timed call, in as many layers as that takes
LAYERS = 100  # of one timed call at most
WIDTH, INNER = 4096, 1024  # of a layer's result, and the inner dimension of its product, at most
FREE = "free"  # the layer without a collective


@functools.cache
def program(mesh, layers: int, operation: str, compression: Compression | str | None):
    """Returns the jit of x [ranks, T, K], w [ranks, K, D] -> [ranks, T, K] after so many layers, each of the result of
    the one before: launching the program hardly counts."""
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.sharding import PartitionSpec as P

    import taco_jax
    from taco_jax.collectives import to_varying

    ranks = mesh.devices.size

    def send(y_TD):
        part = y_TD[: len(y_TD) // ranks]
        if compression == FREE:
            return y_TD if operation != "psum_scatter" else part
        if operation == "psum":
            return to_varying(taco_jax.psum(y_TD, "tp", compression=compression), "tp")
        if operation == "psum_scatter":
            return taco_jax.psum_scatter(y_TD, "tp", tiled=True, compression=compression)
        if operation == "all_gather":
            return taco_jax.all_gather(part, "tp", tiled=True, compression=compression)
        perm = [(r, (r + 1) % ranks) for r in range(ranks)]
        return taco_jax.ppermute(y_TD, "tp", perm, compression=compression)

    def layer(_, carry):
        x_TK, w_KD = carry
        z = send(x_TK @ w_KD)
        # Normalised, so that values stay finite, and every value is read; then as wide and long as x.
        scale = lax.rsqrt(jnp.square(z.astype(jnp.float32)).mean(-1, keepdims=True) + 1e-6).astype(z.dtype)
        z = (z * scale).reshape(len(z), -1, x_TK.shape[1]).mean(1).astype(x_TK.dtype)
        return jnp.tile(z, (len(x_TK) // len(z), 1)), w_KD

    def local(x_1TK, w_1KD):
        return lax.fori_loop(0, layers, layer, (x_1TK[0], w_1KD[0]))[0][None]

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("tp"), out_specs=P("tp")))


def layers_of_call(mesh, nbytes: int) -> int:
    """Returns how many layers a timed call has, for a message of so many bytes."""
    return 2 if mesh.devices.flat[0].platform == "cpu" else max(2, min(LAYERS, TARGET_BYTES // nbytes))


def shape_of(elements: int, ranks: int) -> tuple[int, int, int]:
    """Returns (T, K, D) of a layer whose result has so many elements: T tokens, which the ranks divide, of width D.

    K is the inner dimension. Of the widest layer that leaves out at most 1/32 of them, else of one of width 1.
    """
    width = WIDTH
    tokens = lambda: elements // width // ranks * ranks
    while width > 1 and 32 * (elements - tokens() * width) > elements:
        width //= 2
    return max(ranks, tokens()), min(width, INNER), width


def arguments(config: TuneConfig, mesh, nbytes: int):
    """Returns the shapes of x [ranks, T, K] and w [ranks, K, D] on the mesh."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    ranks = mesh.devices.size
    tokens, inner, width = shape_of(nbytes // jnp.dtype(config.dtype).itemsize, ranks)
    shapes = (ranks, tokens, inner), (ranks, inner, width)
    return [jax.ShapeDtypeStruct(shape, config.dtype, sharding=NamedSharding(mesh, P("tp"))) for shape in shapes]


def tensors(config: TuneConfig, mesh, nbytes: int):
    """Returns values of `arguments`, normal ones: the weights so that a product's are as large as x's."""
    import jax

    x, w = arguments(config, mesh, nbytes)

    def make():
        keys = jax.random.split(jax.random.key(0))
        return jax.random.normal(keys[0], x.shape, x.dtype), jax.random.normal(keys[1], w.shape, w.dtype) * w.shape[
            1
        ] ** -0.5

    return jax.jit(make, out_shardings=(x.sharding, w.sharding))()
