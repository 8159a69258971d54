"""Chains with every hop beside a product of its own, in both directions; for whole sequences.

A layer is differentiated here by hand, because only so can one chain's message be put beside another chain's products
in the backward pass too. `<` is what `AsyncCollective.overlap_with` puts between a value and a hop of the other chain's
message:

    forward    h = norm(x)    u = core(h) <    y = last(u) <    send y;    x += sum
    backward   du = last'(dy) <    dh = core'(du) <    send dh;    dx += norm'(sum),  dy = dx

A message in one hop passes the second of both places only, beside the whole half.

Dims: B batch, L length, D model, F features between the products.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from taco_jax.collectives import comm_log
from taco_jax.collectives.async_collective import AsyncCollective
from taco_jax.collectives.vjp import as_slot
from taco_jax.compression.site_scales import SiteScales, merge_uses
from taco_jax.models.chains import Half, State
from taco_jax.models.projections import add_bias, row
from taco_jax.models.run_config import Parallel, remat
from taco_jax.tensor_parallel import start_sum, to_varying


def scheduled(halves: tuple[Half, ...], par: Parallel) -> Callable:
    """`chains.side_by_side(halves, par)` under `remat(..., par.remat)`, the same values and gradients.

    Call it where the layer's messages are counted (`sites.repeat`). First derivatives only.
    """
    calls = {direction: comm_log.current_calls(direction) for direction in ("forward", "backward")}

    @jax.custom_vjp
    def layer(xs, params, state: State, shared):
        return _forward(halves, par, calls["forward"], xs, params=params, state=state, shared=shared)[0]

    def forward(xs, params, state, shared):
        ys, residuals, measures = _forward(halves, par, calls["forward"], xs, params=params, state=state, shared=shared)
        return ys, (residuals, measures, params, state, shared)

    def backward(saved, cts):
        residuals, measures, params, state, shared = saved
        cts, grads, more = _backward(
            halves, par, calls["backward"], residuals, params=params, state=state, shared=shared, cts=cts
        )
        slots = {site: _slot(scales, measures.get(site), more.get(site)) for site, scales in state.items()}
        return cts, grads, slots, None

    layer.defvjp(forward, backward)
    return layer


class _Sent(NamedTuple):
    """A message under way and the chain that waits for it; `receive` takes its sum."""

    chain: int
    site: str
    message: AsyncCollective
    receive: Callable[[jax.Array], None]


class _Link:
    """The tensor-parallel link: one message at a time, and the measures of those that have arrived."""

    def __init__(self, par: Parallel, state: State, direction: str, calls: int):
        self.measures: dict[str, list[Any]] = {}
        self._par, self._state, self._direction, self._calls = par, state, direction, calls
        self._sent: _Sent | None = None

    def send(self, chain: int, site: str, y_BLD: jax.Array, receive: Callable[[jax.Array], None]) -> None:
        message = start_sum(
            y_BLD, self._par.axis, self._par.compression(site), self._state.get(site), self._direction, site=site,
            calls=self._calls,
        )  # fmt: skip
        self._sent = _Sent(chain, site, message, receive)

    def overlap_with(self, value: jax.Array, *, last: bool) -> jax.Array:
        """`value` beside a hop of what is under way. After the `last` of a half, the message is there."""
        if self._sent and (last or self._sent.message.hops > 1):
            value = self._sent.message.overlap_with(value)
            if last:
                self.done()
        return value

    def done(self, chain: int | None = None) -> None:
        """Waits for what is under way, with nothing beside it; `chain`: only if it is that chain's."""
        if self._sent and chain in (None, self._sent.chain):
            y, measure = self._sent.message.done()
            self.measures.setdefault(self._sent.site, []).append(measure)
            self._sent.receive(y)
            self._sent = None


class _Use(NamedTuple):
    """What the backward pass of one half and chain takes: the input, or the functions that hold what it needs.

    last: None where `core` does both products.
    """

    x: Any = None
    norm: Any = None
    core: Any = None
    last: Any = None


def _forward(halves, par: Parallel, calls: int, xs, params, state: State, shared):
    xs, link, residuals = list(xs), _Link(par, state, "forward", calls), []

    def receive(i, out):
        def of(sum_BLD):
            xs[i] += add_bias(sum_BLD, out)

        return of

    for half in halves:
        out = params[half.name][half.out_name]
        for i in range(len(xs)):
            link.done(i)
            use, y_BLD = _run(half, par, link, xs[i], params=params, shared=shared)
            link.send(i, half.leaves, link.overlap_with(y_BLD, last=True), receive(i, out))
            residuals.append(use)
    link.done()
    return tuple(xs), residuals, link.measures


