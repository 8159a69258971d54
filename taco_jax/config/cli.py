"""Command line of the programs: `--config FILE.py`, then one flag for every field of the config, errors in one line.

    python -m taco_jax.train --config experiments/quickstart.py --mesh.tp 4 --compression.forward int8h

Everything here happens before JAX starts a backend, so that `--devices cpu:8` can still choose one.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import io
import os
import re
import runpy
import signal
import sys
import traceback
import typing
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, TextIO

from taco_jax.config import ConfigError, TrainConfig, get, keys, parse_devices, with_compression
from taco_jax.config.checks import check_types
from taco_jax.errors import did_you_mean, error_line

DESCRIPTION = """Train a language model with compressed tensor parallelism.

--config FILE.py takes the settings from an experiment file, a Python file that assigns a TrainConfig to the name
'config'. It is executed: give only a file that you would run. The flags below override single fields of it. With
--config, --help shows the file's values as defaults.

--compression none makes all messages exact, those of tensor, pipeline and data parallelism; --compression
FORWARD:BACKWARD, or one name for both, sets the tensor-parallel codecs alone. Flags of single fields go before it."""

MALLOPT = {"M_MMAP_MAX": (-4, 0), "M_TRIM_THRESHOLD": (-1, 2**31 - 1), "M_ARENA_MAX": (-8, 1)}
"""Options of glibc's malloc.h, their numbers there and the values of `_keep_memory`."""


def parse(args: Sequence[str], *, prog: str = "python -m taco_jax.train") -> TrainConfig:
    """The config of a command line: defaults, then the file of `--config`, then the flags.

    Raises ConfigError with one line for an unknown flag, a value of the wrong type, or a file that holds no config.
    `--help` prints the help and exits with code 0.
    """
    path, rest = _take(list(args), "config", "the path of an experiment file, such as experiments/quickstart.py")
    codecs, rest = _take(rest, "compression", "codecs, such as none or taco:int8h")
    default = TrainConfig() if path is None else load(path)
    if codecs is not None:
        default = with_compression(default, codecs)
    prog, more = f"{prog} [--config FILE.py] [--compression CODECS]", {"config", "compression"}
    return parse_flags(default, rest, prog=prog, description=DESCRIPTION, more=more)


def parse_flags(default: Any, args: Sequence[str], *, prog: str, description: str, more: Set[str] = frozenset()) -> Any:
    """A copy of a config dataclass with the fields that the flags name replaced. Errors as of `parse`.

    more: flags that the help may name and that were taken before.
    """
    import tyro

    if not {"-h", "--help"} & set(args):
        known = {key.replace("_", "-"): get(default, key) for key in keys(default)} | dict.fromkeys({"help", *more})
        _check_flags(args, known)
        args = _spelled_out(args, type(default))
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(type(default), default=default, args=list(args), prog=prog, description=description)
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ConfigError(_one_line(errors.getvalue())) from None


def load(path: str | Path) -> TrainConfig:
    """The `config` of an experiment file, which is executed; ConfigError when there is none or it does not run."""
    path = Path(path)
    if not path.is_file():
        folder = path.parent if path.parent.is_dir() else Path("experiments")
        files = (p for p in sorted(folder.glob("*.py")) if p.is_file())
        known = [str(p) for p in files if "\nconfig = " in p.read_text(errors="replace")]
        what = "is a folder" if path.is_dir() else "no such file"
        if (path / "config.json").is_file():
            raise ConfigError(
                f"--config {path}: is the workdir of a run; give the experiment file that it was started with, and "
                f"--workdir {path} to go on with it (its config.json has the settings)"
            )
        raise ConfigError(f"--config {path}: {what}; {did_you_mean(str(path), known) if known else 'give a .py file'}")
    if path.suffix.lower() in (".json", ".yaml", ".yml", ".toml"):
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
    try:
        check_types(config)
    except ConfigError as error:
        raise ConfigError(f"--config {path}: {error}") from error
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
    return f"did you mean --{close[0]}?" if close else "--help lists them all"


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
    return f"{text}; --help describes every option"


def _explain(error: Exception) -> str:
    """An exception of an experiment file in one line, with the nearest key where a dataclass refused one."""
    text = " ".join(str(error).split())
    match = re.search(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", text)
    if match:
        import dataclasses

        from taco_jax import config as module

        cls = getattr(module, match[1], None)
        names = [f.name for f in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
        return f"{match[1]} has no key {match[2]!r}; {did_you_mean(match[2], names) if names else ''}".rstrip("; ")
    return text if type(error) is ValueError else f"{type(error).__name__}: {text}"


def _line_of(error: BaseException, path: Path) -> str:
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).name == path.name]
    line = lines[-1] if lines else getattr(error, "lineno", None)
    return f" line {line}" if line else ""


