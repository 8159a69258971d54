"""Does it change the loss that ZeRO-1 sends its updated weights compressed? Trainings, paired by seed.

    python experiments/weights_study.py --out experiments/results/weights

Trains the quickstart's model at dp 4 with ZeRO-1 once for each seed and codec of the weights, in a process of its own.
All other messages are exact. Other flags go to the trainer of every run. Finished runs of OUT are kept. What comes out
is the record by which `auto` takes a codec for weights: experiments/fit_forecast.py reads it.

output     OUT/README.md (hardware, commit, command, table), OUT/summary.json, OUT/CODEC-SEED.jsonl (metrics)
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import runs

from taco_jax.config import cli
from taco_jax.forecast import recommend
from taco_jax.forecast.record import Loss, bound

CONFIG = str(Path(__file__).with_name("quickstart.py"))
EXACT = "none"
SETTINGS = [
    "--mesh.dp", "4", "--mesh.tp", "1", "--devices", "cpu:4", *runs.codec_flags(EXACT),
    "--data-parallel.gradients", EXACT, "--data-parallel.zero1",
]  # fmt: skip
"""The flags of every run: nothing is compressed but the weights."""
OWN = {
    "seed": "the seeds are those of --seeds",
    "data-parallel.parameters": "the codecs are those of --codecs",
    "data-parallel.gradients": "the gradients are exact in all runs",
    "data-parallel.zero1": "it is what is studied",
    "checkpoint.enabled": "a run's folder is gone after it",
}


def summarise(found: dict[str, dict[str, list[dict]]]) -> dict[str, dict]:
    """Returns {codec: what its runs say against the exact ones with the same seeds} from {codec: {seed: records}}."""
    exact = {seed: records[-1]["validation_loss"] for seed, records in found[EXACT].items()}
    out = {}
    for codec, by_seed in found.items():
        losses = {seed: records[-1]["validation_loss"] for seed, records in by_seed.items() if seed in exact}
        if not losses:
            continue
        changes = [loss / exact[seed] - 1 for seed, loss in losses.items()]
        error = statistics.stdev(changes) / len(changes) ** 0.5 if len(changes) > 1 else None
        *_, records = by_seed.values()
        out[codec] = {
            "mean": statistics.mean(losses.values()), "change": statistics.mean(changes), "error": error,
            "runs": len(changes), "losses": losses, "steps": records[-1]["step"],
            "dp_bytes": records[-1]["comm"]["dp"]["bytes"],
        }  # fmt: skip
    return out


def table(summary: dict[str, dict]) -> list[str]:
    lines = [
        "| weights | bits an element | bytes a step over dp | validation loss, mean | change | standard error "
        "| within the bound | by seed |",
        "|---" * 8 + "|",
    ]
    for codec, r in summary.items():
        bits = 32.0 if codec == EXACT else recommend.bits(codec)
        beside = ["", "", ""]
        if codec != EXACT:
            error = "" if r["error"] is None else f"{r['error']:.2%}"
            counts = recommend.within(Loss(r["change"], r["error"], r["runs"], ""), bound())
            beside = [f"{r['change']:+.2%}", error, "yes" if counts else "no"]
        seeds = ", ".join(f"{seed}: {loss:.4f}" for seed, loss in r["losses"].items())
        cells = [f"`{codec}`", f"{bits:g}", f"{r['dp_bytes']:.0f}", f"{r['mean']:.4f}", *beside, seeds]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def report(out: Path, found: dict[str, dict[str, list[dict]]], named_commit: str | None) -> None:
    """Writes what there is; nothing without an exact run to compare with."""
    if not found.get(EXACT):
        return
    found = {codec: by_seed for codec, by_seed in found.items() if by_seed}
    summary = summarise(found)
    about = (
        "The quickstart's model, dp 4 (emulated), ZeRO-1, all other messages exact: the gradients, in float32, are the "
        "rest of the bytes. `none` sends the weights in float32, a codec the change of everybody's copy. Change: mean "
        f"over paired seeds. Within the bound: change and one standard error are at most {bound():.1%}."
    )
    lines = [*runs.header("Weights that ZeRO-1 sends compressed: losses by seed", named_commit), about, ""]
    (out / "README.md").write_text("\n".join([*lines, *table(summary)]) + "\n")
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print("\n".join(table(summary)), flush=True)


def main(arguments: Sequence[str]) -> int:
    parser = runs.parser(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--codecs", default="none,int8h,int6h,int4h", help="of the weights; none is needed")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--every", type=int, default=10, help="keep the metrics of every so many steps")
    parser.add_argument("--report", action="store_true", help="write the report of what OUT has; train nothing")
    parser.add_argument("--commit", default=None, help="commit to name where there is no git")
    parser.add_argument("--timeout", type=float, default=None, help="seconds for each run; default: no limit")
    args, flags = parser.parse_known_args(arguments)
    codecs = runs.codecs(args.codecs, pairs=False)
    seeds = [str(seed) for seed in runs.numbers("--seeds", args.seeds, 0)]
    for codec in codecs:
        runs.experiment(CONFIG, flags, OWN, [*SETTINGS, "--data-parallel.parameters", codec])
    runs.require(args.every > 0, "--every", args.every, "must be 1 step or more")
    timeout = runs.limit("--timeout", args.timeout)
    runs.folder("--out", args.out)
    kept = {(codec, seed): args.out / f"{codec}-{seed}.jsonl" for codec in codecs for seed in seeds}
    found = {run: runs.read_kept(path) for run, path in kept.items() if path.exists()}
    failures = 0
    for seed in seeds:
        for codec in codecs:
            if (codec, seed) not in found and not args.report:
                own = [*SETTINGS, "--data-parallel.parameters", codec, "--seed", seed, "--checkpoint.no-enabled"]
                try:
                    path = kept[codec, seed]
                    found[codec, seed] = runs.make(CONFIG, path, [*own, *flags], timeout=timeout, every=args.every)
                except runs.FAILURES as error:
                    failures += 1
                    print(f"FAILED {codec}, seed {seed}: {error}", file=sys.stderr, flush=True)
        ran = {codec: {s: found[codec, s] for s in seeds if (codec, s) in found} for codec in codecs}
        report(args.out, ran, args.commit)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
