"""Runs one function on every rank of an emulated mesh: leading dim of inputs and outputs = rank."""

import jax
import numpy as np
from helpers import make_mesh
from jax.sharding import PartitionSpec as P


def per_rank(f, ranks: int, *, axis="tp", invarying_out: bool = False, dp: int = 1):
    """jit of f over `ranks` devices. f sees its rank's row of each input; outputs are stacked, or the same everywhere.

    dp: more ranks on a second axis, which a tuple axis ("dp", "tp") joins.
    """
    mesh = make_mesh(dp=dp, tp=ranks)
    spec = P(("dp", "tp")) if dp > 1 else P(axis)

    def local(*args):
        out = f(*jax.tree.map(lambda x: x[0], args))
        return out if invarying_out else jax.tree.map(lambda y: y[None], out)

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=P() if invarying_out else spec))


def bits_of_every_device(y) -> list[bytes]:
    """The bytes that each device holds: those of a replicated array must be equal, which a plain read cannot see."""
    return [np.asarray(shard.data).tobytes() for shard in y.addressable_shards]
