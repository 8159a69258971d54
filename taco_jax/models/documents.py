"""Documents that follow each other in a sequence of tokens, each ending with the same token.

Attention that stays inside of them (`taco_jax.models.attention`) needs to know which document a position is in; learned
positions start again in each. Rotary ones need nothing: only distances count.

Dims: B batch, L length.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def documents(tokens_BL: jax.Array, end_token: int | None) -> jax.Array | None:
    """The number of each position's document in its sequence, int32[B, L]; an end token belongs to what it ends.

    None where no token ends documents.
    """
    if end_token is None:
        return None
    ends_BL = (tokens_BL == end_token).astype(jnp.int32)
    return jnp.cumsum(ends_BL, axis=1) - ends_BL


def positions_in_documents(documents_BL: jax.Array) -> jax.Array:
    """The place of each position in its document, int32[B, L]."""
    places_L = jnp.arange(documents_BL.shape[1], dtype=jnp.int32)
    before_BL = jnp.concatenate([documents_BL[:, :1], documents_BL[:, :-1]], axis=1)
    starts_BL = jnp.where(documents_BL != before_BL, places_L, 0)
    return places_L - lax.cummax(starts_BL, axis=1)
