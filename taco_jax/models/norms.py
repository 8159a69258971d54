"""RMSNorm and LayerNorm over the last dim, in float32, so that gradients of scale and bias are summed in float32 too.

Dims: B batch, L length, D model.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax


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


def norm(x_BLD: jax.Array, params: Mapping[str, jax.Array], eps: float) -> jax.Array:
    """The normalisation whose parameters these are: LayerNorm if they have a bias, else RMSNorm."""
    if "bias" in params:
        return layer_norm(x_BLD, params["scale"], params["bias"], eps)
    return rms_norm(x_BLD, params["scale"], eps)
