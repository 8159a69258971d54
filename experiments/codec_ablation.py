"""The accuracy record: GPT-2 at TP 4 with every codec, by seed, beside the TACO paper's own figures.

    python experiments/codec_ablation.py --tokens tokens/ --out experiments/results/codec_ablation
    python experiments/codec_ablation.py --tokens tokens/ --out experiments/results/codec_ablation \
        --model gpt2_350m --seeds 0
    python experiments/codec_ablation.py --out experiments/results/codec_ablation --report

One run a codec and seed, each in a process of its own, one pass over --tokens/train.bin (GPT-2's tokenizer, uint16) by
default. Runs that OUT already has are kept: a study is made in as many goes as the GPU time allows (--minutes), seed by
seed, so that every codec has the same seeds. "int6h:none" compresses the forward messages only, "none:int6h" the
gradients'.

criterion  as in seed_study.py: paired by seed, mean difference within 0.5 % or one standard deviation of `none`
output     OUT/README.md (hardware, commit, command, tables), OUT/summary.json, OUT/codec_ablation.png,
           OUT/<model>-<codec>-<seed>.jsonl (metrics)
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import runs
from seed_study import summarise

CODECS = "none,taco,e4m3,e5m2,int8h,int6h,int5h,int4h,int6h:none,none:int6h"
# Validation loss against bf16 in arXiv 2604.24088: its GPT-350M runs, and its ablation of the element format.
PAPER = {"taco": "+0.25 % (350M), +0.17 % (ablation)", "e5m2": "+24 %", "int8h": "INT8 without rotation diverges"}
HERE = Path(__file__).parent


def one_pass(tokens: Path, model: str, batch: int, length: int) -> int:
    """Steps that see every training token once."""
    size = np.memmap(tokens / "train.bin", np.uint16, mode="r").size
    return max(1, (size - 1) // (batch * length))


def name_of(model: str, codec: str, seed: str) -> str:
    return f"{model}-{codec.replace(':', '-')}-{seed}.jsonl"


def collect(out: Path, model: str, codecs: list[str]) -> dict[str, dict[str, list[dict]]]:
    """{codec: {seed: records}} of the runs that are there."""
    found: dict[str, dict[str, list[dict]]] = {}
    for codec in codecs:
        for path in sorted(out.glob(name_of(model, codec, "*"))):
            found.setdefault(codec, {})[path.stem.rsplit("-", 1)[1]] = runs.read(path)
    return found


def snr(records: list[dict]) -> dict[str, float]:
    """Mean SNR in dB of every site and direction over the logged steps that measured it."""
    values: dict[str, list[float]] = {}
    for record in records:
        for site, measured in record.get("sites", {}).items():
            values.setdefault(site, []).append(measured["snr_db"])
    return {site: statistics.mean(v) for site, v in values.items()}


def summary_of(found: dict[str, dict[str, list[dict]]]) -> dict:
    losses = {c: {s: r[-1]["validation_loss"] for s, r in by_seed.items()} for c, by_seed in found.items()}
    summary = summarise(losses, "none")
    for codec, by_seed in found.items():
        records = [r for rs in by_seed.values() for r in rs]
        summary[codec] |= {
            "tokens_per_second": statistics.median(r["tokens_per_second"] for r in records),
            "ratio": records[-1]["comm_bytes_bf16"] / (records[-1]["comm_bytes"] or 1),
            "steps": records[-1]["step"],
            "snr_db": snr(records),
        }
    return summary


def tables(model: str, summary: dict) -> list[str]:
    lines = [
        f"## {model}",
        "",
        "| codec | traffic ratio | validation loss | std | against none | equal | seeds | tokens/s | the paper |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for codec, r in summary.items():
        lines.append(
            f"| {codec} | {r['ratio']:.2f} | {r['mean']:.4f} | {r['std']:.4f} | {r['difference']:+.2%} | "
            f"{'yes' if r['equal'] else 'no'} | {len(r['seeds'])} | {r['tokens_per_second']:.0f} | "
            f"{PAPER.get(codec, '')} |"
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
            axis.plot([k - 0.3, k + 0.3], [100 * r["difference"]] * 2, "k-")
        spread = 100 * summary["none"]["std"] / summary["none"]["mean"]
        axis.axhspan(-spread, spread, alpha=0.15, label="spread of none over seeds")
        axis.set_xticks(range(len(summary)), list(summary), rotation=45)
        axis.set_ylabel("validation loss against none, %")
        axis.set_title(model)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def report(out: Path, codecs: list[str], named_commit: str | None) -> None:
    models = {}
    for model in ("gpt2_124m", "gpt2_350m"):
        found = collect(out, model, codecs)
        if "none" in found:
            models[model] = summary_of(found)
    if not models:
        sys.exit(f"{out}: no finished run of codec none yet, so there is nothing to compare with")
    lines = runs.header("Codecs and accuracy: GPT-2 at TP 4", named_commit)
    for model, summary in models.items():
        lines += tables(model, summary)
    (out / "README.md").write_text("\n".join([*lines, "![differences](codec_ablation.png)"]) + "\n")
    (out / "summary.json").write_text(json.dumps(models, indent=1) + "\n")
    plot(models, out / "codec_ablation.png")
    print("\n".join(lines), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=Path, help="folder with train.bin and val.bin")
    parser.add_argument("--model", default="gpt2_124m", choices=("gpt2_124m", "gpt2_350m"))
    parser.add_argument("--codecs", default=CODECS)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=None, help="default: one pass over the tokens")
    parser.add_argument("--batch", type=int, default=64, help="sequences a step")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no run after that long")
    parser.add_argument("--report", action="store_true", help="only write the tables and the plot of what is there")
    parser.add_argument("--commit", default=None, help="commit to name where there is no git")
    args, flags = parser.parse_known_args()
    codecs = args.codecs.split(",")
    args.out.mkdir(parents=True, exist_ok=True)
    if args.report:
        return report(args.out, codecs, args.commit)
    if args.tokens is None or not (args.tokens / "train.bin").exists():
        sys.exit(
            f"--tokens={args.tokens}: must name a folder with train.bin and val.bin (tokenize_corpus.py makes one)"
        )
    steps = args.steps or one_pass(args.tokens, args.model, args.batch, 1024)
    start = time.monotonic()
    for seed in args.seeds.split(","):
        for codec in codecs:
            kept = args.out / name_of(args.model, codec, seed)
            if kept.exists() or time.monotonic() - start > 60 * args.minutes:
                continue
            with tempfile.TemporaryDirectory() as folder:
                workdir = Path(folder) / "run"
                own = [
                    "--data.train", str(args.tokens / "train.bin"), "--data.validation", str(args.tokens / "val.bin"),
                    "--steps", str(steps), "--global-batch", str(args.batch), "--seed", seed,
                    "--evaluation.every", str(steps), "--metrics.snr-every", str(max(1, steps // 10)),
                    "--checkpoint.no-enabled",
                ]  # fmt: skip
                runs.train(str(HERE / f"{args.model}.py"), workdir, [*runs.codec_flags(codec), *own, *flags])
                shutil.copy(workdir / "metrics.jsonl", kept)
            report(args.out, codecs, args.commit)


if __name__ == "__main__":
    main()
