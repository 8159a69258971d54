"""GPipe and its circular form: all forward passes, then all backward passes in the opposite order.

In every tick a stage takes what arrived, runs the layers of one chunk and sends the result on. An empty tick computes
on zeros and takes part in nothing that counts. The residuals of all microbatches are kept until their backward pass, as
`remat` says: memory grows with their number. Each is written once, in its place in one array of all ticks and layers
(`taco_jax.pipeline.residuals`), and gradients are added up in the array of all layers.

`evaluate` is the forward pass alone, for validation. It keeps nothing, so it needs no more memory than one microbatch.
Without a backward pass a conditional costs nothing. Empty ticks compute nothing, and embedding and head run in the tick
of their microbatch.

GPipe: Huang et al., arXiv 1811.06965. Circular: `taco_jax/config/schedule.py`.

Dims: M microbatches, T ticks, B sequences of a microbatch, L length, D model, V chunks, N layers of a chunk, R rounds
of a stage: items and one for empty ticks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from taco_jax.collectives import comm_log
from taco_jax.compression.site_scales import SiteScales, merge_uses
from taco_jax.config.schedule import Schedule
from taco_jax.models import decoder, lora
from taco_jax.models.config import ModelConfig
from taco_jax.models.documents import documents
from taco_jax.models.run_config import Parallel
from taco_jax.pipeline import send, stages
from taco_jax.pipeline.residuals import Split
from taco_jax.tensor_parallel import to_varying


def value_and_grad(params, slots, exponents, tokens_BL, targets_BL, weights_BL, scale, config: ModelConfig,
                   par: Parallel, schedule: Schedule, base=None):  # fmt: skip
    """(loss, (gradients, measures of the sites)) of the local batch in microbatches.

    The loss is scale * sum of weighted negative log-likelihoods: a stage's part of it, zero where a stage has none.

    Args:
      params: this stage's shards; all of them must vary over pp (of the whole ones each stage has its own gradient).
      slots, exponents: of all sites, by their names.
      tokens_BL, targets_BL, weights_BL: the whole local batch; the number of microbatches divides B.
      base: parameters without gradients, for which params are adapters (`lora.join`).
    """
    axes = stages.activation_axes(params, par)
    loss_axes = axes - {par.axis}
    weights_BL = to_varying(weights_BL, loss_axes)
    params, finish_grads, base = stages.used_once(params, base, config, par)
    chunks = schedule.chunks
    in_layers = lambda site: site in decoder.LAYER_SITES
    own = lambda slots: {s: stages.own(slot, chunks) if in_layers(s) else slot for s, slot in slots.items()}
    slots, finish_measures = jax.vjp(own, slots)
    exponents = own(exponents)
    only = lambda site: {site: slots[site]} if site in slots else {}
    state = lambda slots: {site: SiteScales(exponents[site], slot) for site, slot in slots.items()}

    ends = {name: tree for name, tree in params.items() if name != "layers"}

    def embed(ends, slots):
        params = lora.join(base, ends)
        start = lambda: decoder.embed(params, tokens_BL, config, par, state(slots))
        return stages.where_true(stages.is_first(), start, axes)

    def head(ends, y_BLD, slots):
        params = lora.join(base, ends)
        finish = lambda *batch: stages.head_loss(params, *batch, config=config, par=par, state=state(slots))
        if schedule.shares_head(len(y_BLD), config.vocab_size, lax.axis_size(par.axis)):
            share = lambda a: stages.own_share(a, schedule)
            return scale * finish(stages.share_of_last(y_BLD, schedule), share(targets_BL), share(weights_BL))[0]
        only_last = lambda: finish(y_BLD, targets_BL, weights_BL)
        return scale * stages.where_true(stages.is_last(), only_last, loss_axes)[0]

    cut = lambda a: a.reshape(schedule.microbatches, -1, *a.shape[1:])
    layers = _Layers(
        stages.in_chunks(params["layers"], schedule),
        {site: slot for site, slot in slots.items() if in_layers(site)},
        stages.in_chunks(base["layers"], schedule) if base else None,
        {site: e for site, e in exponents.items() if in_layers(site)},
        stages.own_windows(config, chunks),
    )
    between = (only(send.SITE), {site: e for site, e in exponents.items() if site == send.SITE})
    stage = _Stage(layers, between, cut(tokens_BL), axes, config=config, par=par, schedule=schedule)

    x_BLD, embed_pull = jax.vjp(embed, ends, only("embed"))
    y_MBLD, saved = stage.forward(cut(x_BLD))
    loss, head_pull = jax.vjp(head, ends, y_MBLD.reshape(x_BLD.shape), only("head"))
    ends_grads, ct_BLD, head_measures = head_pull(jnp.ones_like(loss))
    ct_MBLD, layer_grads, measures = stage.backward(saved, cut(ct_BLD))
    more_grads, embed_measures = embed_pull(ct_MBLD.reshape(x_BLD.shape))

    grads = jax.tree.map(jnp.add, ends_grads, more_grads)
    if layer_grads:
        grads |= {"layers": stages.out_of_chunks(layer_grads, schedule)}
    (grads,) = finish_grads(grads)
    (measures,) = finish_measures(measures | head_measures | embed_measures)
    return loss, (grads, measures)


class _Layers(NamedTuple):
    """A stage's layers and what belongs to them, each array [V, N, ...]; `windows` and `base` may be None."""

    params: Any
    slots: dict[str, jax.Array]
    base: Any
    exponents: dict[str, jax.Array]
    windows: jax.Array | None

    @property
    def differentiated(self):
        return self.params, self.slots

    @property
    def others(self):
        return self.base, self.exponents, self.windows


