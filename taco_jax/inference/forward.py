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
from taco_jax.models.attention import causal, contexts, windows_of
from taco_jax.models.blocks import norm
from taco_jax.models.config import ModelConfig
from taco_jax.models.overlap import LAYERS_A_BODY, join_streams, one_chain_layer, prompt_layer, split_stream
from taco_jax.models.projections import ResidualStream, finish_stream, init_stream


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
    make = _whole_layer if chains.count == 1 else _chained_layer
    streams = split_stream(stream, chains.count, chains.dim)
    layer, unroll = make(config, layout, chains, tokens_BL.shape[1]), 1 if chains.count == 1 else LAYERS_A_BODY
    streams, (keys, values) = scan_layers(layer, streams, params["layers"], layout, unroll)
    return join_streams(streams, chains.dim), kv.filled(keys, values, slots)


def _whole_layer(config: ModelConfig, layout: Layout, chains: Chains, length: int) -> Callable:
    """Returns the layer of whole prompts, for `scan_layers`."""
    context = contexts_by_layer(config, jnp.arange(length))

    def layer(streams, index, of_layer, sites_of):
        kept = []

        def attend(q_BLNH, k_BLKH, v_BLKH, context):
            kept.extend((k_BLKH, v_BLKH))
            return causal(config, layout.par)(q_BLNH, k_BLKH, v_BLKH, context)

        (stream,), here = streams, context(index)
        stream = _layer(stream, of_layer, here, config, layout=layout, attend=attend, sites_of=sites_of)
        return (stream,), tuple(kept)

    return layer


def _chained_layer(config: ModelConfig, layout: Layout, chains: Chains, length: int) -> Callable:
    """Returns the layer of prompts in chains: parts of the batch, or of each sequence, one behind the other.

    A part of a sequence sees the keys of those before it, which the layer has computed when its turn comes.
    """
    n, of_sequence = chains.count, chains.dim == 1
    size = length // n if of_sequence else length
    starts = [i * size if of_sequence else 0 for i in range(n)]
    contexts = [contexts_by_layer(config, jnp.arange(start, start + size)) for start in starts]
    par = layout.par

    def layer(streams, index, of_layer, sites_of):
        kept = []

        def attend(q_BLNH, k_BLKH, v_BLKH, context):
            kept.append((k_BLKH, v_BLKH))
            if not of_sequence or len(kept) == 1:
                return causal(config, par)(q_BLNH, k_BLKH, v_BLKH, context)
            k_BSKH, v_BSKH = (jnp.concatenate(parts, 1) for parts in zip(*kept))
            start = k_BSKH.shape[1] - size
            # A causal mask counts from the first query, in cuDNN too: zeros stand for the queries before.
            q_BSNH = jnp.pad(q_BLNH, ((0, 0), (start, 0), (0, 0), (0, 0)))
            return causal(config, par)(q_BSNH, k_BSKH, v_BSKH, context)[:, start:]

        with comm_log.repeat(n):
            run = prompt_layer([decoder.sublayers(config, par, attend, sites_of)] * n, par)
        streams = run(streams, of_layer, layout.scales(), [context(index) for context in contexts])
        return streams, tuple(jnp.concatenate(parts, chains.dim) for parts in zip(*kept))

    return layer


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


def scan_layers(layer: Callable, carry: Any, stacked: Any, layout: Layout, unroll: int = 1) -> tuple[Any, Any]:
    """(carry, results stacked over all layers) of `layer(carry, index, parameters, its sites' prefix)`.

    unroll: layers in the body of the loop.

    The parameters are indexed where they lie: cutting them into segments first would copy them.
    """
    results = []
    for segment in layout.segments:

        def one(carry, index, sites_of=segment.sites_of):
            of_layer = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index, keepdims=False), stacked)
            return layer(carry, index, of_layer, sites_of)

        with comm_log.repeat(segment.stop - segment.start):
            carry, result = lax.scan(one, carry, jnp.arange(segment.start, segment.stop), unroll=unroll)
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
