"""The custom_vjp around every compressed collective: two messages, forward and backward, with codec and site scale.

| operation | forward message | backward message |
|---|---|---|
| psum (g) | all-reduce, varying -> invarying | none: the cotangent is cast to varying |
| psum with feedback | the same; its result is (sum, error) | as psum's; the error has no cotangent |
| copy (f) | none: x is cast to varying | all-reduce of the cotangent |
| copy with feedback | the same, of (x, carrier) | the same, of their cotangents' sum; its result is (sum, error) |
| psum_scatter | reduce-scatter | all-gather |
| all_gather | all-gather | reduce-scatter (none with to="invarying": each rank keeps its slice) |
| all_to_all | exchange of pieces | the inverse exchange |
| ppermute | permutation | the inverse permutation |

Exponents are read only. The slot's cotangent is the measure float32[2, K]: row 0 of the forward message, row 1 of the
backward one, zero where there is none.

Inside `probed_by` a probe takes the place of all operations that have a slot (`taco_jax.calibration.probe`).
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from taco_jax.collectives import all_reduce, comm_log, gather_permute, hierarchical, nvlink, peer_copy
from taco_jax.collectives.async_collective import AsyncCollective
from taco_jax.collectives.manual_region import Rest, over_rest, permute, to_varying
from taco_jax.collectives.message import Message
from taco_jax.compat import varying_axes

# Saving these by a remat policy keeps a checkpointed layer from repeating its forward communication in the backward
# pass. The wire is not named: it would cost as much memory again.
OUTPUT_NAME, AMAX_NAME = "tp_out", "tp_amax"
REMAT_NAMES = (OUTPUT_NAME, AMAX_NAME)
# Directions without a message.
SILENT = (("psum", "backward"), ("copy", "forward"))

_probe: contextvars.ContextVar[Callable | None] = contextvars.ContextVar("taco_jax_probe", default=None)


@dataclasses.dataclass(frozen=True)
class Operation:
    """The static part of a collective. `dims` and `perm` are the operation's own arguments (see `_run`).

    rest: how the mesh axes over which the region is not manual cut x and y; None where there are none.
    """

    name: str
    forward: Message
    backward: Message
    dims: tuple[int, ...] = ()
    tiled: bool = True
    to: str = "varying"
    perm: tuple[tuple[int, int], ...] = ()
    rest: Rest | None = None

    def result_dims(self, ndim: int) -> list[int | None]:
        """The dim of y that each of x's `ndim` dims becomes, None for one that is cut or joined."""
        if self.tiled:
            return [None if d in self.dims else d for d in range(ndim)]
        y = list(range(ndim))
        if self.name in ("psum_scatter", "all_to_all"):
            y.remove(self.dims[0])
        if self.name in ("all_gather", "all_to_all"):
            y.insert(self.dims[-1], None)
        return [y.index(d) if d in y else None for d in range(ndim)]


@contextlib.contextmanager
def probed_by(probe: Callable) -> Iterator[None]:
    """Operations traced inside the block that have a slot are `probe(operation, x, exponents, slot)`.

    With feedback x is the pair (x, error as it was carried), and so is the result.
    """
    token = _probe.set(probe)
    try:
        yield
    finally:
        _probe.reset(token)


def probing() -> bool:
    """Returns whether this is inside a `probed_by` block."""
    return _probe.get() is not None


def apply(operation: Operation, x, exponents, slot, key):
    """y of the operation; exponents int32[2] or None, slot float32[2, K] or None, key a typed PRNG key or None."""
    probe = _probe.get()
    if probe is not None and slot is not None:
        return probe(operation, x, exponents, slot)
    return _apply(operation, x, exponents, slot, key)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apply(operation: Operation, x, exponents, slot, key):
    return _send(operation, "forward", x, exponents, key)[0]


def _apply_fwd(operation, x, exponents, slot, key):
    y, measure = _send(operation, "forward", x, exponents, key)
    if operation.forward.feedback:
        # The error is not saved: nothing that a backward pass computes again needs it.
        y = checkpoint_name(y[0], OUTPUT_NAME), y[1]
    elif operation.name != "copy":
        y = checkpoint_name(y, OUTPUT_NAME)
    if operation.name != "copy":
        measure = None if slot is None or measure is None else checkpoint_name(measure, AMAX_NAME)
    return y, (measure, exponents, slot, key)


def _apply_bwd(operation, residuals, ct):
    measure, exponents, slot, key = residuals
    dx, backward_measure = _send(operation, "backward", ct, exponents, key)
    if slot is None:
        return dx, None, None, None
    rows = [jnp.zeros_like(slot[0]) if m is None else as_slot(m, slot[0]) for m in (measure, backward_measure)]
    return dx, None, jnp.stack(rows), None


_apply.defvjp(_apply_fwd, _apply_bwd)


