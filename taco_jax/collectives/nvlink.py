"""The collectives as one kernel each that writes into peers' memory (`pallas_kernels/nvlink`), and when that is taken.

Values are those of the kernels and NCCL collectives of `all_reduce.py` and `gather_permute.py`, bit for
bit, where messages are whole groups of 8 rows of 128; the last few elements of others are summed exactly.

Peer memory is addressed by a device's place in the mesh, and a kernel takes that for its number among the process's
devices. While a region is traced its mesh is abstract, and says nothing about the order of its devices: `by_mesh` is
the choice that is made when the program is lowered.

Dim letters: P ranks, S elements of x, N elements of a message.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir

from pallas_kernels import KernelUnavailableError
from pallas_kernels import nvlink as kernels
from pallas_kernels.dispatch import region_device
from pallas_kernels.formats import round_up
from pallas_kernels.nvlink import hardware
from taco_jax.collectives import all_reduce, comm_log
from taco_jax.collectives.async_collective import AsyncCollective, Hopping
from taco_jax.collectives.manual_region import axis_tuple, mesh_of, to_varying
from taco_jax.collectives.message import Message
from taco_jax.collectives.transport import chunk_elements
from taco_jax.compat import as_varying, barrier, varying_axes
from taco_jax.compression import dispatch


def takes(message: Message, operation: str, x: jax.Array) -> bool:
    """Returns whether a message goes over NVLink in one kernel. operation: all_reduce, reduce_scatter or all_gather of
    x.

    Raises KernelUnavailableError where that is forced and cannot be.
    """
    if message.link == "nccl" or (message.link != "nvlink" and operation not in kernels.OPERATIONS):
        return False
    reason = why_unsupported(message, operation, x)
    asked = message.link == "nvlink"
    found = "nvlink was asked for" if asked else "one kernel over NVLink writes into peers' memory"
    dispatch.note(message.codec, operation, ("nccl", reason) if reason else ("nvlink", found))
    if reason and asked:
        raise KernelUnavailableError(
            f"link 'nvlink' cannot {operation} codec {message.codec.name!r}: {reason}; use link 'auto' or 'nccl'"
        )
    return reason is None


def why_unsupported(message: Message, operation: str, x: jax.Array) -> str | None:
    """Returns why a message takes NCCL, None where it takes NVLink.

    The order of the mesh's devices is not asked for: it is known when the program is lowered.
    """
    device = region_device()
    if (reason := kernels.why_device_unsupported(device)) is not None:
        return reason
    if message.backend not in ("auto", "mosaic"):
        return f"backend {message.backend!r} was asked for, and NVLink kernels are mosaic's"
    if message.link != "nvlink" and (reason := hardware.missing(device.device_kind)) is not None:
        return reason
    if message.local:
        return "it goes in levels, inside hosts and between, and NVLink kernels are for one host"
    if len(axis_tuple(message.axis)) != 1:
        return f"it goes over the axes {message.axis}, and NVLink kernels over one"
    if (reason := dispatch.without_format(message.codec)) is not None:
        return reason
    if message.with_stats:
        return "statistics are counted by the jnp codec"
    sizes = {"all_reduce": _geometry(message, _whole(message, x.size)).per_message, "all_gather": x.size}
    n = sizes.get(operation, x.size // message.ranks)
    fmt = dispatch.to_format(message.codec)
    return kernels.why_unsupported(fmt, operation, str(x.dtype), message.ranks, per_message=n)


def start(message: Message, x: jax.Array, exponent, key) -> AsyncCollective:
    """The sum of x over the axis: varying -> invarying, x's shape and dtype, with the measure of its hops. To the
    caller the kernel is one hop."""
    return AsyncCollective(_all_reduce(message, x, exponent, key), 1)


def _all_reduce(message: Message, x: jax.Array, exponent, key) -> Hopping:
    codec, (axis,) = message.codec, axis_tuple(message.axis)
    x_S = to_varying(x, axis).reshape(-1)
    whole = _whole(message, x.size)
    geometry = _geometry(message, whole)

    def fused(x_S, exponent):
        y, measure = kernels.all_reduce(dispatch.to_format(codec), geometry, x_S, axis, exponent=exponent)
        if whole < x.size:
            tail = lax.psum(x_S[whole:].astype(jnp.float32), axis).astype(x.dtype)
            y = jnp.concatenate([as_varying(y, varying_axes(tail)), tail])
        return y, measure

    def separate(x_S, exponent):
        return all_reduce.start(message, x_S, exponent, key).done()

    y, measure = run(message, fused, separate, (x_S,), exponent=exponent, to="invarying")
    _record(message, "psum", x, geometry, hops=1 if message.in_one_shot else 2)
    if whole < x.size:
        label, n = message.label, x.size - whole
        exact = {"kind": "other", "calls": label.calls}
        comm_log.add(
            label.site,
            label.direction,
            "psum",
            axis,
            ranks=message.ranks,
            elements=n,
            dtype=jnp.dtype(jnp.float32),
            **exact,
        )
    (y,) = yield [y]
    # XLA fuses an addition to the residual stream and the norm behind it, but not with the kernel's rows among them.
    (y,) = barrier(y.reshape(x.shape))
    return y, measure


def reduce_scatter(message: Message, x_PN: jax.Array, exponent, key) -> tuple[jax.Array, jax.Array]:
    """Row r of the summed [P, N] for rank r, x's dtype[N], the own term unquantised."""
    (axis,) = axis_tuple(message.axis)
    p, n = x_PN.shape
    fused = lambda x, exponent: kernels.reduce_scatter(dispatch.to_format(message.codec), x, axis, exponent)
    separate = lambda x, exponent: all_reduce.reduce_scatter(message, x, exponent, key)
    y, measure = run(message, fused, separate, (to_varying(x_PN, axis),), exponent=exponent, to="varying")
    _record(message, "psum_scatter", x_PN, dispatch.Geometry(p * n, p, n), hops=1)
    return y, measure


