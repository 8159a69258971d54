"""Attention's masks: a position looks back at all before it, at those of a sliding window, of its own document.

    causal             j <= i
    sliding window w   i - w < j
    documents          document of j = document of i

All layers run the same program in one scan. Where some have the window and others do not, a bool that is scanned along
says which a layer is.

Dims: B batch, L length, S keys, N query heads, K kv heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dispatch import compute_capability
from taco_jax.models.config import ModelConfig
from taco_jax.models.rope import rope_angles
from taco_jax.models.run_config import Parallel


class Context(NamedTuple):
    """A layer's part of what attention needs to know beside the activations, and its tokens'.

    angles: as in `rope`, None without rotary positions. sliding: whether the layer has the window, a bool of an array;
    None where all layers are alike. documents_BL: the number of each position's document, None where attention crosses
    their ends.
    """

    angles: jax.Array | None = None
    sliding: jax.Array | None = None
    documents_BL: jax.Array | None = None


Attend = Callable[[jax.Array, jax.Array, jax.Array, Context], jax.Array]
"""(q_BLNH, k_BLKH, v_BLKH) of this rank's heads -> y_BLNH."""


def contexts(config: ModelConfig, positions: jax.Array, documents_BL: jax.Array | None = None) -> Callable:
    """Returns f(sliding) -> the Context of a layer, for positions as in `rope_angles`; sliding as in `Context`."""
    if config.positions != "rope":
        return lambda sliding: Context(None, sliding, documents_BL)
    angles = rope_angles(config, positions)
    if config.rope_local_theta is None:
        return lambda sliding: Context(angles, sliding, documents_BL)
    local = rope_angles(config, positions, local=True)
    here = lambda sliding: local if sliding is None else jnp.where(sliding, local, angles)
    return lambda sliding: Context(here(sliding), sliding, documents_BL)


def windows_of(config: ModelConfig) -> jax.Array | None:
    """Returns which layers have the window, bool[n_layers] to be scanned; None where all are alike."""
    return None if isinstance(config.windows, bool) else jnp.array(config.windows)


def implementation(device, dtype: Any, head_dim: int) -> str:
    """Returns what jax.nn.dot_product_attention runs for whole sequences: "cudnn", whose memory grows with the
    sequence, where cuDNN has it (NVIDIA GPUs from compute capability 8.0 on, 16-bit types, head dims of multiples of 8
    up to 128), else "xla", which holds the scores of all pairs of positions at once."""
    capability = compute_capability(device) if device.platform == "gpu" else None
    fits = jnp.dtype(dtype).itemsize == 2 and head_dim % 8 == 0 and head_dim <= 128
    return "cudnn" if capability is not None and capability >= (8, 0) and fits else "xla"


def why_not_cudnn(config: ModelConfig, documents: bool = False) -> str | None:
    """Returns why cuDNN cannot attend in this model, as the start of a sentence; None where it can."""
    if config.attention_softcap is not None:
        return f"model.attention_softcap={config.attention_softcap}"
    return "data.document_mask=True" if documents else None


def causal(config: ModelConfig, par: Parallel) -> Attend:
    """Attention of whole sequences: `softmax(q k^T / sqrt(H), masked) v`."""

    def attend(q_BLNH, k_BLKH, v_BLKH, context: Context):
        length, window, documents_BL = q_BLNH.shape[1], config.sliding_window, context.documents_BL
        sliding = config.windows if context.sliding is None else context.sliding
        options: dict[str, Any] = {"is_causal": True}
        windowed = {"local_window_size": (window - 1, 0)} if window is not None else {}
        if documents_BL is not None:
            options["mask"] = (documents_BL[:, :, None] == documents_BL[:, None, :])[:, None]
        run = lambda **more: _softmax(q_BLNH, k_BLKH, v_BLKH, config, par.attention_implementation, **options | more)
        if window is None or window >= length:
            return run()
        if isinstance(sliding, bool):
            return run(**windowed) if sliding else run()
        if par.attention_implementation == "cudnn":  # which knows its window when it is compiled
            return lax.cond(sliding, lambda: run(**windowed), run)
        near_LL = _behind(length, length) < window
        return run(mask=(near_LL | ~sliding) & options.get("mask", True))

    return attend


def cached(config: ModelConfig, positions_B: jax.Array, slots: int) -> Callable:
    """Returns f(q_B1NH, keys_BSKH, values_BSKH, sliding) of one position a row, up to which the slots hold keys."""
    behind_BS = positions_B[:, None] - jnp.arange(slots)

    def attend(q_B1NH, keys_BSKH, values_BSKH, sliding):
        options = {"key_value_seq_lengths": positions_B + 1}
        if config.sliding_window is not None and config.sliding_window < slots:
            near_BS = behind_BS < config.sliding_window
            options["mask"] = (near_BS if sliding is None else near_BS | ~sliding)[:, None, None, :]
        return _softmax(q_B1NH, keys_BSKH, values_BSKH, config, "xla", **options)

    return attend


def _behind(queries: int, keys: int) -> jax.Array:
    """How far each key lies behind each query, int32[queries, keys]."""
    return jnp.arange(queries)[:, None] - jnp.arange(keys)


def _softmax(q_BLNH, k_BSKH, v_BSKH, config: ModelConfig, implementation: str | None, **options) -> jax.Array:
    """`jax.nn.dot_product_attention` with the config's scale and soft cap."""
    if config.attention_softcap is not None:
        return _capped(q_BLNH, k_BSKH, v_BSKH, config, **options)
    if config.attention_scale is not None:
        options["scale"] = config.attention_scale
    return jax.nn.dot_product_attention(q_BLNH, k_BSKH, v_BSKH, implementation=implementation, **options)


def _capped(q_BLNH, k_BSKH, v_BSKH, config: ModelConfig, *, mask=True, is_causal=False, local_window_size=None,
            key_value_seq_lengths=None) -> jax.Array:  # fmt: skip
    """Attention with `c tanh(s / c)` in the place of the scores s; scores and softmax are float32."""
    cap, scale = config.attention_softcap, config.attention_scale
    batch, length, heads, width = q_BLNH.shape
    slots, groups = k_BSKH.shape[1:3]
    behind_LS = _behind(length, slots)
    if is_causal:
        mask = mask & (behind_LS >= 0)
    if local_window_size is not None:
        mask = mask & (behind_LS <= local_window_size[0])
    if key_value_seq_lengths is not None:
        mask = mask & (jnp.arange(slots) < key_value_seq_lengths[:, None])[:, None, None]
    q_BLKGH = q_BLNH.reshape(batch, length, groups, heads // groups, width)
    scores_BKGLS = jnp.einsum("BLKGH,BSKH->BKGLS", q_BLKGH, k_BSKH, preferred_element_type=jnp.float32)
    scores_BKGLS = cap * jnp.tanh(scores_BKGLS * ((width**-0.5 if scale is None else scale) / cap))
    mask = mask[:, :, None] if mask.ndim == 4 else mask
    probabilities = jax.nn.softmax(jnp.where(mask, scores_BKGLS, -jnp.inf), axis=-1).astype(v_BSKH.dtype)
    return jnp.einsum("BKGLS,BSKH->BLKGH", probabilities, v_BSKH).reshape(batch, length, heads, width)
