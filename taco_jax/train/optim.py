"""Optimisers and learning-rate schedules. Gradients are clipped by their global norm; matrices alone have weight decay.

AdamW (arXiv 1711.05101):

    g <- g * min(1, clip / ||g||);   m <- b1 m + (1 - b1) g;   v <- b2 v + (1 - b2) g^2
    w <- w - lr(t) * (m^ / (sqrt(v^) + eps) + decay * w)

Lion (arXiv 2302.06675) has one moment:

    w <- w - lr(t) * (sign(b1 m + (1 - b1) g) + decay * w);   m <- b2 m + (1 - b2) g

Muon (`taco_jax.train.muon`) updates the matrices of the layers, AdamW with it all other leaves. Master weights and
moments are float32; the first moment m may be kept in bfloat16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from taco_jax.config import OptimizerConfig
from taco_jax.train import muon


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """lr(t) for t = 0 .. steps - 1: linear to `learning_rate` over `warmup_steps`, then as `config.schedule` says:

    cosine, linear: down to `floor`, which the last step has, and every one after it. wsd: constant, then linear down to
    `floor` in the last `decay_fraction` of the steps. constant: constant.

    The first step already moves: lr(0) = peak / warmup_steps.
    """
    peak, low, warmup = config.learning_rate, config.floor, config.warmup_steps
    fall = max(steps - 1 - warmup, 1)
    decay = min(fall, max(1, round(config.decay_fraction * steps)))
    after = {
        "cosine": lambda t: low + (peak - low) * (0.5 * (1 + jnp.cos(jnp.pi * jnp.clip(t / fall, 0, 1)))),
        "linear": optax.linear_schedule(peak, low, fall),
        "wsd": optax.linear_schedule(peak, low, decay, transition_begin=fall - decay),
        "constant": optax.constant_schedule(peak),
    }[config.schedule]

    def schedule(count):
        t = jnp.asarray(count, jnp.float32)
        rise = jnp.minimum(1.0, (t + 1) / max(warmup, 1))
        return jnp.where(t < warmup, peak * rise, after(t - warmup))

    return schedule


def _names(path: Any) -> list[str]:
    return [str(getattr(key, "key", getattr(key, "name", key))) for key in path]


def decayed(params: Any, stacked_dims: int = 1) -> Any:
    """A tree of bools: True for the leaves with weight decay, which are matrices by their shape in one layer.

    Leaves below a key "layers" are stacked on `stacked_dims` leading dims, which do not count; biases have none,
    whatever their shape.
    """

    def matrix(path, leaf) -> bool:
        names = _names(path)
        return leaf.ndim - stacked_dims * ("layers" in names) >= 2 and "bias" not in names[-1]

    return jax.tree_util.tree_map_with_path(matrix, params)


def muon_leaves(params: Any, stacked_dims: int = 1) -> Any:
    """A tree of "muon" for the matrices of the layers and "adamw" for embeddings, head, norms and biases."""

    def label(path, matrix: bool) -> str:
        return "muon" if matrix and "layers" in _names(path) else "adamw"

    return jax.tree_util.tree_map_with_path(label, decayed(params, stacked_dims))


def make(
    config: OptimizerConfig,
    steps: int,
    stacked_dims: int = 1,
    orthogonal: Callable[[Any], Any] = muon.orthogonal_each,
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """(optimizer, schedule). The optimiser's state has the same structure for every setting but `name`, and the same
    dtypes for every one but `moment_dtype`, so any other can change on a resumed run. `clip_norm=None` clips at
    infinity, which changes nothing.

    Args:
      stacked_dims: as of `decayed`.
      orthogonal: what Muon makes of a tree of momenta; by default of leaves [..., I, O] that are whole.
    """
    schedule = learning_rate(config, steps)
    matrices = functools.partial(decayed, stacked_dims=stacked_dims)
    betas = {"b1": config.beta1, "b2": config.beta2}
    decay = {"weight_decay": config.weight_decay, "mask": matrices}
    adamw = optax.adamw(schedule, **betas, eps=config.eps, **decay)
    if config.name == "adamw":
        chosen = adamw
    elif config.name == "lion":
        chosen = optax.lion(schedule, **betas, **decay)
    else:
        of_layers = optax.chain(
            muon.scale_by_momentum(config.momentum, orthogonal),
            optax.add_decayed_weights(config.weight_decay),
            optax.scale_by_learning_rate(schedule),
        )
        labels = functools.partial(muon_leaves, stacked_dims=stacked_dims)
        chosen = optax.partition({"muon": of_layers, "adamw": adamw}, labels)
    clip = optax.clip_by_global_norm(float("inf") if config.clip_norm is None else config.clip_norm)
    optimizer = optax.chain(clip, chosen)
    return with_moments(optimizer, jnp.dtype(config.moment_dtype)), schedule


def with_moments(optimizer: optax.GradientTransformation, dtype: Any) -> optax.GradientTransformation:
    """The optimizer with first moments (`mu` of its states) kept in `dtype`, and computed with in float32.

    optax's own `mu_dtype` multiplies the moment by b1 in bfloat16, in which 0.9 is 0.8984: the mean would be 1.5 % too
    small.
    """
    if dtype == jnp.float32:
        return optimizer

    def cast(state: Any, dtype: Any) -> Any:
        change = lambda path, a: a.astype(dtype) if is_first_moment(path) else a
        return jax.tree_util.tree_map_with_path(change, state)

    def update(grads, state, params=None):
        updates, state = optimizer.update(grads, cast(state, jnp.float32), params)
        return updates, cast(state, dtype)

    return optax.GradientTransformation(lambda params: cast(optimizer.init(params), dtype), update)


def is_first_moment(path: Any) -> bool:
    """Returns whether a leaf with this path of an optimiser's state is a first moment."""
    return any(getattr(key, "name", None) == "mu" for key in path)


def map_params(function: Callable, state: Any, *trees: Any, other: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    """The optimiser's state with function(leaf, leaf of each tree) in the place of every leaf that belongs to a
    parameter, and other(leaf) of the rest (counts).

    A leaf belongs to a parameter if its path ends in the parameter's. trees: one leaf for each parameter, nested as
    they are.
    """
    tables = [dict(jax.tree_util.tree_flatten_with_path(tree)[0]) for tree in trees]

    def change(path, leaf):
        start = len(path)
        while start and isinstance(path[start - 1], jax.tree_util.DictKey):
            start -= 1
        own = path[start:]
        return function(leaf, *(table[own] for table in tables)) if own in tables[0] else other(leaf)

    return jax.tree_util.tree_map_with_path(change, state)


def describe(config: OptimizerConfig) -> str:
    """Returns what the optimiser's state holds, for the dry run."""
    m, wide = config.moment_dtype, config.moment_dtype == "float32"
    if config.name == "lion":
        return f"Lion, one {m} moment"
    if config.name == "muon":
        return f"Muon, AdamW for the rest; first moments {m}"
    return "AdamW, two float32 moments" if wide else f"AdamW, moments {m} and float32"
