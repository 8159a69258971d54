"""The forward pass alone, for validation: nothing is kept, so it needs no more memory than one microbatch.

Ticks and messages are those of `circular.py`. Without a backward pass a conditional costs nothing, so empty ticks
compute nothing, and embedding and head run in the tick of their microbatch.

Dims: M microbatches, B sequences of a microbatch, L length, D model.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from taco_jax.config.schedule import Schedule
from taco_jax.models import decoder
from taco_jax.models.config import ModelConfig
from taco_jax.models.run_config import Parallel
from taco_jax.pipeline import send, stages
from taco_jax.tensor_parallel import to_varying


def evaluate(params, tokens_BL, targets_BL, weights_BL, config: ModelConfig, par: Parallel, state: stages.State,
             schedule: Schedule) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """`circular.loss`, not to be differentiated; arguments as there."""
    axes = stages.activation_axes(params, par)
    params = decoder.use_replicated_params(params, config, par)
    scales, ring, last_chunk = stages.own_scales(state, schedule.chunks), schedule.chunks > 1, schedule.chunks - 1
    chunks = stages.in_chunks(params["layers"], schedule)
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
            return decoder.layers(of_chunk(chunks), x_BLD, tokens_BL.shape[-1], config, par=par, state=of_chunk(scales))

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
