"""1F1B: every tick holds one microbatch's forward pass and another's backward pass, so few are in flight at once.

Stage s of S takes microbatch m forward in tick m + s and backward in tick m + 2 (S - 1) - s; the last stage does both
in one tick. Only a stage's input is kept in between, in a ring of 2 S - 1 microbatches whatever their number; the
backward tick runs the stage again, its tensor-parallel messages too. The site table counts them twice; of the
embedding's second one XLA leaves out what no measure needs. Autodiff sees one stage and one microbatch at a time:
gradients are added up in float32 over the ticks.

An empty pass is a conditional's other branch: it computes nothing and sends nothing to ranks of tp. Messages between
stages are one program for all ranks and travel in every tick.

PipeDream-flush: Narayanan et al., arXiv 2006.09503, 2104.04473.

Dims: M microbatches, R places of the ring, B sequences of a microbatch, L length, D model, K slot width.
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
from taco_jax.tensor_parallel import to_varying


class _Sums(NamedTuple):
    """Sums over backward passes: gradients, the sites' measures, the loss."""

    grads: Any
    measures: dict[str, jax.Array]
    loss: jax.Array

    def plus(self, grads, measures, loss=0.0) -> _Sums:
        """The sums after one more use of some of the parameters and sites."""
        merged = {s: merge_uses(jnp.stack([self.measures[s], m])) for s, m in measures.items()}
        added = {name: jax.tree.map(jnp.add, self.grads[name], g) for name, g in grads.items()}
        return _Sums(self.grads | added, self.measures | merged, self.loss + loss)


