"""`Probe`: an exact message that measures what candidate codecs would make of it, and what their errors would cost.

A probed message sends exact values. What is measured leaves by the cotangent of its slot float32[2, K], row 0 of the
forward message, row 1 of the backward one, as sums over what this device has:

    x    the values that a rank hands in: its terms of a sum, its shard of a gather
    y    the result, e = y(codec) - y of each candidate, g the gradient of the loss at y
    fed  g of an error that the next sum takes along: it passes one sublayer only, so that g is the gradient at y less
         the gradient at the next sum (`taco_jax.models.projections`), which comes back as the cotangent of the error

Squares of g e predict the rise of the loss, by a second-order expansion at the exact model with the Fisher matrix in
the place of the Hessian, of which errors that know nothing of each other need the diagonal (docs/plans.md):

    rise = 1/2 sum over elements of E[g^2 e^2]

Dims: K columns, C channels (the last dim).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.formats import ELEMENTS
from taco_jax.codec import Codec, as_codec, tah
from taco_jax.codec.block_scale import ceil_log2
from taco_jax.collectives import to_varying
from taco_jax.collectives.vjp import SILENT, Operation, as_slot, send_once
from taco_jax.compat import varying_axes

EXACT = as_codec("none")
# The first column of a slot is a maximum where slots of several uses are joined; here it is nothing.
HEAD = ("unused", "values", "square", "fourth", "results", "signal")
"""Sums of one message: numbers of x and of y, x^2, x^4, y^2."""
OF_CODEC = ("noise", "diagonal", "product", "diagonal_fed", "product_fed")
"""Sums for each candidate: e^2; g^2 e^2 by element; (g . e)^2 by token; both with g as of feedback."""


@dataclasses.dataclass(frozen=True)
class Probe:
    """Call it in the place of an operation (`taco_jax.collectives.vjp.probed_by`).

    codecs: candidates. injected: the codec whose error a message gets where its switch is on, None for no switches.
    before: the codec of the sum before one with feedback: its error is part of what candidates are measured on, since
      they send it. exponent: of site scales; None: by the largest value, as a run calibrates them.
    """

    codecs: tuple[Codec, ...]
    injected: Codec | None = None
    before: Codec = as_codec("int5h")
    exponent: int | None = None

    def width(self, channels: int) -> int:
        """Returns K, the columns of a slot."""
        return len(HEAD) + len(OF_CODEC) * len(self.codecs) + channels

    def read(self, row: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], np.ndarray]:
        """Returns the columns [..., K] of a row as (HEAD by name, OF_CODEC by name [..., candidates], x^2 [..., C])."""
        head, rest = row[..., : len(HEAD)], row[..., len(HEAD) :]
        size = len(OF_CODEC) * len(self.codecs)
        of_codec = rest[..., :size].reshape(*rest.shape[:-1], len(self.codecs), len(OF_CODEC))
        by_name = lambda names, values: {name: values[..., i] for i, name in enumerate(names)}
        return by_name(HEAD, head), by_name(OF_CODEC, of_codec), rest[..., size:]

    def __call__(self, operation: Operation, x, switches: jax.Array, slot: jax.Array):
        """Returns the exact y; with feedback, of x and the error of the sum before, (exact sum of x, the next error).

        switches: int32[2], 1 where the forward or the backward message gets the error of `injected`.
        """
        return _probed(self, operation, x, switches, slot)

    def _row(self, operation: Operation, direction: str, x, y, width: int, error=None, g=None, g_fed=None) -> jax.Array:
        """Returns the measures float32[width] of a message that made y of x.

        error: of the sum before, which is sent with x. g, g_fed: None where there is none.
        """
        x32, y32 = x.astype(jnp.float32), y.astype(jnp.float32)
        squares = jnp.square(x32)
        head = [0.0, x.size, jnp.sum(squares), jnp.sum(jnp.square(squares)), y.size, jnp.sum(jnp.square(y32))]
        columns = []
        x_sent, y_exact = x, y32
        if error is not None:
            x_sent = x + error
            y_exact = self.sent(operation, direction, EXACT, x_sent).astype(jnp.float32)
        for codec in self.codecs:
            lost = self.sent(operation, direction, codec, x_sent).astype(jnp.float32) - y_exact
            columns += [jnp.sum(jnp.square(lost)), *_felt(lost, g), *_felt(lost, g_fed)]
        channels = jnp.sum(squares, axis=tuple(range(x.ndim - 1)))
        vary = lambda value: to_varying(jnp.asarray(value, jnp.float32), _axes(x, y, g))
        row = jnp.stack([vary(value) for value in (*head, *columns)])
        row = jnp.concatenate([row, vary(channels)])
        if row.size != width:
            raise ValueError(f"probe: a slot of {width} columns, of {x.shape[-1]} channels must have {row.size}")
        return row

    def sent(self, operation: Operation, direction: str, codec: Codec, x, *, feedback: bool = False):
        """Returns the result of one direction's message in another codec, flat; with feedback (result, error)."""
        change = lambda m: dataclasses.replace(m, codec=EXACT, feedback=False, with_stats=False, local=0, between=None)
        plain = dataclasses.replace(operation, forward=change(operation.forward), backward=change(operation.backward))
        message = dataclasses.replace(getattr(plain, direction), codec=codec.of(x.shape), feedback=feedback)
        exponents = None
        if not codec.exact and codec.scale in ("ue5m3", "site"):
            exponents = jnp.full((2,), self._exponent(codec, x), jnp.int32)
        return send_once(dataclasses.replace(plain, **{direction: message}), direction, x, exponents)

    def _exponent(self, codec: Codec, x: jax.Array) -> jax.Array | int:
        if self.exponent is not None:
            return self.exponent
        maximum = (tah.HIGH if codec.mixed else ELEMENTS[codec.element]).maximum
        peak = jnp.max(jnp.abs(x.astype(jnp.float32))) / maximum
        peak = lax.pmax(peak, tuple(varying_axes(peak))) if varying_axes(peak) else peak
        return ceil_log2(jnp.maximum(peak, 2.0**-126))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _probed(probe: Probe, operation: Operation, x, switches, slot):
    return _probed_fwd(probe, operation, x, switches, slot)[0]


