"""The tensors of a checkpoint in safetensors files, read piece by piece: nothing is in memory but what was asked for.

folder/model.safetensors                                     one file
folder/model.safetensors.index.json, model-0000i-of-n...     several, and which tensor is in which
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from taco_jax.config import ConfigError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = ("F32", "F16", "BF16")


class Tensors(Protocol):
    """What `loading` reads: safetensors here, GGUF in `gguf`."""

    def names(self) -> Iterable[str]: ...

    def where(self, name: str) -> str:
        """The file that holds a tensor, for messages."""

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """That part of a tensor, in the type of the file. Raises ConfigError, naming the file."""


class SafetensorsFolder:
    """The tensors of a folder. Raises ConfigError for files that are missing, cut off or not what the index says."""

    def __init__(self, folder: Path):
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError:
            raise ConfigError(f"--model {folder}: needs safetensors: pip install 'taco-jax[inference]'") from None
        self._error, self._files, self._of = SafetensorError, {}, {}
        index = folder / INDEX
        listed = _listed(index) if index.is_file() else None
        for file in [SINGLE] if listed is None else sorted(set(listed.values())):
            path = folder / file
            if not path.is_file():
                said = f"{INDEX} names it" if listed else f"it, or {INDEX}, must be there"
                raise ConfigError(f"{path}: there is no such file; {said}; is the download complete?")
            try:
                self._files[file] = safe_open(path, "np")
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{path}: {_cut_off(error)}") from None
            self._of |= dict.fromkeys(self._files[file].keys(), file)
        for name, file in (listed or {}).items():
            if self._of.get(name) != file:
                found = f"which is in {self._of[name]}" if name in self._of else "which no file holds"
                raise ConfigError(f"{index}: says that {file} holds the tensor {name!r}, {found}")
        self._folder = folder

    def names(self) -> Iterable[str]:
        return self._of.keys()

    def where(self, name: str) -> str:
        return str(self._folder / self._of[name])

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        view = self._slice(name)
        if view.get_dtype() not in DTYPES:
            raise ConfigError(
                f"{self.where(name)}: the tensor {name!r} is of type {view.get_dtype()}; must be one of "
                f"{', '.join(DTYPES)} (quantised checkpoints are read as GGUF files only)"
            )
        return view[index]

    def _slice(self, name: str) -> Any:
        try:
            return self._files[self._of[name]].get_slice(name)
        except (self._error, OSError) as error:
            raise ConfigError(f"{self.where(name)}: tensor {name!r}: {_cut_off(error)}") from None


def _listed(index: Path) -> dict[str, str]:
    try:
        return dict(json.loads(index.read_text())["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{index}: is no index of a sharded checkpoint ({type(error).__name__}: {error})") from None


def _cut_off(error: Exception) -> str:
    return f"is no complete safetensors file ({' '.join(str(error).split())}); was it cut off in a download?"
