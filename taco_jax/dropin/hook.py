"""`compressed` and `install`: a plan in force for a block of a program, or for the rest of it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax

import pallas_kernels
import taco_jax
from pallas_kernels import KernelUnavailableError
from taco_jax.compression import tuned
from taco_jax.dropin import compat
from taco_jax.dropin.mesh_axes import live_meshes
from taco_jax.dropin.observe import Measuring, observe
from taco_jax.dropin.plan import DropInPlan, check_require, parse_plan
from taco_jax.dropin.replacement import record
from taco_jax.dropin.report import DropInError, History, Report
from taco_jax.dropin.rewrite import donates, read_note, rewrite

PROGRAM_FOLDERS = ("codec", "collectives", "compression", "dropin")
OPCODES = (b"all-reduce", b"reduce-scatter", b"all-gather", b"all-to-all", b"collective-permute")


class _Hooks:
    """The plans in force, and the one callback that serves them all."""

    def __init__(self):
        self._lock = threading.RLock()
        self._in_threads: dict[int, list[DropInPlan | Measuring]] = {}
        self._everywhere: list[DropInPlan | Measuring] = []
        self._histories: dict[DropInPlan | Measuring, History] = {}
        self._compiling: dict[int, str] = {}  # thread -> name of the program
        self._used = 0
        self._registered = False
        self._open = contextlib.ExitStack()

    def history(self, plan: DropInPlan | Measuring) -> History:
        """Returns what was compiled under a plan; one for all equal plans, whose programs are the same."""
        with self._lock:
            return self._histories.setdefault(plan, History(plan, _loaded_notes))

    def plan(self, thread: int) -> DropInPlan | Measuring | None:
        """The plan that is in force in a thread."""
        own = self._in_threads.get(thread)
        plans = own or self._everywhere
        return plans[-1] if plans else None

    def start(self, *, now: bool) -> None:
        """Counts a user. now: registers the callback, which may start the backends; else before the first program."""
        compat.transformations()
        with self._lock:
            self._used += 1
            try:
                if self._used == 1:
                    calls = (self._on_lowered, self._on_compiling, self._on_cache_hit, self._on_compiled)
                    self._open.enter_context(compat.listening(*calls))
                    self._open.enter_context(compat.in_cache_key(self._cache_key))
                if now:
                    self._register()
            except BaseException:
                self.stop()
                raise

    def stop(self) -> None:
        with self._lock:
            self._used -= 1
            if self._used == 0:
                self._open.close()
                if self._registered:
                    compat.unregister()
                    self._registered = False

    def _register(self) -> None:
        with self._lock:
            if self._registered or not self._used:
                return
            self._registered = True
            try:
                compat.register(self._callback)
            except BaseException:
                self._registered = False
                raise

    def _on_lowered(self, name: str) -> None:
        plan = self.plan(threading.get_ident())
        if plan is not None:
            self._register()
            self.history(plan).lowered(name)

    def _on_compiling(self, name: str) -> None:
        self._compiling[threading.get_ident()] = name

    def _on_cache_hit(self) -> None:
        thread = threading.get_ident()
        if (plan := self.plan(thread)) is not None:
            self.history(plan).loading(thread)

    def _on_compiled(self) -> None:
        thread = threading.get_ident()
        self._compiling.pop(thread, None)
        if (plan := self.plan(thread)) is not None:
            self.history(plan).loaded(thread)

    def _cache_key(self) -> str:
        thread = threading.get_ident()
        plan = self.plan(thread)
        if plan is None or not self.history(plan).knows(self._compiling.get(thread, "")):
            return ""
        # All that decides what a module becomes.
        meshes = sorted({(mesh.axis_names, mesh.devices.shape) for mesh in live_meshes()})
        file = tuned.path(jax.default_backend())
        measured = file.read_text() if file is not None and file.is_file() else ""
        return f"taco_jax {taco_jax.__version__} {_source_digest()} {plan!r} {meshes} {measured}"

    def _callback(self, serialized: bytes) -> bytes | None:
        name = _module_name(serialized)
        record(name, serialized)
        plan = self._plan_of(name)
        if plan is None:
            return None
        history = self.history(plan)
        history.handed += 1
        if not any(opcode in serialized for opcode in OPCODES):
            return None
        if not history.knows(name):
            history.elsewhere.append(name)
            # Its `Lowered` keeps what it is compiled to, and calls without a plan take it from there.
            return None
        try:
            change = observe if isinstance(plan, Measuring) else rewrite
            rewritten = change(serialized, plan, history)
        except (KernelUnavailableError, TypeError, ValueError) as error:
            # XLA makes one text of it and its traceback.
            history.problems.append(f"{name}: {error}")
            raise
        if rewritten is None:
            return None
        if not compat.KEEPS_DONATION and donates(serialized):
            warnings.warn(
                f"{name}: under this jax a program that is rewritten keeps its donated arguments in memory of their "
                "own; jax 0.11 and newer use it again",
                stacklevel=1,
            )
        return rewritten

    def _plan_of(self, name: str) -> DropInPlan | Measuring | None:
        """The plan of the thread that has asked for a module."""
        plans = {self.plan(thread) for thread in compat.compiling_threads(name)} or {self.plan(threading.get_ident())}
        if len(plans) > 1:
            raise RuntimeError(
                f"{name}: two threads compile programs of this name at once, under different plans; "
                "taco_jax.install a plan for all threads, or give the functions different names"
            )
        return plans.pop()


@functools.cache
def _source_digest() -> str:
    """Returns a digest of the files that make programs: a checkout changes without its version."""
    own = Path(taco_jax.__file__).parent
    digest = hashlib.sha256()
    for folder in (*map(own.joinpath, PROGRAM_FOLDERS), Path(pallas_kernels.__file__).parent):
        for file in sorted(folder.rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _loaded_notes(seen: set[bytes]) -> list[str]:
    return list(filter(None, map(read_note, compat.loaded_modules(seen))))


def _module_name(serialized: bytes) -> str:
    """A serialized module's name, its first field."""
    from taco_jax.dropin.hlo_proto import NameProto

    return NameProto.FromString(serialized).name


