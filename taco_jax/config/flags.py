"""A flag for every field of a config, `--config FILE.py` before them, and errors of one line.

python -m taco_jax.train --config experiments/quickstart.py --mesh.tp 4 --compression.forward int8h
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import difflib
import io
import json
import re
import runpy
import traceback
import typing
from collections.abc import Container, Mapping, Sequence, Set
from pathlib import Path
from types import NoneType
from typing import Any

from taco_jax import config as config_package
from taco_jax.config import help
from taco_jax.config.derived import get, keys, with_compression
from taco_jax.config.settings import TrainConfig
from taco_jax.config.stored import read_config
from taco_jax.errors import ConfigError, did_you_mean

DESCRIPTION = """Train a language model with compressed tensor parallelism.

--config FILE.py takes the settings from an experiment file, a Python file that assigns a TrainConfig to the name
'config'. It is executed: give only a file that you would run. The flags below override single fields of it. With
--config, --help and --help-all show the file's values as defaults.

--config RUN/config.json takes those of a run, and goes on with it in RUN. With --workdir it is another run.

--compression none makes all messages exact, those of tensor, pipeline and data parallelism; --compression
FORWARD:BACKWARD, or one name for both, sets the tensor-parallel codecs alone. Flags of single fields go before it."""

TEXT_OR_LIST = ("data.train",)
"""Flags that take several values, of which one alone is no list."""
_ALL = "--help-all"


def parse(args: Sequence[str], *, prog: str = "python -m taco_jax.train") -> TrainConfig:
    """Returns the config of a command line: defaults, then the file of `--config`, then the flags.

    Raises ConfigError with one line for an unknown flag, a value of the wrong type, or a file that holds no config.
    `--help` prints one page, `--help-all` all flags; both exit with code 0.
    """
    path, rest = _take(list(args), "config", "the path of an experiment file, such as experiments/quickstart.py")
    codecs, rest = _take(rest, "compression", "codecs, such as none or taco:int8h")
    default = TrainConfig() if path is None else load(path)
    plan, rest = _take_plan(rest)
    if plan is not None:
        kept = plan if Path(plan).exists() else _plan_of_run(plan, rest, default)
        compression = dataclasses.replace(default.compression, plan=kept)
        default = dataclasses.replace(default, compression=compression)
    if codecs is not None:
        default = with_compression(default, codecs)
    if _ALL not in rest and {"-h", "--help"} & set(rest):
        print(help.page(default))
        raise SystemExit(0)
    rest = ["--help" if arg == _ALL else arg for arg in rest]
    prog, more = f"{prog} [--config FILE] [--compression CODECS]", {"config", "compression", "help-all"}
    config = parse_flags(default, rest, prog=prog, description=DESCRIPTION, more=more)
    if path is not None and not (config.workdir or config.dry_run):
        raise ConfigError(f"--config {path}: its folder is no run's; say where this one works with --workdir")
    return config


def given(args: Sequence[str]) -> frozenset[str]:
    """The dotted keys of the fields that a command line's flags name."""
    names = (arg[2:].partition("=")[0].replace("-", "_") for arg in args if re.match(r"--[A-Za-z]", arg))
    return frozenset(
        f"{group}{dot}{last.removeprefix('no_')}" for group, dot, last in (n.rpartition(".") for n in names)
    )


def parse_flags(default: Any, args: Sequence[str], *, prog: str, description: str, more: Set[str] = frozenset()) -> Any:
    """Returns a copy of a config dataclass with the fields replaced that the flags name. Errors as in `parse`.

    more: flags that the help may name and that were taken before.
    """
    import tyro

    if not {"-h", "--help"} & set(args):
        known = {key.replace("_", "-"): get(default, key) for key in keys(default)} | dict.fromkeys({"help", *more})
        _check_flags(args, known)
        args = _spelled_out(_joined(args, known), type(default))
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(type(default), default=default, args=list(args), prog=prog, description=description)
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        # A field's own rule raises where tyro makes the object, and says all that there is to say.
        cause: BaseException | None = stop
        while cause is not None:
            if isinstance(cause, ConfigError):
                raise cause from None
            cause = cause.__context__
        raise ConfigError(f"{_one_line(errors.getvalue())}; {_all_flags(more)} describes every option") from None


