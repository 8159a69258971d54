"""What a seeded fault is; `tests/mutants.py` applies them one by one."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One fault, seeded by replacing `old`, which occurs once in `file`, by `new`.

    Attributes:
      name: unique, for `--only`. what: the fault in one line.
      tests: the likeliest to catch it, in the order in which they run: files of tests, with ` -k EXPRESSION` where
        the file is an expensive one.
      gpu: CUDA code alone, which a test marked `gpu` catches.
      new_jax: caught by tests that skip themselves before jax 0.11 (Mosaic's interpreter, kernels over NVLink).
    """

    name: str
    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    gpu: bool = False
    new_jax: bool = False

    @property
    def paths(self) -> list[str]:
        """The files of `tests`."""
        return [entry.partition(" ")[0].partition("::")[0] for entry in self.tests]

    def problem(self, root: Path = REPOSITORY) -> str | None:
        """Why it cannot be applied to the tree at `root`, in one line; None where it can."""
        path = root / self.file
        if not path.is_file():
            return f"{self.name}: {self.file} does not exist; name the file that has its code now"
        found = path.read_text().count(self.old)
        if found != 1:
            return f"{self.name}: its place occurs {found} times in {self.file}, must be once: {self.old.strip()!r}"
        if self.old == self.new:
            return f"{self.name}: changes nothing: {self.old.strip()!r}"
        for entry in self.tests:
            try:
                selected = shlex.split(entry)[1:]
            except ValueError as error:
                return f"{self.name}: tests={entry!r}: {error}"
            if selected and (len(selected) != 2 or selected[0] != "-k"):
                return f"{self.name}: tests={entry!r}: must be FILE or FILE -k EXPRESSION"
        missing = [test for test in self.paths if not (root / test).is_file()]
        if missing or not self.tests:
            return f"{self.name}: tests={missing}: must be files of tests that exist"
        return None

    def apply(self, root: Path) -> None:
        """Seeds the fault in the tree at `root`. Raises ValueError where it has no place there."""
        if (problem := self.problem(root)) is not None:
            raise ValueError(problem)
        path = root / self.file
        path.write_text(path.read_text().replace(self.old, self.new))
