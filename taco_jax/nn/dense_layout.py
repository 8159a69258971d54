"""How a dense layer's global arrays lie on the mesh: which mesh axes each dim of x and of y is split over.

On Explicit axes the type of x says it, on Auto axes nobody does: there the batch is taken to be split over every axis
but the tensor-parallel one, unless the layer's `batch_axes` says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P


def activation_specs(dense, x: jax.Array, mesh) -> tuple[P, P]:
    """Specs of x and y of a `Dense` layer. One of the two has its features split over the axis.

    The other is the same on all devices of the axis, or split along sequence_dim.

    Raises:
      ValueError: a size that the mesh does not divide, or a type that asks for gathering x.
    """
    last = x.ndim - 1
    sequence = sequence_of(dense, x, range(last))
    dims = other_axes(dense, x, mesh, summed=(last,), split=last, sequence=sequence)
    split, whole = list(dims), list(dims)
    split[last] = [dense.axis]
    if sequence is not None:
        whole[sequence] = [*dims[sequence], dense.axis]
    x_dims, y_dims = (whole, split) if dense.kind == "column" else (split, whole)
    return spec_of(x_dims), spec_of(y_dims)


def other_axes(
    dense, x: jax.Array, mesh, *, summed: Sequence[int], split: int, sequence: int | None, shared: Sequence[int] = ()
) -> list[list[str]]:
    """The mesh axes of each dim of x but for the layer's own.

    summed: the dims that the product sums over, of which a row layer splits `split`. shared: those that the kernel has
    too and keeps. The batch is the first of the others.

    Raises:
      ValueError: a size that the mesh does not divide, or a type that asks for gathering x.
    """
    dims = []
    for d, axes in enumerate(explicit_axes(x, mesh)):
        if dense.axis in axes and d != (split if dense.kind == "row" else sequence):
            raise ValueError(
                f"{dense.name}(kind={dense.kind!r}): dim {d} of x is split over axis {dense.axis!r} (type "
                f"{jax.typeof(x)}), so it would have to be gathered; use jax.sharding.reshard first"
                f"{'' if d in (*summed, *shared) else f', or sequence_dim={d}'}"
            )
        dims.append([a for a in axes if a != dense.axis])
    for d in summed:
        if dims[d]:
            raise ValueError(
                f"{dense.name}: the features of x are split over {dims[d]} (type {jax.typeof(x)}), which is not the "
                f"layer's axis {dense.axis!r}; use jax.sharding.reshard first"
            )
    batch = next((d for d in range(x.ndim) if d not in (*summed, *shared)), None)
    if dense.batch_axes and batch is None:
        raise ValueError(f"batch_axes={dense.batch_axes}: x has shape {x.shape}, its only dim holds the features")
    if batch is not None:
        if dense.batch_axes is not None:
            dims[batch] = list(dense.batch_axes)
        else:
            used = {a for axes in dims for a in axes}
            axes = zip(mesh.axis_names, mesh.axis_types, strict=True)
            dims[batch] += [a for a, kind in axes if kind == AxisType.Auto and a != dense.axis and a not in used]
        _check_batch(x, batch, dims[batch], mesh)
    if sequence is not None:
        _check_sequence(dense, x, sequence, [*dims[sequence], dense.axis], mesh)
    return dims


def typed(x: jax.Array, mesh, spec: P) -> jax.Array:
    """x with the type that a shard_map over Explicit axes insists on; its value stays."""
    explicit = _explicit(mesh)
    wanted = [tuple(a for a in axes if a in explicit) for axes in _entries(spec, x.ndim)]
    if wanted == explicit_axes(x, mesh):
        return x
    return jax.sharding.reshard(x, NamedSharding(mesh, spec_of(wanted)))


def explicit_axes(x: jax.Array, mesh) -> list[tuple[str, ...]]:
    """The Explicit mesh axes of each dim, as the type of x says."""
    explicit = _explicit(mesh)
    return [tuple(a for a in axes if a in explicit) for axes in _entries(jax.typeof(x).sharding.spec, x.ndim)]


def _explicit(mesh) -> set[str]:
    return {a for a, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit}


def _entries(spec: P, ndim: int) -> list[tuple[str, ...]]:
    entries = [*spec, *[None] * (ndim - len(spec))]
    return [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries]


def spec_of(dims) -> P:
    """The PartitionSpec of dims that are each split over some mesh axes."""
    return P(*(tuple(axes) if axes else None for axes in dims))


def sequence_of(dense, x, valid: Sequence[int]) -> int | None:
    """sequence_dim counted from the front. Raises ValueError for one that is not among the valid dims of x."""
    if dense.sequence_dim is None:
        return None
    if not -x.ndim <= dense.sequence_dim < x.ndim or dense.sequence_dim % x.ndim not in valid:
        found = f"{valid[0]} to {valid[-1]}" if isinstance(valid, range) and valid else list(valid) or "none"
        raise ValueError(
            f"sequence_dim={dense.sequence_dim}: x has shape {x.shape}; valid are {found}, the others hold the features"
        )
    return dense.sequence_dim % x.ndim


def _check_sequence(dense, x, sequence: int, axes, mesh) -> None:
    ranks = math.prod(mesh.shape[a] for a in axes)
    if x.shape[sequence] % ranks:
        raise ValueError(
            f"sequence_dim={dense.sequence_dim}: its size {x.shape[sequence]} (x has shape {x.shape}) must be a "
            f"multiple of {ranks}, the devices of {_sizes(axes, mesh)}"
        )


def _check_batch(x, batch: int, axes, mesh) -> None:
    ranks = math.prod(mesh.shape[a] for a in axes)
    if x.shape[batch] % ranks:
        raise ValueError(
            f"batch_axes={tuple(axes)}: dim {batch} of x has size {x.shape[batch]} (shape {x.shape}) and must be a "
            f"multiple of {ranks}, the devices of {_sizes(axes, mesh)}; name fewer axes, or none: batch_axes=() "
            "gives every device the whole batch"
        )


def _sizes(axes, mesh) -> str:
    return ", ".join(f"{a!r} ({mesh.shape[a]})" for a in axes)
