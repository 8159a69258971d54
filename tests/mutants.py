"""Proves that the tests notice faults: seeds them one at a time (`tests/faults/`) and runs the likeliest tests on each.

    python tests/mutants.py                       all of them, with a table of who killed which
    python tests/mutants.py --only top-p usage    some of them
    python tests/mutants.py --list                what there is; nothing runs
    python tests/mutants.py --readme              writes the table of tests/README.md anew

Every fault is applied to a copy of the repository's files of its own, as they were at the start, in a temporary folder.
It is killed where pytest ends with a failed test; if that waited in vain, its line names the limit. A copy whose tests
cannot be collected, crash, reach pytest's limit or `--timeout`, or end with a misspelt name proves nothing and is
reported as broken. First of all the same tests must pass without a fault. Ctrl-C, SIGTERM and SIGHUP end all that was
started and remove what is temporary; `--out` keeps what is known.

Exit code: 0 if all that ran were killed, 1 if one lived or is broken, 2 for a fault whose place in the code is not
found once, and for bad arguments; 128 and the signal's number for a run that was stopped.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import difflib
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from faults import KINDS, MUTANTS, Mutant
from faults.mutant import REPOSITORY

KILLED, LIVED, BROKEN, LEFT_OUT = "killed", "LIVED", "BROKEN", "left out"
README, BEGIN, END = "tests/README.md", "<!-- faults: made by tests/mutants.py --readme -->", "<!-- end of faults -->"
# A failure of this kind says that the fault is no Python, not that a test noticed it.
MISSPELT = re.compile(r"\b(NameError|UnboundLocalError|SyntaxError|ImportError|ModuleNotFoundError|AttributeError)\b")
# A failure of this kind is a wait that did not end (helpers.py, served.py): what some faults do, and a stalled machine.
LIMIT = re.compile(r"\blimit of [\d.e+]+ s\b|\bTimeoutExpired\b")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SUITE = "tests"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of one fault. by: the test that failed first; detail: why it is broken or was left out."""

    name: str
    outcome: str
    by: str = ""
    seconds: float = 0.0
    detail: str = ""


class CopyError(Exception):
    """The repository's files cannot be listed or copied. One line."""


class Stopped(BaseException):
    """A signal asks to end. Its argument is the signal's number."""


def check(mutants: Iterable[Mutant], root: Path = REPOSITORY) -> list[str]:
    """What keeps faults from being applied, one line each."""
    mutants = list(mutants)
    names = [mutant.name for mutant in mutants]
    twice = [f"{name}: the name of more than one fault" for name in sorted({n for n in names if names.count(n) > 1})]
    return twice + [problem for mutant in mutants if (problem := mutant.problem(root)) is not None]


def why_not_here(mutant: Mutant) -> str | None:
    """Why this machine cannot kill a fault, None where it can."""
    gpus = os.environ.get("TACO_TEST_GPU") == "1"
    if mutant.gpu and not gpus:
        return "needs GPUs and TACO_TEST_GPU=1"
    if gpus and not mutant.gpu:
        return "runs without TACO_TEST_GPU"
    if mutant.new_jax and sys.version_info < (3, 12):
        return "needs jax 0.11, and so Python 3.12"
    return None