def select_devices(devices: str | None, *, deterministic: bool = False, in_order: bool = False) -> None:
    """Makes JAX see the devices that a `devices` value names. Call it before anything starts a backend.

    "cpu:N" sets JAX_PLATFORMS and, in XLA_FLAGS, the number of emulated devices and a long rendezvous timeout: more
    devices than cores can take longer than XLA's 40 s to arrive at a collective, which then aborts the process. Other
    flags of the user stay, and so does their own timeout. It also keeps freed memory in the process (`_keep_memory`).
    `deterministic` makes GPU results repeat bit for bit. `in_order`: GPUs start kernels of all streams in the order of
    their launch.
    """
    platform, count = parse_devices(devices)
    flags = os.environ.get("XLA_FLAGS", "").split()

    def have(flag: str) -> bool:
        return any(f.startswith(flag) for f in flags)

    # All of these flags are known to every jax that this package supports; XLA aborts on one that it does not know.
    if count is not None:
        flags = [f for f in flags if not f.startswith("--xla_force_host_platform_device_count")]
        flags.append(f"--xla_force_host_platform_device_count={count}")
        if not have("--xla_cpu_collective_call_terminate_timeout_seconds"):
            flags.append("--xla_cpu_collective_call_terminate_timeout_seconds=600")
        _keep_memory()
    if deterministic:
        if not have("--xla_gpu_deterministic_ops"):
            flags.append("--xla_gpu_deterministic_ops=true")
        # NCCL's sums in the NVLink switch depend on how its memory came to lie.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if in_order:
        # A matrix product fills the GPU. One that starts before the message beside it, on any rank, holds it up.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if flags:
        os.environ["XLA_FLAGS"] = " ".join(flags)
    if platform is not None:
        os.environ["JAX_PLATFORMS"] = platform
        if "jax" in sys.modules:
            # jax read JAX_PLATFORMS when it was imported; XLA reads its flags only when the backend starts.
            sys.modules["jax"].config.update("jax_platforms", platform)


def _keep_memory() -> None:
    """Makes malloc keep what a step frees for the next step, instead of giving it back to the kernel.

    XLA takes the temporaries of a program on each emulated device as one block. glibc maps blocks of 32 MB and more
    for themselves and unmaps them after use, so the kernel clears every page again at the next step: of the quickstart
    258,000 pages a step, a fifth of its time. Blocks of the heap stay; only the main arena's heap grows that large. A
    user's own MALLOC_* or GLIBC_TUNABLES have the last word.
    """
    if sys.platform != "linux" or "GLIBC_TUNABLES" in os.environ or any(k.startswith("MALLOC_") for k in os.environ):
        return
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    for option, value in MALLOPT.values() if mallopt else ():
        mallopt(option, value)


def devices(name: str | None) -> list[Any]:
    """jax.devices(), which starts the backend; ConfigError where `devices` names one that this machine has not."""
    import jax

    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # without a word where no plugin for the platform is installed
        reason = " ".join(str(error).split())[:300] or "this jax has no such devices"
        where = f"devices={name!r}" if name else f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}"
        raise ConfigError(f"{where}: cannot be used here ({reason}); try --devices cpu:8") from None


def say(text: str, stream: TextIO | None = None) -> None:
    """Prints a line, at once even into a pipe. A program goes on where nobody reads any more, or the device is full.

    The stream is then connected to /dev/null, and where it was standard output, a line on standard error says so.
    """
    stream = sys.stdout if stream is None else stream
    try:
        print(text, file=stream, flush=True)
    except (OSError, ValueError) as error:  # a ValueError of a closed stream
        _to_null(stream)
        if stream is sys.stdout:
            reason = getattr(error, "strerror", None) or error
            say(f"standard output: {reason}; it goes on without", sys.stderr)


def _to_null(stream: TextIO) -> None:
    """Connects a stream to /dev/null: what is left in its buffer goes there, now and when Python ends."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        stream.flush()


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ConfigErrors of one line, without the usage in lines of its own."""

    def __init__(self, **options: Any):
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False} | options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help describes every option")


class OutputError(OSError):
    """Standard output takes no more."""


class _Output:
    """Standard output whose errors are OutputErrors, so that they are told from those of files."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._try(self._stream.write, text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, call: Callable, *args: str) -> Any:
        try:
            return call(*args)
        except OSError as error:
            raise OutputError(error.errno, error.strerror) from error


def _open_closed_streams() -> None:
    """Connects standard streams that were closed (`>&-`) to /dev/null.

    Else the next file that is opened, a checkpoint's perhaps, has a standard stream's number, and takes what native
    code says there.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w" if number else "r"))


def run(main: Callable[[Sequence[str]], int | None], args: Sequence[str] | None = None) -> int:
    """Runs a program's main function: a ConfigError becomes one line on stderr and exit code 2.

    A program that is of no use without its output ends where standard output takes no more: in silence with exit code
    141 where its reader has gone, as programs end that a SIGPIPE ends, else in one line with exit code 1.
    """
    _open_closed_streams()
    code, real = 0, sys.stdout
    sys.stdout = _Output(real)
    try:
        try:
            code = main(sys.argv[1:] if args is None else args) or 0
        except ConfigError as error:
            say(error_line(error), sys.stderr)
            code = 2
        except OSError as error:
            # Of any flag's path: a question whether there is such a file raises it.
            if error.errno != errno.ENAMETOOLONG:
                raise
            say(error_line(ConfigError(f"{error.filename}: {error.strerror}; use a shorter path")), sys.stderr)
            code = 2
        except KeyboardInterrupt:
            say("interrupted", sys.stderr)
            code = 130
        finally:
            # Here an error can still be told; Python's own flush at its end prints a traceback.
            sys.stdout.flush()
    except OutputError as error:
        _to_null(real)
        gone = error.errno == errno.EPIPE
        if not (code or gone):
            say(f"error: standard output: {error.strerror}", sys.stderr)
        code = code or (128 + signal.SIGPIPE if gone else 1)
    finally:
        sys.stdout = real
    return code
