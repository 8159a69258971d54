"""The accuracy record: GPT-2 at TP 4 with every codec, by seed, beside the TACO paper's own figures.

    python experiments/codec_ablation.py --tokens tokens/ --out experiments/results/codec_ablation
    python experiments/codec_ablation.py --tokens tokens/ --out experiments/results/codec_ablation \
        --model gpt2_350m --seeds 0
    python experiments/codec_ablation.py --out experiments/results/codec_ablation --report

One run a codec and seed, each in a process of its own, one pass over --tokens/train.bin (GPT-2's tokenizer, uint16) by
default. Runs that OUT already has are kept, and the tables are of all of them: a study is made in as many goes as the
GPU time allows (--minutes), seed by seed, so that every codec has the same seeds. "int6h:none" compresses the forward
messages only, "none:int6h" the gradients'. With JAX_COMPILATION_CACHE_DIR set, runs share what they compile.
Tokens/s are of the fastest seed: others may run two studies at a time.

criterion  as in seed_study.py: paired by seed, mean difference within 0.5 % or one standard deviation of `none`
output     OUT/README.md (hardware, commit, command, tables), OUT/summary.json, OUT/codec_ablation.png,
           OUT/<model>-<codec>-<seed>.jsonl (metrics of every tenth step; a pair of codecs is forward+backward)
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import runs
from seed_study import compared, summarise

from taco_jax import cli
from taco_jax.config import ConfigError

MODELS = ("gpt2_124m", "gpt2_350m")
CODECS = "none,taco,e4m3,e5m2,int8h,int6h,int5h,int4h,int6h:none,none:int6h"
# Validation loss against bf16 in arXiv 2604.24088: its GPT-350M runs, and its ablation of the element format.
PAPER = {"taco": "+0.25 % (350M), +0.17 % (ablation)", "e5m2": "+24 %", "int8h": "INT8 without rotation diverges"}
HERE = Path(__file__).parent
# Flags of the trainer that the study sets itself, beside runs.NOT_HANDED_ON.
OWN = {
    "seed": "the seeds are those of --seeds",
    "steps": "they are those of the study's own --steps, once",
    "global-batch": "set --batch",
    "data.train": "set --tokens, a folder with train.bin and val.bin",
    "data.validation": "set --tokens, a folder with train.bin and val.bin",
    "optimizer.warmup-steps": "set --warmup",
    "evaluation.every": "each run is validated at its end",
    "metrics.snr-every": "SNR is measured ten times in a run",
    "metrics.every": "every tenth step is kept",
    "stop-after": "set --steps: a run that stops early has not had its whole schedule",
    "checkpoint.enabled": "a run's folder is gone after it",
}


def one_pass(tokens: Path, batch: int, length: int) -> int:
    """Steps that see every training token once."""
    size = (tokens / "train.bin").stat().st_size // np.dtype(np.uint16).itemsize
    return max(1, (size - 1) // (batch * length))


def name_of(model: str, codec: str, seed: str) -> str:
    """No codec has a dash or a plus in its name, so `collect` reads back what is written here and nothing else."""
    return f"{model}-{codec.replace(':', '+')}-{seed}.jsonl"


def collect(out: Path, model: str) -> dict[str, dict[str, list[dict]]]:
    """{codec: {seed: records}} of all runs that are there, in the order of CODECS, then by name."""
    found: dict[str, dict[str, list[dict]]] = {}
    for path in sorted(out.glob(f"{model}-*.jsonl")):
        match = re.fullmatch(rf"{model}-(\w+(?:\+\w+)?)-(\d+)\.jsonl", path.name)
        if match:
            found.setdefault(match[1].replace("+", ":"), {})[match[2]] = runs.read_kept(path)
    usual = CODECS.split(",")
    return dict(sorted(found.items(), key=lambda item: (item[0] not in usual, [*usual, item[0]].index(item[0]))))


def snr(records: list[dict]) -> dict[str, float]:
    """Mean SNR in dB of every site and direction over the logged steps that measured it."""
    values: dict[str, list[float]] = {}
    for record in records:
        for site, measured in record.get("sites", {}).items():
            if measured["snr_db"] is not None:  # where nothing was sent, there is none
                values.setdefault(site, []).append(measured["snr_db"])
    return {site: statistics.mean(v) for site, v in values.items()}


def summary_of(found: dict[str, dict[str, list[dict]]]) -> dict:
    losses = {c: {s: r[-1]["validation_loss"] for s, r in by_seed.items()} for c, by_seed in found.items()}
    summary = summarise(losses, "none")
    for codec, by_seed in found.items():
        records = [r for rs in by_seed.values() for r in rs]
        summary[codec] |= {
            # Of the fastest run: two goes at a time may share the GPUs.
            "tokens_per_second": max(
                statistics.median(r["tokens_per_second"] for r in of_seed) for of_seed in by_seed.values()
            ),
            "ratio": records[-1]["comm_bytes_bf16"] / (records[-1]["comm_bytes"] or 1),
            "steps": records[-1]["step"],
            "runs": len(by_seed),
            "snr_db": snr(records),
        }
    return summary


def tables(model: str, summary: dict) -> list[str]:
    lines = [
        f"## {model}",
        "",
        "| codec | traffic ratio | validation loss | std | against none | equal | paired runs | tokens/s | the paper |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for codec, r in summary.items():
        lines.append(
            f"| {codec} | {r['ratio']:.2f} | {r['mean']:.4f} | {r['std']:.4f} | {compared(r)} "
            f"{len(r['seeds'])} of {r['runs']} | {r['tokens_per_second']:.0f} | {PAPER.get(codec, '')} |"
        )
    sites = sorted({site for r in summary.values() for site in r["snr_db"]})
    if sites:
        lines += ["", "SNR in dB by site and direction", "", "| codec | " + " | ".join(sites) + " |"]
        lines.append("|---" * (len(sites) + 1) + "|")
        for codec, r in summary.items():
            values = [f"{r['snr_db'][s]:.1f}" if s in r["snr_db"] else "" for s in sites]
            lines.append(f"| {codec} | " + " | ".join(values) + " |")
    return [*lines, ""]


def plot(models: dict[str, dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(models), figsize=(7 * len(models), 4), squeeze=False)
    for axis, (model, summary) in zip(axes[0], models.items(), strict=True):
        reference = summary["none"]["seeds"]
        for k, r in enumerate(summary.values()):
            paired = [100 * (loss / reference[s] - 1) for s, loss in r["seeds"].items()]
            axis.plot([k] * len(paired), paired, "o", alpha=0.5)
            if paired:
                axis.plot([k - 0.3, k + 0.3], [100 * r["difference"]] * 2, "k-")
        spread = 100 * summary["none"]["std"] / summary["none"]["mean"]
        axis.axhspan(-spread, spread, alpha=0.15, label="spread of none over seeds")
        axis.set_xticks(range(len(summary)), list(summary), rotation=45)
        axis.set_ylabel("validation loss against none, %")
        axis.set_title(model)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def report(out: Path, named_commit: str | None) -> bool:
    """Writes what OUT has; False, and nothing, without a run of `none` to compare with."""
    models = {}
    for model in MODELS:
        found = collect(out, model)
        if "none" in found:
            models[model] = summary_of(found)
    if not models:
        return False
    lines = runs.header("Codecs and accuracy: GPT-2 at TP 4", named_commit)
    for model, summary in models.items():
        lines += tables(model, summary)
    (out / "README.md").write_text("\n".join([*lines, "![differences](codec_ablation.png)"]) + "\n")
    (out / "summary.json").write_text(json.dumps(models, indent=1) + "\n")
    plot(models, out / "codec_ablation.png")
    print("\n".join(lines), flush=True)
    return True


def main(arguments: Sequence[str]) -> int:
    parser = runs.parser(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=Path, help="folder with train.bin and val.bin")
    parser.add_argument("--model", default="gpt2_124m", choices=MODELS)
    parser.add_argument("--codecs", default=CODECS)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=None, help="default: one pass over the tokens")
    parser.add_argument("--warmup", type=int, default=None, help="steps of warm-up; default: a tenth of the steps")
    parser.add_argument("--batch", type=int, default=64, help="sequences a step")
    parser.add_argument("--minutes", type=float, default=None, help="start no run after that long")
    parser.add_argument("--timeout", type=float, default=None, help="seconds for each run; default: no limit")
    parser.add_argument("--report", action="store_true", help="only write the tables and the plot of what is there")
    parser.add_argument("--commit", default=None, help="commit to name where there is no git")
    args, flags = parser.parse_known_args(arguments)
    codecs = runs.codecs(args.codecs)
    seeds = [str(seed) for seed in runs.numbers("--seeds", args.seeds, 0)]
    timeout, minutes = runs.limit("--timeout", args.timeout), runs.limit("--minutes", args.minutes)
    for key in ("steps", "batch"):
        value = getattr(args, key)
        runs.require(value is None or value > 0, f"--{key}", value, "must be above 0")
    runs.require(args.warmup is None or args.warmup >= 0, "--warmup", args.warmup, "must be 0 or more steps")
    if args.report:
        runs.require(not flags, "--report", " ".join(flags), "runs nothing, so it takes no flags of the trainer")
        if not args.out.is_dir() or not report(args.out, args.commit):
            raise ConfigError(f"--out={args.out}: has no finished run of codec none to compare with")
        return 0
    runs.require(args.tokens, "--tokens", args.tokens, "needed: a folder with train.bin and val.bin")
    for name in ("train.bin", "val.bin"):
        runs.file("--tokens", args.tokens / name, "tokenize_corpus.py makes one")
    config = str(HERE / f"{args.model}.py")
    length = runs.experiment(config, flags, OWN, ["--global-batch", str(args.batch)]).data.sequence_length
    runs.folder("--out", args.out)
    for model in MODELS:
        collect(args.out, model)  # raises now what it would raise after a run
    steps = args.steps or one_pass(args.tokens, args.batch, length)
    warmup = round(steps / 10) if args.warmup is None else args.warmup
    start, failures = time.monotonic(), 0
    for seed in seeds:
        for codec in codecs:
            kept = args.out / name_of(args.model, codec, seed)
            if kept.exists() or (minutes and time.monotonic() - start > 60 * minutes):
                continue
            own = [
                *runs.codec_flags(codec),
                "--data.train", str(args.tokens / "train.bin"), "--data.validation", str(args.tokens / "val.bin"),
                "--steps", str(steps), "--global-batch", str(args.batch), "--seed", seed,
                "--optimizer.warmup-steps", str(warmup), "--evaluation.every", str(steps),
                "--metrics.snr-every", str(max(1, steps // 10)), "--checkpoint.no-enabled",
            ]  # fmt: skip
            try:
                runs.make(config, kept, [*own, *flags], timeout=timeout, every=10)
            except runs.FAILURES as error:
                failures += 1
                print(f"FAILED {codec}, seed {seed}: {error}", file=sys.stderr, flush=True)
                continue
            report(args.out, args.commit)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
