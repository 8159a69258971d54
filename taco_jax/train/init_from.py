"""The start of a run from weights that exist: `--init-from` a Hugging Face folder, a .gguf file or another run.

    config = with_model(config)                          # the source's shape; reads headers alone
    state, start = first_state(config, program)          # every device reads its shards of the weights

The source is read when a workdir has no checkpoint. A run that goes on takes its own checkpoint, so the source may be
gone. Site scales, the learning-rate schedule and the position in the data start anew in every case. Of a run, the
optimiser's moments come along if `init_optimizer` says so; Adam's count belongs to them.
"""

from __future__ import annotations

import dataclasses
import json
import re
import zlib
from collections.abc import Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from taco_jax.config import CheckpointConfig, ConfigError, TrainConfig, to_dict
from taco_jax.models.config import ModelConfig
from taco_jax.train.digests import of_params
from taco_jax.train.model_files import check_vocabulary
from taco_jax.train.workdir import CHECKPOINTS, CONFIG, read_config

if TYPE_CHECKING:
    from taco_jax.inference.loading import Checkpoint
    from taco_jax.train.state import TrainState
    from taco_jax.train.step import Program

HUGGING_FACE, GGUF, RUN = "Hugging Face", "GGUF", "run"


class Source(NamedTuple):
    """An opened source. step: of a run; checkpoint: of a model's files, whose weights are not read yet. adapted: a run
    of adapters."""

    given: str
    path: Path
    kind: str
    model: ModelConfig
    step: int | None = None
    checkpoint: Checkpoint | None = None
    adapted: bool = False


class Start(NamedTuple):
    """Where a run's first weights are from.

    origin: what is kept of it, plain values, the same on every process and mesh: {"from": path, "kind", "step",
    "optimizer", "digests": {parameter: digest}}.
    """

    source: Source
    origin: dict[str, Any]


def with_model(config: TrainConfig, given: Set[str] = frozenset()) -> TrainConfig:
    """Returns the config with the model's shape of its `init_from`; of a workdir with checkpoints, with that one's.

    An experiment file's model gives way. `model.init_std`, which no weights follow from, stays.

    Args:
      given: dotted keys that were set by hand, which must not say otherwise.

    Raises:
      ConfigError: no such source, one that cannot be used, or a key of `given` that contradicts it.
    """
    if config.init_from is None:
        _refuse_forgotten(config)
        return config
    _refuse_itself(config)
    where, model = _model(config)
    names = [field.name for field in dataclasses.fields(ModelConfig) if field.name != "init_std"]
    differing = {name for name in names if getattr(config.model, name) != getattr(model, name)}
    for name in names:
        if name in differing and f"model.{name}" in given:
            raise ConfigError(
                f"model.{name}={getattr(config.model, name)!r}: {where} has {getattr(model, name)!r}, and the model's "
                f"shape comes from there; leave --model.{name.replace('_', '-')} out"
            )
    config = dataclasses.replace(config, model=model)
    check_vocabulary(config)
    return config


def first_state(config: TrainConfig, program: Program) -> tuple[TrainState, Start]:
    """The state of step 0 with the weights of `init_from`, on the program's mesh. All processes call it.

    Raises:
      ConfigError: weights that are missing, damaged, or not those of the config's model.
    """
    source = open_source(config)
    state = program.init(jax.random.key(config.seed))
    stored, wanted = program.stored.pack(state), program.stored.shapes
    # What it has drawn has served its purpose, and the devices may have no room for both.
    drawn = (stored.params, stored.copy) if program.base is None else state.base
    jax.tree.map(lambda array: array.delete(), drawn)
    taken = {"params": wanted.params if program.base is None else program.base.shapes}
    if source.kind == RUN:
        taken |= {"opt_state": wanted.opt_state} if config.init_optimizer else {}
        taken = _read_run(source, taken, config.model.vocab_size)
    else:
        from taco_jax.inference.loading import read_params

        taken = {"params": _said_by(config, lambda: read_params(source.checkpoint, taken["params"]))}
    if "opt_state" in taken:
        taken["opt_state"] = _with_new_schedule(taken["opt_state"])
    weights = taken["params"]
    origin = {
        "from": str(source.path), "kind": source.kind, "step": source.step, "optimizer": "opt_state" in taken,
        "digests": of_params(weights, config.model.vocab_size),
    }  # fmt: skip
    if program.base is not None:  # the adapters stay as they were drawn
        return dataclasses.replace(state, base=program.base.unpack(weights)), Start(source, origin)
    stored = dataclasses.replace(stored, copy=None, **taken)
    return program.stored.unpack(stored), Start(source, origin)


