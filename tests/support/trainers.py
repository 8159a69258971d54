"""Trainers that are not ours: how they run, exact and under a plan, and what judges them. Does not import jax."""

import dataclasses
import importlib.util
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from helpers import cpu_environment, run_python
from hlo import collectives

FOUND = "FOUND "  # before the line of `compare_gradients`


def wanted(program: str, package: str, how: str) -> pytest.MarkDecorator:
    """Skips where TACO_TEST_PROGRAMS=PROGRAM[,PROGRAM...] names others or, without it, the package is not installed."""
    named = os.environ.get("TACO_TEST_PROGRAMS")
    if named is not None:
        return pytest.mark.skipif(
            program not in named.split(","), reason=f"TACO_TEST_PROGRAMS={named} has no {program}"
        )
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed: {how}")


@dataclasses.dataclass(frozen=True)
class Trainer:
    """A program, and the name of its compiled step. variables: of its environment."""

    program: Sequence[object]
    step: str
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def run(self, folder: Path, arguments: Sequence[object], plan: Sequence[str] | None = None) -> None:
        """Runs it in `folder`, with a plan through `taco_jax.run`.

        folder: gets the report of what was compressed (report.txt) and the compiled programs (hlo/).
        """
        folder.mkdir(exist_ok=True)
        program = [*self.program, *arguments]
        if plan is not None:
            report = ["--min-bytes", "0", "--require", "0.95", "--report", folder / "report.txt"]
            program = ["-m", "taco_jax.run", "--compress", *plan, *report, "--", *program]
        environment = self.environment()
        dump = f"--xla_dump_to={folder / 'hlo'} --xla_dump_hlo_as_text --xla_dump_hlo_module_re={self.step}"
        environment["XLA_FLAGS"] += " " + dump
        # A program from the cache would leave no text.
        environment["JAX_COMPILATION_CACHE_DIR"] = None
        run_python(program, devices=None, env=environment, cwd=folder)

    def environment(self) -> dict[str, str | None]:
        return {**cpu_environment(4), **self.variables}

    def compiled_step(self, folder: Path) -> str:
        """The text of the compiled training step of a run: the last one, where it was compiled again."""
        return max((folder / "hlo").glob(f"*{self.step}.cpu_after_optimizations.txt")).read_text()

    def found(self, folder: Path, program: Sequence[object]) -> dict:
        """What `compare_gradients` prints in a program."""
        result = run_python(program, devices=None, env=self.environment(), cwd=folder)
        (line,) = (line for line in result.stdout.splitlines() if line.startswith(FOUND))
        return json.loads(line.removeprefix(FOUND))


def compare_gradients(step: Callable, arguments: tuple, plan: Sequence[str]) -> None:
    """Prints, of a jitted function's (loss, gradients), exact and compressed: losses, the slope of all gradients and
    of each array, relative errors, and whether the exact ones afterwards are those before, bit for bit.

    Arrays of fewer than 1,000 elements have no slope of their own: it would scatter by more than what it is to show.
    """
    import jax

    import taco_jax
    from taco_jax.dropin.plan import parse_text

    before = step(*arguments)
    with taco_jax.compressed(parse_text(plan), min_bytes=0, require=0.95):
        inside = step(*arguments)
    after = step(*arguments)
    flat = lambda tree: [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)]
    pairs = list(zip(flat(before[1]), flat(inside[1]), strict=True))
    whole = tuple(map(np.concatenate, zip(*pairs)))
    found = {
        "losses": [float(before[0]), float(inside[0])],
        "slopes": [float(x @ y / (x @ x)) for x, y in [whole, *pairs] if x.size >= 1000],
        "errors": [float(np.linalg.norm(x - y) / np.linalg.norm(x)) for x, y in pairs],
        "same": all(x.tobytes() == y.tobytes() for x, y in zip(flat(before), flat(after), strict=True)),
    }
    print(FOUND + json.dumps(found))


def check_gradients(found: dict) -> None:
    """found: as `compare_gradients` prints it, with slopes of at least nine arrays."""
    assert all(abs(slope - 1) < 0.02 for slope in found["slopes"]) and len(found["slopes"]) >= 1 + 9
    assert 0 < max(found["errors"]) < 0.15
    assert found["losses"][0] == pytest.approx(found["losses"][1], rel=0.005)
    assert found["same"]


def check_losses(exact: Sequence[float], ours: Sequence[float], steps: int) -> None:
    """Losses of an exact run that learns, and of one that goes the same way but is not the same."""
    assert len(exact) == len(ours) == steps and exact[0] - exact[-1] > 0.02
    np.testing.assert_allclose(ours, exact, rtol=0.005)
    assert max(abs(a - b) for a, b in zip(ours, exact)) > 0


def sent(text: str) -> dict[str, int]:
    """Bytes that collectives of more than 4 KiB put out on one device, by dtype."""
    totals: dict[str, int] = {}
    for _, dtype, elements in collectives(text):
        nbytes = elements * (2 if dtype == "bfloat16" else np.dtype(dtype).itemsize)
        if nbytes > 4096:
            totals[dtype] = totals.get(dtype, 0) + nbytes
    return totals
