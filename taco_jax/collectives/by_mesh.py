"""A choice that only the mesh's devices decide, which tracing does not see: it is made when the program is lowered.

Peer memory is addressed by a device's place in the mesh, and a kernel takes that for its number among the process's
devices. While a region is traced its mesh is abstract, and says nothing about the order of its devices.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir

MOST_DEVICES = 8
_choose = Primitive("taco_jax_by_mesh")
_choose.multiple_results = True


def by_mesh(in_order: Callable, else_: Callable | None, *args: jax.Array) -> list[jax.Array]:
    """in_order(*args) where the mesh's devices are the process's own, 0, 1, ... in that order; else else_(*args).

    Both return sequences of arrays of the same types. Where else_ is None, lowering raises ValueError in its place.
    Neither is differentiated.
    """
    first, second = _closed(in_order, args), None if else_ is None else _closed(else_, args)
    if second is not None and _kinds(first) != _kinds(second):
        raise TypeError(f"by_mesh: results differ: {first.out_avals} and {second.out_avals}")
    return _choose.bind(*args, in_order=first, else_=second)


def _closed(f: Callable, args):
    return jax.jit(lambda *args: tuple(f(*args))).trace(*args).jaxpr


def _kinds(jaxpr) -> list[tuple]:
    return [(aval.shape, aval.dtype, aval.manual_axis_type) for aval in jaxpr.out_avals]


@_choose.def_abstract_eval
def _types(*args, in_order, else_):
    return list((else_ or in_order).out_avals)


def order(module_context) -> list[int] | None:
    """The ids of the mesh's devices, row by row; None where nobody knows them yet: of a mesh without devices, and when
    the program is exported to run on others."""
    mesh = getattr(module_context.axis_context, "mesh", None)
    exported = getattr(module_context.lowering_parameters, "for_export", False)
    return None if exported or not isinstance(mesh, jax.sharding.Mesh) else [d.id for d in mesh.devices.flat]


def _lower(ctx, *args, in_order, else_):
    ids = order(ctx.module_context)
    good = ids == list(range(len(ids or ()))) and len(ids) <= MOST_DEVICES
    if not good:
        found = f"the mesh has {'no known devices' if ids is None else f'devices {ids}'}, and peer memory needs the "
        found += f"process's own from 0 on in order, {MOST_DEVICES} at most"
        if else_ is None:
            raise ValueError(
                f"link='nvlink': {found}; use link='auto' or 'nccl', or a mesh of jax.devices() as they come"
            )
        warnings.warn(f"link='auto': {found}: NCCL's collectives are used, whatever was listed", stacklevel=2)
    return mlir.lower_fun(jaxpr_as_fun(in_order if good else else_), multiple_results=True)(ctx, *args)


def _batch(args, dims, *, in_order, else_):
    # A batch of collectives is one after the other in their own words: kernels have no batch.
    if else_ is None:
        raise NotImplementedError("link='nvlink': jax.vmap of a collective; use link='auto' or 'nccl'")
    outs = jax.vmap(jaxpr_as_fun(else_), in_axes=dims)(*args)
    return outs, [0] * len(outs)


mlir.register_lowering(_choose, _lower)
batching.primitive_batchers[_choose] = _batch