def value_and_grad(params, slots, exponents, tokens_BL, targets_BL, weights_BL, scale, config: ModelConfig,
                   par: Parallel, schedule: Schedule, base=None):  # fmt: skip
    """(loss, (gradients, measures of the sites)) of the local batch, loss = scale * sum of weighted nll in nats.

    Arguments as of `circular.value_and_grad`.
    """
    axes = stages.activation_axes(params, par)
    loss_axes = axes - {par.axis}
    weights_BL = to_varying(weights_BL, loss_axes)
    params, finish_grads, base = stages.used_once(params, base, config, par)
    own = lambda slots: {s: stages.own(slot, 1)[0] if s in decoder.LAYER_SITES else slot for s, slot in slots.items()}
    slots, finish_measures = jax.vjp(own, slots)
    exponents = own(exponents)
    first, last, stage = stages.is_first(), stages.is_last(), lax.axis_index(send.AXIS)
    cut = lambda a: a.reshape(schedule.microbatches, -1, *a.shape[1:])
    batch = cut(tokens_BL), cut(targets_BL), cut(weights_BL)

    def microbatch(m):
        return [lax.dynamic_index_in_dim(a, m, keepdims=False) for a in batch]

    def state(slots):
        return {site: SiteScales(exponents[site], slot) for site, slot in slots.items()}

    def embed(params, slots, m):
        with comm_log.repeat(schedule.microbatches), comm_log.forward_again():
            params = lora.join(base, params)
            return to_varying(decoder.embed(params, microbatch(m)[0], config, par, state(slots)), axes)

    windows = jax.tree.map(lambda w: w[0], stages.own_windows(config, 1))

    def run_layers(params, x_BLD, slots, m):
        length, masks = tokens_BL.shape[1], {"windows": windows}
        if par.end_token is not None:
            masks["documents_BL"] = documents(microbatch(m)[0], par.end_token)
        with comm_log.repeat(schedule.microbatches), comm_log.forward_again():
            params = lora.join(base, params)
            return decoder.layers(params["layers"], x_BLD, length, config, par=par, state=state(slots), **masks)

    def head_loss(params, y_BLD, slots, m):
        _, targets_BL, weights_BL = microbatch(m)
        with comm_log.repeat(schedule.microbatches):
            params = lora.join(base, params)
            nll, _ = stages.head_loss(params, y_BLD, targets_BL, weights_BL, config=config, par=par, state=state(slots))
        return to_varying(scale * nll, loss_axes)

    layer_slots = {s: slot for s, slot in slots.items() if s in decoder.LAYER_SITES}
    of_layers = {"layers": params["layers"]}
    ends = {name: tree for name, tree in params.items() if name != "layers"}
    only = lambda site: {site: slots[site]} if site in slots else {}

    def backward(sums: _Sums, x_BLD, ct_BLD, m):
        """The sums with those of microbatch m, whose input was x_BLD; and the cotangent of that."""
        y_BLD, layers_pull = jax.vjp(lambda p, x, s: run_layers(p, x, s, m), of_layers, x_BLD, layer_slots)

        def at_the_end():
            loss, pull = jax.vjp(lambda p, y, s: head_loss(p, y, s, m), ends, y_BLD, only("head"))
            grads, ct_BLD, measures = pull(jnp.ones_like(loss))
            return sums.plus(grads, measures, loss), ct_BLD

        sums, ct_BLD = lax.cond(last, at_the_end, lambda: (sums, ct_BLD))
        grads, ct_BLD, measures = layers_pull(ct_BLD)
        sums = sums.plus(grads, measures)

        def at_the_beginning():
            _, pull = jax.vjp(lambda p, s: embed(p, s, m), ends, only("embed"))
            return sums.plus(*pull(ct_BLD))

        return lax.cond(first, at_the_beginning, lambda: sums), ct_BLD

    def tick(carry, t):
        ring_RBLD, received_BLD, ct_BLD, sums = carry
        places = len(ring_RBLD)
        # Forward.
        m = t - stage
        live = (m >= 0) & (m < schedule.microbatches)
        place = jnp.clip(m, 0) % places
        x_BLD = lax.cond(live & first, lambda: embed(params, slots, m), lambda: received_BLD)
        kept_BLD = lax.dynamic_index_in_dim(ring_RBLD, place, keepdims=False)
        ring_RBLD = lax.dynamic_update_index_in_dim(ring_RBLD, jnp.where(live, x_BLD, kept_BLD), place, 0)
        forwards = live & ~last
        y_BLD = stages.where_true(forwards, lambda: run_layers(of_layers, x_BLD, layer_slots, jnp.clip(m, 0)), axes)
        # Backward.
        m = t - 2 * (schedule.stages - 1) + stage
        live = (m >= 0) & (m < schedule.microbatches)
        x_BLD = lax.dynamic_index_in_dim(ring_RBLD, jnp.clip(m, 0) % places, keepdims=False)
        nothing = lambda: (sums, jnp.zeros_like(ct_BLD))
        sums, ct_BLD = lax.cond(live, lambda: backward(sums, x_BLD, ct_BLD, m), nothing)

        # Both messages.
        def to_next(y_BLD, slots):
            scales = state(slots).get(send.SITE)
            return send.send(y_BLD, scales, forwards, live & ~first, par, ring=False)

        with comm_log.repeat(schedule.ticks):
            received_BLD, pull = jax.vjp(to_next, y_BLD, only(send.SITE))
        ct_BLD, measures = pull(ct_BLD)
        return (ring_RBLD, received_BLD, ct_BLD, sums.plus({}, measures)), None

    nothing_BLD = to_varying(stages.nothing(tokens_BL, config, par, schedule), axes)
    ring_RBLD = jnp.zeros_like(nothing_BLD, shape=(schedule.in_flight, *nothing_BLD.shape))
    zeros = lambda tree: jax.tree.map(jnp.zeros_like, tree)
    sums = _Sums(zeros(params), zeros(slots), to_varying(jnp.zeros(()), loss_axes))
    (*_, sums), _ = lax.scan(tick, (ring_RBLD, nothing_BLD, nothing_BLD, sums), jnp.arange(schedule.ticks))
    (grads,), (measures,) = finish_grads(sums.grads), finish_measures(sums.measures)
    return sums.loss, (grads, measures)
