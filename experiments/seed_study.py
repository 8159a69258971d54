"""Does compression change the loss? One experiment with several codecs, each with the same seeds.

    python experiments/seed_study.py --config experiments/quickstart.py --codecs none,taco --seeds 0,1,2 \
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

from taco_jax import cli


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


def table(summary: dict, ratios: dict[str, float]) -> str:
    lines = ["| codec | traffic ratio | validation loss, mean | std | difference | equal | by seed |"]
    lines.append("|---|---|---|---|---|---|---|")
    for codec, r in summary.items():
        seeds = ", ".join(f"{s}: {loss:.4f}" for s, loss in r["seeds"].items())
        lines.append(
            f"| {codec} | {ratios[codec]:.2f} | {r['mean']:.4f} | {r['std']:.4f} | {r['difference']:+.2%} | "
            f"{'yes' if r['equal'] else 'no'} | {seeds} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
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
    runs.folder("--out", args.out)
    losses: dict[str, dict[str, float]] = {codec: {} for codec in codecs}
    ratios, seconds = {}, {}
    for seed in seeds:
        for codec in codecs:
            kept = args.out / f"{codec.replace(':', '-')}-{seed}.jsonl"
            if not kept.exists():
                with tempfile.TemporaryDirectory() as folder:
                    workdir = Path(folder) / f"{codec}-{seed}"
                    own = [*runs.codec_flags(codec), "--seed", seed, *flags]
                    runs.train(args.config, workdir, own, timeout=args.timeout)
                    runs.keep(workdir, kept)
            records = runs.read(kept)
            losses[codec][seed] = records[-1]["validation_loss"]
            ratios[codec] = records[-1]["comm_bytes_bf16"] / (records[-1]["comm_bytes"] or 1)
            seconds[codec] = statistics.median(r["step_seconds"] for r in records)
        summary = summarise(losses, codecs[0])
        for codec in codecs:
            summary[codec] |= {"ratio": ratios[codec], "step_seconds": seconds[codec], "steps": records[-1]["step"]}
        report = [*runs.header(f"{Path(args.config).stem}: codecs by seed", args.commit), table(summary, ratios)]
        (args.out / "README.md").write_text("\n".join(report) + "\n\n![loss](loss.png)\n")
        (args.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        print(table(summary, ratios), flush=True)
    draw(args.out, codecs, seeds[0])


def draw(out: Path, codecs: list[str], seed: str) -> None:
    """The loss curves of one seed on one picture."""
    from taco_jax import plot

    with tempfile.TemporaryDirectory() as folder:
        folders = []
        for codec in codecs:
            folders.append(Path(folder) / codec.replace(":", "-"))
            folders[-1].mkdir()
            shutil.copy(out / f"{codec.replace(':', '-')}-{seed}.jsonl", folders[-1] / "metrics.jsonl")
        plot.draw(folders, out / "loss.png")


if __name__ == "__main__":
    sys.exit(cli.run(main))
