"""The kv cache: keys and values of every position that attention may look back at.

Sequences start at slot 0 of their row, whatever their lengths, so position p of a sequence is slot p. A prompt that was
padded on the right leaves padding behind its end: those slots are beyond what its row's queries see, and the tokens
that follow are written over them.

Dims: N layers, B batch, S slots (the longest sequence that fits), L length, Q query heads, K kv heads, H head dim. On
the mesh K is cut over the tensor-parallel axis; with more ranks than kv heads each rank keeps the one head that it
uses, so K is then the number of ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from taco_jax.models.attention import cached
from taco_jax.models.config import ModelConfig


class KVCache(NamedTuple):
    """keys, values: [N, B, S, K, H] in the compute dtype."""

    keys: jax.Array
    values: jax.Array


def specs(axis: str = "tp") -> KVCache:
    spec = P(None, None, None, axis, None)
    return KVCache(spec, spec)


def cache_bytes(config: ModelConfig, batch: int, slots: int, tp: int, itemsize: int) -> int:
    """Bytes of one device's part of a cache."""
    heads = max(config.n_kv_heads // tp, 1)
    return 2 * config.n_layers * batch * slots * heads * config.head_dim * itemsize


def filled(keys_NBLKH: jax.Array, values_NBLKH: jax.Array, slots: int) -> KVCache:
    """A cache of `slots` slots, the first L of which are given."""
    room = [(0, 0), (0, 0), (0, slots - keys_NBLKH.shape[2]), (0, 0), (0, 0)]
    return KVCache(jnp.pad(keys_NBLKH, room), jnp.pad(values_NBLKH, room))


def write(cache: KVCache, layer: jax.Array, positions_B: jax.Array, k_B1KH: jax.Array, v_B1KH: jax.Array) -> KVCache:
    """One token of each row put at its position in one layer; a position beyond the last slot is dropped."""
    rows = jnp.arange(len(positions_B))
    put = lambda slots, new: slots.at[layer, rows, positions_B].set(new[:, 0], mode="drop")
    return KVCache(put(cache.keys, k_B1KH), put(cache.values, v_B1KH))


def attend(cache: KVCache, layer: jax.Array, positions_B: jax.Array, q_B1QH: jax.Array, config: ModelConfig,
           sliding: jax.Array | None = None) -> jax.Array:  # fmt: skip
    """`softmax(q k^T / sqrt(H)) v` over the slots up to each row's position, [B, 1, Q, H]; sliding as in `Context`.

    A sliding window leaves out older slots. The cache keeps them, so it is as large as without one.
    """
    keys_BSKH, values_BSKH = (jax.lax.dynamic_index_in_dim(a, layer, keepdims=False) for a in cache)
    return cached(config, positions_B, keys_BSKH.shape[1])(q_B1QH, keys_BSKH, values_BSKH, sliding)
