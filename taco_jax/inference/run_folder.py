"""A training run's folder as a model: its settings, and the parameters of a checkpoint, read array by array.

    run = open_run("runs/x@340")               # without @340 the latest checkpoint; settings, names, no weights yet
    up = run.read("layers/mlp/up/kernel", sharding)
    config, params = load_run("runs/x@340")    # all of them, in the host's memory

Every array is compared with its digest in the checkpoint's record. Nothing in the folder is changed, so a run may be
working in it. The optimiser's state, site scales and the ranks' copies are not read. A run of adapters is one model:
the weights in its folder `base`, the adapters of the checkpoint merged into them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from taco_jax.config import CheckpointConfig, ConfigError
from taco_jax.config.stored import lora_of
from taco_jax.errors import did_you_mean
from taco_jax.inference.in_memory import by_name, name_of, stored_dtype
from taco_jax.inference.model_folder import is_run, read_object
from taco_jax.inference.tensors import not_finite
from taco_jax.models import lora
from taco_jax.models.config import ModelConfig
from taco_jax.models.huggingface import VOCAB_DIM
from taco_jax.models.lora import Adapters
from taco_jax.models.params import init_params, param_specs
from taco_jax.train.base import COPY_BACK, DIGEST, STEP, missing, other
from taco_jax.train.checkpoint import CheckpointError, Checkpoints
from taco_jax.train.digests import DIGESTS, UNPADDED, VOCABULARY, take_damaged
from taco_jax.train.workdir import BASE, CHECKPOINTS, CONFIG

MODEL, SOURCE_CONFIG, DATA = "model", "source_config.json", "meta.json"
"""The folder of what a run's model came with, and there the config.json of the model, and the prepared data's own file
where the model came with data alone."""


def find(path: str | Path) -> tuple[Path, int | None] | None:
    """Returns (folder, step) of RUN or RUN@STEP, the step None without one; None where no run has that name.

    Raises:
      ConfigError: what follows the @ is no step.
    """
    path = Path(path)
    if path.exists():
        return (path, None) if path.is_dir() and is_run(path) else None
    folder, at, step = str(path).rpartition("@")
    if not at or not folder or not Path(folder).is_dir() or not is_run(Path(folder)):
        return None
    if not re.fullmatch(r"[0-9]{1,15}", step):
        raise ConfigError(
            f"{path}: {step!r} must be a step of {folder}, such as {folder}@100; without @ it is the latest"
        )
    return Path(folder), int(step)


class _Reader(Checkpoints):
    """The checkpoints of a run, which are only looked at. Messages name the run as its user did."""

    def __init__(self, run: Path, folder: str = CHECKPOINTS):
        self._run = run
        super().__init__(run / folder, CheckpointConfig(enabled=False))
        self.folder = run / folder

    def _options(self) -> dict[str, Any]:
        return {"read_only": True}

    def _before(self, step: int) -> str:
        if self.folder.name == BASE:
            return COPY_BACK
        earlier = [s for s in self.steps() if s < step]
        return f"{self._run}@{earlier[-1]} is the one before it" if earlier else "no other is before it"

    def step(self, asked: int | None) -> int:
        """Returns the step to read: `asked`, else the latest. Raises CheckpointError where there is none."""
        present = self.steps()
        if asked in present or (asked is None and present):
            return present[-1] if asked is None else asked
        there = f"present: {', '.join(map(str, present))}" if present else "it has no other"
        # Orbax gives a checkpoint its name when it is whole.
        parts = self.folder.iterdir() if self.folder.is_dir() else ()
        begun = {name.group(1) for part in parts if (name := re.match(r"(\d+)\.orbax-checkpoint-tmp", part.name))}
        if asked is not None and str(asked) in begun:
            raise CheckpointError(
                f"{self._run}@{asked}: this checkpoint is not finished (it is being written, or was cut off); {there}"
            )
        if asked is not None and present:
            raise CheckpointError(f"{self._run}@{asked}: there is no checkpoint of this step; {there}")
        what = (
            f"the only one, of step {min(begun, key=int)}, is not finished"
            if begun
            else "its training has saved none yet"
        )
        raise CheckpointError(
            f"{self._run}: has no checkpoint ({what}); a run saves one at its end and every checkpoint.every steps"
        )

    def open(self, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns (record, parameters as Orbax describes them, by name). Raises CheckpointError for damaged files."""
        meta = self._readable(step, lambda: self._manager.item_metadata(step))
        record = self.record(step)
        self._check_complete(step, record, meta)
        tree = self._readable(step, lambda: getattr(meta["state"], "tree", meta["state"])["params"])
        return record, by_name(tree)

    def read(
        self,
        step: int,
        name: str,
        target: jax.ShapeDtypeStruct,
        *,
        record: Mapping[str, Any],
        stored: tuple[int, ...],
    ) -> jax.Array:
        """Returns a parameter in the place and shape of `target`, once its digest is that of the record.

        stored: its shape in the checkpoint.
        """
        ocp = self._ocp
        nested: Any = target
        how: Any = ocp.ArrayRestoreArgs(
            sharding=target.sharding, global_shape=target.shape, dtype=target.dtype, strict=False
        )
        for part in ("params", *name.split("/"))[::-1]:
            nested, how = {part: nested}, {part: how}
        arguments = ocp.args.PyTreeRestore(item=nested, restore_args=how, partial_restore=True)
        folder = self.folder.absolute() / str(step) / "state"
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            found = self._readable(step, lambda: checkpointer.restore(folder, args=arguments))
        (array,) = jax.tree.leaves(found["params"])
        entry = "state.params." + name.replace("/", ".")
        of_it = {key: {entry: record[key][entry]} for key in (DIGESTS, UNPADDED) if entry in record.get(key, {})}
        of_it |= {VOCABULARY: record[VOCABULARY]} if VOCABULARY in record else {}
        if take_damaged(of_it, {entry: array}, {entry: stored}):
            raise CheckpointError(
                f"checkpoint {self.folder / str(step)}: is damaged: not as saved is {name}; {self._before(step)}"
            )
        return array


