"""The command: another program, a module or a script, whose collectives go compressed.

python -m taco_jax.run --compress tensor=int8h --require 0.95 -- -m some.package.train config.yml
python -m taco_jax.run --compress tensor=int8h fsdp/reduce_scatter=int8h -- train.py --steps 10
python -m taco_jax.run --compress plan.json -- train.py --steps 10
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from taco_jax.config import ConfigError, cli

if TYPE_CHECKING:
    from taco_jax.dropin import Installed

DESCRIPTION = """Run a program with compressed collectives, without a changed line.

What follows -- is the program: -m MODULE ARGUMENTS, or SCRIPT.py ARGUMENTS. At its end the report says what was
compressed; exit code 1 if that is nothing, or less than --require."""
USAGE = "give the program after --, such as: -- -m some.package.train config.yml, or: -- train.py"


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The compression of the program after --."""

    compress: tuple[str, ...] = ()
    """AXIS=CODEC, AXIS/OPERATION=CODEC or AXIS/PATTERN=CODEC, several times: tensor=int8h fsdp/reduce_scatter=int8h.
    fsdp+tensor is of collectives over both axes at once; patterns are of op_name, such as '*layers/mlp*'. Or one plan
    file: plan.json."""
    min_bytes: int | None = None
    """Collectives of fewer bytes stay exact; None: as tuned for codec, ranks and link."""
    require: float | None = None
    """Least share, 0 to 1, of the bytes that are named that must be compressed."""
    report: str | None = None
    """File that the report is written to; None: standard error."""
    devices: str | None = None
    """'cpu:8' emulates eight devices on the CPU; None takes what JAX finds."""


def run(args: Sequence[str] | None = None) -> int:
    """Runs the command line's program. Returns the exit code.

    What is wrong with the command is one line. What the program prints and raises is its own, as without the command.
    """
    prepared: list[Callable[[], int]] = []
    code = cli.run(lambda args: prepared.append(prepare(args)), args)
    return code or prepared[0]()


def prepare(args: Sequence[str]) -> Callable[[], int]:
    """Returns a function that runs the program and returns the exit code.

    Raises:
      ConfigError: what is wrong before the program starts.
    """
    ours, dashes, program = _split(args)
    if not dashes and not {"-h", "--help"} & set(ours):
        raise ConfigError(f"no program; {USAGE}")
    config = cli.parse_flags(RunConfig(), ours, prog="python -m taco_jax.run", description=DESCRIPTION)
    plan = _checked(config)
    if not program:
        raise ConfigError(f"no program; {USAGE}")
    # The program may go to another folder.
    report = None if config.report is None else Path(config.report).absolute()
    start = _program(program)
    cli.select_devices(config.devices)
    import taco_jax
    from taco_jax.dropin import MissingHookError

    try:
        installed = taco_jax.install(plan, min_bytes=config.min_bytes, require=config.require)
    except MissingHookError as error:
        raise ConfigError(str(error)) from None
    return functools.partial(_run, start, installed, report)


def _run(start: Callable[[], None], installed: Installed, report: Path | None) -> int:
    from taco_jax.dropin import DropInError

    try:
        start()
    except SystemExit as stop:
        if stop.code not in (None, 0):
            raise
    finally:
        # While the plan is in force still: what the program does at its end is a part of it.
        written = _write(report, installed)
    try:
        installed.check()
    except DropInError as error:
        cli.say(cli.error_line(error), sys.stderr)
        return 1
    return 0 if written else 1


def _split(args: Sequence[str]) -> tuple[list[str], bool, list[str]]:
    """(arguments before --, whether there is one, those after)."""
    args = list(args)
    if "--" not in args:
        return args, False, []
    at = args.index("--")
    return args[:at], True, args[at + 1 :]


def _file(lines: Sequence[str]) -> Path | None:
    """The plan file that --compress names, as a path that stays good where the program changes its folder."""
    from taco_jax.compression.plan_file import is_plan_path

    files = [line for line in lines if is_plan_path(line) and "=" not in line]
    if not files:
        return None
    if len(lines) > 1:
        raise ConfigError(f"compress: {files[0]}: a plan file stands alone; leave out what is beside it")
    return Path(files[0])


def _checked(config: RunConfig) -> Mapping | Path:
    """The plan. Raises ConfigError for values that cannot be."""
    from taco_jax.dropin.plan import check_require, parse_plan, parse_text

    if not config.compress:
        raise ConfigError("compress: must name an axis and a codec, such as --compress tensor=int8h")
    try:
        plan = _file(config.compress) or parse_text(config.compress)
        check_require(config.require, parse_plan(plan, config.min_bytes))
    except (TypeError, ValueError) as error:
        own = isinstance(error, ConfigError) or str(error).startswith(("min_bytes=", "require="))
        raise ConfigError(str(error) if own else f"compress: {error}") from None
    if config.report is not None:
        folder = Path(config.report).parent
        if not folder.is_dir() or Path(config.report).is_dir():
            raise ConfigError(f"report={config.report}: must be a file in a folder that exists")
    return plan


def _program(program: Sequence[str]):
    """A function that runs the program as Python would. Raises ConfigError where there is none."""
    head, *rest = program
    if head == "-m":
        if not rest:
            raise ConfigError(f"-m: needs a module; {USAGE}")
        module, *arguments = rest
        _check_module(module)

        def start():
            sys.argv = [module, *arguments]
            runpy.run_module(module, run_name="__main__", alter_sys=True)

        return start
    if not Path(head).is_file():
        what = "is a folder" if Path(head).is_dir() else "no such file"
        raise ConfigError(f"{head}: {what}; {USAGE}")

    def start():
        sys.argv = [head, *rest]
        sys.path[0] = str(Path(head).resolve().parent)
        runpy.run_path(head, run_name="__main__")

    return start


def _check_module(module: str) -> None:
    """Raises ConfigError where Python could not run a module."""
    if module == "__main__" or not all(part.isidentifier() for part in module.split(".")):
        raise ConfigError(f"-m {module}: must be the name of a module; {USAGE}")
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError as error:
        # Of the package that it is in, which is imported to find it.
        if not f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(f"-m {module}: its package cannot be imported: {error}; install what it needs") from None
        found = None
    if found is None:
        raise ConfigError(f"-m {module}: no such module here; {USAGE}")
    if found.submodule_search_locations is not None and importlib.util.find_spec(f"{module}.__main__") is None:
        raise ConfigError(f"-m {module}: is a package without a __main__; name one of its modules")


def _write(file: Path | None, installed: Installed) -> bool:
    """Writes the report, to standard error where the file does not take it. Returns whether it went where it should."""
    import jax

    # Where nothing was compiled, to ask who this is could start the backends.
    if installed.report.programs and jax.process_index() != 0:
        return True
    text = str(installed.report)
    try:
        if file is not None:
            file.write_text(text + "\n")
            return True
    except OSError as error:
        cli.say(text, sys.stderr)
        cli.say(cli.error_line(ConfigError(f"report={file}: {error.strerror}; it is above")), sys.stderr)
        return False
    cli.say(text, sys.stderr)
    return True
