"""GPipe and its circular form: all forward passes, then, by autodiff of the loop over ticks, all backward passes.

In every tick a stage takes what arrived, runs the layers of one chunk and sends the result on. An empty tick computes
on zeros (a conditional would keep the weights as residuals of every tick) and takes part in nothing that counts. The
activations of all microbatches are kept until the backward pass, as `remat` says: memory grows with their number.

`evaluate` is the forward pass alone, for validation. It keeps nothing, so it needs no more memory than one microbatch.
Without a backward pass a conditional costs nothing. Empty ticks compute nothing, and embedding and head run in the tick
of their microbatch.

GPipe: Huang et al., arXiv 1811.06965. Circular: `taco_jax/config/schedule.py`.

Dims: M microbatches, T ticks, B sequences of a microbatch, L length, D model, V chunks, N layers of a chunk.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from taco_jax.collectives import comm_log
from taco_jax.compression.site_scales import SiteScales, stack_uses
from taco_jax.config.schedule import Schedule
from taco_jax.models import decoder
from taco_jax.models.config import ModelConfig
from taco_jax.models.documents import documents
from taco_jax.models.run_config import Parallel
from taco_jax.pipeline import send, stages
from taco_jax.tensor_parallel import to_varying


def loss(params, tokens_BL, targets_BL, weights_BL, config: ModelConfig, par: Parallel, state: stages.State,
         schedule: Schedule) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """`decoder.loss` of the local batch in microbatches, on the last stage; zeros on the others.

    Args:
      params: this stage's shards; all of them must vary over pp (of the whole ones each stage has its own gradient).
      tokens_BL, targets_BL, weights_BL: the whole local batch; the number of microbatches divides B.
    """
    axes = stages.activation_axes(params, par)
    params = decoder.use_replicated_params(params, config, par)
    x_BLD = stages.where_true(stages.is_first(), lambda: decoder.embed(params, tokens_BL, config, par, state), axes)
    y_BLD = _run(params["layers"], x_BLD, tokens_BL, config, par=par, state=state, schedule=schedule, axes=axes)
    head = lambda: stages.head_loss(params, y_BLD, targets_BL, weights_BL, config=config, par=par, state=state)
    return stages.where_true(stages.is_last(), head, axes - {par.axis})


def _run(layers, x_BLD, tokens_BL, config, par, state, schedule: Schedule, axes) -> jax.Array:
    """Returns what the last stage makes of x_BLD; on other stages, nothing of use."""
    length, windows = tokens_BL.shape[1], stages.own_windows(config, schedule.chunks)
    tokens_MBL = tokens_BL.reshape(schedule.microbatches, -1, length)
    ticks, ring = schedule.forward_ticks, schedule.chunks > 1
    x_MBLD = x_BLD.reshape(schedule.microbatches, -1, *x_BLD.shape[1:])
    # What the first stage starts in each tick (anything where it starts nothing), and when the last one finishes.
    starts = np.clip(schedule.work(np.arange(ticks))[0], 0, schedule.microbatches - 1)
    last_chunk = schedule.chunks - 1
    ends = [schedule.item(m, last_chunk) + schedule.stages - 1 for m in range(schedule.microbatches)]
    scales = stages.own_scales(state, schedule.chunks) | {send.SITE: state.get(send.SITE)}
    slots = {site: stack_uses(s.slot, ticks) for site, s in scales.items() if s is not None and s.slot is not None}
    chunks = stages.in_chunks(layers, schedule)
    first, last = stages.is_first(), stages.is_last()

    def tick(received_BLD, at):
        t, x_BLD, slots = at
        m, chunk, live = schedule.work(t - lax.axis_index(send.AXIS))
        _, next_chunk, next_live = schedule.work(t + 1 - lax.axis_index(send.AXIS))
        of_chunk = lambda a: lax.dynamic_index_in_dim(a, chunk, keepdims=False) if ring else a[0]
        used = {site: None if s is None else SiteScales(s.exponents, slots.get(site)) for site, s in scales.items()}
        sent = used.pop(send.SITE)
        used = {site: send.masked(jax.tree.map(of_chunk, s), live) for site, s in used.items()}
        x_BLD = jnp.where(live, jnp.where(first & (chunk == 0), x_BLD, received_BLD), 0)
        m = jnp.clip(m, 0, schedule.microbatches - 1)
        documents_BL = documents(lax.dynamic_index_in_dim(tokens_MBL, m, keepdims=False), par.end_token)
        masks = {"documents_BL": documents_BL, "windows": jax.tree.map(of_chunk, windows)}
        y_BLD = decoder.layers(jax.tree.map(of_chunk, chunks), x_BLD, length, config, par=par, state=used, **masks)
        sends = live & ~(last & (chunk == last_chunk))
        receives = next_live & ~(first & (next_chunk == 0))
        return send.send(y_BLD, sent, sends, receives, par, ring=ring), y_BLD

    with comm_log.repeat(ticks):
        nothing_BLD = to_varying(jnp.zeros_like(x_MBLD[0]), axes)
        _, y_TBLD = lax.scan(tick, nothing_BLD, (jnp.arange(ticks), x_MBLD[starts], slots))
    return y_TBLD[np.array(ends)].reshape(x_BLD.shape)


def evaluate(params, tokens_BL, targets_BL, weights_BL, config: ModelConfig, par: Parallel, state: stages.State,
             schedule: Schedule) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Returns `loss`, not to be differentiated, of any schedule; arguments as there."""
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
