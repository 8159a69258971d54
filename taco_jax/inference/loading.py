"""A checkpoint onto the mesh: every device's shard of every parameter is read from the file by itself.

    checkpoint = open_checkpoint("path/to/model")      # config, tokenizer and names; no weights yet
    params = load_params(checkpoint, mesh, jnp.bfloat16)

So no device and no moment needs the whole model: beside what lies on the devices, the host holds one shard of one
(stacked) parameter. Matrices and tables get the compute dtype, norms and biases stay float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from taco_jax.config import ConfigError
from taco_jax.inference.in_memory import InMemory
from taco_jax.inference.model_folder import no_model, read_object
from taco_jax.inference.run_folder import SOURCE_CONFIG, RunFolder, find, open_run
from taco_jax.inference.templates import Template, called_special, read_template, special_tokens
from taco_jax.inference.tensors import AT_ONCE, SafetensorsFolder, Tensors, check_sizes, finite, not_finite
from taco_jax.inference.text import IN_MEMORY, ByteTokenizer, Tokenizer, read_tokenizer
from taco_jax.models import huggingface
from taco_jax.models.arrangement import check_order, fold, fold_leaf
from taco_jax.models.config import ModelConfig, validate
from taco_jax.models.huggingface import Source
from taco_jax.models.params import init_params, param_specs

BYTES = 256
"""The vocabulary of a run on the bytes of texts."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """The contents of a model's files. eos: the ids that end a text. template: makes a prompt of a chat's messages."""

    path: Path
    config: ModelConfig
    tensors: Tensors | InMemory | RunFolder
    tokenizer: Tokenizer | ByteTokenizer | None
    eos: frozenset[int]
    template: Template | None = None


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens a Hugging Face folder, a .gguf file, or a training run's checkpoint: its folder, or RUN@STEP.

    Raises:
      ConfigError: no such model, a config that the decoder has not, files that are missing, cut off or damaged.
    """
    try:
        path = Path(path).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:  # a name that is too long; a home that nobody has
        raise ConfigError(f"--model {path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if path.is_file() and path.suffix == ".gguf":
        from taco_jax.inference import gguf

        return Checkpoint(path, *gguf.open_file(path))
    if find(path) is not None:
        return _of_run(open_run(path))
    if not (path / "config.json").is_file() and (why := no_model(path)):
        raise ConfigError(f"--model {path}: {why}")
    described = read_object(path / "config.json")
    try:
        config = huggingface.config_from_hf(described)
    except KeyError as error:
        raise ConfigError(f"{path / 'config.json'}: has no key {error}") from None
    except ValueError as error:
        raise ConfigError(f"{path / 'config.json'}: {error}") from None
    tensors = SafetensorsFolder(path)
    check_sizes(config, tensors, path / "config.json")
    if config.tied_head and _two_tables(tensors, path):
        config = dataclasses.replace(config, tied_head=False)
    tokenizer = read_tokenizer(path / "tokenizer.json", called_special(path))
    return Checkpoint(
        path, config, tensors, tokenizer,
        eos=_eos(path / "config.json", described, tokenizer), template=read_template(path),
    )  # fmt: skip


def tokenizer_of(run: RunFolder) -> Tokenizer | ByteTokenizer | None:
    """Returns the tokenizer that a run keeps; without one, bytes for a vocabulary of 256, else None."""
    folder = run.model_files
    if run.config.vocab_size == BYTES and not (folder / "tokenizer.json").is_file():
        return ByteTokenizer()
    return read_tokenizer(folder / "tokenizer.json", called_special(folder))


def _of_run(run: RunFolder) -> Checkpoint:
    folder, tokenizer = run.model_files, tokenizer_of(run)
    eos = _eos(folder / SOURCE_CONFIG, run.source, tokenizer)
    eos |= set() if run.end_token is None else {run.end_token}
    return Checkpoint(folder, run.config, run, tokenizer, eos=eos, template=read_template(folder))


def in_memory(
    config: ModelConfig,
    params: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    tokenizer: str | Path | None = None,
    eos: Iterable[int] = (),
) -> Checkpoint:
    """A model of parameters that are in memory (their tree: `taco_jax.models.params`), or of random ones.

    Args: as in `Generator.of`.
    """
    if tokenizer is not None and not Path(tokenizer).is_file():
        raise ConfigError(f"tokenizer={str(tokenizer)!r}: no such file; name a tokenizer.json, or leave it out")
    read = None if tokenizer is None else read_tokenizer(Path(tokenizer))
    return Checkpoint(IN_MEMORY, config, InMemory(params, seed), read, frozenset(eos))


def load_params(checkpoint: Checkpoint, mesh: Mesh, dtype: Any, order: Sequence[int] | None = None) -> dict[str, Any]:
    """The decoder's parameters on the mesh, cut over its axis tp as `param_specs` says.

    order: of the residual channels (`taco_jax.models.arrangement`); None: as stored.

    Raises:
      ConfigError: a tensor that is missing, left over or of another shape than the config says, with its file; an
        order that is none of the model's channels.
    """
    config, tp = checkpoint.config, mesh.shape["tp"]
    try:
        validate(config, tp)
    except ValueError as error:
        raise ConfigError(f"tp={tp}: {error}") from None
    if isinstance(checkpoint.tensors, InMemory | RunFolder):
        placed = checkpoint.tensors.place(config, mesh, dtype)
        return placed if order is None else fold(placed, order, config)
    names = _names(checkpoint)
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0), tp))
    channels = None if order is None else check_order(order, config.d_model)

    def load(path, leaf, spec):
        reader = _reader(checkpoint, names, path, leaf.shape)
        reader.check()
        target = np.dtype(jnp.float32 if reader.is_vector else dtype)
        placed = jax.make_array_from_callback(
            leaf.shape, NamedSharding(mesh, spec), lambda index: reader.read(index, target), dtype=target
        )
        return placed if channels is None else fold_leaf(path, placed, channels)

    return jax.tree_util.tree_map_with_path(load, shapes, param_specs(config, tp))