def _backward(halves, par: Parallel, calls: int, residuals, params, state: State, shared, cts):
    cts, link, grads = list(cts), _Link(par, state, "backward", calls), {}

    def receive(i, norm, name):
        def of(sum_BLD):
            dx_BLD, dnorm = norm(sum_BLD)
            cts[i] += dx_BLD
            _add(grads, name, dnorm)

        return of

    for half in reversed(halves):
        out = params[half.name][half.out_name]
        for i in reversed(range(len(cts))):
            link.done(i)
            use = residuals.pop()
            if use.x is not None:
                use = _use(half, par, use.x, params, shared)[0]
            bias = {"bias": out["bias"]} if "bias" in out else {}
            ct_BLD, dbias = jax.vjp(add_bias, jnp.zeros_like(cts[i]), bias)[1](cts[i])
            ct_BLD = to_varying(ct_BLD, par.axis)
            if use.last is None:
                dh_BLD, dcore, dkernel = use.core(ct_BLD)
            else:
                du_BLF, dkernel = use.last(ct_BLD)
                dh_BLD, dcore = use.core(link.overlap_with(du_BLF, last=False))
            dh_BLD = link.overlap_with(dh_BLD, last=True)
            _add(grads, half.name, dcore | {half.out_name: {"kernel": dkernel, **dbias}})
            link.send(i, half.enters, dh_BLD, receive(i, use.norm, half.norm_name))
    link.done()
    return tuple(cts), grads, link.measures


def _run(half: Half, par: Parallel, link: _Link, x_BLD, params, shared) -> tuple[_Use, jax.Array]:
    """(what the backward pass takes, this rank's term) of one half and chain."""
    kernel = params[half.name][half.out_name]["kernel"]
    if par.remat == "dots":
        # The features are computed again, which joins both products in one function.
        h_BLD, norm = jax.vjp(remat(_norm(half, par), "full"), x_BLD, params[half.norm_name])
        both = remat(lambda h, p, kernel: row(half.core(h, p, shared), kernel, par), "dots")
        y_BLD, core = jax.vjp(both, to_varying(h_BLD, par.axis), _core_params(half, params), kernel)
        return _Use(None, norm, core), y_BLD
    use, u_BLF = _use(half, par, x_BLD, params, shared)
    y_BLD = row(link.overlap_with(u_BLF, last=False), kernel, par)
    return (_Use(x_BLD) if par.remat == "full" else use), y_BLD


def _use(half: Half, par: Parallel, x_BLD, params, shared) -> tuple[_Use, jax.Array]:
    """(the functions of the backward pass, the features before the last product)."""
    kernel = params[half.name][half.out_name]["kernel"]
    h_BLD, norm = jax.vjp(_norm(half, par), x_BLD, params[half.norm_name])
    u_BLF, core = jax.vjp(lambda h, p: half.core(h, p, shared), to_varying(h_BLD, par.axis), _core_params(half, params))
    last = jax.vjp(functools.partial(row, par=par), u_BLF, kernel)[1]
    return _Use(None, norm, core, last), u_BLF


def _norm(half: Half, par: Parallel) -> Callable:
    return lambda x_BLD, params: half.norm(x_BLD, params).astype(par.dtype)


def _core_params(half: Half, params):
    return {name: value for name, value in params[half.name].items() if name != half.out_name}


def _add(grads: dict, name: str, more) -> None:
    grads[name] = jax.tree.map(jnp.add, grads[name], more) if name in grads else more


def _slot(scales: SiteScales | None, forward: list | None, backward: list | None):
    """The cotangent of a site's scales: the measures of all chains, merged, in the row of their direction."""
    if scales is None or scales.slot is None:
        return None if scales is None else SiteScales(None, None)
    rows = []
    for row_K, measures in zip(scales.slot, (forward, backward)):
        measures = [m for m in measures or () if m is not None]
        rows.append(as_slot(merge_uses(jnp.stack(measures)), row_K) if measures else jnp.zeros_like(row_K))
    return SiteScales(None, jnp.stack(rows))
