"""Does error feedback in the backward pass make four bits possible in both directions? Trainings, paired by seed.

    python experiments/feedback_backward.py --config experiments/quickstart.py --mesh.dp 1 --seeds 0,1,2 \
        --out experiments/results/feedback_backward

Rows are codecs as in accuracy.py: "forward:backward" or one for both, and CODEC_fed feeds errors back in its direction.
Runs the trainer once per seed and row, in its own process; other flags go to the trainer. Finished runs of OUT are
kept. The errors of gradients, for a pretrained model and without a training, are those of feedback_gradients.py.

output     OUT/README.md (hardware, commit, command, table), OUT/summary.json, OUT/loss.png, OUT/<row>-<seed>.jsonl
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import accuracy
import runs
import seed_study

from taco_jax.config import cli

ROWS = ("none", "int4h", "int4h_fed:int4h", "int4h_fed:int4h_fed")


def row_flags(row: str) -> list[str]:
    """The trainer's flags of a row."""
    forward, backward, fed, fed_backward = accuracy.parts(row)
    flags = runs.codec_flags(f"{forward}:{backward}")
    flags += ["--compression.error-feedback"] * fed
    return flags + ["--compression.backward-error-feedback"] * fed_backward


def main(arguments: Sequence[str]) -> int:
    parser = runs.parser(__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--every", type=int, default=10, help="keep the metrics of every so many steps")
    parser.add_argument("--commit", default=None, help="commit to name where there is no git")
    parser.add_argument("--timeout", type=float, default=None, help="seconds for each run; default: no limit")
    args, flags = parser.parse_known_args(arguments)
    rows, seeds = accuracy.rows(args.rows), [str(seed) for seed in runs.numbers("--seeds", args.seeds, 0)]
    runs.file("--config", Path(args.config), "name an experiment, such as experiments/quickstart.py")
    refused = {"seed": "the seeds are those of --seeds"}
    refused |= {f"compression.{key}": "name a row of --rows" for key in accuracy.FEEDBACK}
    runs.experiment(args.config, flags, refused)
    runs.require(args.every > 0, "--every", args.every, "must be 1 step or more")
    timeout = runs.limit("--timeout", args.timeout)
    runs.folder("--out", args.out)
    kept = {(row, seed): args.out / f"{row.replace(':', '-')}-{seed}.jsonl" for row in rows for seed in seeds}
    found = {run: runs.read_kept(path) for run, path in kept.items() if path.exists()}
    failures = 0
    for seed in seeds:
        for row in rows:
            if (row, seed) not in found:
                own = [*row_flags(row), "--seed", seed, *flags]
                try:
                    limits = {"timeout": timeout, "every": args.every}
                    found[row, seed] = runs.make(args.config, kept[row, seed], own, **limits)
                except runs.FAILURES as error:
                    failures += 1
                    print(f"FAILED {row}, seed {seed}: {error}", file=sys.stderr, flush=True)
        ran = {row: {s: found[row, s] for s in seeds if (row, s) in found} for row in rows}
        title = f"{Path(args.config).stem}: error feedback forward and backward, by seed"
        seed_study.report(args.out, title, ran, args.commit)
    if drawn := [row for row in rows if (row, seeds[0]) in found]:
        seed_study.draw(args.out, drawn, seeds[0])
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
