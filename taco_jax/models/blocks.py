"""The parts of a decoder layer up to their last product: normalisation, causal self-attention, mlp.

Norms are computed in float32, so that gradients of scale and bias are summed in float32 too. Attention has grouped kv
heads, rotary positions (`taco_jax.models.rope`) and qk-norm; the mlp is plain or gated. What a position attends to is
in `taco_jax.models.attention`.

Dims: B batch, L length, D model, N query heads, K kv heads, H head dim, F mlp. N, K and F are local: 1/tp of the
model's, but K is 1 where kv heads are replicated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from taco_jax.models.attention import Attend, Context
from taco_jax.models.config import ModelConfig
from taco_jax.models.lora import Adapted
from taco_jax.models.projections import Dense, column_parallel
from taco_jax.models.rope import attention_factor, rope
from taco_jax.models.run_config import Parallel


def rms_norm(x: jax.Array, scale_D: jax.Array, eps: float) -> jax.Array:
    """`x / sqrt(mean(x^2) + eps) * scale` over the last dim, computed in float32, returned in x's dtype."""
    x_f32 = x.astype(jnp.float32)
    return (x_f32 * lax.rsqrt(jnp.mean(jnp.square(x_f32), -1, keepdims=True) + eps) * scale_D).astype(x.dtype)


def layer_norm(x: jax.Array, scale_D: jax.Array, bias_D: jax.Array, eps: float) -> jax.Array:
    """`(x - mean) / sqrt(var + eps) * scale + bias` over the last dim, computed in float32, returned in x's dtype."""
    x_f32 = x.astype(jnp.float32)
    centred = x_f32 - jnp.mean(x_f32, -1, keepdims=True)
    normal = centred * lax.rsqrt(jnp.mean(jnp.square(centred), -1, keepdims=True) + eps)
    return (normal * scale_D + bias_D).astype(x.dtype)


def norm(x_BLD: jax.Array, params: Mapping[str, jax.Array], config: ModelConfig) -> jax.Array:
    """The normalisation whose parameters these are: LayerNorm if they have a bias, else RMSNorm."""
    if "bias" in params:
        return layer_norm(x_BLD, params["scale"], params["bias"], config.norm_eps)
    scale = params["scale"]
    return rms_norm(x_BLD, 1 + scale if config.norm_plus_one else scale, config.norm_eps)


def activation(name: str) -> Callable[[jax.Array], jax.Array]:
    """The elementwise function called `name` in a ModelConfig."""
    return {
        "silu": jax.nn.silu,
        "relu": jax.nn.relu,
        "gelu": lambda x: jax.nn.gelu(x, approximate=False),
        "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    }[name]


def mlp(x_BLD: jax.Array, params: Mapping[str, Any], config: ModelConfig, par: Parallel) -> jax.Array:
    """This rank's part of `act(x gate) * (x up)`, or of `act(x up)` without a gate, for a `column_input`."""
    names = ("gate", "up") if config.gated_mlp else ("up",)
    return _activated(config.activation, *column_parallel(x_BLD, [params[name] for name in names], par))


def _activate(name: str, first_BLF: jax.Array, *up_BLF: jax.Array) -> jax.Array:
    """Returns `act(first) * up`, or `act(first)` of one array."""
    y_BLF = activation(name)(first_BLF)
    return y_BLF * up_BLF[0] if up_BLF else y_BLF


# Keeps its arguments alone for the gradient. Where nothing is recomputed, autodiff would keep each step between them
# too: twice the memory, written and read again.
_activated = jax.custom_vjp(_activate, nondiff_argnums=(0,))
_activated.defvjp(
    lambda name, *ys: (_activate(name, *ys), ys),
    lambda name, ys, ct: jax.vjp(functools.partial(_activate, name), *ys)[1](ct),
)


def kv_replicated(config: ModelConfig, tp: int) -> bool:
    """Returns whether every rank holds all k and v weights and uses one head (tp a true multiple of the kv heads)."""
    return config.n_kv_heads % tp != 0


def _own_kv_head(dense: Dense, config: ModelConfig, par: Parallel) -> Dense:
    """The columns of the one kv head that this rank's query heads share, out of replicated weights."""
    head = lax.axis_index(par.axis) * config.n_kv_heads // lax.axis_size(par.axis)
    columns = lambda w: lax.dynamic_slice_in_dim(w, head * config.head_dim, config.head_dim, axis=-1)
    cut = lambda w: Adapted(columns(w.kernel), w.a, columns(w.b)) if isinstance(w, Adapted) else columns(w)
    return {name: cut(weight) for name, weight in dense.items()}


def attention(x_BLD: jax.Array, params: Mapping[str, Any], context: Context, config: ModelConfig,
              par: Parallel, attend: Attend) -> jax.Array:  # fmt: skip
    """Returns what `attend` makes of this rank's heads, [B, L, N H], for a `column_input`."""
    q, k, v = params["q"], params["k"], params["v"]
    if kv_replicated(config, lax.axis_size(par.axis)):
        k, v = _own_kv_head(k, config, par), _own_kv_head(v, config, par)
    q_BLNH, k_BLKH, v_BLKH = (
        y_BLF.reshape(*y_BLF.shape[:2], -1, config.head_dim) for y_BLF in column_parallel(x_BLD, (q, k, v), par)
    )
    if config.qk_norm:
        q_BLNH, k_BLKH = norm(q_BLNH, params["q_norm"], config), norm(k_BLKH, params["k_norm"], config)
    if context.angles is not None:
        factor = attention_factor(config)
        q_BLNH, k_BLKH = rope(q_BLNH, context.angles, factor), rope(k_BLKH, context.angles, factor)
    y_BLNH = attend(q_BLNH, k_BLKH, v_BLKH, context)
    return y_BLNH.reshape(*y_BLNH.shape[:2], -1)
