"""How the layers of a state lie on the stages: [n_layers, ...] cut into as many parts as there are stages, or, with
several chunks a stage, [chunks, n_layers / chunks, ...] cut along its second dim.

Stage s of S then holds of every chunk the s-th of S parts, and still nothing is out of order: both are the same array
of layers in another shape. Checkpoints have the first one, whatever the run's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from taco_jax.collectives.manual_region import axis_tuple
from taco_jax.config.schedule import Schedule
from taco_jax.pipeline.send import AXIS


def chunks_of(schedule: Schedule | None) -> int:
    return 1 if schedule is None else schedule.chunks


def specs(params: Mapping[str, Any], schedule: Schedule | None) -> dict[str, Any]:
    """The PartitionSpecs of a decoder's parameters (`decoder.param_specs`), the layers cut over the stages too."""
    if schedule is None:
        return dict(params)
    lead = (AXIS,) if schedule.chunks == 1 else (None, AXIS)
    is_spec = lambda node: isinstance(node, P)
    cut = jax.tree.map(lambda spec: P(*lead, *spec[1:]), params["layers"], is_leaf=is_spec)
    return dict(params, layers=cut)


def in_layers(params: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of `params` with True for the leaves that are stacked over layers, else False."""
    return {name: jax.tree.map(lambda _, name=name: name == "layers", tree) for name, tree in params.items()}


def split(chunks: int) -> Callable[[jax.Array, bool], jax.Array]:
    """f(leaf, whether it is stacked over layers): [n_layers, ...] -> [chunks, n_layers / chunks, ...]."""
    return lambda a, stacked: a.reshape(chunks, -1, *a.shape[1:]) if stacked and chunks > 1 else a


def join(chunks: int) -> Callable[[jax.Array, bool], jax.Array]:
    """The inverse of `split`."""
    return lambda a, stacked: a.reshape(-1, *a.shape[2:]) if stacked and chunks > 1 else a


def joined(chunks: int, mesh: Mesh) -> Callable[[jax.ShapeDtypeStruct, bool], jax.ShapeDtypeStruct]:
    """`join` of a leaf's description: the axes of both dims cut the one that they become."""

    def describe(a: jax.ShapeDtypeStruct, stacked: bool) -> jax.ShapeDtypeStruct:
        if not stacked or chunks == 1:
            return a
        spec = [*a.sharding.spec, *[None] * (len(a.shape) - len(a.sharding.spec))]
        axes = tuple(axis for entry in spec[:2] if entry is not None for axis in axis_tuple(entry))
        shape = (a.shape[0] * a.shape[1], *a.shape[2:])
        return jax.ShapeDtypeStruct(shape, a.dtype, sharding=NamedSharding(mesh, P(axes or None, *spec[2:])))

    return describe
