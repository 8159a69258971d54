"""The report of a plan: every collective of the programs compiled under it, and why those are exact that are."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping

from taco_jax.dropin.compat import FIRST
from taco_jax.dropin.plan import MEASURE, DropInPlan, Rule, is_uncalibrated


class DropInError(RuntimeError):
    """The plan did not do what it says. One line."""


@dataclasses.dataclass(frozen=True)
class Site:
    """One collective of a compiled program.

    Attributes:
      program: the module's name. op_name: where it comes from, JAX's name stack.
      operation: one of `plan.OPERATIONS`. axes: mesh axes, () where the groups are none.
      direction: "backward" of what is transposed, else "forward".
      dtype, shape: of what is reduced, gathered or sent, on one device.
      runs: in one run of the program, as far as the trips of its loops are known.
      before, after: bytes that one device sends in one run of the collective.
      codec: "none" where it stayed exact; reason: why.
      named: whether the plan says that it is to be compressed.
      ranks: that exchange it. message: of what is measured, equal for sites of a program that become one message where
        their codec is one.
    """

    program: str
    op_name: str
    operation: str
    axes: tuple[str, ...]
    direction: str
    dtype: str
    shape: tuple[int, ...]
    runs: int
    before: float
    after: float
    codec: str = "none"
    reason: str = ""
    named: bool = False
    ranks: int = 0
    message: int = -1

    @property
    def compressed(self) -> bool:
        return self.codec != "none"


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program: its sites, the numbers of the plan's rules that fitted one, the axes of the process's meshes.

    id: of the module as it came, equal for equal ones. axes: (name, whether it has
    several of the program's devices).
    """

    id: str
    name: str
    sites: tuple[Site, ...]
    rules: frozenset[int]
    axes: frozenset[tuple[str, bool]]


def note(plan: DropInPlan, program: Program) -> str:
    """Returns what `History.add` takes, as text that a compiled program keeps."""
    return json.dumps(
        {
            "plan": plan.digest, "id": program.id, "program": program.name,
            "sites": [dataclasses.asdict(site) for site in program.sites], "rules": sorted(program.rules),
            "axes": sorted(program.axes),
        }
    )  # fmt: skip


def _letters(name: str) -> str:
    """The letters of a program's name, jit(f), that its module's, jit_f, has too."""
    return re.sub("[^a-zA-Z0-9]", "", name)


class History:
    """The programs that this process has compiled under a plan, or loaded from the persistent compilation cache."""

    def __init__(self, plan: DropInPlan, notes: Callable[[set[bytes]], Iterable[str]] = lambda seen: ()):
        """notes: gives those (`note`) of all programs that are loaded, as programs from the persistent cache bring
        them, but of those in `seen`, to which it adds."""
        self.plan = plan
        self.asked = self.handed = 0  # programs that JAX lowered, modules that the compiler handed over
        self.problems: list[str] = []  # why programs could not be compiled
        self.elsewhere: list[str] = []  # programs that were lowered where the plan was not in force
        self._lowered: set[str] = set()
        self._notes = notes
        self._programs: dict[str, Program] = {}
        self._loading: set[int] = set()  # threads in which a program comes from the cache
        self._seen: set[bytes] = set()
        self._lock = threading.RLock()

    def lowered(self, name: str) -> None:
        """A program of this name is lowered under the plan, and will be compiled."""
        with self._lock:
            self.asked += 1
            self._lowered.add(_letters(name))

    def knows(self, name: str) -> bool:
        """Returns whether a program of this name, or with a module of it, was lowered under the plan.

        Yes where jax does not name programs.
        """
        with self._lock:
            return not name or bool(self._lowered & {"", _letters(name)})

    def add(self, note: str) -> None:
        """Lists the program of a note of this plan; one that is listed stays as it is."""
        found = json.loads(note)
        if found["plan"] != self.plan.digest:
            return
        sites = (Site(**s | {"axes": tuple(s["axes"]), "shape": tuple(s["shape"])}) for s in found["sites"])
        program = Program(
            found["id"], found["program"], tuple(sites), frozenset(found["rules"]), frozenset(map(tuple, found["axes"]))
        )
        with self._lock:
            self._programs.setdefault(program.id, program)

    def loading(self, thread: int) -> None:
        """A program comes from the persistent compilation cache."""
        with self._lock:
            self._loading.add(thread)

    def loaded(self, thread: int) -> None:
        """Lists a program that came from the cache while it is there: it may go before the report is read."""
        with self._lock:
            if thread in self._loading:
                self._loading.remove(thread)
                for note in self._notes(self._seen):
                    self.add(note)

    def programs(self) -> list[Program]:
        with self._lock:
            return list(self._programs.values())