def check_tensors(checkpoint: Checkpoint) -> None:
    """Raises ConfigError for the first tensor that `read_params` could not use. Reads no weights."""
    config = checkpoint.config
    names = _names(checkpoint)
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    check = lambda path, leaf: _reader(checkpoint, names, path, leaf.shape).check()
    jax.tree_util.tree_map_with_path(check, shapes)
    checkpoint.tensors.check_types()


def read_params(checkpoint: Checkpoint, targets: Any) -> dict[str, Any]:
    """The decoder's parameters as `targets` describes them: their tree of ShapeDtypeStructs with shardings.

    Every process reads what its devices hold, each part once however many of them hold it. Tables may be padded for any
    number of ranks. Raises ConfigError as `load_params`.
    """
    names = _names(checkpoint)

    def read(path, target):
        reader = _reader(checkpoint, names, path, target.shape)
        reader.check()
        parts: dict[tuple, tuple[tuple[slice, ...], list]] = {}
        for device, index in target.sharding.addressable_devices_indices_map(target.shape).items():
            bounds = tuple(s.indices(size)[:2] for s, size in zip(index, target.shape))
            parts.setdefault(bounds, (index, []))[1].append(device)
        arrays = []
        for index, devices in parts.values():
            part = reader.read(index, target.dtype)
            # Not the host's memory itself: a training step gives its state's buffers away.
            arrays += [jax.device_put(part, device, may_alias=False) for device in devices]
        return jax.make_array_from_single_device_arrays(target.shape, target.sharding, arrays, dtype=target.dtype)

    return jax.tree_util.tree_map_with_path(read, targets)


def _names(checkpoint: Checkpoint) -> dict[str, str]:
    """{name as in `Source`: the file's}. Raises ConfigError for tensors that are missing or left over."""
    try:
        return huggingface.match_names(checkpoint.tensors.names(), checkpoint.config)
    except ValueError as error:
        raise ConfigError(f"{checkpoint.path}: {error}") from None


def _reader(checkpoint: Checkpoint, names: Mapping[str, str], path: Any, shape: tuple[int, ...]) -> _Reader:
    """The reader of the leaf at `path` of the parameters' tree, of a padded shape."""
    at = "/".join(entry.key for entry in path)
    source = huggingface.sources(checkpoint.config)[at]
    return _Reader(checkpoint.tensors, names, source, shape, _real_shape(at, shape, checkpoint.config))


