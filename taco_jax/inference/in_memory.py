"""Parameters that are no file: a trained model's that are in memory already, or random ones.

    checkpoint = in_memory(config, params)             # as `open_checkpoint` returns, without a folder
    params = load_params(checkpoint, mesh, jnp.bfloat16)

The tree is that of `taco_jax.models.params`, of arrays of the host or of devices. Tables may have the vocabulary's own
rows, or be padded for any number of ranks, as the trainer's are.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from taco_jax.config import ConfigError
from taco_jax.inference.tensors import finite, not_finite
from taco_jax.models import huggingface
from taco_jax.models.config import ModelConfig, valid_tp
from taco_jax.models.params import init_params, param_specs
from taco_jax.nn.vocab_parallel import pad_vocab


@dataclasses.dataclass(frozen=True)
class InMemory:
    """params: None for random ones, drawn on the devices with `seed`."""

    params: Mapping[str, Any] | None
    seed: int = 0

    def place(self, config: ModelConfig, mesh: Mesh, dtype: Any) -> dict[str, Any]:
        """On the mesh, cut over its axis tp, in the types of `load_params`.

        Raises:
          ConfigError: a tensor that is missing, left over, of another shape than the config says, no float, or not
            finite.
        """
        tp = mesh.shape["tp"]
        make = functools.partial(init_params, config, tp=tp)
        shapes, specs = jax.eval_shape(make, jax.random.key(0)), param_specs(config, tp)
        targets = jax.tree_util.tree_map_with_path(lambda path, leaf: stored_dtype(path, leaf, dtype), shapes)
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        if self.params is None:
            cast = lambda key: jax.tree.map(lambda leaf, target: leaf.astype(target), make(key), targets)
            return jax.jit(cast, out_shardings=shardings)(jax.random.key(self.seed))
        given, wanted = by_name(self.params), by_name(shapes)
        check_names(given, wanted)
        put = lambda path, shape, target, sharding: _put(
            name_of(path), given[name_of(path)], shape.shape, target, sharding=sharding, config=config
        )
        placed = jax.tree_util.tree_map_with_path(put, shapes, targets, shardings)
        # Arrays of the host were looked at one by one.
        on_devices = {name: leaf for name, leaf in by_name(placed).items() if isinstance(given[name], jax.Array)}
        for name, good in (jax.device_get(_all_finite(on_devices)) if on_devices else {}).items():
            if not good:
                was = np.asarray(jax.device_get(given[name]))
                raise ConfigError(f"params: the tensor {name!r} {not_finite(was, on_devices[name].dtype)}")
        return placed


@jax.jit
def _all_finite(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return jax.tree.map(lambda array: jnp.isfinite(array).all(), arrays)


def stored_dtype(path, leaf, dtype) -> np.dtype:
    """Matrices and tables get the compute dtype, norms and biases stay float32."""
    stacked = name_of(path).startswith("layers/")
    return np.dtype(jnp.float32 if len(leaf.shape) - stacked == 1 else dtype)


def name_of(path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def by_name(tree: Any) -> dict[str, Any]:
    return {name_of(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def check_names(given: Iterable[str], wanted: Iterable[str]) -> None:
    given, wanted = set(given), set(wanted)
    if missing := sorted(wanted - given):
        raise ConfigError(f"params: the tensor {missing[0]!r} is missing; the config needs {len(wanted)} tensors")
    if more := sorted(given - wanted):
        raise ConfigError(f"params: the tensor {more[0]!r} is left over: a model of this config has none of that name")


def _put(name: str, leaf: Any, shape: tuple[int, ...], dtype: np.dtype, sharding, config: ModelConfig) -> jax.Array:
    """One checked tensor on the mesh; a table's rows beyond the vocabulary are left out, or filled up with zeros."""
    if not (hasattr(leaf, "shape") and jnp.issubdtype(getattr(leaf, "dtype", None), jnp.floating)):
        kind = f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "shape") else type(leaf).__name__
        raise ConfigError(f"params: the tensor {name!r} is {kind}: must be an array of floats")
    dim, have = huggingface.VOCAB_DIM.get(name), tuple(leaf.shape)
    real = tuple(config.vocab_size if d == dim else size for d, size in enumerate(shape))
    padded = {config.vocab_size, *(pad_vocab(config.vocab_size, tp) for tp in valid_tp(config))}
    fits = len(have) == len(real) and all(
        size in padded if d == dim else size == real[d] for d, size in enumerate(have)
    )
    if not fits:
        more = "" if dim is None else f" (dim {dim} may be padded for a number of ranks, such as {shape[dim]})"
        raise ConfigError(f"params: the tensor {name!r} has shape {list(have)}, the config needs {list(real)}{more}")
    module = jnp if isinstance(leaf, jax.Array) else np
    with np.errstate(over="ignore"):
        kept = leaf[tuple(slice(size) for size in real)].astype(dtype)
    if isinstance(kept, np.ndarray) and not finite(kept):
        raise ConfigError(f"params: the tensor {name!r} {not_finite(np.asarray(leaf), dtype)}")
    padding = [(0, size - n) for size, n in zip(shape, real)]
    whole = module.pad(kept, padding) if any(after for _, after in padding) else kept
    return jax.device_put(whole, sharding)