def _probed_fwd(probe, operation, x, switches, slot):
    fed = operation.forward.feedback
    own, error = x if fed else (x, None)
    exact = y = probe.sent(operation, "forward", EXACT, own)
    if probe.injected is not None and _speaks(operation, "forward"):
        y = _switched(y, probe.sent(operation, "forward", probe.injected, own), switches[0])
    if fed:
        carrier = probe.sent(operation, "forward", probe.before, own + error, feedback=True)[1].astype(error.dtype)
        y = y, to_varying(carrier, varying_axes(error))
    return y, (own, exact, switches, slot, error)


def _probed_bwd(probe, operation, residuals, ct):
    x, y, switches, slot, error = residuals
    fed, width = operation.forward.feedback, slot.shape[-1]
    g, after = ct if fed else (ct, None)
    rows = [jnp.zeros_like(slot[0]), jnp.zeros_like(slot[0])]
    if _speaks(operation, "forward"):
        x = _after(x, g)
        whole = g
        if operation.name == "all_gather" and operation.to == "varying":
            whole = lax.psum(g, operation.forward.axis)  # of what every rank makes of the same y
        g32 = whole.astype(jnp.float32)
        g_fed = g32 - lax.pmean(after, operation.forward.axis).astype(jnp.float32) if fed else None
        row = probe._row(operation, "forward", x, y, width, error=error, g=g32, g_fed=g_fed)
        rows[0] = as_slot(row, slot[0])
    dx = probe.sent(operation, "backward", EXACT, g)
    if _speaks(operation, "backward"):
        rows[1] = as_slot(probe._row(operation, "backward", g, dx, width), slot[0])
        if probe.injected is not None:
            dx = _switched(dx, probe.sent(operation, "backward", probe.injected, g), switches[1])
    for row in rows:
        dx = _after(dx, row)
    if fed:
        # Not the gradient of the error, which has none, but what the sum before this one needs to know.
        dx = dx, to_varying(g.astype(error.dtype), varying_axes(error))
    return dx, None, jnp.stack(rows)


_probed.defvjp(_probed_fwd, _probed_bwd)


def _speaks(operation: Operation, direction: str) -> bool:
    silent = (operation.name, direction) in SILENT
    return not silent and not (
        operation.name == "all_gather" and operation.to == "invarying" and direction != "forward"
    )


def _switched(y: jax.Array, sent: jax.Array, switch: jax.Array) -> jax.Array:
    return jnp.where(switch > 0, sent, y)


def _after(x: jax.Array, earlier: jax.Array) -> jax.Array:
    """x, bit for bit, by an operation that waits for the whole of `earlier`.

    On emulated devices XLA starts what comes after a loop over layers while the loop still runs, collectives too. All
    have one channel, so that ranks then meet in different ones: the process aborts or waits for ever. A collective that
    needs what came out of the last loop, and that the next loop needs, has no loop beside it. An optimization_barrier
    orders instructions, and is gone when they start.
    """
    bits = lax.bitcast_convert_type(earlier.astype(jnp.float32), jnp.int32)
    never = lax.shift_right_logical(jnp.sum(bits) & np.int32(2**31 - 1), np.int32(31))  # 0, which XLA does not see
    more = tuple(varying_axes(never) - varying_axes(x))
    never = lax.pmax(never, more) if more else never
    return jnp.where(to_varying(never, varying_axes(x)) == 0, x, jnp.zeros_like(x))


def _felt(error: jax.Array, g: jax.Array | None) -> list:
    if g is None:
        return [0.0, 0.0]
    product = g * error
    return [jnp.sum(jnp.square(product)), jnp.sum(jnp.square(jnp.sum(product, axis=-1)))]


def _axes(*arrays) -> frozenset[str]:
    return frozenset().union(*(varying_axes(a) for a in arrays if a is not None))