# Second derivatives differentiate the rules above, and codes have no derivative: here too the transpose of each
# direction is the other one, to any order.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _send(operation: Operation, direction: str, x, exponents, key) -> tuple[jax.Array, Any]:
    """(result, measure or None) of one direction's message."""
    run = _forward if direction == "forward" else _backward
    if operation.rest is None or (operation.name, direction) in SILENT:
        return run(operation, x, exponents, key)
    run = functools.partial(run, dataclasses.replace(operation, rest=None))
    return over_rest(operation.rest, run, x, exponents, key, forward=direction == "forward")


def _send_fwd(operation, direction, x, exponents, key):
    return _send(operation, direction, x, exponents, key), (exponents, key)


def _send_bwd(operation, direction, residuals, ct):
    other = "backward" if direction == "forward" else "forward"
    result = _send(operation, other, ct[0], *residuals)[0]
    if operation.forward.feedback and direction == "backward":
        result = result[0], jnp.zeros_like(result[1])
    if operation.backward.feedback and direction == "backward":
        result = result[0], result[0]  # both cotangents are terms of the sum
    return result, None, None


_send.defvjp(_send_fwd, _send_bwd)


def send_once(operation: Operation, direction: str, x, exponents=None) -> jax.Array:
    """Returns the result of one direction's message, which nothing differentiates."""
    run = _forward if direction == "forward" else _backward
    return run(operation, x, exponents, None)[0]


def as_slot(measure: jax.Array, row: jax.Array) -> jax.Array:
    extra = varying_axes(measure) - varying_axes(row)
    if extra:
        raise ValueError(
            f"amax slot: it must vary over {sorted(extra)} like the message; shard its device dim over all mesh axes"
        )
    return to_varying(measure.astype(row.dtype), varying_axes(row))


def _forward(op: Operation, x, exponents, key):
    if op.name == "copy":
        return jax.tree.map(lambda x: to_varying(x, op.forward.axis), x), None
    return _run(op.name, op, op.forward, x, exponent=None if exponents is None else exponents[0], key=key)


def _backward(op: Operation, ct, exponents, key):
    exponent = None if exponents is None else exponents[1]
    message = op.backward
    if op.name == "psum":
        return to_varying(ct[0] if op.forward.feedback else ct, message.axis), None
    if op.name == "all_gather" and op.to == "invarying":
        index = lax.axis_index(message.axis)
        n = ct.shape[op.dims[0]] // message.ranks if op.tiled else 1
        piece = lax.dynamic_slice_in_dim(to_varying(ct, message.axis), index * n, n, op.dims[0])
        return (piece if op.tiled else piece.squeeze(op.dims[0])), None
    if op.name == "copy" and message.feedback:
        return _sum_with_feedback(op, message, *ct, exponent=exponent, key=key)
    inverse = {"copy": "psum", "psum_scatter": "all_gather", "all_gather": "psum_scatter"}.get(op.name, op.name)
    if op.name == "all_to_all":
        op = dataclasses.replace(op, dims=op.dims[::-1])
    if op.name == "ppermute":
        op = dataclasses.replace(op, perm=tuple((d, s) for s, d in op.perm))
    return _run(inverse, op, message, ct, exponent=exponent, key=key)


def _sum_with_feedback(op: Operation, message: Message, ct, error, exponent, key):
    """((sum of the cotangents and errors, the errors that it leaves), measure); an exact sum leaves none."""
    # In the cotangent's dtype, so that XLA may add it in the product that the cotangent is.
    ct += error.astype(ct.dtype)
    result, measure = _run("psum", op, message, ct, exponent=exponent, key=key)
    exact = message.codec.exact or message.ranks == 1
    return ((result, jnp.zeros_like(ct)) if exact else result), measure


def _run(name: str, op: Operation, message: Message, x, exponent, key) -> tuple[jax.Array, Any]:
    """One message: (result, measure), or the exact jax.lax collective and no measure where the codec is `none`."""
    if name == "psum":
        return start_all_reduce(message, x, exponent, key).done()
    if name == "psum_scatter":
        return _psum_scatter(op, message, x, exponent, key)
    if name == "all_gather":
        return _all_gather(op, message, x, exponent, key)
    if name == "all_to_all":
        return _all_to_all(op, message, x, exponent, key)
    if message.codec.exact or message.ranks == 1:
        _record_exact("ppermute", message, x, x.size)
        return permute(to_varying(x, message.axis), message.axis, op.perm), None
    nvlink.takes(message, "ppermute", x)
    return gather_permute.ppermute(message, x, exponent, key, op.perm)


def start_all_reduce(message: Message, x, exponent, key) -> AsyncCollective:
    """The sum of x over the ranks (measure None where it is exact), its first hop started."""
    if message.codec.exact or message.ranks == 1:
        return AsyncCollective(_exact_psum(message, x), 1)
    if not message.feedback and peer_copy.takes(message, x):
        return peer_copy.start(message, x, exponent, key)
    takes = not message.feedback and nvlink.takes(message, "all_reduce", x)
    kind = nvlink if takes else hierarchical if message.local else all_reduce
    return kind.start(message, x, exponent, key)