def described(origin: dict[str, Any]) -> str:
    """Returns where a run has its weights from, in a few words."""
    step = "" if origin["step"] is None else f", step {origin['step']}"
    optimizer = ", with its optimiser's moments" if origin["optimizer"] else ""
    return f"{origin['from']} ({origin['kind']}{step}{optimizer})"


def lineage(origin: dict[str, Any]) -> dict[str, Any]:
    """Returns what a checkpoint's record keeps of an origin: one digest in the place of many."""
    digest = zlib.crc32(json.dumps(origin["digests"], sort_keys=True).encode())
    return {key: origin[key] for key in ("from", "kind", "step", "optimizer")} | {"digest": digest}


def open_source(config: TrainConfig) -> Source:
    """Opens what `init_from` names and looks at its headers. Raises ConfigError for what no run can start from."""
    given = config.init_from
    path, step = _path_and_step(given)
    run = _run_of(path)
    if run is not None:
        source = _open_run(given, run, step)
        if source.adapted and config.init_optimizer:
            raise ConfigError(
                f"init_optimizer=True: {given} has trained adapters, and moments of these alone; leave init_optimizer "
                f"out"
            )
        return source
    _refuse_part_of_a_run(given, path)
    if step is not None:
        if not path.exists():
            raise ConfigError(f"init_from={given}: there is no run {path}; name a run's workdir, as runs/x@{step}")
        raise ConfigError(f"init_from={given}: {path} is no run, and only runs have steps; leave @{step} out")
    if config.init_optimizer:
        raise ConfigError(
            f"init_optimizer=True: {given} is no run, and only runs have an optimiser; leave init_optimizer out"
        )

    def open_files() -> Source:
        from taco_jax.inference.loading import check_tensors, open_checkpoint

        checkpoint = open_checkpoint(path)
        check_tensors(checkpoint)
        model = dataclasses.replace(checkpoint.config, init_std=config.model.init_std)
        checkpoint = dataclasses.replace(checkpoint, config=model)
        kind = GGUF if path.is_file() else HUGGING_FACE
        return Source(given, path.absolute(), kind, model, checkpoint=checkpoint)

    return _said_by(config, open_files)


def saved_steps(workdir: str | Path) -> list[int]:
    """Steps of a workdir's checkpoints, ascending, by the names of their folders. Nothing is read."""
    folder = Path(workdir) / CHECKPOINTS
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit()) if folder.is_dir() else []


def _refuse_forgotten(config: TrainConfig) -> None:
    """Raises ConfigError where a workdir's run began with weights that the command does not name, so that its shape is
    another: rules about that shape would speak of a model that nobody has asked for."""
    path = Path(config.workdir) / CONFIG
    if not (saved_steps(config.workdir) and path.is_file()):
        return
    first = read_config(path)
    now, before = to_dict(config)["model"], first.get("model", {})
    if first.get("init_from") is not None and any(before.get(key, value) != value for key, value in now.items()):
        raise ConfigError(
            f"workdir={config.workdir}: its run began with --init-from {first['init_from']}, and the model of this "
            f"command is another; give --init-from {first['init_from']} again, or use another --workdir"
        )


def _refuse_itself(config: TrainConfig) -> None:
    path = _run_of(_path_and_step(config.init_from)[0])
    if path is not None and path.resolve() == Path(config.workdir).resolve():
        raise ConfigError(
            f"init_from={config.init_from}: is the workdir itself, which goes on from its checkpoints by itself; leave "
            f"init_from out, or use another --workdir for a run that starts from them"
        )


def _model(config: TrainConfig) -> tuple[str, ModelConfig]:
    """(who says it, the shape of the run's model)."""
    from taco_jax.inference.run_folder import model_config

    path = Path(config.workdir) / CONFIG
    if saved_steps(config.workdir) and path.is_file():
        first = read_config(path)
        own = f"the workdir {config.workdir}", model_config(first, path)
        if first.get("init_from") == config.init_from:
            return own
        try:  # another source than the run's must at least be of its model, where it can be seen
            return f"init_from={config.init_from}", open_source(config).model
        except ConfigError:
            return own
    return f"init_from={config.init_from}", open_source(config).model


