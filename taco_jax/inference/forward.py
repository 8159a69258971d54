"""The decoder's forward pass with a kv cache: whole prompts (`prefill`), then a token at a time (`decode`).

The layers are those of `taco_jax.models.decoder`; only what attention looks at is another. All functions run inside a
shard_map that is manual over all mesh axes, on local shards.

Dims: B batch, L length of the padded prompts, D model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from taco_jax.collectives import comm_log
from taco_jax.inference import cache as kv
from taco_jax.inference.cache import KVCache
from taco_jax.inference.settings import ROWS, Chains, Layout
from taco_jax.models import decoder
from taco_jax.models.attention import Attend, causal, contexts, windows_of
from taco_jax.models.blocks import norm
from taco_jax.models.config import ModelConfig
from taco_jax.models.overlap import (
    ChainedLayer,
    Pending,
    add_pending,
    join_streams,
    no_term,
    one_chain_layer,
    prompt_layers,
    split_stream,
)
from taco_jax.models.projections import ResidualStream, finish_stream, init_stream

LAYERS_A_BODY = 4
"""Layers in chains in the body of a loop over them, which copies the streams at its end."""


def prefill(params, tokens_BL: jax.Array, lengths_B: jax.Array, slots: int, config: ModelConfig,
            layout: Layout) -> tuple[jax.Array, KVCache]:  # fmt: skip
    """(logits float32[B, V] of what follows each prompt, the cache that holds the prompts).

    Args:
      tokens_BL: int32 ids, row b's prompt in its first lengths_B[b] places; any id of the vocabulary behind them.
      slots: of the cache, at least L.
    """
    stream, cache = prompt_stream(params, tokens_BL, slots, config, layout)
    return last_logits(params, stream, lengths_B, config, layout), cache


def prompt_stream(params, tokens_BL: jax.Array, slots: int, config: ModelConfig,
                  layout: Layout) -> tuple[ResidualStream, KVCache]:  # fmt: skip
    """(the stream behind the last layer, the cache) of `prefill`."""
    params = decoder.use_replicated_params(params, config, layout.par)
    x_BLD = decoder.embed(params, tokens_BL, config, layout.par, {})
    stream, chains = stream_of(x_BLD, layout), layout.chains_of(config, *tokens_BL.shape)
    if chains.count > 1:
        return _in_chains(params["layers"], stream, slots, config, layout, chains=chains)
    context = contexts_by_layer(config, jnp.arange(tokens_BL.shape[1]))

    def layer(stream, index, of_layer, sites_of):
        kept = []

        def attend(q_BLNH, k_BLKH, v_BLKH, context):
            kept.extend((k_BLKH, v_BLKH))
            return causal(config, layout.par)(q_BLNH, k_BLKH, v_BLKH, context)

        stream = _layer(stream, of_layer, context(index), config, layout=layout, attend=attend, sites_of=sites_of)
        return stream, tuple(kept)

    stream, (keys, values) = scan_layers(layer, stream, params["layers"], layout)
    return stream, kv.filled(keys, values, slots)


def _in_chains(
    stacked, stream: ResidualStream, slots: int, config: ModelConfig, layout: Layout, chains: Chains
) -> tuple[ResidualStream, KVCache]:
    """`prompt_stream` in chains: parts of the batch, or of each sequence, one behind the other.

    A part of a sequence sees the keys of those before it, which the layer has computed when its turn comes.
    """
    par, n, dim = layout.par, *chains
    sizes = jnp.split(jnp.arange(stream.x_BLD.shape[1]), n) if dim else [jnp.arange(stream.x_BLD.shape[1])] * n
    contexts = [contexts_by_layer(config, positions) for positions in sizes]

    at = lambda index: jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index, keepdims=False), stacked)

    def layer(index, sites_of, kept: list) -> ChainedLayer:
        sublayers = decoder.sublayers(config, par, _keeping(kept, config, layout, of_sequence=dim == 1), sites_of)
        return ChainedLayer([sublayers] * n, at(index), [context(index) for context in contexts])

    def pending_before(index, segment, y_BLD) -> Pending:
        """Returns the last sum of layer index - 1; before the segment's first layer nothing is pending, in zeros."""
        branch = last_of(segment).branch_params(at(jnp.maximum(index - 1, 0)))
        branch = jax.tree.map(lambda a: jnp.where(index > segment.start, a, jnp.zeros_like(a)), branch)
        return Pending(y_BLD, branch, layout.scales().get(last_of(segment).out_site))

    last_of = lambda segment: decoder.sublayers(config, par, causal(config, par), segment.sites_of)[-1]

    def layers(carried, first, segment, count: int):
        streams, y_BLD = carried
        kept = [[] for _ in range(count)]
        with comm_log.repeat(n):
            run = prompt_layers(par, layout.scales())
        of_layers = [layer(first + i, segment.sites_of, own) for i, own in enumerate(kept)]
        carried = run(streams, of_layers, pending_before(first, segment, y_BLD))
        join = lambda parts: jnp.concatenate(parts, dim)
        return carried, tuple(jnp.stack([join([pair[k] for pair in own]) for own in kept]) for k in range(2))

    streams, results = split_stream(stream, n, dim), []
    for segment in layout.segments:
        count, (start, stop) = min(LAYERS_A_BODY, segment.stop - segment.start), segment[1:]
        rest = (stop - start) % count
        with comm_log.repeat(stop - start):
            several = lambda carried, first, s=segment, c=count: layers(carried, first, s, c)
            carried = streams, no_term(streams[-1], par)
            carried, result = lax.scan(several, carried, jnp.arange(start, stop - rest, count))
            results.append(jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), result))
            if rest:
                carried, result = layers(carried, stop - rest, segment, rest)
                results.append(result)
            with comm_log.repeat(n):
                streams = add_pending(last_of(segment), par, carried[0], pending_before(stop, segment, carried[1]))
    keys, values = results[0] if len(results) == 1 else jax.tree.map(lambda *parts: jnp.concatenate(parts), *results)
    return join_streams(streams, dim), kv.filled(keys, values, slots)


