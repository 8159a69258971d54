"""Rules that the collectives set of the region they are traced in, and the casts between varying and invarying values.

Every differentiable entry needs `jax.shard_map` that is manual over ALL mesh axes, with check_vma=True. Without the
type system the same custom_vjp gives weight gradients that are exactly 1/P of the truth while every forward test
passes; in a partly manual region XLA gathers the operand over the other axes first. So both raise.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from taco_jax.compat import as_varying, varying_axes

AxisName = str | tuple[str, ...]


def axis_tuple(axis: AxisName) -> tuple[str, ...]:
    return (axis,) if isinstance(axis, str) else tuple(axis)


def in_manual_region(axis: AxisName) -> bool:
    """True inside a shard_map that is manual over `axis`."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return all(a in manual for a in axis_tuple(axis))


def check_axis(axis: AxisName, entry: str) -> None:
    """Raises TypeError for what is no name of a mesh axis, and no tuple of them."""
    if not isinstance(axis, str | tuple) or not all(isinstance(a, str) for a in axis):
        raise TypeError(f"{entry}: axis_name={axis!r}: must be the name of a mesh axis or a tuple of them")


def check_region(axis: AxisName, entry: str) -> None:
    """Raises ValueError unless `entry` is traced where its gradient is right."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = axis_tuple(axis)
    missing = [a for a in axes if a not in mesh.manual_axes]
    if missing:
        raise ValueError(
            f"{entry}: axis {missing[0]!r} is not a manual mesh axis here (manual: "
            f"{sorted(mesh.manual_axes) or 'none'}); call it inside jax.shard_map(f, mesh=mesh, in_specs=..., "
            "out_specs=...) over a mesh that has this axis"
        )
    rest = [a for a in mesh.axis_names if a not in mesh.manual_axes and mesh.shape[a] > 1]
    if rest:
        raise ValueError(
            f"{entry}: the region is manual over {sorted(mesh.manual_axes)} but not over {rest}; XLA would gather the "
            "operand over them first. Leave axis_names out of jax.shard_map, so that it is manual over all mesh axes"
        )
    if not all(a in varying_axes(lax.axis_index(a)) for a in axes):
        raise ValueError(
            f"{entry}: the region was made with check_vma=False, where gradients of replicated weights are divided "
            "by the number of ranks; use jax.shard_map(..., check_vma=True), the default"
        )


def to_varying(x: jax.Array, axes: AxisName | frozenset[str]) -> jax.Array:
    """x typed varying over `axes` too; a no-op where it is already. Its transpose is a psum over the added axes."""
    return as_varying(x, axis_tuple(axes) if isinstance(axes, str | tuple) else axes)


def permute(x: jax.Array, axis: AxisName, perm: Sequence[tuple[int, int]]) -> jax.Array:
    """lax.ppermute in which ranks count as lax.axis_index(axis) does, whatever the order of a tuple of axes.

    Every other collective follows the tuple; lax.ppermute follows the mesh (jax 0.10, silently) or refuses a tuple in
    another order (0.11 and newer).
    """
    axes = axis_tuple(axis)
    in_mesh = tuple(sorted(axes, key=jax.sharding.get_abstract_mesh().axis_names.index))
    if in_mesh != axes:
        place = np.arange(lax.axis_size(axes)).reshape([lax.axis_size(a) for a in in_mesh])
        place = place.transpose([in_mesh.index(a) for a in axes]).ravel().tolist()
        perm = [(place[s], place[d]) for s, d in perm]
    return lax.ppermute(x, in_mesh if len(axes) > 1 else axes[0], perm)


_same = Primitive("taco_jax_same_on_all_ranks")


def same_on_all_ranks(x: jax.Array, axis: AxisName) -> jax.Array:
    """x, invarying over `axis`: the cast that jax.lax does not have. The result of a gather among groups of ranks is
    typed varying over the axis, whatever the groups sent each other. The caller knows that its bits are the same on
    every rank: nothing checks it.

    It has no derivative: it belongs into rules that have their own.
    """
    # The type is that of a sum, which nobody computes.
    (like,) = jax.jit(lambda x: lax.psum(x, axis)).trace(x).jaxpr.out_avals
    return _same.bind(x, like=like, axis=axis)


@_same.def_abstract_eval
def _type(_, *, like, axis):
    return like


def _batch(args, dims, *, like, axis):
    return same_on_all_ranks(args[0], axis), dims[0]


mlir.register_lowering(_same, lambda ctx, x, *, like, axis: [x])
batching.primitive_batchers[_same] = _batch
