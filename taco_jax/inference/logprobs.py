"""Log-probabilities of the tokens of a prompt and of the tokens that follow it, with the most likely alternatives.

They are the model's own: of its logits before temperature, top_k and top_p change anything. Prompts are scored a chunk
of positions at a time, so that the logits of a whole prompt never exist.

Dims: B batch, L length of a padded prompt, D model, V vocabulary, K alternatives.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from taco_jax.inference.cache import KVCache
from taco_jax.inference.forward import last_logits, prompt_stream
from taco_jax.inference.settings import Layout
from taco_jax.models import decoder
from taco_jax.models.blocks import norm
from taco_jax.models.config import ModelConfig
from taco_jax.models.projections import finish_stream

MOST_ALTERNATIVES = 20
"""The most alternatives of a token that can be asked for: as many as OpenAI's chats give."""


class Scores(NamedTuple):
    """chosen: float32[B], of the tokens that are there. best: float32[B, K], of the most likely ids, the likeliest
    first; ids: int32[B, K]."""

    chosen: jax.Array
    best: jax.Array
    ids: jax.Array


def width(asked: int, vocab_size: int) -> int:
    """The alternatives that programs compute for a request of so many: 1 or MOST_ALTERNATIVES, so that few programs
    are needed."""
    return 1 if asked <= 1 else min(MOST_ALTERNATIVES, vocab_size)


def of_tokens(logits_BV: jax.Array, tokens_B: jax.Array, top: int) -> Scores:
    """Scores of tokens that were chosen from logits; NaN where they are NOT_FINITE's."""
    lse_B = jax.nn.logsumexp(logits_BV, axis=-1)
    chosen_B = jnp.take_along_axis(logits_BV, jnp.maximum(tokens_B, 0)[:, None], axis=1)[:, 0]
    best_BK, ids_BK = jax.lax.top_k(logits_BV, top)
    return Scores(chosen_B - lse_B, best_BK - lse_B[:, None], ids_BK.astype(jnp.int32))


def scored_prefill(params, tokens_1L: jax.Array, lengths_1: jax.Array, config: ModelConfig, layout: Layout,
                   top: int) -> tuple[jax.Array, KVCache, Scores]:  # fmt: skip
    """`forward.prefill` of one prompt into L slots, and Scores of the token behind each position (B = L here).

    Those of the last position and of the padding are of no token. With error feedback every position has what the
    last sum lost added, as in `perplexity.measured`: one exact message of all positions.
    """
    length = tokens_1L.shape[1]
    stream, cache = prompt_stream(params, tokens_1L, length, config, layout)
    x_1LD = norm(finish_stream(stream, layout.par, "error"), params["final_norm"], config)
    following_L = jnp.roll(tokens_1L[0], -1)
    scores = decoder.head_logprobs(params, x_1LD[0], following_L, config=config, par=layout.par, top=top)
    return last_logits(params, stream, lengths_1, config, layout), cache, Scores(*scores)