def load(path: str | Path) -> TrainConfig:
    """The `config` of an experiment file, which is executed, or of a run's config.json (`taco_jax.config.stored`).

    ConfigError when there is none or it does not run.
    """
    path = Path(path)
    if not path.is_file():
        folder = path.parent if path.parent.is_dir() else Path("experiments")
        files = (p for p in sorted(folder.glob("*.py")) if p.is_file())
        known = [str(p) for p in files if "\nconfig = " in p.read_text(errors="replace")]
        what = "is a folder" if path.is_dir() else "no such file"
        if (path / "config.json").is_file():
            raise ConfigError(
                f"--config {path}: is the workdir of a run; give {path / 'config.json'} to go on with it, or to start "
                f"another one with its settings and --workdir"
            )
        raise ConfigError(f"--config {path}: {what}; {did_you_mean(str(path), known) if known else 'give a .py file'}")
    if path.suffix.lower() == ".json":
        return read_config(path)
    if path.suffix.lower() in (".yaml", ".yml", ".toml"):
        raise ConfigError(
            f"--config {path}: is no experiment file; give a Python file that assigns a TrainConfig to the name "
            f"'config', such as experiments/quickstart.py, and what differs as flags"
        )
    try:
        names = runpy.run_path(str(path), run_name="__config__")
    except ConfigError as error:
        raise ConfigError(f"--config {path}: {error}") from error
    except SystemExit as stop:
        what = " ".join(f"SystemExit: {stop.code}".split())
        raise ConfigError(
            f"--config {path}{_line_of(stop, path)}: ends Python ({what}) before it has assigned a TrainConfig "
            f"to the name 'config'; take that out, or give an experiment file"
        ) from None
    except Exception as error:
        raise ConfigError(f"--config {path}{_line_of(error, path)}: {_explain(error)}") from error
    config = names.get("config")
    if not isinstance(config, TrainConfig):
        found = "nothing" if config is None else type(config).__name__
        raise ConfigError(f"--config {path}: must assign a TrainConfig to the name 'config', found {found}")
    return config


def _take(args: list[str], name: str, needs: str) -> tuple[str | None, list[str]]:
    """Cuts `--name VALUE` or `--name=VALUE` out of the arguments. Returns (value, the rest)."""
    flag, values, rest, i = f"--{name}", [], [], 0
    while i < len(args):
        if args[i] == flag:
            if i + 1 == len(args) or args[i + 1].startswith("--"):
                raise ConfigError(f"{flag}: needs {needs}")
            values.append(args[i + 1])
            i += 1
        elif args[i].startswith(f"{flag}="):
            values.append(args[i].removeprefix(f"{flag}="))
        else:
            rest.append(args[i])
        i += 1
    if len(values) > 1:
        raise ConfigError(f"{flag}: given {len(values)} times ({', '.join(values)}); give it once")
    return (values[0] if values else None), rest


def _take_plan(args: list[str]) -> tuple[str | None, list[str]]:
    """Cuts `--compression.plan FILE.json` out of the arguments; pairs of patterns and codecs stay."""
    flag = "--compression.plan"
    joined = [arg.replace("=", "\0", 1).split("\0") if arg.startswith(f"{flag}=") else [arg] for arg in args]
    flat = [arg for part in joined for arg in part]
    if flag not in flat:
        return None, args
    at = flat.index(flag) + 1
    end = next((i for i in range(at, len(flat)) if flat[i].startswith("--")), len(flat))
    if not any(value.endswith(".json") for value in flat[at:end]):
        return None, args
    if end - at > 1 or flag in flat[end:]:
        raise ConfigError(f"{flag} {' '.join(flat[at:end])}: give a plan's file alone, or pairs of patterns and codecs")
    return flat[at], flat[: at - 1] + flat[end:]


def _plan_of_run(path: str, args: list[str], default: TrainConfig) -> Any:
    """Returns the plan that the workdir keeps under the path of a file that is gone; the path, where it keeps none."""
    workdir = Path(_take(args, "workdir", "a folder")[0] or default.workdir)
    steps = [file for file in workdir.glob("checkpoints/*/run/metadata") if file.parts[-3].isdecimal()]
    # The latest start's: config.json is that of the first one.
    for file in (*sorted(steps, key=lambda file: -int(file.parts[-3])), workdir / "config.json"):
        try:
            content = json.loads(file.read_text())
            kept = content["plan"] if file.name == "metadata" else content["compression"]["plan"]
            return {path: kept[path]}
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return path


def _check_flags(args: Sequence[str], known: Mapping[str, Any]) -> None:
    """Raises ConfigError for an unknown flag, with the nearest known one. A dash and an underscore mean the same.

    known: flags with their default values.
    """
    for arg in args:
        if not re.match(r"--[A-Za-z]", arg):
            continue
        flag = arg[2:].split("=")[0].replace("_", "-")
        prefix, _, last = flag.rpartition(".")
        positive = f"{prefix}.{last.removeprefix('no-')}".lstrip(".")
        if flag not in known and not (last.startswith("no-") and positive in known):
            raise ConfigError(f"unknown option --{flag}; {_nearest_flag(flag, known)}")


