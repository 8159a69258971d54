"""The tensors of a checkpoint in safetensors files, read piece by piece: nothing is in memory but what was asked for.
Weights that are no numbers are found when they are read, by the bits of their exponents, in one pass over memory.

folder/model.safetensors                                     one file; an index beside it is not looked at
folder/model.safetensors.index.json, model-0000i-of-n...     several, and which tensor is in which
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from taco_jax.config import ConfigError
from taco_jax.inference.model_folder import read_object
from taco_jax.models.config import ModelConfig
from taco_jax.models.huggingface import BUFFERS

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = ("F32", "F16", "BF16")
# Type -> (unsigned integers of its size, its exponent's bits: all ones in infinities and NaN).
_EXPONENTS = {
    "bfloat16": (np.uint16, 0x7F80),
    "float16": (np.uint16, 0x7C00),
    "float32": (np.uint32, 0x7F80_0000),
    "float64": (np.uint64, 0x7FF0_0000_0000_0000),
}

AT_ONCE = 1 << 20
"""Elements that are copied at a time: few enough for a cache."""


class Tensors(Protocol):
    """The source that `loading` reads: safetensors here, GGUF in `gguf`."""

    def names(self) -> Iterable[str]: ...

    def where(self, name: str) -> str:
        """The file that holds a tensor, for messages."""

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Returns that part of a tensor, in the type of the file. Raises ConfigError, naming the file."""

    def check_types(self) -> None:
        """Raises ConfigError for the first tensor of a type that `read` refuses, as far as headers tell."""


def check_sizes(config: ModelConfig, tensors: Tensors, where: Path) -> None:
    """Raises ConfigError for sizes that the files cannot hold, before anything of those sizes is made."""
    names = list(tensors.names())
    if config.n_layers > len(names):
        raise ConfigError(f"{where}: says {config.n_layers} layers, but the files hold {len(names)} tensors in all")
    largest = max((size for name in names for size in tensors.shape(name)), default=0)
    for said, size in (
        ("a vocabulary of", config.vocab_size), ("a width of", config.d_model), ("an mlp width of", config.d_mlp),
        ("heads that are together as wide as", config.n_heads * config.head_dim),
        ("positions up to", config.max_length if config.positions == "learned" else 0),
    ):  # fmt: skip
        if size > largest:
            raise ConfigError(f"{where}: says {said} {size}, but the largest dimension of any tensor is {largest}")


class SafetensorsFolder:
    """The tensors of a folder. Raises ConfigError for files that are missing, cut off or not what the index says."""

    def __init__(self, folder: Path):
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError:
            raise ConfigError(f"--model {folder}: needs safetensors: pip install 'taco-jax[inference]'") from None
        self._error, self._files, self._of = SafetensorError, {}, {}
        index = folder / INDEX
        # As transformers does: shards beside the single file are of another download.
        listed = _listed(index) if index.is_file() and not (folder / SINGLE).is_file() else None
        for file in [SINGLE] if listed is None else sorted(set(listed.values())):
            path = folder / file
            if not os.path.isfile(path):  # of a name that no file can have too
                said = f"{INDEX} names it" if listed else f"it, or {INDEX}, must be there"
                raise ConfigError(f"{path}: there is no such file; {said}; is the download complete?")
            try:
                self._files[file] = safe_open(path, "np")
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{path}: {_cut_off(error)}") from None
            names = self._files[file].keys()
            others = [] if listed is None else [name for name in names if listed.get(name) != file]
            if others := [name for name in others if not name.endswith(BUFFERS)]:
                instead = f"says to be in {listed[others[0]]!r}" if others[0] in listed else "does not name"
                raise ConfigError(
                    f"{path}: holds the tensor {others[0]!r}, which {INDEX} {instead}; are the files of one download?"
                )
            self._of |= dict.fromkeys(names, file)
        for name, file in (listed or {}).items():
            if self._of.get(name) != file:
                raise ConfigError(f"{index}: says that {file} holds the tensor {name!r}, which no file holds")
        self._folder = folder

    def names(self) -> Iterable[str]:
        return self._of.keys()

    def where(self, name: str) -> str:
        return str(self._folder / self._of[name])

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        return self._floats(name)[index]

    def check_types(self) -> None:
        for name in self.names():
            if not name.endswith(BUFFERS):
                self._floats(name)

    def _floats(self, name: str) -> Any:
        view = self._slice(name)
        if view.get_dtype() not in DTYPES:
            raise ConfigError(
                f"{self.where(name)}: the tensor {name!r} is of type {view.get_dtype()}; must be one of "
                f"{', '.join(DTYPES)} (quantised checkpoints are read as GGUF files only)"
            )
        return view

    def _slice(self, name: str) -> Any:
        try:
            return self._files[self._of[name]].get_slice(name)
        except (self._error, OSError) as error:
            raise ConfigError(f"{self.where(name)}: tensor {name!r}: {_cut_off(error)}") from None


def _listed(index: Path) -> dict[str, str]:
    """{tensor: file} of an index."""
    listed = read_object(index).get("weight_map")
    if not isinstance(listed, dict):
        raise ConfigError(f"{index}: is no index of a sharded checkpoint: weight_map must name each tensor's file")
    for name, file in listed.items():
        if not isinstance(file, str) or Path(file).name != file or file in ("", "..") or "\\" in file:
            raise ConfigError(f"{index}: weight_map[{name!r}]={file!r}: must be the name of a file in the same folder")
    return listed


def _cut_off(error: Exception) -> str:
    return f"is no complete safetensors file ({' '.join(str(error).split())}); was it cut off in a download?"


def finite(array: np.ndarray) -> bool:
    """Returns whether an array of floats holds neither NaN nor infinities."""
    if array.dtype.name not in _EXPONENTS:
        return bool(np.isfinite(array.astype(np.float32)).all())
    unsigned, exponent = _EXPONENTS[array.dtype.name]
    bits = np.atleast_1d(array.view(unsigned))
    rows = max(1, AT_ONCE * len(bits) // max(1, bits.size))
    parts = (bits[start : start + rows] & unsigned(exponent) for start in range(0, len(bits), rows))
    return all(part.max(initial=0) < exponent for part in parts)


def not_finite(array: np.ndarray, dtype: np.dtype) -> str:
    """Returns the end of a sentence: what is wrong with an array that is not `finite` once it is of that type."""
    if finite(array):
        return f"holds numbers beyond what {np.dtype(dtype).name} reaches; use dtype bfloat16 or float32"
    return "holds NaN or infinities: the model is damaged, or was saved after its training had diverged"
