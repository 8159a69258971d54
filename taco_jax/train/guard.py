"""The guard's decisions: which site falls under its bound, to which codec it moves, and when it goes back.

Nothing here runs on a device. `taco_jax.train.guarded` measures, compiles and says what is decided.

A way is a site and a direction, "layers/mlp/out/forward". A measurement of it is that of `metrics.jsonl`: {"snr_db",
"clipped", "flushed"} over all devices and layers. A way fails where one of these holds:

    snr_db  < bound              of the plan's file (guard_snr_db), else FIRST measurements' median - margin_db
    clipped > first + CLIPPED    (first: the median of its own FIRST measurements)
    flushed > first + FLUSHED    which outliers raise where the SNR hides them: they are most of the signal's power

A way that fails `patience` times in a row moves up its ladder, to the first codec that is predicted to pass. The
prediction serves for nothing else: where few values are flushed, the SNR of two codecs of a family differs by what it
does for normal values (NOMINAL_DB); where many are, by less, and the next measurements say so.

It goes back to the codec before where that one, measured, passes `patience` times in a row. Measured and not predicted,
because outliers make the prediction wrong by 10 dB and more, and an exact site has no SNR to predict from. It passes
with half of the margin to spare, and each return doubles what the next one takes, so that nothing flaps.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from pallas_kernels.formats import ELEMENTS
from taco_jax.codec import CODECS, Codec, as_codec, tah

MODES = ("off", "warn", "act")
SHARE = 0.003
"""What the account brings of the time of all steps. The guard may take 0.005: a clock says 1.65 times what the account
does, since what a measurement delays after its own step is not in that step's time (experiments/results/guard_cost)."""
WARM_STEPS = 10
"""Steps after a start before the first measurement: the first ones are slow, and scales are not calibrated."""
LEAST_STEPS = 10
"""Steps between two measurements at least: more of them say nothing new."""
FIRST = 3
"""First measurements that set what the later ones are compared with."""
CLIPPED = 0.01
"""Share of clipped elements that a way may have beyond its first."""
FLUSHED = 0.1
"""Share of flushed elements that a way may have beyond its first. A normal block of 128 in 4 bits flushes 16 %, and
22 % once its largest value is 1.4 times as large, which costs 3 dB."""
FORMER_EVERY = 4
"""Measurements for each of the codecs that moved ways had before. That one takes as long as a step."""
NOMINAL_DB = {
    "e4m3": 31.8, "e5m2": 25.8, "int8": 43.7, "int6": 31.5, "int5": 25.2, "int4": 18.6, "int3": 11.2, "e3m2": 25.8,
    "e2m3": 31.5, "e3m1": 19.9, "e2m2": 25.4, "e1m3": 25.2, "e2m1": 19.3, "e1m2": 18.6, "e1m1": 11.2, tah.ELEMENT: 16.9,
}  # fmt: skip
"""SNR of each element for normal values in blocks of 128 with bfloat16 scales (tests/train/test_guard.py measures)."""
_STEP_UP_DB = 3.0
_OWN_SCALES = ("float32", "bfloat16", "e8m0")


def bits(codec: Codec) -> int:
    return 4 if codec.mixed else ELEMENTS[codec.element].bits


def ladder(codec: Codec) -> list[Codec]:
    """Returns the codecs that a way in `codec` can move to, each better than the one before; the last is exact.

    Blocks and rotation stay. Elements stay integers, and become them where no float of as many bits is better. A scale
    that is relative to the site's becomes a bfloat16 of the block's own: what the site's scale misses is then no
    longer missed.
    """
    if codec.exact:
        return []
    integers = codec.mixed or ELEMENTS[codec.element].name.startswith("int")
    elements = ("int4", "int5", "int6", "int8") if integers else ("e2m3", "int8")
    own = bits(codec), NOMINAL_DB[codec.element]
    better = [e for e in elements if ELEMENTS[e].bits >= own[0] and NOMINAL_DB[e] >= own[1] + _STEP_UP_DB]
    scale = codec.scale if codec.scale in _OWN_SCALES else "bfloat16"
    fits = [e for e in better if not codec.per_token or ELEMENTS[e].bits == 8]
    return [*(dataclasses.replace(codec, element=e, scale=scale) for e in fits), CODECS["none"]]


def text_of(codec: Codec) -> str:
    """Returns a text of which `as_codec` makes this codec."""
    if codec.name in CODECS:
        return codec.name
    differing = {
        name: [f.name for f in dataclasses.fields(Codec) if getattr(codec, f.name) != getattr(preset, f.name)]
        for name, preset in CODECS.items()
        if preset.per_token == codec.per_token
    }
    base = min(differing, key=lambda name: ("element" in differing[name], len(differing[name]), name))
    return ",".join([base, *(f"{field}={getattr(codec, field)}" for field in differing[base])])


class Measured(NamedTuple):
    """A measurement of one way. Shares are of all elements."""

    snr_db: float
    clipped: float
    flushed: float