def all_gather(message: Message, x: jax.Array, exponent, key, to: str, separate) -> tuple[jax.Array, jax.Array]:
    """[...] -> [P, ...]; the own shard is quantised too. separate(x, exponent): the same through NCCL."""
    (axis,) = axis_tuple(message.axis)

    def fused(x, exponent):
        y_PN, measure = kernels.all_gather(dispatch.to_format(message.codec), x.reshape(-1), axis, exponent)
        return y_PN.reshape(-1, *x.shape), measure

    y, measure = run(message, fused, separate, (to_varying(x, axis),), exponent=exponent, to=to)
    whole = jax.ShapeDtypeStruct((message.ranks * x.size,), x.dtype)
    _record(message, "all_gather", whole, dispatch.Geometry(x.size, 1, x.size), hops=1)
    return y, measure


def run(message: Message, fused: Callable, separate: Callable, operands, *, exponent, to: str) -> list[jax.Array]:
    """(result, measure) of fused(*operands, exponent) or of separate, where the mesh is in no order for peer memory; a
    kernel's results come typed as if they were the same on every device."""
    inputs = [*operands] if exponent is None else [*operands, jnp.asarray(exponent, jnp.int32)]
    axes = frozenset().union(*map(varying_axes, inputs))
    of_result = axes - {*axis_tuple(message.axis)} if to == "invarying" else axes

    def typed(run):
        def traced(*inputs):
            y, measure = run(*inputs, *([None] if exponent is None else []))
            measure = measure.reshape(-1)
            return as_varying(y, sorted(of_result)), as_varying(measure, sorted(axes))

        return traced

    def aside(*inputs):
        with contextlib.ExitStack() as stack:
            for quiet in (comm_log.record, dispatch.record):
                stack.enter_context(quiet())
            return typed(separate)(*inputs)

    return by_mesh(typed(fused), None if message.link == "nvlink" else aside, *inputs)


def _whole(message: Message, size: int) -> int:
    """Returns how many of `size` elements are in whole groups of 8 rows."""
    group = _group(message)
    return size // group * group


def _group(message: Message) -> int:
    return 8 * max(128, message.codec.block)


def _geometry(message: Message, size: int) -> dispatch.Geometry:
    """The messages of an all-reduce of `size` elements: one, or one for each owner."""
    size = max(1, size)
    if message.in_one_shot:
        return dispatch.Geometry(size, 1, size)
    n = round_up(chunk_elements(message.codec, size, message.ranks), _group(message))
    return dispatch.Geometry(size, message.ranks, n)


def _record(message: Message, op: str, x, geometry: dispatch.Geometry, hops: int) -> None:
    """Lists what is written into peers' memory: in each hop as many frames as the result has in messages."""
    frames = message.ranks * kernels.message_bytes(dispatch.to_format(message.codec), geometry)
    message.record(op, x.size, x.dtype, [("custom-call", frames)] * hops)


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
    mesh = mesh_of(module_context)
    exported = getattr(module_context.lowering_parameters, "for_export", False)
    return None if exported or mesh is None else [d.id for d in mesh.devices.flat]


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
