"""The command: another program, a module or a script, whose collectives go compressed.

python -m taco_jax.run --compress tensor=int8h --require 0.95 -- -m some.package.train config.yml
python -m taco_jax.run --compress tensor=int8h fsdp/reduce_scatter=int8h -- train.py --steps 10
python -m taco_jax.run --calibrate plan.json --bits 4.5 -- train.py --steps 10
python -m taco_jax.run --compress plan.json -- train.py --steps 1000
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import runpy
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from taco_jax.config import ConfigError, cli
from taco_jax.errors import check_writable

if TYPE_CHECKING:
    from taco_jax.dropin import Calibration, Installed

DESCRIPTION = """Run a program with compressed collectives, without a changed line; or measure what codecs would lose.

What follows -- is the program: -m MODULE ARGUMENTS, or SCRIPT.py ARGUMENTS. At its end the report says what was
compressed; exit code 1 if that is nothing, or less than --require. With --calibrate plan.json the program runs exactly,
and leaves a plan file for --compress."""
USAGE = "give the program after --, such as: -- -m some.package.train config.yml, or: -- train.py"


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The compression of the program after --."""

    compress: tuple[str, ...] = ()
    """AXIS=CODEC, AXIS/OPERATION=CODEC or AXIS/PATTERN=CODEC, several; AXIS+AXIS is both at once; or one plan.json."""
    min_bytes: int | None = None
    """Collectives of fewer bytes stay exact; None: as tuned for codec, ranks and link."""
    require: float | None = None
    """Least share, 0 to 1, of the bytes that are named that must be compressed."""
    calibrate: str | None = None
    """The plan file that is written at the end, of what each codec loses of the program's own values: plan.json."""
    bits: float | None = None
    """With --calibrate: average bits an element, for which errors are made least. Without --snr: 4.5."""
    snr: float | None = None
    """With --calibrate: dB that each collective reaches, with the fewest bits."""
    calibrate_steps: int = 4
    """With --calibrate: how many runs of each program are measured. Later ones are counted, and as slow."""
    axes: tuple[str, ...] = ()
    """With --calibrate: AXIS or AXIS/OPERATION that are measured; none given: all axes, but gathers of weights."""
    codecs: tuple[str, ...] = ()
    """With --calibrate: those that are tried; none given: mxfp4 int4h int5h int6h int8h."""
    report: str | None = None
    """File that the report or the table is written to; None: standard error."""
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
    begin = _checked(config)
    if not program:
        raise ConfigError(f"no program; {USAGE}")
    # The program may go to another folder.
    report = None if config.report is None else Path(config.report).absolute()
    start = _program(program)
    cli.select_devices(config.devices)
    from taco_jax.dropin import MissingHookError

    try:
        in_force = begin()
    except MissingHookError as error:
        raise ConfigError(str(error)) from None
    if config.calibrate is not None:
        command = f"python -m taco_jax.run {shlex.join(args)}"
        plan = Path(config.calibrate).absolute()
        return functools.partial(_calibrate, start, in_force, plan=plan, command=command, report=report)
    return functools.partial(_run, start, in_force, report)


def _calibrate(
    start: Callable[[], None], calibration: Calibration, *, plan: Path, command: str, report: Path | None
) -> int:  # fmt: skip
    """Runs the program, writes the plan whatever becomes of it, and returns the exit code."""
    from taco_jax.dropin import DropInError

    stop: BaseException | None = None
    try:
        start()
    except BaseException as error:
        stop = error
    code = 0
    try:
        calibration.stop()
        table = str(calibration)
        calibration.write(plan, command)
    except (ConfigError, DropInError) as error:
        cli.say(cli.error_line(error), sys.stderr)
        code = 1
    else:
        code = 0 if _write(report, table) else 1
    if stop is not None and not (isinstance(stop, SystemExit) and stop.code in (None, 0)):
        raise stop
    return code


def _run(start: Callable[[], None], installed: Installed, report: Path | None) -> int:
    from taco_jax.dropin import DropInError

    try:
        start()
    except SystemExit as stop:
        if stop.code not in (None, 0):
            raise
    finally:
        # While the plan is in force still: what the program does at its end is a part of it.
        written = _write(report, str(installed.report), programs=bool(installed.report.programs))
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


def _checked(config: RunConfig) -> Callable[[], Installed | Calibration]:
    """Returns what puts the plan in force. Raises ConfigError for values that cannot be."""
    if config.report is not None:
        _check_file("report", config.report)
    if config.calibrate is not None:
        return _checked_calibration(config)
    for key in ("bits", "snr", "calibrate_steps", "axes", "codecs"):
        if getattr(config, key) != getattr(RunConfig, key):
            flag = key.replace("_", "-")
            raise ConfigError(f"{flag}: is an option of --calibrate plan.json, which measures; leave it out")
    if not config.compress:
        raise ConfigError(
            "compress: must name an axis and a codec, such as --compress tensor=int8h; or measure with --calibrate"
        )
    import taco_jax

    return functools.partial(
        taco_jax.install, _checked_plan(config), min_bytes=config.min_bytes, require=config.require
    )


def _checked_calibration(config: RunConfig) -> Callable[[], Calibration]:
    from taco_jax.compression.plan_file import is_plan_path
    from taco_jax.dropin import calibrate

    for key, given in {"compress": config.compress, "require": config.require is not None}.items():
        if given:
            raise ConfigError(f"{key}: with --calibrate the program runs exactly; leave it out")
    if not is_plan_path(config.calibrate):
        raise ConfigError(f"calibrate={config.calibrate}: must be the path of a plan file, such as plan.json")
    _check_file("calibrate", config.calibrate)
    axes = [axis for axes in config.axes for axis in axes.split(",")] or None
    options = calibrate.checked(
        bits=config.bits, snr=config.snr, steps=config.calibrate_steps, axes=axes,
        codecs=config.codecs or calibrate.CODECS, min_bytes=config.min_bytes,
    )  # fmt: skip
    return functools.partial(calibrate.Calibration, *options)


def _check_file(key: str, path: str) -> None:
    folder = Path(path).parent
    if not folder.is_dir() or Path(path).is_dir():
        raise ConfigError(f"{key}={path}: must be a file in a folder that exists")
    check_writable(key, path)


def _checked_plan(config: RunConfig) -> Mapping | Path:
    from taco_jax.dropin.plan import check_require, parse_plan, parse_text

    try:
        plan = _file(config.compress) or parse_text(config.compress)
        check_require(config.require, parse_plan(plan, config.min_bytes))
    except (TypeError, ValueError) as error:
        own = isinstance(error, ConfigError) or str(error).startswith(("min_bytes=", "require="))
        raise ConfigError(str(error) if own else f"compress: {error}") from None
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


def _write(file: Path | None, text: str, *, programs: bool = True) -> bool:
    """Writes the report, to standard error where the file does not take it. Returns whether it went where it should."""
    import jax

    # Where nothing was compiled, to ask who this is could start the backends.
    if programs and jax.process_index() != 0:
        return True
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
