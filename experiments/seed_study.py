"""Does compression change the loss? One experiment with several codecs, each with the same seeds.

    python experiments/seed_study.py --config experiments/quickstart.py --codecs none,int8h --seeds 0,1,2 \
        --out experiments/results/quickstart

Runs the trainer once per seed and codec ("forward:backward" names a pair), in its own process; other flags go to the
trainer. Finished runs of OUT are kept, so a study can be continued or extended.

criterion  per seed the relative difference of the validation loss to the first codec's; compressed training counts as
           equal if the mean difference is within 0.5 % or within one standard deviation of the first codec's losses
output     OUT/README.md (hardware, commit, command, table), OUT/summary.json, OUT/loss.png,
           OUT/<codec>-<seed>.jsonl (metrics)
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import runs

from taco_jax.config import cli


def summarise(losses: dict[str, dict[str, float]], base: str) -> dict:
    """{codec: {"mean", "std", "difference" (mean over paired seeds, relative), "equal"}} from {codec: {seed: loss}}.

    A codec is compared by the seeds that `base` has too, its "seeds"; without one "difference" and "equal" are None.
    """
    reference = losses[base]
    spread = statistics.stdev(reference.values()) if len(reference) > 1 else 0.0
    out = {}
    for codec, of_codec in losses.items():
        seeds = [s for s in of_codec if s in reference]
        if not seeds:
            mean, difference, equal = statistics.mean(of_codec.values()), None, None
        else:
            mean = statistics.mean(of_codec[s] for s in seeds)
            difference = statistics.mean(of_codec[s] / reference[s] - 1 for s in seeds)
            absolute = abs(mean - statistics.mean(reference[s] for s in seeds))
            equal = abs(difference) <= 0.005 or absolute <= spread
        out[codec] = {
            "mean": mean,
            "std": statistics.stdev(of_codec.values()) if len(of_codec) > 1 else 0.0,
            "difference": difference,
            "equal": equal,
            "seeds": {s: of_codec[s] for s in seeds},
        }
    return out


def compared(of_codec: dict) -> str:
    """The cells "difference" and "equal" of a table's row, empty for a codec without a seed to compare."""
    if of_codec["difference"] is None:
        return "| |"
    return f"{of_codec['difference']:+.2%} | {'yes' if of_codec['equal'] else 'no'} |"


def table(summary: dict) -> str:
    lines = ["| codec | traffic ratio | validation loss, mean | std | difference | equal | by seed |"]
    lines.append("|---|---|---|---|---|---|---|")
    for codec, r in summary.items():
        seeds = ", ".join(f"{s}: {loss:.4f}" for s, loss in r["seeds"].items())
        lines.append(f"| {codec} | {r['ratio']:.2f} | {r['mean']:.4f} | {r['std']:.4f} | {compared(r)} {seeds} |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    parser = runs.parser(__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--codecs", default="none,taco")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--commit", default=None, help="commit to name where there is no git")
    parser.add_argument("--timeout", type=float, default=None, help="seconds for each run; default: no limit")
    args, flags = parser.parse_known_args(arguments)
    codecs = runs.codecs(args.codecs)
    seeds = [str(seed) for seed in runs.numbers("--seeds", args.seeds, 0)]
    runs.file("--config", Path(args.config), "name an experiment, such as experiments/quickstart.py")
    runs.experiment(args.config, flags, {"seed": "the seeds are those of --seeds"})
    timeout = runs.limit("--timeout", args.timeout)
    runs.folder("--out", args.out)
    kept = {(codec, seed): args.out / f"{codec.replace(':', '-')}-{seed}.jsonl" for codec in codecs for seed in seeds}
    # Raises now what it would raise after hours.
    found = {run: runs.read_kept(path) for run, path in kept.items() if path.exists()}
    failures = 0
    for seed in seeds:
        for codec in codecs:
            if (codec, seed) in found:
                continue
            own = [*runs.codec_flags(codec), "--seed", seed, *flags]
            try:
                found[codec, seed] = runs.make(args.config, kept[codec, seed], own, timeout=timeout)
            except runs.FAILURES as error:
                failures += 1
                print(f"FAILED {codec}, seed {seed}: {error}", file=sys.stderr, flush=True)
        ran = {codec: {s: found[codec, s] for s in seeds if (codec, s) in found} for codec in codecs}
        report(args.out, f"{Path(args.config).stem}: codecs by seed", ran, args.commit)
    for seed in seeds:
        drawn = [codec for codec in codecs if (codec, seed) in found]
        if drawn:
            draw(args.out, drawn, seed)
            break
    return 1 if failures else 0


def report(out: Path, title: str, ran: dict[str, dict[str, list[dict]]], named_commit: str | None) -> None:
    """Writes what there is of {codec: {seed: records}}; nothing without a run of the first codec to compare with."""
    if not ran[next(iter(ran))]:
        return
    losses = {codec: {s: r[-1]["validation_loss"] for s, r in by.items()} for codec, by in ran.items() if by}
    summary = summarise(losses, next(iter(ran)))
    for codec in summary:
        *_, records = ran[codec].values()
        summary[codec] |= {
            "ratio": records[-1]["comm_bytes_bf16"] / (records[-1]["comm_bytes"] or 1),
            "step_seconds": statistics.median(r["step_seconds"] for r in records),
            "steps": records[-1]["step"],
        }
    lines = [*runs.header(title, named_commit), table(summary)]
    (out / "README.md").write_text("\n".join(lines) + "\n\n![loss](loss.png)\n")
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(table(summary), flush=True)


def draw(out: Path, codecs: list[str], seed: str) -> None:
    """Draws the loss curves of one seed; no throughput, since runs of a study may have the machine to share."""
    from taco_jax.train import plot

    with tempfile.TemporaryDirectory() as folder:
        folders = []
        for codec in codecs:
            folders.append(Path(folder) / codec.replace(":", "-"))
            folders[-1].mkdir()
            shutil.copy(out / f"{codec.replace(':', '-')}-{seed}.jsonl", folders[-1] / "metrics.jsonl")
        plot.draw(folders, out / "loss.png", throughput=False)


if __name__ == "__main__":
    sys.exit(cli.run(main))