@dataclasses.dataclass(frozen=True)
class Event:
    """A decision. kind: raise (to more bits), back, or warn (nothing is changed; `after` is what act would take).
    measured: of the codec `before`; of `after` where the kind is back. why: what failed."""

    kind: str
    way: str
    before: str
    after: str
    why: str
    measured: Measured
    bound_db: float | None

    def words(self, patience: int) -> str:
        """The event in a step's line."""
        site, _, direction = self.way.rpartition("/")
        bound = "" if self.bound_db is None else f", bound {self.bound_db:.1f}"
        measured = f"SNR {self.measured.snr_db:.1f} dB{bound}"
        if self.why in ("clipped", "flushed"):
            measured = f"{getattr(self.measured, self.why):.1%} {self.why}, {measured}"
        if self.kind == "back":
            return f"{site} {direction} {self.before} -> {self.after} again ({self.after} has {measured})"
        if self.kind == "warn":
            better = f"compression.guard=act would send it in {self.after}"
            return f"{site} {direction} stays in {self.before} ({measured}, {patience} in a row; {better})"
        return f"{site} {direction} {self.before} -> {self.after} ({measured}, {patience} in a row)"


@dataclasses.dataclass
class Way:
    """The state of one way. codecs: the plan's first, then each that it moved to; the last is in force.

    first: its FIRST measurements, each (snr_db, clipped, flushed). failed, passed: measurements in a row that failed,
    and of the codec before that passed. returns: how often it went back. warned: it is said that it fails.
    """

    codecs: list[str]
    bound: float | None = None
    first: list[list[float]] = dataclasses.field(default_factory=list)
    failed: int = 0
    passed: int = 0
    returns: int = 0
    warned: bool = False

    @property
    def codec(self) -> str:
        return self.codecs[-1]

    @property
    def moved(self) -> bool:
        return len(self.codecs) > 1

    def typical(self, name: str) -> float | None:
        """The median of a field of `first`; None before all are there."""
        if len(self.first) < FIRST:
            return None
        return statistics.median(row[Measured._fields.index(name)] for row in self.first)

    def why_failed(self, measured: Measured, bound: float | None, spare: float) -> str | None:
        """Returns which of "snr", "clipped" and "flushed" fails; None where nothing does. spare: of the share of the
        limits that a measurement must keep free."""
        if bound is not None and measured.snr_db < bound:
            return "snr"
        for name, more in (("clipped", CLIPPED), ("flushed", FLUSHED)):
            usual = self.typical(name)
            if usual is not None and getattr(measured, name) > usual + more * (1 - spare):
                return name
        return None


