"""The guard in a run: when it measures, the programs of changed codecs, and what it says (`taco_jax.train.guard`).

With several processes all of them decide alike: what is measured and what it cost is process 0's everywhere, and the
decisions follow from that. A measured step is waited for, so a change is in force from the step after it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from taco_jax.config import TrainConfig
from taco_jax.train import step as step_lib
from taco_jax.train.guard import Budget, Event, Guard, text_of
from taco_jax.train.site_stats import summarise_stats

_DIRECTIONS = ("forward", "backward")


class GuardedPrograms:
    """The programs of a run with a guard. `program` is the one in force; the state has the same form in all of them.

    Programs stay as long as they can be needed: that of the plan, that in force, and that of the codecs before.
    """

    def __init__(self, config: TrainConfig, program: step_lib.Program, step: int, state: Mapping[str, Any] | None):
        """program: in the plan's codecs. step: the last one before this start. state: of a checkpoint."""
        mode, bounds = mode_and_bounds(config)
        options = {"margin_db": config.compression.guard_margin_db, "patience": config.compression.guard_patience}
        state = state or {}
        self.guard = Guard(mode, ways_of(program), bounds, state=state.get("ways"), **options)
        self.budget = Budget(step, config.metrics.snr_every, state.get("budget"))
        self._programs = {frozenset(): program}
        self.program = self._program(self.guard.moved)
        self._before: tuple[int, float] | None = None
        self._step_seconds = 0.0

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {"ways": self.guard.state(), "budget": self.budget.state()}

    def words(self) -> str:
        """Returns what the guard is going to do, in the words of a run's first lines."""
        guard = self.guard
        what = "moves them to more bits" if guard.mode == "act" else "says it"
        text = (
            f"guard: {what} where one of {len(guard.ways)} sites and directions loses {guard.margin_db:g} dB, or falls "
            f"under its plan's bound, {guard.patience} measurements in a row"
        )
        moved = [f"{way} {codec} instead of {guard.ways[way].codecs[0]}" for way, codec in guard.moved.items()]
        return f"{text}; moved: {', '.join(moved)}" if moved else text

    # When.

    def due(self, step: int) -> bool:
        return self.budget.due(step)

    def restart(self, step: int, now: float) -> None:
        """The next step begins now, after `step`: what came between was none."""
        self._before = step, now

    def timed(self, step: int, now: float, *, measured: bool) -> None:
        """Takes the time at which a step ended."""
        if self._before is not None and self._before[0] == step - 1:
            self._step_seconds = now - self._before[1]
            if not measured:
                self.budget.plain(self._step_seconds)
        else:
            self._step_seconds = 0.0
        self._before = step, now

    # What.

    def measured(self, step: int, stats: Mapping[str, Any], state: Any, batch: Any) -> list[Event]:
        """Decides by what `step` measured, after its end; every `FORMER_EVERY` times also by what moved ways would have
        had in their codecs before, which it measures on the step's batch. Returns what is decided."""
        cost, stats = _agree(max(0.0, self.budget.cost(self._step_seconds) - 1), stats)
        self.budget.measured(step, cost)
        events = self.guard.observe(summarise_stats(stats))
        if self.guard.moved and not events and self.budget.former_due():
            former = self._program(self.guard.former)
            measure, scales = former.measure, self._fresh_scales(state, self.guard.moved)
            start = time.perf_counter()
            stats = jax.device_get(measure(dataclasses.replace(state, scales=scales), batch))
            cost, stats = _agree(self.budget.cost(time.perf_counter() - start), stats)
            self.budget.measured_former(cost)
            events = self.guard.observe_former(summarise_stats(stats))
        return events

    def change(self, events: list[Event], state: Any) -> tuple[Any, float]:
        """Puts the programs of the guard's codecs in force. Returns (the state for them, seconds of compiling)."""
        start = time.perf_counter()
        old, self.program = self.program, self._program(self.guard.moved)
        _compile(self.program)
        if not any(event.way.endswith("/forward") for event in events):
            self.program.eval_step = old.eval_step  # it sends nothing backward
        needed = {frozenset(), frozenset(self.guard.moved.items()), frozenset(self.guard.former.items())}
        self._programs = {key: program for key, program in self._programs.items() if key in needed}
        state = dataclasses.replace(state, scales=self._fresh_scales(state, [event.way for event in events]))
        return state, time.perf_counter() - start

    def _program(self, codecs: Mapping[str, str]) -> step_lib.Program:
        key = frozenset(codecs.items())
        if key not in self._programs:
            plan = self._programs[frozenset()]
            self._programs[key] = step_lib.build(plan.config, plan.mesh, codecs)
        return self._programs[key]

    def _fresh_scales(self, state: Any, ways) -> Any:
        """The scales of a state, new ones at the sites of `ways`: another element has other ones, and those of a site
        that was exact are old."""
        sites = {way.rpartition("/")[0] for way in ways}
        fresh = self.program.init_scales()
        return {site: fresh[site] if site in sites else scales for site, scales in state.scales.items()}


