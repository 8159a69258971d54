"""Site scales: an int32 exponent per site and direction, carried from step to step.

The exponents go into the step read-only. Each use of a site also gets an amax slot of zeros; the slot's cotangent is
the largest block scale that the use saw on this device, forward and backward. After the gradient one maximum over
devices serves all sites, and `update_scale_state` rolls the history:

    a = ceil(log2(max over devices and history of s)),   s = max|z| / Qmax

A zero or non-finite maximum changes nothing.

Dim letters: S any stack of sites (layers), H history, K width of a slot.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.formats import UNCALIBRATED
from taco_jax.codec import STATS
from taco_jax.codec.block_scale import ceil_log2, largest_magnitude

STATS_WIDTH = len(STATS)
SLOT_NAME = "amax_slot"  # of a layer's variable; `update_scales` knows slots by it


class SiteScales(NamedTuple):
    """Arrays that one use of a site is handed inside the manual region.

    exponents: int32[2] (forward, backward), the same on every device; cotangent zero.
    slot: float32[2, K], this device's, zeros; its cotangent is the measure of the use (K = 1: largest scale;
      STATS_WIDTH: all of `codec.STATS`).
    """

    exponents: jax.Array | None = None
    slot: jax.Array | None = None


class ScaleState(NamedTuple):
    """The carried state: exponents int32[S, 2]; history float32[S, 2, H] of maxima, newest first, zeros at first."""

    exponents: jax.Array
    history: jax.Array


def new_scale_state(shape: tuple[int, ...] = (), history: int = 16) -> ScaleState:
    """An uncalibrated state for a stack of sites; `history` steps are remembered (1 or more)."""
    if history < 1:
        raise ValueError(f"history={history}: must be at least 1 step")
    return ScaleState(np.full((*shape, 2), UNCALIBRATED, np.int32), np.zeros((*shape, 2, history), np.float32))


def update_scale_state(state: ScaleState, amax: jax.Array, keep_going: jax.Array | bool = True) -> ScaleState:
    """Rolls amax float32[S, 2] (already the maximum over devices) into the history and sets the exponents from it.

    keep_going: False leaves the state as it was (a calibration that is not wanted, a skipped step).
    """
    valid = (amax > 0) & jnp.isfinite(amax) & keep_going
    rolled = jnp.concatenate([amax[..., None], state.history[..., :-1]], axis=-1)
    history = jnp.where(valid[..., None], rolled, state.history)
    exponents = jnp.where(valid, ceil_log2(jnp.maximum(history.max(-1), 2.0**-126)), state.exponents)
    return ScaleState(exponents.astype(jnp.int32), history)


def merge_uses(measures: jax.Array) -> jax.Array:
    """Measures [N, ..., 2, K] of N uses as one: the largest scale, summed statistics."""
    largest = largest_magnitude(measures[..., :1], 0)
    return largest if measures.shape[-1] == 1 else jnp.concatenate([largest, measures[..., 1:].sum(0)], axis=-1)


def fork(scales: SiteScales | None, uses: int) -> list[SiteScales | None]:
    """The scales of one site for each of several uses of it.

    The cotangent of `scales.slot` is the uses' measures, merged; handed to all of them as it is, it would be their sum.
    """
    if uses == 1 or scales is None or scales.slot is None:
        return [scales] * uses
    return [SiteScales(scales.exponents, slot) for slot in _fork(uses, scales.slot)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fork(uses: int, slot: jax.Array) -> list[jax.Array]:
    return [slot] * uses


_fork.defvjp(lambda uses, slot: (_fork(uses, slot), None), lambda uses, _, cts: (merge_uses(jnp.stack(cts)),))


def stack_uses(slot: jax.Array, uses: int) -> jax.Array:
    """`fork` for the uses of a loop: the slot of each on a leading dim, for a scan to hand out."""
    return _stack(uses, slot)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _stack(uses: int, slot: jax.Array) -> jax.Array:
    return jnp.broadcast_to(slot, (uses, *slot.shape))


_stack.defvjp(lambda uses, slot: (_stack(uses, slot), None), lambda uses, _, cts: (merge_uses(cts),))


def update_scales(state: Any, grads: Any) -> Any:
    """New site scales for people who bring their own training loop.

    Args:
      state: NNX: `nnx.state(model, taco_jax.SiteScaleState)`. Linen: `variables["site_scale"]`. In general any tree in
        which every site is a node with leaves `exponents` int32[S, 2] and `history` float32[S, 2, H], like
        `ScaleState`.
      grads: NNX: the gradient with respect to the `AmaxSlot` variables. Linen: that of the "_overwrite_with_gradient"
        collection. The same nesting, one leaf `amax_slot` float32[..., S, 2, K] at each site; over leading dims
        (devices, microbatches) the maximum counts. Other leaves, gradients of parameters for example, are ignored.

    Returns:
      The state with rolled histories and new exponents, same structure. A zero or non-finite maximum changes nothing.

    Raises:
      ValueError: a site has no slot in `grads`.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(state)
    leaves = {_names(path): leaf for path, leaf in flat}
    slots = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(grads)[0]:
        names = _names(path)
        slots[names[:-1] if names[-1:] == (SLOT_NAME,) else names] = leaf
    new = dict(leaves)
    for site in {path[:-1] for path in leaves}:
        if site not in slots:
            known = sorted("/".join(s) for s in slots)
            raise ValueError(f"update_scales: no gradient for the amax slot of {'/'.join(site)!r}; grads has {known}")
        old = ScaleState(*(leaves[*site, field] for field in ScaleState._fields))
        slot = slots[site]
        amax = largest_magnitude(slot[..., 0], tuple(range(slot.ndim - 1 - old.exponents.ndim)))
        for field, value in update_scale_state(old, amax)._asdict().items():
            new[*site, field] = value
    return jax.tree_util.tree_unflatten(treedef, [new[path] for path in leaves])


def _names(path) -> tuple[str, ...]:
    """A leaf's path as names. An NNX variable's own key, its last, is not one of them."""
    names = tuple(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)
    return names[:-1] if names and names[-1] in ("value", "raw_value") else names
