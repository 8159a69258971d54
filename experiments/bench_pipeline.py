"""A step in stages and on data-parallel ranks beside one device's, in one process, in turn.

    python experiments/bench_pipeline.py --config experiments/gpt2_350m.py --out experiments/results/stages

With --schedules: for each of --remats one device's step of M accumulated microbatches, and the same microbatches
through P stages (--stages) by each schedule. A schedule's goal is a share of one device's time with the same remat:

    gpipe     (M + P - 1) / (M P)                  every stage has 1 / P of the layers, and P - 1 empty ticks
    circular  (M + (P - 1) / V) / (M P)            the empty ticks are of 1 / V of a stage's layers (--chunks V)
    1f1b      gpipe's times 4 / 3                  each stage runs forward a second time

With --data-parallel: a step of the whole batch on --ranks, gradients exact (`none`) and with each codec, and that of
one device with its part of the batch, which sends nothing. Other flags go to the trainer. The link is the machine's;
NCCL_P2P_DISABLE=1 before the command gives another one.

ways    GRADIENTS, a codec of data_parallel.gradients; or zero1:GRADIENTS:WEIGHTS, with shares of the optimiser's state;
        either with +overlap, gradients beside the backward pass (data_parallel.overlap)
output  OUT/README.md (hardware, commit, command, tables), OUT/summary.json
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import runs

from taco_jax.config import ConfigError, TrainConfig, cli
from taco_jax.config.checks import REMAT, check
from taco_jax.config.schedule import SCHEDULES
from taco_jax.mesh import make_mesh
from taco_jax.train import dry_run, step

# Steps before the first that counts: allocation, the first collectives.
WARM_UP = 2
ONE, PART, EXACT = "one device", "one device, its part of the batch", "none"
OVERLAP = "+overlap"


@dataclasses.dataclass
class Row:
    """A step to be measured. name: in the table. of: the row that it is compared with, and with which share of its
    time; none of what is compared with."""

    name: str
    flags: list[str]
    of: str | None = None
    share: float = 1.0
    seconds: list[float] = dataclasses.field(default_factory=list)
    peak_bytes: int = 0


def share(schedule: str, stages: int, microbatches: int, chunks: int) -> float:
    """Returns the goal of a schedule: the share of one device's time."""
    empty = (stages - 1) / (chunks if schedule == "circular" else 1)
    return (microbatches + empty) / (microbatches * stages) * (4 / 3 if schedule == "1f1b" else 1)


def stage_rows(args, remat: str) -> list[Row]:
    common = ["--remat", remat, "--mesh.dp", "1", "--mesh.tp", "1"]
    m = str(args.microbatches)
    rows = [Row(ONE, [*common, "--mesh.pp", "1", "--accumulation", m])]
    for schedule in args.schedules:
        flags = ["--mesh.pp", str(args.stages), "--accumulation", "1", "--pipeline.microbatches", m]
        flags += ["--pipeline.schedule", schedule, "--pipeline.chunks", str(args.chunks)]
        part = share(schedule, args.stages, args.microbatches, args.chunks)
        rows.append(Row(schedule, [*common, *flags], ONE, part))
    return rows