def _compile(program: step_lib.Program) -> None:
    """Compiles both forms of the step; on one process at the same time, so that a change waits for one of them."""
    program.lowered, program.lowered_with_stats  # noqa: B018 (the properties trace, which threads do in turn)
    parts = ("step", "step_with_stats")
    with ThreadPoolExecutor(len(parts) if jax.process_count() == 1 else 1) as threads:
        list(threads.map(lambda part: getattr(program, part), parts))


def mode_and_bounds(config: TrainConfig) -> tuple[str, dict[str, float]]:
    """Returns what the guard does, and the least SNR in dB of those ways that have a bound in a plan's file."""
    planned, bounds = config.compression.planned, {}
    for site, plan in planned.sites.items() if planned is not None else ():
        for direction in _DIRECTIONS:
            bound = (getattr(plan, f"{direction}_measured") or {}).get("guard_snr_db")
            if bound is not None:
                bounds[f"{site}/{direction}"] = float(bound)
    return config.compression.guard or ("off" if planned is None else "warn"), bounds


def ways_of(program: step_lib.Program) -> dict[str, str]:
    """Returns {"SITE/DIRECTION": the text of its codec} of what a program sends compressed, by its site table."""
    sent = {(row.site, row.direction) for row in program.table.rows() if row.codec != "none"}
    return {
        f"{site}/{direction}": text_of(codec)
        for site, compression in program.parallel.plan
        for direction, codec in zip(_DIRECTIONS, compression.codecs if compression is not None else ())
        if (site, direction) in sent
    }


def line(step: int, events: list[Event], patience: int, seconds: float | None) -> str:
    """Returns the line of what was decided after `step`. seconds: of compiling; None where nothing was compiled."""
    changed = [event for event in events if event.kind != "warn"]
    end = "" if not changed else f"; from step {step + 1} on"
    end += "" if seconds is None else f", compiled in {seconds:.0f} s"
    return f"guard: step {step}: {'; '.join(event.words(patience) for event in events)}{end}"


def record(step: int, event: Event, seconds: float | None) -> dict[str, Any]:
    """Returns the event as `metrics.jsonl` has it, a list of which is under "guard" in its step's record."""
    site, _, direction = event.way.rpartition("/")
    values = {"kind": event.kind, "site": site, "direction": direction, "from": event.before, "to": event.after}
    values |= {"why": event.why, "bound_db": event.bound_db, **event.measured._asdict()}
    if event.kind != "warn":
        values |= {"first_step": step + 1, "compile_seconds": seconds}
    return values


def _agree(cost: float, stats: Mapping[str, Any]) -> tuple[float, Mapping[str, Any]]:
    """Returns process 0's cost and measurements. Every process calls it, in the same order among its programs."""
    if jax.process_count() == 1:
        return cost, stats
    from jax.experimental import multihost_utils

    names = sorted(stats)
    leaves = [np.asarray(stats[name], np.float32) for name in names]
    flat = np.concatenate([np.float32([cost]), *(leaf.reshape(-1) for leaf in leaves)])
    flat = np.asarray(multihost_utils.broadcast_one_to_all(flat))
    ends = 1 + np.cumsum([leaf.size for leaf in leaves])[:-1]
    parts = np.split(flat[1:], ends - 1)
    return float(flat[0]), {name: part.reshape(leaf.shape) for name, part, leaf in zip(names, parts, leaves)}
