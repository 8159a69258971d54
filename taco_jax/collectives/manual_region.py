"""Rules that the collectives set of the region they are traced in, and the casts between varying and invarying values.

Every differentiable entry needs `jax.shard_map` with check_vma=True. Without the type system the same custom_vjp gives
weight gradients that are exactly 1/P of the truth while every forward test passes, so it raises.

In a region that is manual over some axes only XLA cannot partition the work on a message: it gathers the operand over
the rest first. There each message brings a shard_map of its own over the rest (`over_rest`), which cuts dims that the
message leaves alone. On Explicit axes the type of the operand says which. On Auto axes nothing does: the first dim
that can be cut is, which costs nothing where it is the batch and XLA has split it so, and moves the operand where not.
"""

from __future__ import annotations

import contextvars
import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

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


def other_axes() -> list[str]:
    """The mesh axes of more than one device over which the region is not manual."""
    mesh = jax.sharding.get_abstract_mesh()
    return [a for a in mesh.axis_names if a not in mesh.manual_axes and mesh.shape[a] > 1]


def check_region(axis: AxisName, entry: str, *, partly: bool = False) -> None:
    """Raises ValueError unless `entry` is traced where its gradient is right.

    partly: the region need not be manual over all mesh axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = axis_tuple(axis)
    missing = [a for a in axes if a not in mesh.manual_axes]
    if missing:
        raise ValueError(
            f"{entry}: axis {missing[0]!r} is not a manual mesh axis here (manual: "
            f"{sorted(mesh.manual_axes) or 'none'}); call it inside jax.shard_map(f, mesh=mesh, in_specs=..., "
            "out_specs=...) over a mesh that has this axis"
        )
    rest = other_axes()
    if rest and not partly:
        raise ValueError(
            f"{entry}: the region is manual over {sorted(mesh.manual_axes)} but not over {rest}; XLA would gather the "
            "operand over them first. Leave axis_names out of jax.shard_map, so that it is manual over all mesh axes"
        )
    if not all(a in varying_axes(lax.axis_index(a)) for a in axes):
        raise ValueError(
            f"{entry}: the region was made with check_vma=False, where gradients of replicated weights are divided "
            "by the number of ranks; use jax.shard_map(..., check_vma=True), the default"
        )


@dataclasses.dataclass(frozen=True)
class Rest:
    """How a message's operand x and result y are cut over the axes that the region is not manual over. Hashable."""

    axes: tuple[str, ...]
    x: P
    y: P

    def piece(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of one device's piece of an x of this shape."""
        sizes = jax.sharding.get_abstract_mesh().shape
        cuts = [math.prod(sizes[a] for a in _names(entry)) for entry in self.x]
        return tuple(n // cut for n, cut in zip(shape, cuts, strict=True))


def cut_over_rest(entry: str, x: jax.Array, dims: Sequence[int | None]) -> Rest | None:
    """How the axes over which the region is not manual cut x; None where there are none, in most regions.

    dims: the dim of y that each dim of x becomes, None for those that the message needs whole.

    Raises:
      ValueError: the type of x says that one of those is split over an Explicit axis.
    """
    if not (rest := other_axes()):
        return None
    mesh, spec = jax.sharding.get_abstract_mesh(), jax.typeof(x).sharding.spec
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    given = [*spec, *[None] * (x.ndim - len(spec))]
    cuts = [[a for a in _names(names) if a in rest and types[a] == AxisType.Explicit] for names in given]
    for d, axes in enumerate(cuts):
        if axes and dims[d] is None:
            raise ValueError(
                f"{entry}: dim {d} of x is split over {axes} (type {jax.typeof(x)}), and this call needs it whole; "
                "use jax.sharding.reshard first"
            )
    for axis in rest:
        # A dim that is not a multiple stays whole; so does x where no dim is.
        fits = lambda d, axis=axis: x.shape[d] % math.prod(mesh.shape[a] for a in [*cuts[d], axis]) == 0
        found = next((d for d in range(x.ndim) if dims[d] is not None and x.shape[d] > 1 and fits(d)), None)
        if types[axis] == AxisType.Auto and found is not None:
            cuts[found].append(axis)
    y = [None] * (1 + max((d for d in dims if d is not None), default=-1))
    for d, axes in zip(dims, cuts, strict=True):
        if d is not None:
            y[d] = tuple(axes) or None
    # Axes of one device too: XLA of jax 0.11 aborts where a region in a region leaves any axis out.
    axes = tuple(a for a in mesh.axis_names if a not in mesh.manual_axes)
    return Rest(axes, P(*(tuple(axes) or None for axes in cuts)), P(*y))


def over_rest(rest: Rest, run: Callable, x: jax.Array, exponents, key, *, forward: bool):
    """(result, measure or None) of `run(x, exponents, key)`, traced where the region is manual over all axes.

    forward: x is cut as `Rest.x` says and the result as `Rest.y`; else the other way round. The measure is that of all
    pieces. It has no derivative: it belongs into rules that have their own.
    """
    spec, result = (rest.x, rest.y) if forward else (rest.y, rest.x)
    cut = tuple(a for names in rest.x for a in _names(names))

    def local(x, exponents, key):
        if key is not None and cut:
            key = jax.random.fold_in(to_varying(key, cut), lax.axis_index(cut))
        y, measure = run(x, exponents, key)
        if measure is not None and cut:
            measure = to_varying(measure, cut)
            # A reduction may drop a NaN from a maximum, never an infinity.
            largest = lax.pmax(jnp.where(jnp.isnan(measure[:1]), jnp.inf, measure[:1]), cut)
            measure = jnp.concatenate([largest, lax.psum(measure[1:], cut)]) if measure.size > 1 else largest
        return y, measure

    arguments = (x, exponents, key)
    in_specs = tuple(None if a is None else s for a, s in zip(arguments, (spec, P(), P()), strict=True))
    sharded = jax.shard_map(local, in_specs=in_specs, out_specs=(result, P()), axis_names=set(rest.axes))
    traced = jax.jit(sharded).trace(*arguments)
    outputs = _whole.bind(*jax.tree.leaves(arguments), jaxpr=traced.jaxpr)
    return jax.tree.unflatten(jax.tree.structure(traced.out_info), outputs)


# A region in a region that nothing takes apart: where jax.lax.scan looks for what it can compute once for all rounds,
# it would split off the region's constants and give them shardings that are not valid there.
_whole = Primitive("taco_jax_region_over_the_rest")
_whole.multiple_results = True


@_whole.def_abstract_eval
def _types(*_, jaxpr):
    return jaxpr.out_avals


def _batch_whole(args, dims, *, jaxpr):
    traced = jax.jit(jax.vmap(jaxpr_as_fun(jaxpr), in_axes=tuple(dims))).trace(*args)
    outputs = _whole.bind(*args, jaxpr=traced.jaxpr)
    return outputs, [0] * len(outputs)


# The mesh of the region around the one that is being lowered, whose own has no devices.
_around: contextvars.ContextVar[jax.sharding.Mesh | None] = contextvars.ContextVar("around", default=None)


def _lower_whole(ctx, *args, jaxpr):
    token = _around.set(mesh_of(ctx.module_context))
    try:
        return mlir.lower_fun(jaxpr_as_fun(jaxpr))(ctx, *args)
    finally:
        _around.reset(token)


def mesh_of(module_context) -> jax.sharding.Mesh | None:
    """The mesh of the region that is being lowered, with its devices; None where nobody knows them."""
    mesh = getattr(module_context.axis_context, "mesh", None)
    return mesh if isinstance(mesh, jax.sharding.Mesh) else _around.get()


mlir.register_lowering(_whole, _lower_whole)
batching.primitive_batchers[_whole] = _batch_whole


def _names(entry) -> tuple[str, ...]:
    """The axes of one entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


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
