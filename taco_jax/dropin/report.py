"""What a plan did: every collective of the programs that were compiled under it, and why those are exact that are."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Iterable, Mapping

from taco_jax.dropin.plan import DropInPlan, is_uncalibrated


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
      named: whether the plan says something of it.
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

    @property
    def compressed(self) -> bool:
        return self.codec != "none"


def note(plan: DropInPlan, id: str, program: str, sites: list[Site], rules: Iterable[int], axes: Iterable[str]) -> str:
    """What `Report.add` takes, as text that a compiled program keeps.

    id: of the module as it came. rules: numbers of the plan's rules that fitted a site. axes: those of its meshes.
    """
    listed = [dataclasses.asdict(site) for site in sites]
    return json.dumps(
        {
            "plan": plan.digest, "id": id, "program": program, "sites": listed, "rules": sorted(rules),
            "axes": sorted(axes),
        }
    )  # fmt: skip


class Report:
    """The sites of every program compiled under a plan in this process. `print(report)` shows them.

    Programs that were compiled before under an equal plan are not compiled again, and are listed again.
    """

    def __init__(self, plan: DropInPlan, notes: Callable[[], Iterable[str]] = tuple):
        """notes: the notes (`note`) of all programs that are loaded, as those from the persistent cache bring them."""
        self.plan = plan
        self._notes = notes
        self._sites: list[Site] = []
        self._programs: dict[str, str] = {}
        self._matched: set[int] = set()
        self._mesh_axes: set[str] = set()
        self._unread = False
        self._lock = threading.RLock()

    @property
    def sites(self) -> list[Site]:
        self._read_notes()
        return list(self._sites)

    @property
    def programs(self) -> list[str]:
        """Names of the modules with collectives, in the order in which they were compiled or loaded."""
        self._read_notes()
        return list(self._programs.values())

    def add(self, note: str) -> None:
        """Lists the program of a note; one that is listed stays as it is."""
        found = json.loads(note)
        if found["plan"] != self.plan.digest:
            return
        with self._lock:
            if found["id"] in self._programs:
                return
            self._programs[found["id"]] = found["program"]
            for site in found["sites"]:
                self._sites.append(Site(**site | {"axes": tuple(site["axes"]), "shape": tuple(site["shape"])}))
            self._matched |= set(found["rules"])
            self._mesh_axes |= set(found["axes"])

    def add_cached(self) -> None:
        """A program came from the persistent compilation cache."""
        self._unread = True

    def _read_notes(self) -> None:
        with self._lock:
            if self._unread:
                self._unread = False
                for note in self._notes():
                    self.add(note)

    def bytes(self, axes: str | tuple[str, ...] | None = None, *, named: bool = False) -> tuple[float, float]:
        """(before, after): bytes that one device sends over these axes, all programs run once.

        named: only collectives that the plan names.
        """
        wanted = (axes,) if isinstance(axes, str) else axes
        found = [s for s in self.sites if (wanted is None or set(s.axes) == set(wanted)) and (s.named or not named)]
        return sum(s.before * s.runs for s in found), sum(s.after * s.runs for s in found)

    def share(self, axes: str | tuple[str, ...] | None = None) -> float:
        """The share of the bytes before, of collectives that the plan names, that is compressed. 0 where there are none."""
        wanted = (axes,) if isinstance(axes, str) else axes
        named = [s for s in self.sites if s.named and (wanted is None or set(s.axes) == set(wanted))]
        total = sum(s.before * s.runs for s in named)
        return sum(s.before * s.runs for s in named if s.compressed) / total if total else 0.0

    def check(self, require: float | Mapping[str, float] | None = None) -> None:
        """Raises DropInError where the plan did not do what it says.

        require: the least share of `share`, of every axis of the plan or of each by name.
        """
        self._read_notes()
        self._check_axes()
        if not any(site.compressed for site in self.sites):
            raise DropInError(f"nothing was compressed: {self._why_nothing()}")
        for n, rule in enumerate(self.plan.rules):
            if n not in self._matched:
                raise DropInError(
                    f"plan: {rule.text}: matches no collective; over {'+'.join(rule.axes)} go {self._listed(rule.axes)}"
                )
        for axes in self.plan.axes if require is not None else ():
            least = require if not isinstance(require, Mapping) else require.get("+".join(axes), 0.0)
            if (share := self.share(axes)) < least:
                raise DropInError(
                    f"require={least:g}: {share:.1%} of the bytes over {'+'.join(axes)} are compressed; the rest: "
                    f"{self._reasons(axes)}"
                )

    def _check_axes(self) -> None:
        if not self._mesh_axes:
            return
        for axes in self.plan.axes:
            for axis in axes:
                if axis not in self._mesh_axes:
                    known = ", ".join(sorted(self._mesh_axes))
                    raise DropInError(f"plan: axis {axis!r} is of no mesh of the programs; their axes are {known}")

    def _why_nothing(self) -> str:
        if not self.programs:
            return (
                "no program with collectives was compiled while the plan was in force; call the jitted step inside of "
                "`with`, over a mesh of several devices"
            )
        return self._reasons(None)

    def _reasons(self, axes) -> str:
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
        lines = [f"{'bytes':>12} {'sent':>12} {'runs':>5}  {'codec':<8} {'axis':<10} {'direction':<9} operation, op_name"]
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
            ratio = f", {before / after:.2f} times fewer" if after else ""
            lines.append(f"{'+'.join(axes)}: {before:,.0f} bytes before, {after:,.0f} after{ratio}")
        if any(is_uncalibrated(rule.compression) for rule in self.plan.rules):
            lines.append("codecs with a site scale, such as taco, are meant uncalibrated: scales are of blocks alone")
        return "\n".join(lines)