def rank_rows(args, global_batch: int) -> list[Row]:
    common = ["--mesh.pp", "1", "--mesh.tp", "1", "--accumulation", "1"]
    alone = ["--mesh.dp", "1", "--global-batch", str(global_batch // args.ranks), "--data-parallel.gradients", "none"]
    rows = [Row(PART, [*common, *alone])]
    for way in args.ways:
        zero1 = way.startswith("zero1:")
        gradients, _, weights = way.removesuffix(OVERLAP).removeprefix("zero1:").partition(":")
        flags = ["--mesh.dp", str(args.ranks), "--data-parallel.gradients", gradients]
        flags += ["--data-parallel.zero1", "--data-parallel.parameters", weights or "none"] if zero1 else []
        flags += ["--data-parallel.overlap", "True"] if way.endswith(OVERLAP) else []
        rows.append(Row(way, [*common, *flags], EXACT))
    return rows


def main(arguments: Sequence[str]) -> None:
    parser = runs.parser(__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--schedules", default=",".join(SCHEDULES), help="'' for none")
    parser.add_argument("--remats", default="dots,none")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--chunks", type=int, default=2)
    parser.add_argument("--data-parallel", default="none,int8h,int4h,zero1:none:none,zero1:int8h:int8h", help="or ''")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps-per-round", type=int, default=3)
    parser.add_argument("--commit", default=None, help="commit to name where there is no git")
    args, flags = parser.parse_known_args(arguments)
    for name in ("stages", "microbatches", "chunks", "ranks", "rounds", "steps_per_round"):
        least = 2 if name in ("stages", "ranks") else 1
        runs.require(getattr(args, name) >= least, runs_flag(name), getattr(args, name), f"must be at least {least}")
    args.schedules = runs.choices("--schedules", args.schedules, SCHEDULES) if args.schedules else []
    args.remats = runs.choices("--remats", args.remats, REMAT)
    args.ways = args.data_parallel.split(",") if args.data_parallel else []
    runs.require(not args.ways or EXACT in args.ways, "--data-parallel", args.data_parallel, "must have none")
    runs.require(len(set(args.ways)) == len(args.ways), "--data-parallel", args.data_parallel, "must name each once")
    runs.require(args.schedules or args.ways, "--schedules", "''", "must name one, or --data-parallel must")
    runs.file("--config", Path(args.config), "name an experiment, such as experiments/gpt2_350m.py")
    own = {f"mesh.{axis}": "--stages and --ranks say how many" for axis in ("dp", "pp", "tp")}
    own |= {"remat": "the modes are those of --remats"} if args.schedules else {}
    own |= {"accumulation": "--microbatches says how many"}
    own |= {f"pipeline.{key}": f"--{flag} says which" for key, flag in
            (("schedule", "schedules"), ("chunks", "chunks"), ("microbatches", "microbatches"))}  # fmt: skip
    own |= {f"data-parallel.{key}": "--data-parallel names the ways"
            for key in ("gradients", "zero1", "parameters", "overlap")}  # fmt: skip
    base = runs.experiment(args.config, flags, own, ["--mesh.dp", "1", "--mesh.tp", "1"], validated=False)
    groups = {f"stages, remat {remat}": stage_rows(args, remat) for remat in args.remats if args.schedules}
    if args.ways:
        groups["data parallel"] = rank_rows(args, base.global_batch)
    parse = lambda row: check(cli.parse(["--config", args.config, *flags, *exact_sums(flags), *row.flags]))
    configs = {name: [parse(row) for row in rows] for name, rows in groups.items()}
    runs.folder("--out", args.out)
    in_order = any(way.endswith(OVERLAP) for way in args.ways)
    cli.select_devices(base.devices, deterministic=base.deterministic, in_order=in_order)
    for name, rows in groups.items():
        measure(name, rows, configs[name], args)
        write(args, base, groups)


def runs_flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def exact_sums(flags: Sequence[str]) -> list[str]:
    """No codec where none is given: what is measured is the schedule."""
    given = {flag for flag in flags if flag.startswith("--pipeline.")}
    return [word for key in ("forward", "backward") if f"--pipeline.{key}" not in given
            for word in (f"--pipeline.{key}", "none")]  # fmt: skip


def measure(group: str, rows: list[Row], configs: list[TrainConfig], args) -> None:
    """Fills the rows' seconds: some steps of each in turn, round by round."""
    start = time.perf_counter()
    programs = [traced(config) for config in configs]
    with ThreadPoolExecutor() as threads:
        compiled = list(threads.map(lambda program: program.step, programs))
    print(f"compiled {group} in {time.perf_counter() - start:.0f} s", flush=True)
    steps = []
    for row, program, run in zip(rows, programs, compiled, strict=True):
        row.peak_bytes = dry_run.memory(program).peak
        steps.append(started(program, run))
        steps[-1](WARM_UP)
    for _ in range(args.rounds):
        for row, run in zip(rows, steps, strict=True):
            row.seconds.append(run(args.steps_per_round))


def traced(config: TrainConfig) -> step.Program:
    """Returns the programs of `config`, the step traced: threads may compile it, only one traces."""
    try:
        program = step.build(config, make_mesh(config.mesh.dp, config.mesh.pp, config.mesh.tp))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    program.lowered  # noqa: B018 it is kept
    return program


def started(program: step.Program, compiled) -> Callable[[int], float]:
    """Returns a function that takes so many steps and returns the seconds of one."""
    shape = program.batch_shapes["tokens"]
    tokens = jax.random.randint(jax.random.key(1), shape.shape, 0, program.config.model.vocab_size, jnp.int32)
    batch = {"tokens": jax.device_put(tokens, shape.sharding)}
    kept: list[Any] = [program.init(jax.random.key(0))]

    def run(steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            kept[0], metrics = compiled(kept[0], batch)
        jax.block_until_ready((kept[0], metrics))
        return (time.perf_counter() - start) / steps

    return run


def summarise(rows: list[Row]) -> dict[str, dict]:
    """Medians over rounds, fastest and slowest, and the time as a multiple of the goal."""
    medians = {row.name: statistics.median(row.seconds) for row in rows}
    found = {}
    for row in rows:
        found[row.name] = {
            "ms": 1e3 * medians[row.name], "fastest_ms": 1e3 * min(row.seconds), "slowest_ms": 1e3 * max(row.seconds),
            "peak_gb": row.peak_bytes / 1e9,
        }  # fmt: skip
        if row.of is not None:
            goal = row.share * medians[row.of]
            found[row.name] |= {"goal_ms": 1e3 * goal, "of_goal": medians[row.name] / goal}
    return found


def table(group: str, found: dict[str, dict]) -> list[str]:
    lines = [f"| {group} | ms (median) | fastest, slowest ms | goal ms | of it | peak GB |", "|---" * 6 + "|"]
    for name, r in found.items():
        spread = f"{r['fastest_ms']:.1f}, {r['slowest_ms']:.1f}"
        goal = f"{r['goal_ms']:.1f} | {r['of_goal']:.3f}" if "goal_ms" in r else "|"
        lines.append(f"| {name} | {r['ms']:.1f} | {spread} | {goal} | {r['peak_gb']:.1f} |")
    return lines


def write(args, config: TrainConfig, groups: dict[str, list[Row]]) -> None:
    """Prints and writes what is measured so far."""
    results = {group: summarise(rows) for group, rows in groups.items() if rows[0].seconds}
    text = "\n\n".join("\n".join(table(group, found)) for group, found in results.items())
    print(text, flush=True)
    report = [
        *runs.header(f"{Path(args.config).stem}: stages and data-parallel ranks beside one device", args.commit),
        f"{config.global_batch} sequences of {config.data.sequence_length} tokens a step, {config.model.n_layers} "
        f"layers; {args.microbatches} microbatches, {args.stages} stages, {args.chunks} chunks where circular. "
        f"{args.rounds} rounds of {args.steps_per_round} steps of each in turn. Goals are what the schedule's empty "
        "ticks allow of one device's time; of data-parallel ranks, the exact step.",
        "",
        text,
    ]
    runs.write(args.out, report, results)


if __name__ == "__main__":
    sys.exit(cli.run(main))
