"""AdamW with linear warm-up, a cosine, clipping by the global norm, and weight decay on matrices alone.

    g <- g * min(1, clip / ||g||);   m <- b1 m + (1 - b1) g;   v <- b2 v + (1 - b2) g^2
    w <- w - lr(t) * (m^ / (sqrt(v^) + eps) + decay * w)

Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (arXiv 1711.05101). Master weights, m and v are float32.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from taco_jax.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """lr(t) for t = 0 .. steps - 1: linear to `learning_rate` over `warmup_steps`, then a cosine that ends at
    `floor` on the last step and stays there. The first step already moves: lr(0) = peak / warmup_steps."""
    peak, low, warmup = config.learning_rate, config.floor, config.warmup_steps
    fall = max(steps - 1 - warmup, 1)

    def schedule(count):
        t = jnp.asarray(count, jnp.float32)
        rise = jnp.minimum(1.0, (t + 1) / max(warmup, 1))
        cosine = 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip((t - warmup) / fall, 0, 1)))
        return jnp.where(t < warmup, peak * rise, low + (peak - low) * cosine)

    return schedule


def decayed(params: Any, stacked_dims: int = 1) -> Any:
    """A tree of bools: True for the leaves with weight decay, which are matrices by their shape in one layer.

    Leaves below a key "layers" are stacked on `stacked_dims` leading dims, which do not count; biases have none,
    whatever their shape.
    """

    def matrix(path, leaf) -> bool:
        names = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
        return leaf.ndim - stacked_dims * ("layers" in names) >= 2 and "bias" not in names[-1]

    return jax.tree_util.tree_map_with_path(matrix, params)


def make(
    config: OptimizerConfig, steps: int, stacked_dims: int = 1
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """(optimizer, schedule). The optimiser's state has the same structure for every setting, so any of them can change
    on a resumed run. `clip_norm=None` clips at infinity, which changes nothing. stacked_dims: as of `decayed`."""
    schedule = learning_rate(config, steps)
    optimizer = optax.chain(
        optax.clip_by_global_norm(float("inf") if config.clip_norm is None else config.clip_norm),
        optax.adamw(
            schedule,
            b1=config.beta1,
            b2=config.beta2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=functools.partial(decayed, stacked_dims=stacked_dims),
        ),
    )
    return optimizer, schedule