class _Arrays(NamedTuple):
    """The parameters of one checkpoint. record: what the trainer wrote beside them. shapes: as they are stored."""

    reader: _Reader
    step: int
    record: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]

    def read(self, name: str, target: jax.ShapeDtypeStruct) -> jax.Array:
        return self.reader.read(self.step, name, target, record=self.record, stored=self.shapes[name])


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """A checkpoint of a run. settings: of its config.json. config: the model's.

    weights: the model's parameters, tables padded for the mesh that it was trained on. trained: of a run of adapters,
    these; `read` merges them.
    """

    folder: Path
    step: int
    settings: Mapping[str, Any]
    config: ModelConfig
    weights: _Arrays
    adapters: Adapters | None = None
    trained: _Arrays | None = None

    def __str__(self) -> str:
        return f"{self.folder}@{self.step}"

    @property
    def model_files(self) -> Path:
        """Returns the folder with the tokenizer's files; there may be none."""
        return self.folder / MODEL

    @functools.cached_property
    def source(self) -> dict[str, Any]:
        """Returns the config.json of the Hugging Face folder that training started from, {} where it was none."""
        return read_object(self.model_files / SOURCE_CONFIG, needed=False)

    @property
    def end_token(self) -> int | None:
        """Returns the id that ends documents in the run's data: of its settings, else of its data's meta.json."""
        data = self.settings.get("data")
        said = data.get("end_token_id") if isinstance(data, dict) else None
        if said is None:
            token = read_object(self.model_files / DATA, needed=False).get("end_token")
            said = token.get("id") if isinstance(token, dict) else None
        return said if type(said) is int and 0 <= said < self.config.vocab_size else None

    def names(self) -> list[str]:
        return sorted(self.weights.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns a parameter's shape without padding of the vocabulary."""
        dim = VOCAB_DIM.get(name)
        return tuple(self.config.vocab_size if d == dim else size for d, size in enumerate(self.weights.shapes[name]))

    def read(self, name: str, sharding: Sharding | None = None, shape: tuple[int, ...] | None = None) -> jax.Array:
        """Returns a parameter, float32, in the place of `sharding`, by default the CPU. Its adapter is merged into it.

        Args:
          shape: that which a mesh pads it to, by default without padding.

        Raises:
          ConfigError: its files are damaged, or it is not what was saved.
        """
        if sharding is None:
            sharding = SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
        target = jax.ShapeDtypeStruct(shape or self.shape(name), jnp.float32, sharding=sharding)
        array = self.weights.read(name, target)
        if name not in self._adapted:
            return array
        whole = NamedSharding(sharding.mesh, P()) if isinstance(sharding, NamedSharding) else sharding
        merge = jax.jit(lora.merged, static_argnums=3, out_shardings=sharding)
        return merge(array, *self.adapter(self._adapted[name], whole), self.adapters.scale)

    @functools.cached_property
    def _adapted(self) -> dict[str, str]:
        """{kernel: target} of those with adapters."""
        targets = () if self.adapters is None else self.adapters.targets
        return {f"layers/{target}/kernel": target for target in targets}

    def adapter(self, target: str, sharding: Sharding | None = None) -> tuple[jax.Array, jax.Array]:
        """Returns (A, B) of a target, float32, stacked over layers. Arguments and errors as of `read`."""
        if sharding is None:
            sharding = SingleDeviceSharding(jax.local_devices(backend="cpu")[0])

        def read(name: str) -> jax.Array:
            shape = self.trained.shapes[name]
            return self.trained.read(name, jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding))

        return read(f"layers/{target}/{lora.A}"), read(f"layers/{target}/{lora.B}")

    def place(self, config: ModelConfig, mesh: Mesh, dtype: Any) -> dict[str, Any]:
        """Returns the parameters on the mesh, cut over its axis tp, in the types of `load_params`.

        Beside them the devices hold one parameter in float32 at a time. Raises ConfigError as `read`, and for values
        that are not finite.
        """
        tp = mesh.shape["tp"]
        shapes, specs = jax.eval_shape(lambda: init_params(config, jax.random.key(0), tp)), param_specs(config, tp)

        def load(path, leaf, spec):
            name, target = name_of(path), stored_dtype(path, leaf, dtype)
            array = self.read(name, NamedSharding(mesh, spec), leaf.shape)
            cast, good = _cast(array, target)
            if not good:
                raise ConfigError(f"{self}: the tensor {name!r} {not_finite(np.asarray(array), target)}")
            return cast

        return jax.tree_util.tree_map_with_path(load, shapes, specs)


