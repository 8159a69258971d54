"""Measures what the guard takes of a training run: the trainer's own loop with and without it, in turn, in one process.

    python experiments/guard_cost.py --config experiments/quickstart.py --out experiments/results/guard_cost \\
        --devices cpu:4 --codecs int4h:int8h

Both runs take the same compiled step and the same data. The guarded one measures when its own account says so, which is
the thing to be measured: a measuring step costs so many plain steps, and the account waits until that is a small share.
Other flags go to the trainer. On emulated devices the time of the process's threads (CPU) says more than that of the
clock, which others on the machine share.

output    OUT/README.md (hardware, commit, command, table), OUT/summary.json
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import runs

from taco_jax import data
from taco_jax.config import CheckpointConfig, EvalConfig, MetricsConfig, TrainConfig, chains, cli
from taco_jax.config.checks import check
from taco_jax.launch.preemption import StopRequests
from taco_jax.mesh import make_mesh
from taco_jax.train import step
from taco_jax.train.checkpoint import Checkpoints
from taco_jax.train.guard import SHARE
from taco_jax.train.loop import Run

ARMS = {"without": "off", "guard": "act"}
SETTLE_STEPS = 60
"""Steps of each run before the first that counts: the first measurement, on credit, is among them."""


def main(arguments: Sequence[str]) -> None:
    parser = runs.parser(__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--codecs", default="int4h:int8h")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps-per-round", type=int, default=400)
    parser.add_argument("--commit", default=None, help="commit to name where there is no git")
    args, flags = parser.parse_known_args(arguments)
    runs.require(args.rounds >= 2, "--rounds", args.rounds, "must be at least 2, to say a standard error")
    runs.require(args.steps_per_round >= 1, "--steps-per-round", args.steps_per_round, "must be at least 1")
    runs.file("--config", Path(args.config), "name an experiment, such as experiments/quickstart.py")
    own = {"compression.guard": "the study sets it", "metrics.snr-every": "the guard's account says when"}
    runs.codecs(args.codecs, exact=False)
    codecs = runs.codec_flags(args.codecs)
    config = runs.experiment(args.config, flags, own, codecs, validated=False)
    config = check(dataclasses.replace(
        config,
        steps=SETTLE_STEPS + args.rounds * args.steps_per_round,
        checkpoint=CheckpointConfig(enabled=False),
        evaluation=EvalConfig(batches=0),
        metrics=MetricsConfig(every=1 << 30),
    ))  # fmt: skip
    runs.folder("--out", args.out)
    cli.select_devices(config.devices, deterministic=config.deterministic, in_order=chains(config)[0] > 1)
    results = measure(config, args.rounds, args.steps_per_round)
    text = table(results)
    print(text, flush=True)
    report = [
        *runs.header(f"{Path(args.config).stem}: what the guard takes", args.commit),
        f"Mesh: dp {config.mesh.dp}, pp {config.mesh.pp}, tp {config.mesh.tp}; {config.compression.forward} forward, "
        f"{config.compression.backward} backward. {args.rounds} rounds of {args.steps_per_round} steps of each run, in "
        f"turn, after {SETTLE_STEPS} steps of each.",
        "",
        text,
    ]
    runs.write(args.out, report, results)


def measure(config: TrainConfig, rounds: int, steps: int) -> dict[str, float]:
    mesh = make_mesh(config.mesh.dp, config.mesh.pp, config.mesh.tp)
    program = step.build(config, mesh)
    tokens, validation = data.open_data(config.data, config.model.vocab_size)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        made = {}
        for name, mode in ARMS.items():
            workdir = Path(folder) / name
            workdir.mkdir()
            own = dataclasses.replace(
                config, workdir=str(workdir), compression=dataclasses.replace(config.compression, guard=mode)
            )
            kept = stack.enter_context(Checkpoints(workdir / "checkpoints", own.checkpoint))
            batches = data.batches(own, tokens)
            made[name] = Run(own, program, kept, batches, validation_tokens=validation, requests=StopRequests())
            stack.callback(made[name].close)
            with contextlib.redirect_stdout(io.StringIO()):
                made[name].begin()
                made[name].announce(mesh, len(tokens), len(validation))
        print("compiling", flush=True)
        for run in made.values():
            advance(run, SETTLE_STEPS)
        budget, taken = made["guard"].guard.budget, {name: [] for name in made}
        before = budget.state()
        for _ in range(rounds):
            for name, run in made.items():
                taken[name].append(advance(run, steps))
        after = budget.state()
        batch = data.device_batch({"tokens": next(made["without"].batches)}, program.batch_sharding)
        apart = min(seconds_of(lambda: program.measure(made["without"].state, batch)) for _ in range(4))
    clock, cpu = ({name: [pair[i] for pair in pairs] for name, pairs in taken.items()} for i in (0, 1))
    plain = statistics.median(clock["without"]) / steps
    measured = after["count"] - before["count"]
    return {
        "plain_step_ms": 1e3 * plain,
        "measurements": measured,
        "measurement_in_steps": (after["spent"] - before["spent"]) / measured if measured else 0.0,
        "former_measurement_in_steps": apart / plain,
        "steps_between": rounds * steps / measured if measured else math.inf,
        "accounted_share": (after["spent"] - before["spent"]) / (rounds * steps),
        "allowed_share": SHARE,
        **{f"{kind}_{key}": value for kind, times in (("clock", clock), ("cpu", cpu))
           for key, value in share(times).items()},
    }  # fmt: skip


def advance(run: Run, steps: int) -> tuple[float, float]:
    """(seconds, seconds of CPU time) that the next `steps` steps of a run take."""
    run.stop = run.step + steps
    with contextlib.redirect_stdout(io.StringIO()):
        run.program.step, run.guard and run.program.step_with_stats  # noqa: B018 (the properties compile)
        start = time.perf_counter(), time.process_time()
        run.loop()
    return time.perf_counter() - start[0], time.process_time() - start[1]


def seconds_of(work) -> float:
    start = time.perf_counter()
    jax.block_until_ready(work())
    return time.perf_counter() - start


def share(seconds: dict[str, list[float]]) -> dict[str, float]:
    """The mean over rounds of what the guarded run takes more, as a share, and its standard error."""
    more = [with_guard / without - 1 for without, with_guard in zip(*(seconds[name] for name in ARMS))]
    return {"share": statistics.mean(more), "error": statistics.stdev(more) / math.sqrt(len(more))}


def table(results: dict[str, float]) -> str:
    percent = lambda key: f"{100 * results[key]:.2f} %"
    rows = {
        "plain step": f"{results['plain_step_ms']:.2f} ms",
        "a measurement, beyond the step that it is": f"{results['measurement_in_steps']:.2f} plain steps",
        "a measurement of the codecs before": f"{results['former_measurement_in_steps']:.2f} plain steps",
        "steps from one to the next": f"{results['steps_between']:.0f}",
        "accounted, of all steps": f"{percent('accounted_share')} (allowed {percent('allowed_share')})",
        "the guarded run's clock, beside the other one's": f"{percent('clock_share')} +- {percent('clock_error')}",
        "its CPU time, beside the other one's": f"{percent('cpu_share')} +- {percent('cpu_error')}",
    }
    return "\n".join(["| what | |", "|---|---|", *(f"| {what} | {value} |" for what, value in rows.items())])


if __name__ == "__main__":
    sys.exit(cli.run(main))