def _joined(args: Sequence[str], known: Mapping[str, Any]) -> list[str]:
    """A list that is given in several flags, --codec taco --codec int8h, is one: --codec taco int8h.

    known: flags with their default values.
    """
    flag_of = lambda arg: arg[2:].partition("=")[0].replace("_", "-") if re.match(r"--[A-Za-z]", arg) else None
    given = collections.Counter(map(flag_of, args))
    takes_several = lambda flag, default: isinstance(default, tuple | dict) or flag in TEXT_OR_LIST
    several = {flag for flag, default in known.items() if takes_several(flag, default) and given[flag] > 1}
    lists: dict[str, list[str]] = {}
    out: list[list[str]] = [[]]
    taking = out[0]
    for arg in args:
        flag = flag_of(arg)
        if flag is None:
            taking.append(arg)
            continue
        if flag not in several:
            out.append(taking := [arg])
            continue
        if flag not in lists:
            out.append(lists.setdefault(flag, [f"--{flag}"]))
        taking = lists[flag]
        taking += [arg.partition("=")[2]] if "=" in arg else []
    return [arg for part in out for arg in part]


def _spelled_out(args: Sequence[str], cls: type) -> list[str]:
    """Flags of True, False or None may stand alone, as others do: --a is --a True, --no-a is --a False."""
    hints = typing.get_type_hints(cls)
    optional = {
        f"--{name.replace('_', '-')}" for name, hint in hints.items() if typing.get_args(hint) == (bool, NoneType)
    }
    out = []
    for arg, following in zip(args, [*args[1:], "--"]):
        flag = arg.replace("_", "-")
        negated = flag.replace("--no-", "--", 1)
        out.append(negated if flag != negated and negated in optional else arg)
        if out[-1] != arg:
            out.append("False")
        elif flag in optional and following.startswith("--"):
            out.append("True")
    return out


def _nearest_flag(flag: str, known: Mapping[str, Any]) -> str:
    group, _, last = flag.removeprefix("no-").rpartition(".")
    if flag.startswith("no-") and isinstance(known.get(f"{group}.{last}".lstrip(".")), bool):
        return f"to switch it off, say --{group}.no-{last}"
    last = flag.rpartition(".")[2]
    # A flag without its group ("--tp") is nearer to "--mesh.tp" than letters say.
    same_end = sorted(key for key in known if key.rpartition(".")[2] == last)
    alike = lambda a, b: difflib.SequenceMatcher(None, a, b).ratio()
    end = lambda key: alike(last, key.rpartition(".")[2])
    # One of a group is like those of the group in the group's letters alone.
    likeness = {key: min(alike(flag, key), end(key) + 0.3) if "." in flag else end(key) for key in known}
    best = max(likeness, key=lambda key: (likeness[key], key))
    # Fewer letters in common are chance.
    close = same_end[:1] or [best] * (likeness[best] >= 0.75)
    return f"did you mean --{close[0]}?" if close else f"{_all_flags(known)} lists them all"


def _all_flags(known: Container[str]) -> str:
    """The flag that prints the help of all flags."""
    return _ALL if _ALL[2:] in known else "--help"


def _one_line(box: str) -> str:
    """The message of one of tyro's error boxes without its frame, its help text and its line breaks.

    A terminal of ASCII gets rules of dashes and the title in a line of its own.
    """
    parts: list[list[str]] = [[]]
    for line in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines():
        text = line.strip("│| \t")
        if text.startswith(("──", "╰", "---")):
            parts.append([])
        elif text and not text.startswith("╭"):
            parts[-1].append(text)
    lines = parts[0] if "╭" in box or not parts[1:] else parts[1]
    text = " ".join(lines).replace("Error parsing ", "").rstrip(".")
    text = re.sub(r"invalid literal for int\(\) with base 10: ('.*?')", r"\1 is no whole number, such as 2", text)
    text = re.sub(r"no type matching (\S+) could be instantiated from \[('.*?')\].*", r"\2 must be one of \1", text)
    text = re.sub(r"could not convert string to float: ('.*?')", r"\1 is no number, such as 0.1", text)
    text = text.replace("one of {None}|INT", "None or a whole number").replace(
        "one of {None}|FLOAT", "None or a number"
    )
    pairs = "needs pairs of a pattern and codecs, such as 'layers/*' taco:int8h"
    text = text.replace("Failed to parse key-value pairs!", pairs)
    return text


def _explain(error: Exception) -> str:
    """An exception of an experiment file in one line, with the nearest key where a dataclass refused one."""
    text = " ".join(str(error).split())
    match = re.search(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", text)
    if match:
        cls = getattr(config_package, match[1], None)
        names = [f.name for f in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
        return f"{match[1]} has no key {match[2]!r}; {did_you_mean(match[2], names) if names else ''}".rstrip("; ")
    return text if type(error) is ValueError else f"{type(error).__name__}: {text}"


def _line_of(error: BaseException, path: Path) -> str:
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).name == path.name]
    line = lines[-1] if lines else getattr(error, "lineno", None)
    return f" line {line}" if line else ""