def _keeping(kept: list, config: ModelConfig, layout: Layout, *, of_sequence: bool) -> Attend:
    """Returns the attention of the chains of a layer, one after the other, which puts their keys and values in `kept`.

    of_sequence: a chain sees the keys of those before it.
    """
    attend = causal(config, layout.par)

    def of_chain(q_BLNH, k_BLKH, v_BLKH, context):
        kept.append((k_BLKH, v_BLKH))
        if not of_sequence or len(kept) == 1:
            return attend(q_BLNH, k_BLKH, v_BLKH, context)
        k_BSKH, v_BSKH = (jnp.concatenate(parts, 1) for parts in zip(*kept))
        start = k_BSKH.shape[1] - q_BLNH.shape[1]
        # A causal mask counts from the first query, in cuDNN too: zeros stand for the queries before.
        q_BSNH = jnp.pad(q_BLNH, ((0, 0), (start, 0), (0, 0), (0, 0)))
        return attend(q_BSNH, k_BSKH, v_BSKH, context)[:, start:]

    return of_chain


def last_logits(params, stream: ResidualStream, lengths_B: jax.Array, config: ModelConfig, layout: Layout) -> jax.Array:
    """Logits float32[B, V] of what follows each prompt."""
    last = jax.tree.map(lambda a_BLD: jnp.take_along_axis(a_BLD, lengths_B[:, None, None] - 1, axis=1), stream)
    return _logits(params, last, config, layout)


def decode(params, tokens_B: jax.Array, positions_B: jax.Array, cache: KVCache, config: ModelConfig,
           layout: Layout) -> tuple[jax.Array, KVCache]:  # fmt: skip
    """(logits float32[B, V] of what follows, the cache with the tokens put at their positions)."""
    params = decoder.use_replicated_params(params, config, layout.par)
    context = contexts_by_layer(config, positions_B[:, None])

    def layer(carry, index, of_layer, sites_of):
        stream, cache = carry
        written = []

        def attend(q_B1NH, k_B1KH, v_B1KH, context):
            written.append(kv.write(cache, index, positions_B, k_B1KH, v_B1KH))
            return kv.attend(written[0], index, positions_B, q_B1NH, config=config, sliding=context.sliding)

        stream = _layer(stream, of_layer, context(index), config, layout=layout, attend=attend, sites_of=sites_of)
        return (stream, written[0]), None

    x_B1D = decoder.embed(params, tokens_B[:, None], config, layout.par, state={}, positions_BL=positions_B[:, None])
    # The cache is carried, not scanned over: XLA then writes one token into it where it lies.
    (stream, cache), _ = scan_layers(layer, (stream_of(x_B1D, layout), cache), params["layers"], layout)
    return _logits(params, stream, config, layout), cache


def stream_of(x_BLD: jax.Array, layout: Layout) -> ResidualStream:
    """Returns the first layer's input."""
    return init_stream(x_BLD, layout.par, (f"{s.sites_of}/{row}" for s in layout.segments for row in ROWS))


def scan_layers(layer: Callable, carry: Any, stacked: Any, layout: Layout) -> tuple[Any, Any]:
    """(carry, results stacked over all layers) of `layer(carry, index, parameters, its sites' prefix)`.

    The parameters are indexed where they lie: cutting them into segments first would copy them.
    """
    results = []
    for segment in layout.segments:

        def one(carry, index, sites_of=segment.sites_of):
            of_layer = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index, keepdims=False), stacked)
            return layer(carry, index, of_layer, sites_of)

        with comm_log.repeat(segment.stop - segment.start):
            carry, result = lax.scan(one, carry, jnp.arange(segment.start, segment.stop))
        results.append(result)
    return carry, results[0] if len(results) == 1 else jax.tree.map(lambda *parts: jnp.concatenate(parts), *results)


def contexts_by_layer(config: ModelConfig, positions: jax.Array) -> Callable:
    """Returns f(index of a layer) -> its `Context`, for positions as in `rope_angles`."""
    make, windows_N = contexts(config, positions), windows_of(config)
    return lambda index: make(None if windows_N is None else windows_N[index])


def _layer(
    stream: ResidualStream, of_layer, context, config: ModelConfig, layout: Layout, attend, sites_of: str
) -> ResidualStream:
    sublayers = decoder.sublayers(config, layout.par, attend, sites_of)
    return one_chain_layer(sublayers, layout.par)(stream, of_layer, layout.scales(), context)


def _logits(params, stream: ResidualStream, config: ModelConfig, layout: Layout) -> jax.Array:
    x_B1D = finish_stream(stream, layout.par, "error")
    x_B1D = norm(x_B1D, params["final_norm"], config)
    return decoder.head_logits(params, x_B1D, config, layout.par, {})[:, 0]
