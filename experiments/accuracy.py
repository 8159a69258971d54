"""The accuracy record: GPT-2 at tp 2 on held-out text, each row another way to send activations, by seed.

    python experiments/accuracy.py --tokens tokens/ --out experiments/results/accuracy --minutes 9
    python experiments/accuracy.py --out experiments/results/accuracy --report --page docs/accuracy.md

Fixed before the first run:

bound     0.5 % of the validation loss. A row is "equivalent" to exact if the 90 % confidence interval of its mean
          relative difference, paired by seed (same initialisation, same order of the data), lies within +-0.5 %: two
          one-sided t-tests at 5 %. It is "not equivalent" if the interval lies wholly beyond, else the test is "open".
          One pair is no test.
data      --tokens/train.bin (tokenize_corpus.py: 32.6M GPT-2 tokens), three times over for the 124M model, so 98M
          tokens of which each was seen three times; 40M tokens for the 350M one. Validation: all of --tokens/val.bin.
order     of PLAN: 124M exact, int8h, int6h, taco with seed 0, then 1, then 2; with seed 0 int4h with error feedback
          forward and int6h backward, exact sums in float32, int4h; 350M exact and int6h; one run that goes from taco to
          exact and back, in thirds; and the paper's ablation: e5m2, int8 without rotation, no block scale. Added
          later, last in order: int4h with error feedback in both directions.

Rows are codecs, "forward:backward" or one for both; CODEC_fed feeds errors back in its direction, "float32" is exact
with sums in float32 (float32_sums.py), "A_then_B" changes in the middle. OWN_CODECS are no presets. Each run also
evaluates its last parameters another way: compressed ones exactly, exact ones in CROSS.

A run starts and ends in one go; runs that OUT has are kept, and the table grows by whole runs. --minutes: no run is
started that would end later. All runs share one process (in_turn.py). Other flags go to the trainer.

output    OUT/README.md, OUT/summary.json, OUT/loss.png, OUT/snr.png, OUT/<model>-<row>-<seed>.jsonl (every tenth step)
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import os
import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import accuracy_report
import numpy as np
import runs

from taco_jax.codec import CODECS, Codec
from taco_jax.config import ConfigError, TrainConfig, cli
from taco_jax.config.checks import check
from taco_jax.train.metrics import flops_per_token

MODELS = ("gpt2_124m", "gpt2_350m")
EPOCHS, TOKENS = {"gpt2_124m": 3}, {"gpt2_350m": 40e6}
# (model, rows, seeds): seed by seed, so that rows have the same seeds wherever the study stands.
PLAN = (
    ("gpt2_124m", ("none", "int8h", "int6h", "taco"), (0, 1, 2)),
    ("gpt2_124m", ("int4h_fed:int6h", "float32", "int4h"), (0,)),
    ("gpt2_350m", ("none", "int6h"), (0,)),
    ("gpt2_124m", ("taco_then_none_then_taco", "e5m2", "int8", "e4m3h_site"), (0,)),
    ("gpt2_124m", ("int4h_fed:int4h_fed",), (0,)),
)
# Of the paper's ablation; presets are what somebody should use.
OWN_CODECS = {"int8": Codec("int8", 128, "none"), "e4m3h_site": Codec("e4m3", 128, "hadamard", "site")}
CROSS = ("int8h", "int6h", "taco", "int4h")
THEN, FED, FLOAT32 = "_then_", "_fed", "float32"
FEEDBACK = ("error-feedback", "backward-error-feedback")
HERE = Path(__file__).parent
# As fast as the recorded settings of the model files or faster on two GPUs, and the same for all rows.
SETTINGS = (
    "--mesh.tp", "2", "--accumulation", "1", "--remat", "dots", "--loss-chunk", "8192", "--checkpoint.no-enabled",
    "--metrics.every", "10",
)  # fmt: skip
# Flags of the trainer that the study sets itself, beside runs.NOT_HANDED_ON.
OWN = {
    "seed": "the seeds are those of --seeds",
    "steps": "they are those of the study's own --steps, once",
    "global-batch": "set --batch",
    "data.train": "set --tokens, a folder with train.bin and val.bin",
    "data.validation": "set --tokens, a folder with train.bin and val.bin",
    "optimizer.warmup-steps": "set --warmup",
    "evaluation.every": "a run is validated ten times",
    "metrics.snr-every": "SNR is measured ten times in a run",
    "metrics.every": "every tenth step is kept",
    "stop-after": "set --steps: a run that stops early has not had its whole schedule",
    "checkpoint.enabled": "a run's folder is gone after it",
} | {f"compression.{key}": "name a row, such as int4h_fed:int6h" for key in FEEDBACK}


def planned_steps(model: str, tokens: Path, batch: int, length: int) -> int:
    """Steps of a model's runs: whole passes over the training tokens, or so many tokens."""
    if model in TOKENS:
        return max(1, round(TOKENS[model] / (batch * length)))
    size = (tokens / "train.bin").stat().st_size // np.dtype(np.uint16).itemsize
    return max(1, EPOCHS[model] * ((size - 1) // (batch * length)))


def rows(text: str) -> list[str]:
    """--rows, checked before anything runs."""
    names = text.split(",")
    for name in names:
        for part in name.split(THEN):
            if part != FLOAT32:
                for codec in parts(part)[:2]:
                    runs.choices("--rows", codec, [*CODECS, *OWN_CODECS, FLOAT32])
    return names


def parts(row: str) -> tuple[str, str, bool, bool]:
    """Returns (forward codec, backward codec, whether each feeds its errors back) of a row that changes nothing.

    One codec is that of both directions; its feedback is that of the forward pass alone.
    """
    forward, _, backward = row.partition(":")
    codec = forward.removesuffix(FED)
    return codec, backward.removesuffix(FED) or codec, forward.endswith(FED), backward.endswith(FED)


def configured(base: TrainConfig, part: str) -> TrainConfig:
    """The checked configuration of a row, or of one part of a row that changes."""
    forward, backward, fed, fed_backward = parts("none" if part == FLOAT32 else part)
    how = {"error_feedback": fed, "backward_error_feedback": fed_backward}
    compression = dataclasses.replace(base.compression, forward=forward, backward=backward, **how)
    return check(dataclasses.replace(base, compression=compression))


def to_evaluate(row: str) -> tuple[str, ...]:
    """The rows in which a run's last parameters are evaluated too."""
    return CROSS if row in ("none", FLOAT32) else ("none",)


def name_of(model: str, row: str, seed: int | str) -> str:
    """No row has a dash or a plus in its name, so `collect` reads back what is written here and nothing else."""
    return f"{model}-{row.replace(':', '+')}-{seed}.jsonl"


def collect(out: Path) -> dict[str, dict[str, dict[str, list[dict]]]]:
    """{model: {row: {seed: records}}} of all runs that are there, in the order of PLAN, then by name."""
    planned = [row for _, names, _ in PLAN for row in names]
    found: dict[str, dict[str, dict[str, list[dict]]]] = {}
    for model in MODELS:
        of_model: dict[str, dict[str, list[dict]]] = {}
        for path in sorted(out.glob(f"{model}-*.jsonl")):
            match = re.fullmatch(rf"{model}-(\w+(?:\+\w+)*)-(\d+)\.jsonl", path.name)
            if match:
                of_model.setdefault(match[1].replace("+", ":"), {})[match[2]] = runs.read_kept(path)
        ordered = sorted(of_model, key=lambda row: (row not in planned, [*planned, row].index(row), row))
        if ordered:
            found[model] = {row: dict(sorted(of_model[row].items(), key=lambda s: int(s[0]))) for row in ordered}
    return found


def report(out: Path, page: Path | None = None) -> None:
    """Writes the tables and pictures of what OUT has, what is still to be run, and the tables of a page."""
    found = collect(out)
    accuracy_report.write(out, found, missing(PLAN, found))
    if page is not None:
        try:
            page.write_text(accuracy_report.page(page.read_text(), found))
        except ValueError as error:
            raise ConfigError(f"--page={page}: {error}") from None


def missing(plan, found) -> list[tuple[str, str, int]]:
    """(model, row, seed) of a plan's runs that are not among those found, in order."""
    wanted = [(model, row, seed) for model, names, seeds in plan for seed in seeds for row in names]
    return [(m, row, seed) for m, row, seed in wanted if str(seed) not in found.get(m, {}).get(row, {})]


def asked_for(args):
    """PLAN, or what --model, --rows and --seeds put in its place."""
    if not (args.rows or args.seeds or args.model):
        return PLAN
    names = rows(args.rows) if args.rows else PLAN[0][1]
    seeds = runs.numbers("--seeds", args.seeds, 0) if args.seeds else [0]
    return ((args.model or MODELS[0], names, seeds),)


def work(config: TrainConfig) -> float:
    """Model FLOPs of a whole run."""
    length = config.data.sequence_length
    return config.steps * config.global_batch * length * flops_per_token(config.model, length)


def expected_seconds(flops: float, found) -> float | None:
    """How long a run of so many FLOPs takes, by the median of those that are there and a twentieth; None where none
    says."""
    rates = [
        r[-1]["run"]["seconds"] / r[-1]["run"]["flops"]
        for of_model in found.values() for of_row in of_model.values() for r in of_row.values() if "run" in r[-1]
    ]  # fmt: skip
    return 1.05 * statistics.median(rates) * flops if rates else None


class Study:
    """The runs of one call: configurations, programs and what is known of their time."""

    def __init__(self, args, configs: dict[str, TrainConfig], flags: Sequence[str]):
        # Imported here: errors in the arguments then come before the seconds that these imports take.
        import float32_sums
        import in_turn
        import jax

        from taco_jax.mesh import make_mesh

        self.args, self.configs, self.flags, self.in_turn = args, configs, flags, in_turn
        mesh = make_mesh(tp=next(iter(configs.values())).mesh.tp)

        def config_of(name: str) -> TrainConfig:
            model, part = name.split("/")
            return configured(configs[model], part)

        def tracing(name: str) -> contextlib.AbstractContextManager:
            model, part = name.split("/")
            dtype = configs[model].compute_dtype
            return float32_sums.sums_in_float32(dtype) if part == FLOAT32 else contextlib.nullcontext()

        self.programs = in_turn.Programs(mesh, config_of, tracing)
        devices = jax.devices()
        self.hardware = f"{mesh.size} x {devices[0].device_kind}, jax {jax.__version__}, {os.cpu_count()} CPU cores"

    def prepare(self, model: str, row: str) -> None:
        for part in row.split(THEN):
            self.programs.prepare(f"{model}/{part}", to_train=True)

    def prepare_others(self, model: str, row: str) -> None:
        for other in to_evaluate(row):
            self.programs.prepare(f"{model}/{other}", to_train=False)

    def run(self, model: str, row: str, seed: int, kept: Path, ahead: Sequence[tuple[str, str]]) -> None:
        """Trains, evaluates and keeps one run, and compiles what those ahead, (model, row), need beside it."""
        self.prepare(model, row)
        config = self.configs[model]
        names = [f"{model}/{part}" for part in row.split(THEN)]
        programs = [self.programs.get(name, to_train=True) for name in names]
        lasts = [round(config.steps * (i + 1) / len(names)) for i in range(len(names))]
        # Not before: what is fitted to the GPU beside another program's compiling is fitted badly.
        self.prepare_others(model, row)
        for following in ahead:
            self.prepare(*following)
            self.prepare_others(*following)
        if not self.args.ahead:
            self.programs.wait()
        get = functools.partial(self.programs.get, to_train=False)
        others = {other: functools.partial(get, f"{model}/{other}") for other in to_evaluate(row)}
        start = time.monotonic()
        records = self.in_turn.train(seed, list(zip(programs, lasts, strict=True)), others)
        records[-1]["run"] = {
            "seconds": time.monotonic() - start,
            "flops": work(config),
            "tokens": config.steps * config.global_batch * config.data.sequence_length,
            "date": str(datetime.date.today()),
            "hardware": self.hardware,
            "commit": self.args.commit or runs.commit(),
            "command": " ".join([accuracy_report.COMMAND, *self.flags]),
            "implementations": {k: v for name in names for k, v in self.programs.choices(name).items()},
        }
        runs.keep(records, kept)


def configurations(args, flags: Sequence[str], models: Sequence[str]) -> dict[str, TrainConfig]:
    """{model: checked configuration of its runs}, with the codec and seed still to come."""
    configs = {}
    for model in models:
        config = str(HERE / f"{model}.py")
        own = [*SETTINGS, "--global-batch", str(args.batch)]
        own += ["--data.train", str(args.tokens / "train.bin"), "--data.validation", str(args.tokens / "val.bin")]
        parsed = runs.experiment(config, flags, OWN, own)
        steps = args.steps or planned_steps(model, args.tokens, args.batch, parsed.data.sequence_length)
        warmup = round(steps / 10) if args.warmup is None else args.warmup
        tenth = max(1, steps // 10)
        configs[model] = dataclasses.replace(
            parsed, steps=steps, optimizer=dataclasses.replace(parsed.optimizer, warmup_steps=warmup),
            evaluation=dataclasses.replace(parsed.evaluation, every=tenth),
            metrics=dataclasses.replace(parsed.metrics, snr_every=tenth),
        )  # fmt: skip
    return configs


@contextlib.contextmanager
def own_codecs() -> Iterator[None]:
    """Makes OWN_CODECS known by their names, as presets are, inside."""
    CODECS.update(OWN_CODECS)
    try:
        yield
    finally:
        for name in OWN_CODECS:
            del CODECS[name]


@own_codecs()
def main(arguments: Sequence[str]) -> int:
    parser = runs.parser(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=Path, help="folder with train.bin and val.bin")
    parser.add_argument("--model", default=None, choices=MODELS, help="with --rows and --seeds in the place of PLAN")
    parser.add_argument("--rows", default=None)
    parser.add_argument("--seeds", default=None)
    parser.add_argument("--steps", type=int, default=None, help="default: what the docstring says")
    parser.add_argument("--warmup", type=int, default=None, help="steps of warm-up; default: a tenth of the steps")
    parser.add_argument("--batch", type=int, default=64, help="sequences a step")
    parser.add_argument("--minutes", type=float, default=None, help="start no run that would end after that long")
    parser.add_argument("--no-ahead", dest="ahead", action="store_false", help="compile nothing beside a run")
    parser.add_argument("--report", action="store_true", help="only write the tables and the pictures of what is there")
    parser.add_argument("--page", type=Path, default=None, help="with --report: a page whose tables are written anew")
    parser.add_argument("--commit", default=None, help="commit to name where there is no git")
    args, flags = parser.parse_known_args(arguments)
    start = time.monotonic()
    minutes = runs.limit("--minutes", args.minutes)
    for key in ("steps", "batch"):
        value = getattr(args, key)
        runs.require(value is None or value > 0, f"--{key}", value, "must be above 0")
    runs.require(args.warmup is None or args.warmup >= 0, "--warmup", args.warmup, "must be 0 or more steps")
    plan = asked_for(args)
    runs.require(args.page is None or args.report, "--page", args.page, "goes with --report")
    if args.report:
        runs.require(not flags, "--report", " ".join(flags), "runs nothing, so it takes no flags of the trainer")
        runs.require(args.out.is_dir(), "--out", args.out, "no such folder, so there is nothing to report")
        if args.page is not None:
            runs.file("--page", args.page, "name a page that has the marks, such as docs/accuracy.md")
        report(args.out, args.page)
        return 0
    runs.require(args.tokens, "--tokens", args.tokens, "needed: a folder with train.bin and val.bin")
    for name in ("train.bin", "val.bin"):
        runs.file("--tokens", args.tokens / name, "tokenize_corpus.py makes one")
    configs = configurations(args, flags, sorted({model for model, _, _ in plan}))
    for model, row, _ in missing(plan, {}):
        for part in row.split(THEN):
            configured(configs[model], part)
    runs.folder("--out", args.out)
    wanted = missing(plan, collect(args.out))
    if not wanted:
        report(args.out)
        return 0
    first = next(iter(configs.values()))
    cli.select_devices(first.devices, deterministic=first.deterministic)
    cli.devices(first.devices)
    study, failures = Study(args, configs, flags), 0
    try:
        for i, (model, row, seed) in enumerate(wanted):
            takes = expected_seconds(work(configs[model]), collect(args.out))
            left = None if minutes is None else 60 * minutes - (time.monotonic() - start)
            if left is not None and (left <= 0 or (takes and takes > left)):
                print(f"no time for {model} {row}, seed {seed}: {takes or 0:.0f} s of {left:.0f} left", flush=True)
                break
            print(f"=== {model} {row}, seed {seed}, after {time.monotonic() - start:.0f} s", flush=True)
            try:
                ahead = [following[:2] for following in wanted[i + 1 : i + 3]]
                study.run(model, row, seed, args.out / name_of(model, row, seed), ahead)
            except Exception as error:  # the others may do
                failures += 1
                text = " ".join(f"{type(error).__name__}: {error}".split())[:3000]
                print(f"FAILED {model} {row}, seed {seed}: {text}", file=sys.stderr, flush=True)
                continue
            report(args.out)
    finally:
        study.programs.close()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
