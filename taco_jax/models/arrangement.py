"""An order of a decoder's residual channels, folded into its weights.

Which channels share a codec's block is free: LayerNorm, RMSNorm and the additions of the residual stream commute with
a permutation of its channels, and products take it into their weights:

    embedding, positions      columns           norms                          scale, bias
    q, k, v, gate, up, head   rows              attention's out, mlp's down    columns, bias

Logits stay what they are, to the rounding of sums in another order, and it costs nothing afterwards. An order is
int[D]: its first entry is the channel that comes first. `taco_jax.calibration.arrangement` learns one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from taco_jax.errors import ConfigError, did_you_mean
from taco_jax.models.config import ModelConfig

ROWS, COLUMNS = -2, -1
"""The residual dim of a leaf that reads the stream, and of one that writes to it or scales it."""
DIMS: dict[str, int | None] = {
    "embed/table": COLUMNS, "embed/positions": COLUMNS, "head/kernel": ROWS,
    **{f"{norm}/{name}": COLUMNS for norm in ("final_norm", "layers/attn_norm", "layers/mlp_norm",
       "layers/attn_post_norm", "layers/mlp_post_norm") for name in ("scale", "bias")},
    **{f"layers/{dense}/{name}": dim for dense in ("attn/q", "attn/k", "attn/v", "mlp/gate", "mlp/up")
       for name, dim in (("kernel", ROWS), ("bias", None))},
    **{f"layers/{dense}/{name}": COLUMNS for dense in ("attn/out", "mlp/down") for name in ("kernel", "bias")},
    "layers/attn/q_norm/scale": None, "layers/attn/k_norm/scale": None,
}  # fmt: skip
"""Path of each leaf -> its residual dim; None for those that have none."""


def check_order(order: Sequence[int], d_model: int) -> np.ndarray:
    """Returns the order as an array.

    Raises:
      ConfigError: it is no permutation of the model's channels.
    """
    order, rule = np.asarray(order), f"must have each of the model's channels, 0 to {d_model - 1}, once"
    if order.ndim != 1 or order.dtype.kind not in "iu":
        raise ConfigError(f"arrangement.order: has entries that are no integers; {rule}")
    if len(order) != d_model:
        raise ConfigError(f"arrangement.order: has {len(order)} entries; {rule}")
    strange = order[(order < 0) | (order >= d_model)]
    if len(strange):
        raise ConfigError(f"arrangement.order: has {strange[0]}; {rule}")
    counts = np.bincount(order, minlength=d_model)
    if counts.max() > 1:
        raise ConfigError(f"arrangement.order: has {counts.argmax()} {counts.max()} times; {rule}")
    return order


def inverse(order: Sequence[int]) -> np.ndarray:
    """Returns the order that undoes `order`: fold(fold(params, order), inverse(order)) are the params."""
    return np.argsort(np.asarray(order))


def fold(params: Mapping[str, Any], order: Sequence[int], config: ModelConfig) -> dict[str, Any]:
    """Returns the parameters of the same model with its residual channels in `order`.

    params: the tree of `taco_jax.models.params`, arrays of the host or of devices, cut as `param_specs` says: no mesh
    axis cuts the residual dim, so nothing is sent. Gradients and optimiser moments have the same tree, and fold alike.

    Raises:
      ConfigError: no order of the model's channels, or a leaf that is not of the decoder's tree.
    """
    order = check_order(order, config.d_model)
    return jax.tree_util.tree_map_with_path(lambda path, leaf: fold_leaf(path, leaf, order), params)


def fold_leaf(path: Any, leaf: Any, order: np.ndarray) -> Any:
    """Returns one leaf of `fold`, by its path in the tree."""
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    if name not in DIMS:
        raise ConfigError(f"arrangement: the tensor {name!r} is not of the decoder's; {did_you_mean(name, DIMS)}")
    dim = DIMS[name]
    if dim is None:
        return leaf
    if not isinstance(leaf, jax.Array):
        return leaf.take(order, axis=dim)
    return jax.jit(lambda a: jnp.take(a, order, axis=dim), out_shardings=leaf.sharding)(leaf)
