"""Rotary positions: angles of positions, and their scaling for sequences longer than a model was first trained on.

A scaling multiplies the frequency f = theta^(-2i/H) of every pair i of a head (wavelength w = 2 pi / f, length O before
the scaling, factor s):

    linear    1 / s
    llama3    1 where w < O / high, 1 / s where w > O / low, between them a line in O / w
    yarn      1 for pairs that turn more than beta_fast times within O, 1 / s below beta_slow times, between them a line
              in i; queries and keys are also multiplied by 0.1 ln(s) + 1, or by what the model says

Sources: linear, Chen et al., arXiv 2306.15595; yarn, Peng et al., arXiv 2309.00071; llama3, as `transformers` computes
it for Llama 3.1.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from taco_jax.models.config import ModelConfig


def rope_angles(config: ModelConfig, positions: jax.Array, *, local: bool = False) -> jax.Array:
    """Rotation angles `position * theta^(-2i/H)` of integer positions [...], scaled, float32[..., H/2].

    local: those of layers with a sliding window, where they have a theta of their own.
    """
    half = config.head_dim // 2
    own = local and config.rope_local_theta is not None
    theta = config.rope_local_theta if own else config.rope_theta
    frequencies_H = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if config.rope_type != "default" and not own:
        frequencies_H *= scaling(config)
    return positions.astype(jnp.float32)[..., None] * frequencies_H


def scaling(config: ModelConfig) -> np.ndarray:
    """Returns what the frequency of every pair is multiplied by, float32[H/2]."""
    half, s = config.head_dim // 2, config.rope_factor
    pairs = np.arange(half)
    if config.rope_type in ("default", "linear"):
        return np.full(half, 1 / s, np.float32)
    turns = config.rope_original_length / (2 * np.pi * config.rope_theta ** (pairs / half))  # O / w
    if config.rope_type == "llama3":
        low, high = config.rope_low_frequency, config.rope_high_frequency
        kept = np.clip((turns - low) / (high - low), 0, 1)
    else:
        start, stop = (_pair_that_turns(config, turns) for turns in (config.rope_beta_fast, config.rope_beta_slow))
        if config.rope_truncate:
            start, stop = math.floor(start), math.ceil(stop)
        start, stop = max(start, 0), min(stop, config.head_dim - 1)
        kept = 1 - np.clip((pairs - start) / (stop - start if stop != start else 0.001), 0, 1)
    return (kept + (1 - kept) / s).astype(np.float32)


def _pair_that_turns(config: ModelConfig, turns: float) -> float:
    """Returns the pair, between whole ones, that turns so many times within the original length."""
    wavelength = config.rope_original_length / (turns * 2 * math.pi)
    return config.head_dim * math.log(wavelength) / (2 * math.log(config.rope_theta))


def attention_factor(config: ModelConfig) -> float:
    """Returns what rotated queries and keys are multiplied by: 1 but with yarn."""
    if config.rope_type != "yarn":
        return 1.0
    given = config.rope_attention_factor
    return 0.1 * math.log(config.rope_factor) + 1 if given is None else given


def rope(x_BLNH: jax.Array, angles: jax.Array, factor: float = 1.0) -> jax.Array:
    """Rotates each pair (x[i], x[i + H/2]) by its position's angle, in float32; the pairing of Llama and Qwen.

    `angles` is [L, H/2], or [B, L, H/2] where the sequences of a batch are at positions of their own. `factor`
    multiplies the result.
    """
    first, second = jnp.split(x_BLNH.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
    if factor != 1:
        cos, sin = factor * cos, factor * sin
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x_BLNH.dtype)