_hooks = _Hooks()


@contextlib.contextmanager
def compressed(
    plan: Mapping | str | os.PathLike,
    *,
    min_bytes: int | None = None,
    require: float | Mapping[str, float] | None = None,
) -> Iterator[Report]:
    """Compresses the collectives of every program that this thread compiles inside the block.

        with taco_jax.compressed({"tensor": "int8h", "fsdp": {"reduce_scatter": "int8h"}}) as report:
            state, metrics = train_step(state, batch)  # anybody's jitted step
        print(report)

    A function that was jitted before is compiled anew inside, and is the old program outside. Blocks of equal plans
    share their programs.

    Args:
      plan: {axis: codec or Compression}, or {axis: {operation or pattern of op_name: codec}}. An axis "fsdp+tensor" is
        of collectives over both at once. Operations: all_reduce, reduce_scatter, all_gather, all_to_all,
        collective_permute, or jax.lax's names. Patterns are shell-style (`fnmatch`), such as "*layers/mlp*".
        What gathers the program's own arguments (weights) is exact unless its operation is named. Or the path of a plan
        file, "plan.json", as `python -m taco_jax.run --calibrate` writes it.
      min_bytes: smaller collectives stay exact. None: as tuned for codec, ranks and link; 0 on the emulator.
      require: the least share of the bytes that the plan names, of every axis or of each by name, that is compressed.

    Raises:
      ValueError, TypeError: a plan or a share that cannot be, in one line.
      DropInError: at the end of the block, where nothing was compressed, an axis is of no mesh, a line of the plan
        matches nothing, or less than `require` is compressed; where a program is compiled whose collectives cannot be
        sent so (`link`, `backend`, `ranks_per_host`). In one line.
      MissingHookError: this jax cannot hand programs over. In one line.
    """
    parsed = parse_plan(plan, min_bytes)
    check_require(require, parsed)
    report = Report(_hooks.history(parsed), parsed.source)
    thread = threading.get_ident()
    _hooks.start(now=True)
    plans = _hooks._in_threads.setdefault(thread, [])
    plans.append(parsed)
    try:
        with compat.context()(parsed):
            yield report
    except jax.errors.JaxRuntimeError as error:
        if (problem := report.problem) is None:
            raise
        raise DropInError(problem) from error
    finally:
        plans.pop()
        if not plans:
            _hooks._in_threads.pop(thread, None)
        report.close()
        _hooks.stop()
    report.check(require)


class Installed:
    """A plan in force in all threads, until `remove`.

    Attributes:
      report: as of `compressed`.
    """

    def __init__(self, plan: DropInPlan, require):
        self.report = Report(_hooks.history(plan), plan.source)
        self._plan, self._require, self._active = plan, require, True

    def check(self) -> None:
        """Raises DropInError as `compressed` does at its end."""
        self.report.check(self._require)

    def remove(self) -> None:
        """Ends it: what runs from now on is the exact program. A second call does nothing."""
        if not self._active:
            return
        self._active = False
        self.report.close()
        end_everywhere(self._plan)


def install(
    plan: Mapping | str | os.PathLike,
    *,
    min_bytes: int | None = None,
    require: float | Mapping[str, float] | None = None,
) -> Installed:
    """Compresses the collectives of every program that is compiled from now on, in all threads.

    It starts no backend, so it may come before `jax.distributed.initialize`. Arguments and errors are those of
    `compressed`; what that raises at its end, `Installed.check` raises.
    """
    parsed = parse_plan(plan, min_bytes)
    check_require(require, parsed)
    start_everywhere(parsed)
    return Installed(parsed, require)


def start_everywhere(plan: DropInPlan | Measuring) -> History:
    """Puts a plan in force in all threads. Returns the history of what is compiled under it."""
    _hooks.start(now=False)
    _hooks._everywhere.append(plan)
    compat.context().set_global(plan)
    return _hooks.history(plan)


def end_everywhere(plan: DropInPlan | Measuring) -> None:
    """Ends what `start_everywhere` began."""
    _hooks._everywhere.remove(plan)
    compat.context().set_global(_hooks._everywhere[-1] if _hooks._everywhere else None)
    _hooks.stop()