class Guard:
    """All ways of a run. `codecs` has the codec in force of each, `former` the one before of those that moved."""

    def __init__(
        self,
        mode: str,
        codecs: Mapping[str, str],
        bounds: Mapping[str, float],
        *,
        margin_db: float,
        patience: int,
        state: Mapping[str, Any] | None = None,
    ):
        """codecs: the plan's, of every way that is not exact. bounds: SNR in dB of those whose bound the plan has.
        state: what `state` returned before."""
        self.mode, self.margin_db, self.patience = mode, margin_db, patience
        self._bounds = dict(bounds)
        self.ways = {way: Way([codec]) for way, codec in codecs.items()}
        self.remarks: list[str] = []
        for way, values in (state or {}).items():
            self._restore(way, Way(**values))

    def _restore(self, way: str, stored: Way) -> None:
        now = self.ways.get(way)
        if now is None or now.codec != stored.codecs[0]:
            if stored.moved:
                has = f"in {now.codec}" if now is not None else "no longer sent in a codec"
                self.remarks.append(f"guard: {way} was moved to {stored.codec}, and is now {has}: it starts anew")
            return
        if self.mode != "act" and stored.moved:
            self.remarks.append(
                f"guard: {way} goes back from {stored.codec} to {now.codec}, since compression.guard={self.mode}"
            )
            stored = Way([now.codec], stored.bound, stored.first)
        self.ways[way] = stored

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {way: dataclasses.asdict(value) for way, value in self.ways.items()}

    @property
    def moved(self) -> dict[str, str]:
        """{way: codec in force} of the ways that are not in the plan's."""
        return {way: value.codec for way, value in self.ways.items() if value.moved}

    @property
    def former(self) -> dict[str, str]:
        """The ways that would not be in the plan's codecs if each that moved were in the one before."""
        return {way: value.codecs[-2] for way, value in self.ways.items() if len(value.codecs) > 2}

    def bound(self, way: str) -> float | None:
        """The least SNR in dB; None where nothing says yet what is usual."""
        return self._bounds.get(way, self.ways[way].bound)

    def observe(self, sites: Mapping[str, Mapping[str, float]]) -> list[Event]:
        """Takes a measurement of the codecs in force. Returns what is decided; in mode act it is in force then."""
        events = []
        for name, way, measured in self._measured(sites):
            if not way.moved and len(way.first) < FIRST:
                way.first.append(list(measured))
                usual = way.typical("snr_db")
                way.bound = way.bound if usual is None else usual - self.margin_db
            bound = self.bound(name)
            why = way.why_failed(measured, bound, spare=0.0)
            way.failed = way.failed + 1 if why else 0
            if why is None and way.warned and way.why_failed(measured, self._spared(name), spare=0.5) is None:
                way.warned = False
            if way.failed < self.patience or way.warned:
                continue
            after, found = self._better(name, measured), {"why": why, "measured": measured, "bound_db": bound}
            if self.mode == "act":
                events.append(Event("raise", name, way.codec, after, **found))
                way.codecs.append(after)
                way.failed = way.passed = 0
            else:
                events.append(Event("warn", name, way.codec, after, **found))
                way.warned = True
        return events

    def observe_former(self, sites: Mapping[str, Mapping[str, float]]) -> list[Event]:
        """Takes a measurement of the codecs that moved ways had before. Returns which go back to them."""
        events = []
        for name, way, measured in self._measured(sites):
            if not way.moved:
                continue
            passes = way.why_failed(measured, self._spared(name), spare=0.5) is None
            way.passed = way.passed + 1 if passes else 0
            if way.passed < self.patience << min(way.returns, 10):
                continue
            before = way.codecs.pop()
            way.failed = way.passed = 0
            way.returns += 1
            found = {"why": "snr", "measured": measured, "bound_db": self.bound(name)}
            events.append(Event("back", name, before, way.codec, **found))
        return events

    def _spared(self, name: str) -> float | None:
        bound = self.bound(name)
        return None if bound is None else bound + self.margin_db / 2

    def _measured(self, sites: Mapping[str, Mapping[str, float]]):
        """(name, way, `Measured`) of the ways with finite values: a direction of zeros has no SNR."""
        for name, way in self.ways.items():
            if (values := sites.get(name)) is not None:
                measured = Measured(*(float(values[key]) for key in Measured._fields))
                if all(map(math.isfinite, measured)):
                    yield name, way, measured

    def _better(self, name: str, measured: Measured) -> str:
        """The next codec that is predicted to pass; exact if none is. A share of flushed values goes with the width of
        a quantisation step."""
        way, wanted = self.ways[name], self._spared(name)
        now, usual = as_codec(way.codec), way.typical("flushed")
        *rungs, exact = ladder(now)
        for rung in rungs:
            gain = NOMINAL_DB[rung.element] - NOMINAL_DB[now.element]
            fine_enough = usual is None or measured.flushed * 10 ** (-gain / 20) <= usual + FLUSHED / 2
            if fine_enough and (wanted is None or measured.snr_db + gain >= wanted):
                return text_of(rung)
        return text_of(exact)


class Budget:
    """When to measure. Times are in plain steps, of which each brings SHARE, and a measurement takes what it costs.

    The first measurement comes after WARM_STEPS, on credit; from then on the account is never below 0 when one begins.
    What is charged is usual: the median of the last costs, and at most one step for the first of a process, in which
    kernels are loaded and links set up. A disk that stalls in a measured step does not silence the guard for days.
    """

    def __init__(self, step: int, every: int = 0, state: Mapping[str, Any] | None = None):
        """step: the last one before this start. every: steps between measurements whatever they cost; 0: by account."""
        self._every, self._warm = every, step + WARM_STEPS
        self._since, self._last, self._spent, self._count = step, 0, 0.0, 0
        self._plain: deque[float] = deque(maxlen=31)
        self._costs: deque[float] = deque(maxlen=5)
        if state is not None:
            self._since, self._last, self._spent, self._count = (state[k] for k in ("since", "last", "spent", "count"))

    def state(self) -> dict[str, Any]:
        return {"since": self._since, "last": self._last, "spent": self._spent, "count": self._count}

    def due(self, step: int) -> bool:
        """Returns whether `step` is to be measured."""
        if self._every:
            return step % self._every == 0
        rested = step >= self._warm and step - self._last >= LEAST_STEPS
        return rested and self._spent <= SHARE * (step - self._since)

    def former_due(self) -> bool:
        """Returns whether the measurement just taken is the turn of the former codecs too."""
        return self._count % FORMER_EVERY == 0

    def plain(self, seconds: float) -> None:
        """Takes the time of a step that measured nothing."""
        self._plain.append(seconds)

    def cost(self, seconds: float) -> float:
        """Plain steps in so many seconds; 0 while no plain step is known."""
        return seconds / statistics.median(self._plain) if self._plain else 0.0

    def measured(self, step: int, cost: float) -> None:
        """Charges a measurement that was made within a step. cost: what that took longer, in plain steps."""
        self._last = step
        self._count += 1
        self._costs.append(max(0.0, cost))
        self._spent += self._usual if len(self._costs) > 1 else min(1.0, self._usual)

    def measured_former(self, cost: float) -> None:
        """Charges a measurement of the codecs before, a step of its own."""
        self._spent += min(max(0.0, cost), 2 * (1 + self._usual))

    @property
    def _usual(self) -> float:
        return statistics.median_low(self._costs)