@functools.partial(jax.jit, static_argnums=1)
def _cast(array: jax.Array, dtype: np.dtype) -> tuple[jax.Array, jax.Array]:
    cast = array.astype(dtype)
    return cast, jnp.isfinite(cast).all()


def open_run(path: str | Path) -> RunFolder:
    """Opens a checkpoint of a run, RUN or RUN@STEP.

    Raises:
      ConfigError: one line: no run, no such checkpoint, one that is not finished, of another model, or damaged.
    """
    if (found := find(path)) is None:
        raise ConfigError(f"{path}: {no_run(Path(path))}")
    folder, asked = found
    settings = read_object(folder / CONFIG)
    config = model_config(settings, folder / CONFIG)
    adapters = adapters_of(settings, config, folder / CONFIG)
    make = lambda: init_params(config, jax.random.key(0))
    if adapters is None:
        weights = _opened(folder, CHECKPOINTS, asked, make, config.vocab_size)
        return RunFolder(folder, weights.step, settings, config, weights)
    trained = _opened(folder, CHECKPOINTS, asked, lambda: adapters.init(config, jax.random.key(0)), config.vocab_size)
    if not (folder / BASE / str(STEP)).is_dir():
        raise CheckpointError(missing(folder / BASE))
    weights = _opened(folder, BASE, STEP, make, config.vocab_size)
    if weights.record.get(DIGEST) != trained.record.get(DIGEST):
        raise CheckpointError(other(folder / BASE))
    return RunFolder(folder, trained.step, settings, config, weights, adapters=adapters, trained=trained)


