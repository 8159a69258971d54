"""The decoder's forward pass with a kv cache: whole prompts (`prefill`), then a token at a time (`decode`).

The layers are those of `taco_jax.models.decoder`; only what attention looks at is another. Both functions run inside a
shard_map that is manual over all mesh axes, on local shards.

Dims: B batch, L length of the padded prompts, D model, V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from taco_jax import sites
from taco_jax.inference import cache as kv
from taco_jax.inference.cache import KVCache
from taco_jax.models import chains, decoder
from taco_jax.models.attention import causal, rope_angles
from taco_jax.models.config import ModelConfig
from taco_jax.models.norms import norm
from taco_jax.models.parallel import Parallel


def prefill(params, tokens_BL: jax.Array, lengths_B: jax.Array, slots: int, config: ModelConfig,
            par: Parallel) -> tuple[jax.Array, KVCache]:  # fmt: skip
    """(logits float32[B, V] of what follows each prompt, the cache that holds the prompts).

    Args:
      tokens_BL: int32 ids, row b's prompt in its first lengths_B[b] places; any id of the vocabulary behind them.
      slots: of the cache, at least L.
    """
    params = decoder.use_replicated_params(params, config, par)
    angles_LH = _angles(config, jnp.arange(tokens_BL.shape[1]))

    def layer(x_BLD, of_layer):
        kept = []

        def attend(q_BLNH, k_BLKH, v_BLKH):
            kept.extend((k_BLKH, v_BLKH))
            return causal(par)(q_BLNH, k_BLKH, v_BLKH)

        return _layer(x_BLD, of_layer, angles_LH, config, par, attend), tuple(kept)

    x_BLD = decoder.embed(params, tokens_BL, config, par, {})
    with sites.repeat(config.n_layers):
        x_BLD, (keys, values) = lax.scan(layer, x_BLD, params["layers"])
    x_B1D = jnp.take_along_axis(x_BLD, lengths_B[:, None, None] - 1, axis=1)
    return _logits(params, x_B1D, config, par), kv.filled(keys, values, slots)


def decode(params, tokens_B: jax.Array, positions_B: jax.Array, cache: KVCache, config: ModelConfig,
           par: Parallel) -> tuple[jax.Array, KVCache]:  # fmt: skip
    """(logits float32[B, V] of what follows, the cache with the tokens put at their positions)."""
    params = decoder.use_replicated_params(params, config, par)
    angles_B1H = _angles(config, positions_B[:, None])

    def layer(carry, of_layer):
        x_B1D, cache = carry
        index, of_layer = of_layer
        written = []

        def attend(q_B1NH, k_B1KH, v_B1KH):
            written.append(kv.write(cache, index, positions_B, k_B1KH, v_B1KH))
            return kv.attend(written[0], index, positions_B, q_B1NH)

        x_B1D = _layer(x_B1D, of_layer, angles_B1H, config, par, attend)
        return (x_B1D, written[0]), None

    x_B1D = decoder.embed(params, tokens_B[:, None], config, par, {}, positions_B[:, None])
    with sites.repeat(config.n_layers):
        # The cache is carried, not scanned over: XLA then writes one token into it where it lies.
        layers = jnp.arange(config.n_layers), params["layers"]
        (x_B1D, cache), _ = lax.scan(layer, (x_B1D, cache), layers)
    return _logits(params, x_B1D, config, par), cache


def _layer(x_BLD, of_layer, angles, config: ModelConfig, par: Parallel, attend) -> jax.Array:
    (x_BLD,) = chains.side_by_side(decoder.halves(config, par, attend), par)((x_BLD,), of_layer, {}, angles)
    return x_BLD


def _angles(config: ModelConfig, positions: jax.Array) -> jax.Array | None:
    return rope_angles(config, positions) if config.positions == "rope" else None


def _logits(params, x_B1D: jax.Array, config: ModelConfig, par: Parallel) -> jax.Array:
    x_B1D = norm(x_B1D, params["final_norm"], config.norm_eps)
    return decoder.head_logits(params, x_B1D, config, par, {})[:, 0]