def _exact_psum(message: Message, x):
    """jax.lax.psum, listed in the site table. One rank: the value unchanged, typed invarying."""
    _record_exact("psum", message, x, x.size)
    (y,) = yield [lax.psum(x, message.axis)]
    return y, None


def start_reduce_scatter(message: Message, x_PN) -> AsyncCollective:
    """Row r of the summed x[P, N] for rank r (measure None where it is exact), its first hop started, by NCCL."""
    exact = message.codec.exact or message.ranks == 1
    if exact:
        return AsyncCollective(_exact_scatter(message, x_PN), 1)
    kind = hierarchical if message.local else all_reduce
    return kind.start_reduce_scatter(message, x_PN, None, None)


def _exact_scatter(message: Message, x_PN):
    """jax.lax.psum_scatter, listed in the site table."""
    _record_exact("psum_scatter", message, x_PN, x_PN.size)
    (y_N,) = yield [lax.psum_scatter(x_PN, message.axis)]
    return y_N, None


def _psum_scatter(op, message, x, exponent, key):
    (dim,) = op.dims
    x = to_varying(x, message.axis)
    if message.codec.exact or message.ranks == 1:
        _record_exact("psum_scatter", message, x, x.size)
        return lax.psum_scatter(x, message.axis, scatter_dimension=dim, tiled=op.tiled), None
    x_PN, shape = _split(x, dim, message.ranks, op.tiled)
    takes = nvlink.takes(message, "reduce_scatter", x_PN)
    kind = nvlink if takes else hierarchical if message.local else all_reduce
    y, measure = kind.reduce_scatter(message, x_PN, exponent, key)
    return y.reshape(shape), measure


def _all_gather(op, message, x, exponent, key):
    (dim,) = op.dims
    if message.codec.exact or message.ranks == 1:
        _record_exact("all_gather", message, x, message.ranks * x.size)
        x = to_varying(x, message.axis)
        return lax.all_gather(x, message.axis, axis=dim, tiled=op.tiled, to=op.to), None
    kind = hierarchical if message.local else gather_permute
    separate = lambda x, exponent: kind.all_gather(message, x, exponent, key, op.to)
    if nvlink.takes(message, "all_gather", x):
        y, measure = nvlink.all_gather(message, x, exponent, key, to=op.to, separate=separate)
    else:
        y, measure = separate(x, exponent)
    return _join(y, dim, op.tiled), measure


def _all_to_all(op, message, x, exponent, key):
    split, concat = op.dims
    x = to_varying(x, message.axis)
    if message.codec.exact or message.ranks == 1:
        _record_exact("all_to_all", message, x, x.size)
        return lax.all_to_all(x, message.axis, split, concat, tiled=op.tiled), None
    nvlink.takes(message, "all_to_all", x)  # raises where it is asked for
    x_PN, shape = _split(x, split, message.ranks, op.tiled)
    y_PN, measure = gather_permute.all_to_all(message, x_PN, exponent, key)
    return _join(y_PN.reshape(-1, *shape), concat, op.tiled), measure


def _split(x, dim: int, ranks: int, tiled: bool) -> tuple[jax.Array, tuple[int, ...]]:
    """Cuts `dim` into a piece for each rank: ([P, elements], a piece's shape). Untiled, the dim is P long and goes."""
    size = x.shape[dim]
    if size % ranks or (not tiled and size != ranks):
        rule = f"a multiple of {ranks}" if tiled else f"{ranks}"
        raise ValueError(f"dim {dim} has size {size}: over {ranks} ranks (tiled={tiled}) it must be {rule}")
    if dim:
        parts = x.reshape(*x.shape[:dim], ranks, size // ranks, *x.shape[dim + 1 :])
        parts = jnp.moveaxis(parts, dim, 0)
    else:
        parts = x.reshape(ranks, size // ranks, *x.shape[1:])
    shape = parts.shape[1:]
    if not tiled:
        shape = shape[:dim] + shape[dim + 1 :]
    return parts.reshape(ranks, -1), shape


def _join(y, dim: int, tiled: bool):
    """The inverse: [P, ...] -> concatenated along `dim`, or untiled stacked there."""
    y = jnp.moveaxis(y, 0, dim)
    return y.reshape(*y.shape[:dim], -1, *y.shape[dim + 2 :]) if tiled else y


def _record_exact(op: str, message: Message, x, elements: int) -> None:
    label = message.label
    comm_log.add(
        label.site,
        label.direction,
        op,
        message.axis,
        ranks=message.ranks,
        elements=elements,
        dtype=x.dtype,
        calls=label.calls,
    )