class Report:
    """The collectives of the programs that were compiled under a plan in a block. `print(report)` shows them.

    Where none was compiled, because a block of an equal plan had compiled them before: those of all such blocks.
    """

    def __init__(self, history: History, source: str | None = None):
        """source: the file that the plan is from, whose lines need not all match."""
        self.plan, self._source = history.plan, source
        self._history = history
        self._first, self._asked, self._handed = len(history.programs()), history.asked, history.handed
        self._problems, self._elsewhere = len(history.problems), len(history.elsewhere)
        self._closed: list[Program] | None = None

    def close(self) -> None:
        """Returns what is compiled from now on is not of this report."""
        self._closed = self._programs()

    def _programs(self) -> list[Program]:
        if self._closed is not None:
            return self._closed
        everything = self._history.programs()
        return everything[self._first :] or everything

    @property
    def problem(self) -> str | None:
        """Why a program of the block could not be compiled, in one line; None where all could."""
        return next(iter(self._history.problems[self._problems :]), None)

    @property
    def elsewhere(self) -> list[str]:
        """Names of modules with collectives that stayed exact: they were lowered where the plan was not in force."""
        return self._history.elsewhere[self._elsewhere :]

    @property
    def sites(self) -> list[Site]:
        return [site for program in self._programs() for site in program.sites]

    @property
    def programs(self) -> list[str]:
        """Names of the modules with collectives."""
        return [program.name for program in self._programs()]

    def bytes(self, axes: str | tuple[str, ...] | None = None, *, named: bool = False) -> tuple[float, float]:
        """(before, after): bytes that one device sends over these axes, all programs run once.

        named: only collectives that the plan names.
        """
        wanted = (axes,) if isinstance(axes, str) else axes
        found = [s for s in self.sites if (wanted is None or set(s.axes) == set(wanted)) and (s.named or not named)]
        return sum(s.before * s.runs for s in found), sum(s.after * s.runs for s in found)

    def share(self, axes: str | tuple[str, ...] | None = None) -> float:
        """The share of the bytes of collectives that the plan names that is compressed; 0 where there are none."""
        wanted = (axes,) if isinstance(axes, str) else axes
        named = [s for s in self.sites if s.named and (wanted is None or set(s.axes) == set(wanted))]
        total = sum(s.before * s.runs for s in named)
        return sum(s.before * s.runs for s in named if s.compressed) / total if total else 0.0

    def check(self, require: float | Mapping[str, float] | None = None) -> None:
        """Raises DropInError where the plan did not do what it says.

        require: the least share of `share`, of every axis of the plan or of each by name.
        """
        self._check_axes()
        if not any(site.compressed for site in self.sites):
            raise DropInError(f"nothing was compressed: {self.why_nothing()}")
        wide = self._wide()
        for rule in self._unmatched() if self._source is None else ():
            if (before := self._taken(rule, wide)) is None:
                raise DropInError(
                    f"plan: {rule.text}: matches no collective; over {'+'.join(rule.axes)} go {self._listed(rule.axes)}"
                )
            # The rest of a plan may have nothing left: its more special lines name everything.
            if before.generality == rule.generality:
                raise DropInError(
                    f"plan: {rule.text}: all that it matches goes by {before.text}, which comes first; leave it out, "
                    "or let it come first"
                )
        for axes in self.plan.axes if require is not None else ():
            least = require if not isinstance(require, Mapping) else require.get("+".join(axes), 0.0)
            if not wide & set(axes):
                continue
            if (share := self.share(axes)) < least:
                raise DropInError(
                    f"require={least:g}: {share:.1%} of the bytes over {'+'.join(axes)} are compressed; the rest: "
                    f"{self.reasons(axes)}"
                )

    def _unmatched(self) -> list[Rule]:
        """The lines of the plan that matched no collective. Nothing goes over an axis of one device."""
        matched, wide = {n for program in self._programs() for n in program.rules}, self._wide()
        return [rule for n, rule in enumerate(self.plan.rules) if n not in matched and wide & set(rule.axes)]

    def _wide(self) -> set[str]:
        """The axes with several devices."""
        return {axis for program in self._programs() for axis, several in program.axes if several}

    def _taken(self, rule: Rule, wide: set[str]) -> Rule | None:
        """The rule that has taken what `rule` matches; None where there is nothing that it matches."""
        for site in self.sites:
            fits = [r for r in self.plan.rules if set(r.axes) & wide == set(site.axes)]
            fits = [r for r in fits if r.matches(site.operation, site.op_name)]
            if rule in fits:
                return fits[0]
        return None

    def _check_axes(self) -> None:
        found = {axis for program in self._programs() for axis, _ in program.axes}
        for axes in self.plan.axes if found else ():
            for axis in axes:
                if axis not in found:
                    known = ", ".join(sorted(found))
                    raise DropInError(f"plan: axis {axis!r} is of no mesh of the programs; their axes are {known}")

    def why_nothing(self) -> str:
        """Returns why no collective was replaced."""
        asked, handed = self._history.asked - self._asked, self._history.handed - self._handed
        if not self.programs and asked and not handed:
            return (
                f"the compiler handed over none of {asked} programs; its plugin is older than jax {FIRST}, or "
                "they came from a cache"
            )
        if not self.programs and self.elsewhere:
            return f"{self.elsewhere[0]} was lowered before the plan was in force; call .lower() inside of `with` too"
        named = sorted({axis for axes in self.plan.axes for axis in axes})
        if self.programs and not self._wide() & set(named):
            return f"no mesh of the programs has several devices along {', '.join(named)}"
        if self._source is not None and self.programs and len(self._unmatched()) == len(self.plan.rules):
            return f"no line of {self._source} matches a collective of these programs; measure them: {MEASURE}"
        if not self.programs:
            return (
                "no program with collectives was compiled while the plan was in force; call the jitted step inside of "
                "`with`, over a mesh of several devices"
            )
        return self.reasons(None)

    def reasons(self, axes) -> str:
        """Returns why collectives stayed exact, the largest first."""
        reasons: dict[str, float] = {}
        for site in self.sites:
            if not site.compressed and (axes is None or set(site.axes) == set(axes)):
                reasons[site.reason] = reasons.get(site.reason, 0.0) + site.before * site.runs
        ranked = sorted(reasons, key=lambda reason: -reasons[reason])
        return "; ".join(ranked[:3]) or "no collectives"

    def _listed(self, axes) -> str:
        found = sorted({f"{s.operation} of {s.op_name}" for s in self.sites if set(s.axes) == set(axes)})
        return ", ".join(found[:3]) + (" and more" if len(found) > 3 else "") if found else "none"

    def __str__(self) -> str:
        """A line for each kind of collective, largest first, then a line for each axis."""
        lines = [
            f"{'bytes':>12} {'sent':>12} {'runs':>5}  {'codec':<8} {'axis':<10} {'direction':<9} operation, op_name"
        ]
        rows: dict[tuple, list] = {}
        for site in self.sites:
            key = (site.codec, site.axes, site.direction, site.operation, site.op_name, site.reason)
            row = rows.setdefault(key, [0.0, 0.0, 0])
            row[0] += site.before * site.runs
            row[1] += site.after * site.runs
            row[2] += site.runs
        for key, (before, after, runs) in sorted(rows.items(), key=lambda item: -item[1][0]):
            codec, axes, direction, operation, op_name, reason = key
            name = "exact" if codec == "none" else codec
            why = f" ({reason})" if reason else ""
            lines.append(
                f"{before:12,.0f} {after:12,.0f} {runs:5}  {name:<8} {'+'.join(axes) or '-':<10} {direction:<9} "
                f"{operation} {op_name}{why}"
            )
        for axes in self.plan.axes:
            before, after = self.bytes(axes)
            ratio = f", {before / after:.2f} times fewer" if 0 < after < before else ""
            lines.append(f"{'+'.join(axes)}: {before:,.0f} bytes before, {after:,.0f} after{ratio}")
        for name in dict.fromkeys(self.elsewhere):
            lines.append(f"{name} is exact: it was lowered before the plan was in force")
        if self._source is not None and self.programs and (idle := self._unmatched()):
            lines.append(
                f"{self._source}: {len(idle)} of {len(self.plan.rules)} lines match no collective of these programs, "
                f"such as {idle[0].text}"
            )
        if any(is_uncalibrated(rule.compression) for rule in self.plan.rules):
            lines.append("codecs with a site scale, such as taco, are meant uncalibrated: scales are of blocks alone")
        return "\n".join(lines)