def _path_and_step(given: str) -> tuple[Path, int | None]:
    """A path, and the step after its last @; a path that exists has none."""
    try:
        path = Path(given).expanduser()
        found = None if path.exists() else re.fullmatch(r"(.+)@(\d+)", given)
        return (path, None) if found is None else (Path(found[1]).expanduser(), int(found[2]))
    except (OSError, RuntimeError, ValueError) as error:  # a name that is too long; a home that nobody has
        raise ConfigError(f"init_from={given}: cannot be read ({getattr(error, 'strerror', None) or error})") from None


def _run_of(path: Path) -> Path | None:
    """The workdir that a path is; None for what is no run."""
    from taco_jax.inference.model_folder import is_run

    return path if path.is_dir() and is_run(path) else None


def _refuse_part_of_a_run(given: str, path: Path) -> None:
    """Raises ConfigError for a run's folder of checkpoints, or one of them, with the run's name."""
    for folder, run, step in ((path, path.parent, ""), (path.parent, path.parent.parent, f"@{path.name}")):
        if folder.name == CHECKPOINTS and _run_of(run):
            raise ConfigError(f"init_from={given}: is a part of a run; name the run: --init-from {run}{step}")


def _open_run(given: str, path: Path, step: int | None) -> Source:
    from taco_jax.inference.run_folder import adapters_of, model_config

    settings, present = read_config(path / CONFIG), saved_steps(path)
    model = model_config(settings, path / CONFIG)
    adapted = adapters_of(settings, model, path / CONFIG) is not None
    if not present:
        raise ConfigError(f"init_from={given}: the run has no checkpoint; wait for its first, or name another run")
    if step is not None and step not in present:
        raise ConfigError(
            f"init_from={given}: the run has no checkpoint of step {step}; present: {', '.join(map(str, present))}"
        )
    return Source(given, path.absolute(), RUN, model, step=present[-1] if step is None else step, adapted=adapted)


def _read_run(source: Source, targets: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """The fields of the run's state that `targets` describes. Adapters of a run are merged into its weights."""
    from taco_jax.train.checkpoint import Checkpoints

    settings, way = CheckpointConfig(enabled=False), f"--init-from {source.path}@{{}}"
    with Checkpoints(source.path / CHECKPOINTS, settings, way) as checkpoints:
        if source.step not in checkpoints.steps():
            raise ConfigError(f"init_from={source.given}: the checkpoint of step {source.step} is not complete")
        remedy = "leave init_optimizer out" if "opt_state" in targets else "use another run"
        if source.adapted:
            targets = dict(targets)
            merged = {"params": _read_merged(source, targets.pop("params"))}
            more = checkpoints.read_fields(source.step, targets, vocab_size, remedy) if targets else {}
            return merged | more
        return checkpoints.read_fields(source.step, targets, vocab_size, remedy)


def _read_merged(source: Source, shapes: Any) -> Any:
    from taco_jax.inference.in_memory import name_of
    from taco_jax.inference.run_folder import open_run

    run = open_run(f"{source.path}@{source.step}")
    return jax.tree_util.tree_map_with_path(lambda path, a: run.read(name_of(path), a.sharding, a.shape), shapes)


def _with_new_schedule(opt_state: Any) -> Any:
    """An optimiser's state whose learning-rate schedule begins; moments and their own counts stay."""
    import optax

    of_schedule = lambda node: isinstance(node, optax.ScaleByScheduleState)
    anew = lambda node: node._replace(count=node.count * 0) if of_schedule(node) else node
    return jax.tree.map(anew, opt_state, is_leaf=of_schedule)


def _said_by(config: TrainConfig, action: Any) -> Any:
    """action(), whose errors name the flag of inference; here they name ours."""
    try:
        return action()
    except ConfigError as error:
        text = str(error)
        there = Path(config.init_from).expanduser().exists() or "runs/x" in text
        more = "" if there else "; of a run its workdir, as runs/x or runs/x@STEP"
        raise ConfigError(text.replace("--model ", "--init-from ") + more) from None
