"""Causal self-attention of a decoder layer: grouped kv heads, rotary positions, qk-norm.

Dims: B batch, L length, D model, N query heads, K kv heads, H head dim. N and K are local: 1/tp of the model's, but K
is 1 where kv heads are replicated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from taco_jax.models.config import ModelConfig
from taco_jax.models.norms import rms_norm
from taco_jax.models.parallel import Parallel
from taco_jax.models.projections import Dense, column


def kv_replicated(config: ModelConfig, tp: int) -> bool:
    """Whether every rank holds all k and v weights and uses one head of them (tp a true multiple of the kv heads)."""
    return config.n_kv_heads % tp != 0


def rope_angles(config: ModelConfig, length: int) -> jax.Array:
    """Rotation angles `position * theta^(-2i/H)`, float32[L, H/2], of positions 0 to length - 1."""
    half = config.head_dim // 2
    frequencies_H = config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    return jnp.arange(length, dtype=jnp.float32)[:, None] * frequencies_H


def rope(x_BLNH: jax.Array, angles_LH: jax.Array) -> jax.Array:
    """Rotates each pair (x[i], x[i + H/2]) by its position's angle, in float32; the pairing of Llama and Qwen."""
    first, second = jnp.split(x_BLNH.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles_LH)[:, None], jnp.sin(angles_LH)[:, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x_BLNH.dtype)


def _own_kv_head(dense: Dense, config: ModelConfig, par: Parallel) -> Dense:
    """The columns of the one kv head that this rank's query heads share, out of replicated weights."""
    head = lax.axis_index(par.axis) * config.n_kv_heads // lax.axis_size(par.axis)
    columns = lambda w: lax.dynamic_slice_in_dim(w, head * config.head_dim, config.head_dim, axis=-1)
    return {name: columns(weight) for name, weight in dense.items()}


def attention(x_BLD: jax.Array, params: Mapping[str, Any], angles_LH: jax.Array | None, config: ModelConfig,
              par: Parallel) -> jax.Array:  # fmt: skip
    """`softmax(q k^T / sqrt(H), causal) v` of this rank's heads, [B, L, N H], for an x that has entered.

    `angles_LH` is None without rotary positions.
    """
    q, k, v = params["q"], params["k"], params["v"]
    if kv_replicated(config, lax.axis_size(par.axis)):
        k, v = _own_kv_head(k, config, par), _own_kv_head(v, config, par)
    q_BLNH, k_BLKH, v_BLKH = (
        y_BLF.reshape(*y_BLF.shape[:2], -1, config.head_dim) for y_BLF in column(x_BLD, (q, k, v), par)
    )
    if config.qk_norm:
        q_BLNH = rms_norm(q_BLNH, params["q_norm"]["scale"], config.norm_eps)
        k_BLKH = rms_norm(k_BLKH, params["k_norm"]["scale"], config.norm_eps)
    if angles_LH is not None:
        q_BLNH, k_BLKH = rope(q_BLNH, angles_LH), rope(k_BLKH, angles_LH)
    y_BLNH = jax.nn.dot_product_attention(
        q_BLNH, k_BLKH, v_BLKH, is_causal=True, implementation=par.attention_implementation
    )
    return y_BLNH.reshape(*y_BLNH.shape[:2], -1)