@dataclasses.dataclass(frozen=True)
class _Reader:
    """One of our leaves as pieces of theirs. shape: padded for the mesh; real: without the vocabulary's padding."""

    tensors: Tensors
    names: Mapping[str, str]
    source: Source
    shape: tuple[int, ...]
    real: tuple[int, ...]

    @property
    def is_vector(self) -> bool:
        return len(self.shape) - self.source.stacked == 1

    def check(self) -> None:
        """Raises ConfigError for a tensor whose shape is not what the config says."""
        for bare in self.source.names:
            name = self.names[bare]
            want, have = self._theirs(self._one(self.real)), self.tensors.shape(name)
            if have != want:
                raise ConfigError(
                    f"{self.tensors.where(name)}: the tensor {name!r} has shape {list(have)}, config.json needs "
                    f"{list(want)}"
                )

    def read(self, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
        """Our leaf[index], padding filled with zeros."""
        bounds = [s.indices(size)[:2] for s, size in zip(index, self.shape)]
        out = np.zeros([stop - start for start, stop in bounds], dtype)
        layers = range(*bounds[0]) if self.source.stacked else [0]
        inner = self._one(bounds)
        # What of the piece is not padding, and where that lies in theirs.
        there = [(start, max(start, min(stop, size))) for (start, stop), size in zip(inner, self._one(self.real))]
        offset = self.source.part * self._one(self.real)[-1]
        taken = [slice(*bound) for bound in there[:-1]] + [slice(there[-1][0] + offset, there[-1][1] + offset)]
        place = tuple(slice(stop - start) for start, stop in there)
        if any(start == stop for start, stop in there):
            return out
        for layer in layers:
            name = self.names[self.source.names[layer]]
            piece = self.tensors.read(name, tuple(self._turned(taken)))
            at = (layer - bounds[0][0], *place) if self.source.stacked else place
            with np.errstate(over="ignore"):
                out[at] = (piece.T if self.source.out_in else piece).astype(dtype)
            if not finite(out[at]):
                raise ConfigError(f"{self.tensors.where(name)}: the tensor {name!r} {not_finite(piece, dtype)}")
        return out

    def _one(self, dims):
        """Without the dim of layers."""
        return dims[1:] if self.source.stacked else dims

    def _turned(self, dims):
        return dims[::-1] if self.source.out_in else dims

    def _theirs(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self._turned((*ours[:-1], ours[-1] * self.source.parts)))


def _real_shape(path: str, shape: tuple[int, ...], config: ModelConfig) -> tuple[int, ...]:
    dim = huggingface.VOCAB_DIM.get(path)
    return tuple(config.vocab_size if d == dim else size for d, size in enumerate(shape))


def _two_tables(tensors: Tensors, path: Path) -> bool:
    """Returns whether the tables of a tied head differ: then, as in transformers, it is not tied.

    All rows are compared, some at a time: a few new tokens may be all that was trained.

    Raises:
      ConfigError: the two have different shapes.
    """
    names = list(tensors.names())
    embed = next((name for name in names if name.endswith(("embed_tokens.weight", "wte.weight"))), None)
    if embed is None or "lm_head.weight" not in names:
        return False
    shape, of_head = list(tensors.shape(embed)), list(tensors.shape("lm_head.weight"))
    if shape != of_head or len(shape) != 2:
        raise ConfigError(
            f"{path / 'config.json'}: ties the head to the table, but {embed!r} has shape {shape} and 'lm_head.weight' "
            f"{of_head}; both must be [vocabulary, width]"
        )
    at_once = max(1, AT_ONCE // max(1, shape[1]))
    parts = [slice(row, min(row + at_once, shape[0])) for row in range(0, shape[0], at_once)]
    same = lambda row: np.array_equal(tensors.read(embed, (row,)), tensors.read("lm_head.weight", (row,)))
    return not all(map(same, parts))


def _eos(file: Path, config: Mapping[str, Any], tokenizer: Tokenizer | ByteTokenizer | None) -> frozenset[int]:
    """The ids that any of the files says a text ends with: models end their turns by other ids than their texts.

    config: the content of `file`, a config.json; the others stand beside it.
    """
    ids: set[int] = set()
    folder = file.parent
    generation = folder / "generation_config.json"
    sources = (file, config), (generation, read_object(generation, needed=False))
    for path, content in sources:
        said = content.get("eos_token_id")
        listed = [] if said is None else said if isinstance(said, list) else [said]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in listed):
            raise ConfigError(f"{path}: eos_token_id={said!r}: must be a token id, or a list of them")
        ids.update(listed)
    text = special_tokens(folder).get("eos_token")
    if tokenizer is not None and text is not None and (token := tokenizer.id_of(text)) is not None:
        ids.add(token)
    return frozenset(ids)
