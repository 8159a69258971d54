"""How the next token is drawn from the logits: the most likely one, or at random among the most likely ones.

Every row has settings and a seed of its own, and its noise depends on nothing but that seed and the token's position: a
row's text is the same alone and in a batch.

Dims: B batch, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from taco_jax.config import ConfigError

NOT_FINITE = -1
"""The token id that stands for logits of which one is NaN or infinite: nothing can be drawn from them."""


def why_not_finite(dtype: str) -> str:
    """Returns what a user can do where the model's logits are not finite."""
    other = "its weights, norm_eps or rope_theta are damaged"
    other += ", or its activations are beyond what float16 reaches: try dtype bfloat16" if dtype == "float16" else ""
    return f"the model's logits hold NaN or infinities; {other}"


@dataclasses.dataclass(frozen=True)
class Sampling:
    """temperature: 0 takes the most likely token; else logits are divided by it and one is drawn.

    top_k: only among the k most likely (0: all). top_p: only among the fewest most likely ones that together have at
    least this probability, of what top_k left. seed: row b of a batch draws with seed + b.

    Raises:
      ConfigError: a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        for key, good, rule in (
            ("temperature", 0 <= self.temperature < float("inf"), "must be 0 (greedy) or more, for example 0.8"),
            ("top_k", self.top_k >= 0, "must be 0 (all tokens) or more, for example 50"),
            ("top_p", 0 < self.top_p <= 1, "must be above 0 and at most 1, for example 0.9"),
            ("seed", 0 <= self.seed < 2**31, "must be from 0 to 2147483647"),
        ):
            if not good:
                raise ConfigError(f"{key}={getattr(self, key)!r}: {rule}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def rows(self, batch: int) -> Rows:
        fill = lambda value, dtype: np.full((batch,), value, dtype)
        seeds = (self.seed + np.arange(batch)).astype(np.uint32)
        return Rows(fill(self.temperature, np.float32), fill(self.top_k, np.int32), fill(self.top_p, np.float32), seeds)


class Rows(NamedTuple):
    """The settings of every row, arrays of [B]: float32, int32, float32, uint32."""

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    seed: jax.Array


def greedy(logits_BV: jax.Array) -> jax.Array:
    """Token ids int32[B]: the most likely ones; NOT_FINITE as in `sample`."""
    return _checked(logits_BV, jnp.argmax(logits_BV, axis=-1).astype(jnp.int32))


def sample(logits_BV: jax.Array, positions_B: jax.Array, rows: Rows) -> jax.Array:
    """Token ids int32[B], drawn as each row says; `positions_B` are where the tokens will stand.

    A row whose logits hold NaN or an infinity gets NOT_FINITE.
    """

    def one(logits_V, position, temperature, top_k, top_p, seed):
        # A greedy row's logits stay as they are: divided, two of them could become equal.
        divisor = jnp.where(temperature == 0, 1.0, jnp.maximum(temperature, 1e-6))
        scaled_V, ids_V = jax.lax.top_k(logits_V / divisor, logits_V.size)  # sorted
        rank_V = jnp.arange(logits_V.size)
        scaled_V = jnp.where((top_k == 0) | (rank_V < top_k), scaled_V, -jnp.inf)
        likelier_V = jnp.cumsum(jax.nn.softmax(scaled_V)) - jax.nn.softmax(scaled_V)
        scaled_V = jnp.where((rank_V == 0) | (likelier_V < top_p), scaled_V, -jnp.inf)
        drawn = jax.random.categorical(jax.random.fold_in(jax.random.key(seed), position), scaled_V)
        return jnp.where(temperature == 0, ids_V[0], ids_V[drawn]).astype(jnp.int32)

    return _checked(logits_BV, jax.vmap(one)(logits_BV, positions_B, *rows))


def _checked(logits_BV: jax.Array, tokens_B: jax.Array) -> jax.Array:
    good_B = jnp.all(logits_BV < jnp.inf, axis=-1) & jnp.any(logits_BV > -jnp.inf, axis=-1)  # NaN is neither
    return jnp.where(good_B, tokens_B, NOT_FINITE)