class _Saved(NamedTuple):
    """Residuals: of layers [R, N, ...], of all rounds of one [V, N, ...], of messages [T, ...]."""

    layers: list[jax.Array]
    fixed: list[jax.Array]
    messages: list[jax.Array]


class _Work(NamedTuple):
    """A tick of a stage: which microbatch and chunk, whether there is work, whether it begins or ends the model."""

    microbatch: jax.Array
    chunk: jax.Array
    live: jax.Array
    begins: jax.Array
    ends: jax.Array
    round: jax.Array


class _Stage:
    """A stage's passes over all its ticks."""

    def __init__(self, layers: _Layers, between, tokens_MBL, axes, *, config, par: Parallel, schedule: Schedule):
        """between: slots and exponents of the messages between stages, by their site, if they have one. axes: over
        which activations vary."""
        self.layers, self.between, self.tokens_MBL = layers, between, tokens_MBL
        self.config, self.par, self.schedule = config, par, schedule
        self.axes = axes
        self.depth = jax.tree.leaves(layers.params)[0].shape[1]

    def forward(self, x_MBLD: jax.Array) -> tuple[jax.Array, _Saved]:
        """Returns (what the last stage makes of x_MBLD; on other stages nothing of use, what `backward` needs)."""
        ticks = self.schedule.forward_ticks
        nothing_BLD = to_varying(jnp.zeros_like(x_MBLD[0]), self.axes)
        with comm_log.repeat(ticks):
            loop, layer = self._layer(self._work(0), nothing_BLD)
            fixed = self._fixed(layer)
            rounds = self.schedule.items + 1
            saved = [self._zeros((rounds, self.depth), aval) for aval in layer.saved]

            def tick(carry, t):
                received_BLD, y_MBLD, saved = carry
                work = self._work(t)
                x_BLD = jnp.where(work.begins, _at(x_MBLD, work.microbatch), received_BLD)
                x_BLD = jnp.where(work.live, x_BLD, 0)
                loop, layer = self._layer(work, x_BLD)

                def one(carry, n):
                    carried, saved = carry
                    carried, more = layer.forward(carried, *self._of(work.chunk, n), _each(fixed, work.chunk, n))
                    saved = [_put(a, value, work.round, n) for a, value in zip(saved, more, strict=True)]
                    return (carried, saved), None

                (carried, saved), _ = lax.scan(one, (loop.enter(x_BLD), saved), jnp.arange(self.depth))
                y_BLD = decoder.without_errors(loop.leave(carried))
                kept_BLD = jnp.where(work.ends, y_BLD, _at(y_MBLD, work.microbatch))
                y_MBLD = _put(y_MBLD, kept_BLD, work.microbatch)
                message, operands = self._message(t, y_BLD)
                received_BLD, of_message = message.forward(y_BLD, *operands, [])
                return (received_BLD, y_MBLD, saved), of_message

            y_MBLD = to_varying(jnp.zeros_like(x_MBLD), self.axes)
            (_, y_MBLD, saved), messages = lax.scan(tick, (nothing_BLD, y_MBLD, saved), jnp.arange(ticks))
        return y_MBLD, _Saved(saved, fixed, messages)

    def backward(self, saved: _Saved, ct_MBLD: jax.Array) -> tuple[jax.Array, Any, dict[str, jax.Array]]:
        """Returns the cotangents of (x_MBLD, the layers' parameters), and the measures of their sites and messages."""
        ticks = self.schedule.forward_ticks
        nothing_BLD = to_varying(jnp.zeros_like(ct_MBLD[0]), self.axes)

        def tick(carry, of_tick):
            (t, of_message), work = of_tick, self._work(of_tick[0])
            ct_BLD, x_ct_MBLD, grads, measures, sent = carry
            message, operands = self._message(t, nothing_BLD)
            ct_BLD, (more,) = message.backward(of_message, *operands, [], ct_BLD)
            sent = {site: _merged(sent[site], measure) for site, measure in more.items()}
            ct_BLD = ct_BLD + jnp.where(work.ends, _at(ct_MBLD, work.microbatch), 0)
            loop, layer = self._layer(work, nothing_BLD)
            leave = lambda carried: decoder.without_errors(loop.leave(carried))
            (ct,) = jax.vjp(leave, loop.enter(nothing_BLD))[1](ct_BLD)

            def one(carry, n):
                ct, grads, measures = carry
                residuals, at = _each(saved.layers, work.round, n), (work.chunk, n)
                ct, (more, uses) = layer.backward(residuals, *self._of(*at), _each(saved.fixed, *at), ct)
                add = lambda a, g: _put(a, _at(a, *at) + jnp.where(work.live, g, 0), *at)
                merge = lambda a, use: _put(a, _merged(_at(a, *at), jnp.where(work.live, use, 0)), *at)
                return (ct, jax.tree.map(add, grads, more), jax.tree.map(merge, measures, uses)), None

            over = jnp.arange(self.depth)
            (ct, grads, measures), _ = lax.scan(one, (ct, grads, measures), over, reverse=True)
            (ct_BLD,) = jax.vjp(loop.enter, nothing_BLD)[1](ct)
            ct_BLD = jnp.where(work.live, ct_BLD, 0)
            begins_BLD = jnp.where(work.begins & work.live, ct_BLD, _at(x_ct_MBLD, work.microbatch))
            x_ct_MBLD = _put(x_ct_MBLD, begins_BLD, work.microbatch)
            return (jnp.where(work.begins, 0, ct_BLD), x_ct_MBLD, grads, measures, sent), None

        with comm_log.repeat(ticks):
            zeros = lambda tree: jax.tree.map(jnp.zeros_like, tree)
            x_ct_MBLD = to_varying(jnp.zeros_like(ct_MBLD), self.axes)
            start = (nothing_BLD, x_ct_MBLD, *zeros(self.layers.differentiated), zeros(self.between[0]))
            of_ticks = (jnp.arange(ticks), saved.messages)
            (_, x_ct_MBLD, grads, measures, sent), _ = lax.scan(tick, start, of_ticks, reverse=True)
        return x_ct_MBLD, grads, measures | sent

    def _work(self, t) -> _Work:
        schedule, last_chunk = self.schedule, self.schedule.chunks - 1
        item = t - lax.axis_index(send.AXIS)
        m, chunk, live = schedule.work(item)
        m, chunk = jnp.clip(m, 0, schedule.microbatches - 1), jnp.clip(chunk, 0, last_chunk)
        begins, ends = stages.is_first() & (chunk == 0), stages.is_last() & (chunk == last_chunk)
        # Every stage has an empty tick: nothing of the round of these is ever used, and it is finite.
        place = jnp.where(live, item, schedule.items)
        return _Work(m, chunk, live=live, begins=begins, ends=live & ends, round=place)

    def _layer(self, work: _Work, x_BLD: jax.Array) -> tuple[decoder.LayerLoop, Split]:
        """Returns the loop over a tick's layers, and one of them, for x_BLD or an array like it."""
        tokens_BL = _at(self.tokens_MBL, work.microbatch)
        length = tokens_BL.shape[1]
        documents_BL = documents(tokens_BL, self.par.end_token)
        loop = decoder.layer_loop(len(x_BLD), length, self.config, self.par, documents_BL=documents_BL)

        def layer(carried, differentiated, others):
            (params, slots), (base, exponents, sliding) = differentiated, others
            state = {site: SiteScales(exponents[site], slot) for site, slot in slots.items()}
            used = {site: state.get(site) for site in decoder.LAYER_SITES}
            return loop.layer(carried, lora.join(base, params), used, sliding)

        with comm_log.repeat(self.depth * loop.chains):
            # Casts of weights are kept only where memory is not short.
            hoist = self.par.remat == "none"
            return loop, Split(layer, loop.enter(x_BLD), *self._of(work.chunk, 0), hoist=hoist)

    def _of(self, chunk, n):
        """Returns (differentiated, others) of one layer."""
        pick = lambda a: _at(a, chunk, n)
        return jax.tree.map(pick, self.layers.differentiated), jax.tree.map(pick, self.layers.others)

    def _fixed(self, layer: Split) -> list[jax.Array]:
        """Returns what all rounds of a layer have in common, for all layers."""
        chunks = self.schedule.chunks
        every = jnp.arange(chunks * self.depth)
        one = lambda _, i: (None, layer.fixed(*self._of(i // self.depth, i % self.depth)))
        _, fixed = lax.scan(one, None, every)
        return [a.reshape(chunks, self.depth, *a.shape[1:]) for a in fixed]

    def _message(self, t, y_BLD: jax.Array) -> tuple[Split, tuple[Any, Any]]:
        """Returns the message after tick t, and what it takes besides y_BLD."""
        work, following = self._work(t), self._work(t + 1)
        flags = work.live & ~work.ends, following.live & ~following.begins
        slots, exponents = self.between

        def message(y_BLD, w, k):
            (slots,), (exponents, flags) = w, k
            scales = {site: SiteScales(e, slots.get(site)) for site, e in exponents.items()}.get(send.SITE)
            return send.send(y_BLD, scales, *flags, self.par, ring=self.schedule.chunks > 1)

        operands = (slots,), (exponents, flags)
        return Split(message, y_BLD, *operands), operands

    def _zeros(self, lead: tuple[int, ...], aval) -> jax.Array:
        axes = frozenset(aval.manual_axis_type.varying) | {send.AXIS}
        return to_varying(jnp.zeros((*lead, *aval.shape), aval.dtype), axes)


def _at(a: jax.Array, *index) -> jax.Array:
    """a[index] of a few indices that are arrays."""
    start = (*index, *[0] * (a.ndim - len(index)))
    return lax.dynamic_slice(a, start, (*[1] * len(index), *a.shape[len(index) :])).reshape(a.shape[len(index) :])


def _each(arrays: list[jax.Array], *index) -> list[jax.Array]:
    return [_at(a, *index) for a in arrays]


def _put(a: jax.Array, value: jax.Array, *index) -> jax.Array:
    """a with a[index] = value."""
    start = (*index, *[0] * (a.ndim - len(index)))
    return lax.dynamic_update_slice(a, value.reshape((1,) * len(index) + value.shape), start)


def _merged(measure: jax.Array, use: jax.Array) -> jax.Array:
    return merge_uses(jnp.stack([measure, use]))


def evaluate(params, tokens_BL, targets_BL, weights_BL, config: ModelConfig, par: Parallel, state: stages.State,
             schedule: Schedule) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Returns (sum of weighted negative log-likelihoods in nats, sum of weights): zeros but on the last stage.

    Arguments as in `value_and_grad`, with any schedule. state: scales of all sites.
    """
    axes = stages.activation_axes(params, par)
    params = decoder.use_replicated_params(params, config, par)
    scales, ring, last_chunk = stages.own_scales(state, schedule.chunks), schedule.chunks > 1, schedule.chunks - 1
    chunks, windows = stages.in_chunks(params["layers"], schedule), stages.own_windows(config, schedule.chunks)
    first, last = stages.is_first(), stages.is_last()
    batch = [a.reshape(schedule.microbatches, -1, a.shape[-1]) for a in (tokens_BL, targets_BL, weights_BL)]

    def tick(carry, t):
        received_BLD, nll, count = carry
        m, chunk, live = schedule.work(t - lax.axis_index(send.AXIS))
        m = jnp.clip(m, 0, schedule.microbatches - 1)
        tokens_BL, targets_BL, weights_BL = (lax.dynamic_index_in_dim(a, m, keepdims=False) for a in batch)

        def embed():
            return to_varying(decoder.embed(params, tokens_BL, config, par, state), axes)

        def run_layers():
            of_chunk = lambda tree: jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, chunk, keepdims=False), tree)
            masks = {"documents_BL": documents(tokens_BL, par.end_token), "windows": of_chunk(windows)}
            layers, length = of_chunk(chunks), tokens_BL.shape[-1]
            return decoder.layers(layers, x_BLD, length, config, par=par, state=of_chunk(scales), **masks)

        def head():
            return stages.head_loss(params, y_BLD, targets_BL, weights_BL, config=config, par=par, state=state)

        x_BLD = lax.cond(live & first & (chunk == 0), embed, lambda: received_BLD)
        y_BLD = stages.where_true(live, run_layers, axes)
        ends = live & last & (chunk == last_chunk)
        more = stages.where_true(ends, head, axes - {par.axis})
        received_BLD = send.send(y_BLD, state.get(send.SITE), live, live, par, ring=ring)
        return (received_BLD, nll + more[0], count + more[1]), None

    nothing_BLD = to_varying(stages.nothing(tokens_BL, config, par, schedule), axes)
    zero = to_varying(jnp.zeros(()), axes - {par.axis})
    (_, nll, count), _ = lax.scan(tick, (nothing_BLD, zero, zero), jnp.arange(schedule.forward_ticks))
    return nll, count
