"""A decoder's parameters: their tree, initial values, and how they are spread over the mesh.

The tree is of nested dicts; all sizes are global, all leaves float32, and leaves under "layers" have a leading dim of
n_layers, over which the model scans:

    embed   table[V, D]  positions[max_length, D]              (positions: learned ones only)
    layers  attn_norm scale[D] bias[D]
            attn      q kernel[D, N*H] bias[N*H]  k, v kernel[D, K*H] bias[K*H]  out kernel[N*H, D] bias[D]
                      q_norm scale[H]  k_norm scale[H]
            mlp_norm  scale[D] bias[D]
            attn_post_norm, mlp_post_norm  scale[D]            (post_norms only)
            mlp       gate, up kernel[D, F] bias[F]  down kernel[F, D] bias[D]
    final_norm  scale[D] bias[D]
    head    kernel[D, V]                                       (untied only)

Dims: D model, N heads, K kv heads, H head dim, F mlp, V vocabulary padded by `vocab.pad_vocab`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from taco_jax.models.blocks import kv_replicated
from taco_jax.models.config import ModelConfig, validate
from taco_jax.nn.vocab_parallel import pad_vocab


class _Leaf(NamedTuple):
    """One parameter: shape, spec, initial standard deviation (or "zeros", "ones"), and which dim is the vocabulary."""

    shape: tuple[int, ...]
    spec: P
    init: float | str
    vocab_dim: int | None = None


def _leaves(config: ModelConfig, tp: int, axis: str) -> dict[str, Any]:
    """The tree of `_Leaf`s: the one place that says which parameters there are."""
    D, F, V = config.d_model, config.d_mlp, pad_vocab(config.vocab_size, tp)
    q_width, kv_width = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    kv_axis = None if kv_replicated(config, tp) else axis
    std = config.init_std
    # GPT-2: the sum of 2 * n_layers branches then has the variance of one.
    std_residual = std / math.sqrt(2 * config.n_layers)

    def norm(width: int, bias: bool) -> dict[str, _Leaf]:
        scale = {"scale": _Leaf((width,), P(), "zeros" if config.norm_plus_one else "ones")}
        return scale | ({"bias": _Leaf((width,), P(), "zeros")} if bias else {})

    def dense(rows: int, columns: int, spec: P, init: float, bias: bool) -> dict[str, _Leaf]:
        kernel = {"kernel": _Leaf((rows, columns), spec, init)}
        return kernel | ({"bias": _Leaf((columns,), P(*spec[1:]), "zeros")} if bias else {})

    column, kv_column, row = P(None, axis), P(None, kv_axis), P(axis, None)
    layer_norm = config.norm == "layernorm"
    attn = {
        "q": dense(D, q_width, column, std, config.qkv_bias),
        "k": dense(D, kv_width, kv_column, std, config.qkv_bias),
        "v": dense(D, kv_width, kv_column, std, config.qkv_bias),
        "out": dense(q_width, D, row, std_residual, config.out_bias),
    }
    if config.qk_norm:
        attn |= {"q_norm": norm(config.head_dim, False), "k_norm": norm(config.head_dim, False)}
    mlp = {"up": dense(D, F, column, std, config.mlp_bias), "down": dense(F, D, row, std_residual, config.mlp_bias)}
    if config.gated_mlp:
        mlp["gate"] = dense(D, F, column, std, config.mlp_bias)
    layer = {"attn_norm": norm(D, layer_norm), "attn": attn, "mlp_norm": norm(D, layer_norm), "mlp": mlp}

    if config.post_norms:
        layer |= {"attn_post_norm": norm(D, False), "mlp_post_norm": norm(D, False)}

    stack = lambda leaf: _Leaf((config.n_layers, *leaf.shape), P(None, *leaf.spec) if leaf.spec else P(), leaf.init)
    tree = {
        "embed": {"table": _Leaf((V, D), P(axis, None), std, vocab_dim=0)},
        "layers": _map(stack, layer),
        "final_norm": norm(D, layer_norm),
    }
    if config.positions == "learned":
        tree["embed"]["positions"] = _Leaf((config.max_length, D), P(), std)
    if not config.tied_head:
        tree["head"] = {"kernel": _Leaf((D, V), P(None, axis), std, vocab_dim=1)}
    return tree


def _map(function: Callable, leaves: dict[str, Any]) -> dict[str, Any]:
    return jax.tree.map(function, leaves, is_leaf=lambda node: isinstance(node, _Leaf))


def init_params(config: ModelConfig, key: jax.Array, tp: int = 1) -> dict[str, Any]:
    """Initial parameters, float32, of global sizes (the vocabulary padded for `tp`); to be jitted with out_shardings.

    Weights are normal with `config.init_std`, those into the residual stream with that over sqrt(2 * n_layers); biases
    0, norms 1. Padding rows of the vocabulary are 0. The values do not depend on tp.

    Raises:
        ValueError: the config does not fit `tp` (see `config.validate`).
    """
    validate(config, tp)
    leaves, structure = jax.tree.flatten(_leaves(config, tp, "tp"), is_leaf=lambda node: isinstance(node, _Leaf))
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(structure, [_initial(leaf, k, config.vocab_size) for leaf, k in zip(leaves, keys)])


def _initial(leaf: _Leaf, key: jax.Array, vocab_size: int) -> jax.Array:
    if isinstance(leaf.init, str):
        return {"zeros": jnp.zeros, "ones": jnp.ones}[leaf.init](leaf.shape, jnp.float32)
    if leaf.vocab_dim is None:
        return leaf.init * jax.random.normal(key, leaf.shape, jnp.float32)
    # Drawn with the vocabulary first: the real rows are then the same for every amount of padding.
    rows, columns = leaf.shape if leaf.vocab_dim == 0 else leaf.shape[::-1]
    drawn = leaf.init * jax.random.normal(key, (rows, columns), jnp.float32)
    table = jnp.where(jnp.arange(rows)[:, None] < vocab_size, drawn, 0)
    return table if leaf.vocab_dim == 0 else table.T


def param_specs(config: ModelConfig, tp: int, axis: str = "tp") -> dict[str, Any]:
    """The PartitionSpec of every parameter: the tree of `init_params`, mesh axis `axis`; replicated over all others."""
    return _map(lambda leaf: leaf.spec, _leaves(validate(config, tp), tp, axis))


def count_params(config: ModelConfig) -> int:
    """Number of the model's parameters, without padding of the vocabulary."""
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    tables = 1 if config.tied_head else 2
    padding = tables * (pad_vocab(config.vocab_size, 1) - config.vocab_size) * config.d_model
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) - padding