class Runner:
    """Runs tests on copies of the repository, `jobs` at a time. `pool` is where its temporary files are."""

    def __init__(self, pool: Path, jobs: int, timeout: float, whole_suite: bool):
        self.pool, self.jobs, self.timeout, self.whole_suite = pool, jobs, timeout, whole_suite
        # All copies are of one state: whoever goes on working in the repository changes nothing of this run.
        self._original = pool / "original"
        _copy(_files(), self._original)
        self._numbers = itertools.count()
        self._lock, self._running, self._stopped = threading.Lock(), set(), False
        self._environment = os.environ | {
            # One cache for all copies: what a fault does not change is compiled once.
            "JAX_COMPILATION_CACHE_DIR": str(pool / "jax_cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "PYTEST_ADDOPTS": "",
            "PYTHONDONTWRITEBYTECODE": "1",
            "COLUMNS": "400",  # pytest cuts the reasons of its summary to them
        }
        for name in ("PYTHONPATH", "PYTHONSAFEPATH"):  # each copy's packages are imported, from its own root
            self._environment.pop(name, None)

    def baseline(self, mutants: Sequence[Mutant]) -> dict[str, str]:
        """{entry of `Mutant.tests`: why it proves nothing} of those that do not pass without a fault."""
        entries = {entry: mutant.gpu for mutant in mutants for entry in mutant.tests}

        def one(entry: str) -> tuple[str, Verdict]:
            return entry, self._on_a_copy(None, [entry], entries[entry])

        verdicts = dict(self._map(one, list(entries)))
        for entry, verdict in verdicts.items():
            print(f"without a fault: {entry}: {_passes(verdict)} ({verdict.seconds:.0f} s)", flush=True)
        return {entry: _passes(verdict) for entry, verdict in verdicts.items() if verdict.outcome != LIVED}

    def run(self, mutants: Sequence[Mutant], unfit: dict[str, str]) -> Iterator[Verdict]:
        """The verdict on each fault, in the order in which they come. unfit: as of `baseline`."""

        def one(mutant: Mutant) -> Verdict:
            bad = [entry for entry in mutant.tests if entry in unfit]
            if bad:
                return Verdict(mutant.name, BROKEN, detail=f"without the fault, {bad[0]}: {unfit[bad[0]]}")
            return self._on_a_copy(mutant, [*mutant.tests, *([SUITE] if self.whole_suite else [])], mutant.gpu)

        yield from self._map(one, mutants)

    def _map(self, function, values):
        with concurrent.futures.ThreadPoolExecutor(self.jobs) as executor:
            futures = [executor.submit(function, value) for value in values]
            try:
                for future in concurrent.futures.as_completed(futures):
                    yield future.result()
            except BaseException:
                self._stop()
                raise
            finally:
                for future in futures:
                    future.cancel()

    def _stop(self) -> None:
        """Ends all that runs; nothing starts any more."""
        with self._lock:
            self._stopped = True
            for process in self._running:
                _kill_session(process)

    def _on_a_copy(self, mutant: Mutant | None, entries: Sequence[str], gpu: bool) -> Verdict:
        folder = self.pool / f"copy{next(self._numbers)}"
        root, temporary = folder / "taco_jax", folder / "tmp"
        start = time.monotonic()
        try:
            shutil.copytree(self._original, root)
            temporary.mkdir()
            if mutant is not None:
                mutant.apply(root)
            for arguments in _together(entries):
                verdict = self._pytest(root, arguments, gpu, temporary)
                if verdict.outcome != LIVED:
                    break
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        name = "" if mutant is None else mutant.name
        return dataclasses.replace(verdict, name=name, seconds=time.monotonic() - start)

    def _pytest(self, root: Path, arguments: list[str], gpu: bool, temporary: Path) -> Verdict:
        # In a copy the test of these tables fails with every fault: its place is gone.
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        command += ["--ignore-glob=*test_mutants.py", "-m", "gpu" if gpu else "not slow", *arguments]
        # What tests start belongs to the same session, so that nothing is left of what hangs.
        with self._lock:
            if self._stopped:
                return Verdict("", BROKEN, detail="stopped")
            process = subprocess.Popen(
                command, cwd=root, env=self._environment | {"TMPDIR": str(temporary)}, text=True, errors="replace",
                start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            self._running.add(process)
        try:
            output = process.communicate(timeout=self.timeout)[0]
        except subprocess.TimeoutExpired:
            return Verdict("", BROKEN, detail=f"--timeout: not done after {self.timeout:g} s")
        finally:
            with self._lock:
                self._running.remove(process)
                _kill_session(process)
            process.wait()
        return judge(process.returncode, output)


def _kill_session(process: subprocess.Popen) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def judge(code: int, output: str) -> Verdict:
    """The verdict on a run of pytest, from its exit code and its output with a short summary (`-ra`)."""
    lines = output.splitlines()
    failed = next((line.removeprefix("FAILED ") for line in lines if line.startswith("FAILED ")), None)
    last = next((line for line in reversed(lines) if line.strip()), "no output")
    if code == 1 and failed is not None:
        by, _, reason = failed.partition(" - ")
        if MISSPELT.search(reason):
            return Verdict("", BROKEN, by, detail=reason)
        return Verdict("", KILLED, by, detail=reason)
    if code == 0 and re.search(r"\b[1-9]\d* passed", last):
        return Verdict("", LIVED)
    if code in (0, 5):
        return Verdict("", BROKEN, detail=f"no test ran: {last}")
    error = next((line for line in lines if line.startswith(("ERROR ", "E  ", "INTERNALERROR"))), last)
    return Verdict("", BROKEN, detail=f"pytest ended with {code} and no failed test: {error.strip()}")


def _passes(verdict: Verdict) -> str:
    return "passes" if verdict.outcome == LIVED else f"{verdict.by} {verdict.detail}".strip()


def _together(entries: Sequence[str]) -> Iterator[list[str]]:
    """Arguments of pytest, one run for neighbouring files and one for each selection of tests."""
    for selected, group in itertools.groupby(entries, key=lambda entry: " " in entry):
        if selected:
            yield from map(shlex.split, group)
        else:
            yield list(group)


def _files() -> list[str]:
    """The files that a fresh clone would have, and those that are not committed yet; of a tree without git all that
    neither Python nor pip has made."""
    if not (REPOSITORY / ".git").exists():
        made = re.compile(r"__pycache__|build|dist|runs|wandb|.*\.egg-info|\.(venv|\w+_cache|hypothesis).*")
        files = [path.relative_to(REPOSITORY) for path in REPOSITORY.rglob("*") if path.is_file()]
        return [str(path) for path in files if not any(made.fullmatch(part) for part in path.parts[:-1])]
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or error
        raise CopyError(f"git ls-files: {' '.join(str(reason).split())}") from None
    return [name for name in listed.split("\0") if name and (REPOSITORY / name).is_file()]


def _copy(files: Sequence[str], root: Path) -> None:
    for name in files:
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, target)


def table(mutants: Iterable[Mutant] = MUTANTS) -> str:
    """The faults as tables of Markdown, one for each kind."""
    chosen, parts = set(mutants), []
    for kind, of_kind in KINDS.items():
        rows = [mutant for mutant in of_kind if mutant in chosen]
        if rows:
            parts += [f"### {kind.capitalize()} ({len(rows)})", "", "| fault | what | in | killed by |"]
            parts += ["|---|---|---|---|", *map(_row, rows), ""]
    return "\n".join(parts).rstrip("\n")


def _row(mutant: Mutant) -> str:
    killers = "; ".join(f"`{entry.removeprefix('tests/')}`" for entry in mutant.tests)
    marks = [" (GPU)"] * mutant.gpu + [" (jax 0.11)"] * mutant.new_jax
    return f"| {mutant.name}{''.join(marks)} | {mutant.what} | `{mutant.file}` | {killers} |"


def in_readme(text: str) -> str:
    """The README's text with the table between its marks made anew."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{README}: lacks the marks {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def _choose(names: Sequence[str]) -> list[Mutant]:
    known = {mutant.name: mutant for mutant in MUTANTS}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, [*known, *KINDS], 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"--only {name}: no such fault; {hint}--list shows all {len(known)}")
    return [known[name] for name in dict.fromkeys(names)] if names else list(MUTANTS)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="faults, or kinds: " + ", ".join(KINDS))
    parser.add_argument("--jobs", type=int, default=1, help="copies that are tested at once (default 1)")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds that a run of pytest may take")
    parser.add_argument("--all", action="store_true", help="run the whole suite on what the named tests let live")
    parser.add_argument("--no-baseline", action="store_true", help="trust that the tests pass without a fault")
    parser.add_argument("--out", type=Path, metavar="JSON", help="write the verdicts to a file")
    parser.add_argument("--list", action="store_true", help="print the faults and end")
    parser.add_argument("--readme", action="store_true", help=f"write the table of {README} and end")
    options = parser.parse_args(arguments)
    names = [name for given in options.only for name in ([m.name for m in KINDS.get(given, ())] or [given])]
    try:
        if options.jobs < 1:
            raise ValueError(f"--jobs {options.jobs}: must be at least 1")
        if not (options.timeout > 0 and math.isfinite(options.timeout)):
            raise ValueError(f"--timeout {options.timeout:g}: must be a finite number of seconds above 0")
        mutants = _choose(names)
        problems = check(MUTANTS)
        if problems:
            raise ValueError("\n".join(problems))
        if options.readme:
            path = REPOSITORY / README
            path.write_text(in_readme(path.read_text()))
            return 0
        if options.list:
            print(table(mutants))
            return 0
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _raise_stopped)
        return _run(mutants, options)
    except (ValueError, CopyError, OSError) as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 2
    except Stopped as stopped:
        (number,) = stopped.args
        print(f"error: stopped by {signal.Signals(number).name}", file=sys.stderr)
        return 128 + number


def _raise_stopped(number, frame):
    for other in SIGNALS:  # what follows takes moments, and a second signal must not leave half of it
        signal.signal(other, signal.SIG_IGN)
    raise Stopped(number)


def _write(path: Path | None, mutants: Sequence[Mutant], verdicts: Sequence[Verdict]) -> None:
    """Writes the verdicts that there are, in the order of the faults."""
    if path is None:
        return
    order = {mutant.name: i for i, mutant in enumerate(mutants)}
    listed = [dataclasses.asdict(verdict) for verdict in sorted(verdicts, key=lambda verdict: order[verdict.name])]
    try:
        path.write_text(json.dumps(listed, indent=1) + "\n")
    except OSError as error:
        raise ValueError(f"--out {path}: cannot be written: {error.strerror}") from None


def _run(mutants: list[Mutant], options: argparse.Namespace) -> int:
    verdicts = [Verdict(m.name, LEFT_OUT, detail=why) for m in mutants if (why := why_not_here(m)) is not None]
    left_out = {verdict.name for verdict in verdicts}
    here = [mutant for mutant in mutants if mutant.name not in left_out]
    for verdict in verdicts:
        _say(verdict)
    _write(options.out, mutants, verdicts)
    with tempfile.TemporaryDirectory(prefix="taco_jax_mutants_") as pool:
        runner = Runner(Path(pool), options.jobs, options.timeout, options.all)
        unfit = {} if options.no_baseline else runner.baseline(here)
        with contextlib.closing(runner.run(here, unfit)) as found:  # closed, it ends what runs
            for verdict in found:
                _say(verdict)
                verdicts.append(verdict)
                _write(options.out, mutants, verdicts)
    count = lambda outcome: sum(verdict.outcome == outcome for verdict in verdicts)
    outcomes = (KILLED, LIVED, BROKEN, LEFT_OUT)
    print(f"{len(verdicts)} faults: " + ", ".join(f"{count(outcome)} {outcome}" for outcome in outcomes), flush=True)
    return 1 if count(LIVED) or count(BROKEN) else 0


def _say(verdict: Verdict) -> None:
    kind = next(kind for kind, of_kind in KINDS.items() if verdict.name in {mutant.name for mutant in of_kind})
    brief = verdict.outcome == KILLED and not LIMIT.search(verdict.detail)
    words = verdict.by if brief else f"{verdict.by} {verdict.detail}".strip()
    print(f"{verdict.outcome:8}  {verdict.name:22}  {kind:11}  {verdict.seconds:5.0f} s  {words[:200]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