def _opened(run: Path, part: str, asked: int | None, make: Callable[[], Any], vocab_size: int) -> _Arrays:
    """The parameters of a checkpoint in a folder of the run, which must be those that `make` would return."""
    reader = _Reader(run, part)
    with reader:
        step = reader.step(asked)
        record, described = reader.open(step)
    stored = {name: tuple(leaf.shape) for name, leaf in described.items()}
    wanted, where = by_name(jax.eval_shape(make)), f"{run}@{step}" if part == CHECKPOINTS else str(run / part)
    if odd := sorted(wanted.keys() ^ stored.keys()):
        what = "lacks" if odd[0] in wanted else "has beside the model's parameters"
        raise CheckpointError(f"{where}: the checkpoint {what} {odd[0]!r}; is {CONFIG} that of this run?")
    for name, leaf in wanted.items():
        dim, have = VOCAB_DIM.get(name), stored[name]
        need = tuple(vocab_size if d == dim else size for d, size in enumerate(leaf.shape))
        if len(have) != len(need) or any(a < b if d == dim else a != b for d, (a, b) in enumerate(zip(have, need))):
            raise CheckpointError(f"{where}: {name!r} has shape {list(have)}, {CONFIG} needs {list(need)}")
        if described[name].dtype != np.float32:
            raise CheckpointError(f"{where}: {name!r} is of type {described[name].dtype}; must be float32")
    return _Arrays(reader, step, record, stored)


def adapters_of(settings: Mapping[str, Any], config: ModelConfig, where: Path) -> Adapters | None:
    """Returns the adapters of a run's settings; None of a run without. Raises ConfigError for what describes none."""
    return Adapters.of(lora_of(settings, where), config)


def load_run(path: str | Path) -> tuple[ModelConfig, dict[str, Any]]:
    """Returns (config, params) of a training run's checkpoint, for `Generator.of` and for programs of your own.

    Args:
      path: a run's folder, "runs/x", whose latest checkpoint is read, or "runs/x@340" for that of step 340.

    Returns:
      The model's `ModelConfig`, and the tree of `taco_jax.models.params` as float32 numpy arrays, whatever mesh the run
      had, tables without padding of the vocabulary.

    Raises:
      ConfigError: one line: no run, no such checkpoint, one that is not finished, or whose arrays are not those that
        were saved.
    """
    run = open_run(path)
    tree: dict[str, Any] = {}
    for name in run.names():
        *parents, last = name.split("/")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = np.asarray(run.read(name))
    return run.config, tree


def model_config(settings: Mapping[str, Any], where: Path) -> ModelConfig:
    """Returns the model of a run's settings. Fields that an older run's file has not are at their defaults."""
    if not isinstance(settings.get("model"), dict):
        raise ConfigError(f"{where}: is not that of a training run, which has a part 'model'")
    given = dict(settings["model"])
    known = [field.name for field in dataclasses.fields(ModelConfig)]
    if unknown := sorted(given.keys() - set(known)):
        raise ConfigError(
            f"{where}: model.{unknown[0]}: there is no such field here; {did_you_mean(unknown[0], known)}"
        )
    try:
        # JSON has lists where the fields have tuples.
        return ModelConfig(**{key: tuple(value) if isinstance(value, list) else value for key, value in given.items()})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: model.{error}") from None


def no_run(path: Path) -> str:
    """Returns the end of a sentence: what is wrong with a path that no run has."""
    if path.name == CHECKPOINTS and is_run(path.parent):
        return f"holds the checkpoints of a run; name the run: {path.parent}"
    if path.parent.name == CHECKPOINTS and is_run(path.parent.parent):
        return f"is a checkpoint; name its run and step: {path.parent.parent}@{path.name}"
    if path.is_dir():
        if (path / "config.json").is_file():
            try:
                settings = json.loads((path / "config.json").read_text())
            except (OSError, ValueError):
                settings = None
            if isinstance(settings, dict) and "model_type" in settings:
                return (
                    "is a model's folder already; must be the workdir of a training run, such as runs/x or runs/x@100"
                )
            return (
                "its config.json is not that of a training run; must be a run's workdir, such as runs/x or runs/x@100"
            )
        if runs := sorted(found.parent for found in path.glob("*/config.json") if is_run(found.parent)):
            return f"holds workdirs of training runs; name one: {runs[0]}"
        return "has no config.json; must be the workdir of a training run, such as runs/x or runs/x@100"
    what = "there is a file of another kind" if path.exists() else "there is nothing"
    return f"must be the workdir of a training run, such as runs/x or runs/x@100; {what}"
