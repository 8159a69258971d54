"""Fits the forecast's constants on sums and kernels in experiments/results, and writes them into the package.

    python experiments/fit_forecast.py            writes constants.json and record.json of taco_jax/forecast anew, and
                                                  taco_jax/compression/recommended.json, which follows from the record
    python experiments/fit_forecast.py --check    exit code 1 if one of them would change

No step's time and no time to a first token is used: experiments/forecast_errors.py compares the forecast with those.
Each fit is linear least squares of relative errors with no negative constants (scipy's nnls). docs/forecast.md has the
equations.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import runs
import three_axes_study
from scipy.optimize import nnls

from taco_jax.codec import CODECS
from taco_jax.compression import recommended
from taco_jax.config import ConfigError, cli
from taco_jax.forecast import recommend
from taco_jax.forecast.links import hop_steps, steps

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results"
PACKAGE = ROOT / "taco_jax" / "forecast"
RECOMMENDED = ROOT / "taco_jax" / "compression" / recommended.FILE
MEGA, KILO = 1 << 20, 1 << 10
H200_PEAK, H200_SMS, H200_SHEET_GB_S, H100_SHEET_GB_S = 989.4e12, 132, 4800, 3350
TILE = (128, 256)  # of cuBLAS's products of bf16 on Hopper (nvjet ... 128x256, 256x128 in overlap_2gpus/trace.txt)
# Widths of the kernel times in overlap_2gpus/trace.txt: the 7B model's heads at tp 2, eight sequences of 2,048.
TRACE = {"sequences": 8, "length": 2048, "heads": 14, "head_dim": 128}


def summary(folder: str) -> dict:
    return json.loads((RESULTS / folder / "summary.json").read_text())


def fit(terms: Sequence[Sequence[float]], times: Sequence[float]) -> tuple[np.ndarray, float]:
    """(constants, largest relative error) of times = terms @ constants."""
    a, t = np.array(terms, float), np.array(times, float)
    scale = np.abs(a).max(axis=0)
    constants = nnls(a / scale / t[:, None], np.ones(len(t)))[0] / scale
    return constants, float(np.max(np.abs(a @ constants / t - 1)))


def products() -> dict:
    """Waves of tiles over the multiprocessors: t = waves (K + K0) / rate."""
    rows = [(16384, {"attn/out": 896, "mlp/down": 4736, "attn/in, backward": 1152, "mlp/in, backward": 9472}[name],
             row["product"]["us"]) for name, row in summary("product_h200").items()]  # fmt: skip
    rows += [(int(m), 4736, row["product"]["us"]) for m, row in summary("feedback_h200").items()]
    waves = lambda m: -(-(-(-m // TILE[0]) * -(-3584 // TILE[1])) // H200_SMS)
    (per_k, start), worst = fit([(waves(m) * k, waves(m)) for m, k, _ in rows], [us for *_, us in rows])
    rate = 2 * TILE[0] * TILE[1] / (per_k * 1e-6) * H200_SMS
    return {
        "tile": TILE, "peak": H200_PEAK, "share_of_peak": rate / H200_PEAK, "k0": start / per_k,
        "worst": worst, "rows": len(rows),
        "source": "product_h200, feedback_h200: products of bf16 on one H200",
    }  # fmt: skip


def attention() -> dict:
    """Shares of the bf16 peak of cuDNN's kernels, causal: half of the pairs, and those of the diagonal's tiles."""
    text = (RESULTS / "overlap_2gpus" / "trace.txt").read_text()
    us = lambda what: [float(x) for x in re.findall(rf"([\d.]+) us\s+cudnn\S+{what}", text)]
    t = TRACE
    pairs = t["sequences"] * t["heads"] * t["length"] * (t["length"] + TILE[0]) / 2
    shares = {}
    for name, kernel, products_ in (("forward", "fprop", 2), ("backward", "bprop", 5)):
        flops = 2 * products_ * pairs * t["head_dim"]
        shares[name] = flops / (np.mean(us(kernel)) * 1e-6) / H200_PEAK
    source = "overlap_2gpus/trace.txt: the mean times of cuDNN's two kernels on H200 (kernels of a step, not the step)"
    return shares | {"source": source}


def memory() -> dict:
    """The fastest copy, as a share of the data sheet's bandwidth."""
    cards, sheets = {}, {"H200": H200_SHEET_GB_S, "H100 80GB HBM3": H100_SHEET_GB_S}
    for card, sheet in sheets.items():
        copies = summary(f"codec_kernels_{card[:4].lower()}")["copies"]
        cards[card] = max(copies.values()) / sheet
    return {
        "share_of_sheet": cards,
        "sheet_gb_s": sheets,
        "source": "codec_kernels_h200, codec_kernels_h100: the fastest copy",
    }


def codecs() -> dict:
    """GB/s of each codec, kernel and operation."""
    cards = {}
    for card in ("H200", "H100 80GB HBM3"):
        found = summary(f"codec_kernels_{card[:4].lower()}")["codecs"]
        cards[card] = {
            codec: {kind: {op: row["gb_s"] for op, row in ops.items()} for kind, ops in kinds.items()}
            for codec, kinds in found.items()
        }
    return {"gb_s": cards, "source": "codec_kernels_h200, codec_kernels_h100"}


def feedback(share: float) -> dict:
    """Bytes of memory for each element that error feedback reads and writes more."""
    rows, times = [], []
    for m, row in summary("feedback_h200").items():
        for name, value in row.items():
            if name.endswith("sum, feedback"):
                more = value["us"] - row[name.removesuffix(", feedback")]["us"]
                rows.append((int(m) * 3584 / (share * H200_SHEET_GB_S * 1e3), 1.0))
                times.append(more)
    (per_element, us), worst = fit(rows, times)
    return {"bytes_per_element": per_element, "us": us, "worst": worst, "source": "feedback_h200"}


def codec_us(codec: str, n: int, ranks: int, kinds: dict) -> float:
    """Microseconds of the codec's kernels of a sum of n values of bf16: `taco_jax.forecast.cost.codec_seconds`."""
    wire, rates = CODECS[codec].wire_bytes(n), kinds[codec]["mosaic"]
    encode, decode = (2 * n + wire) / rates["encode"], (2 * n + wire) / rates["decode"]
    if ranks == 2:
        return (encode + (2 * n + 2 * n + wire) / rates["decode"]) / 1e3
    return (encode + decode + (wire + wire / ranks) / rates["reduce"]) / 1e3


def sums() -> list[tuple[str, int, str, int, float]]:
    """(link, ranks, way, elements, us) of every measured sum; a way is none, CODEC (one kernel) or CODEC:nccl."""
    out = []
    for folder, ranks in (("allreduce_2gpus", 2), ("allreduce_4gpus", 4), ("psum_small_2gpus", 2)):
        for kilo, ways in summary(folder).items():
            # Its README: the smallest size of that benchmark says how long a program takes to start.
            if (folder, kilo) != ("allreduce_2gpus", "4096"):
                out += [("nvlink", ranks, way, int(kilo) * KILO, row["us"]) for way, row in ways.items()]
    for folder, link, ranks in (("psum_2gpus_nvlink", "nvlink", 2), ("psum_nvlink", "nvlink", 4),
                                ("psum_2gpus_host", "host", 2), ("psum_host", "host", 4)):  # fmt: skip
        for mega, ways in summary(folder).items():
            for way, row in ways.items():
                if ":" not in way:  # those in chunks are another way
                    out.append((link, ranks, way if way == "none" else f"{way}:nccl", int(mega) * MEGA, row["us"]))
    text = (RESULTS / "moves_2gpus" / "README.md").read_text()
    for mega, way, *cells in re.findall(r"\| (\d+)M \| (\w+) \| ([\d., ]+) \| ([\d., ]+) \|", text):
        for us in re.findall(r"[\d.]+", " ".join(cells)):
            out.append(("host", 2, way if way == "none" else f"{way}:nccl", int(mega) * MEGA, float(us)))
    return out


def links(kinds: dict) -> dict:
    rows, found = sums(), {}
    for link in ("nvlink", "host"):
        found[link] = {"exact": {}, "hop": {}, "kernel": {}, "worst": {}}
        for ranks in (2, 4):
            of = [row for row in rows if row[:2] == (link, ranks)]
            ring = 2 * (ranks - 1) / ranks
            exact = [(2 * n, us) for _, _, way, n, us in of if way == "none"]
            lines = [(ring * b, us) for b, us in exact]
            other = found[link]["exact"].get("2")
            one_size = len({n for *_, n, _ in of}) == 1
            found[link]["exact"][str(ranks)], worst = _line(lines, other, steps(ranks) / steps(2), one_size=one_size)
            hops, terms = (1 if ranks == 2 else 2), []
            for _, _, way, n, us in of:
                codec, _, transport = way.partition(":")
                if transport == "nccl":
                    sent = hops * (ranks - 1) / ranks * CODECS[codec].wire_bytes(n) * (2 if ranks == 2 else 1)
                    terms.append((sent / hops, (us - codec_us(codec, n, ranks, kinds)) / hops))
            other = found[link]["hop"].get("2")
            if one_size and other is not None:
                start = found["start_us"]
                other = {"us": start + (other["us"] - start) * hop_steps(ranks) / hop_steps(2)}
            found[link]["hop"][str(ranks)], worst_hop = _line(terms, other, 1, one_size=one_size)
            found[link]["worst"][str(ranks)] = {"exact": worst, "hop": worst_hop}
            one = [(way, n, us) for _, _, way, n, us in of if way in CODECS and way != "none"]
            if one:
                terms = [(1, _sent(way, n, ranks), n) for way, n, _ in one]
                (us, per_byte, per_element), worst = fit(terms, [us for *_, us in one])
                kernel = {"us": us, "gb_s": 1 / per_byte / 1e3, "ns": per_element * 1e3}
                found[link]["kernel"][str(ranks)] = kernel
                found[link]["worst"][str(ranks)]["kernel"] = worst
        if link == "nvlink":
            # What a hop of a compressed message takes beside its steps: its kernels' start, and waiting for them.
            step = found[link]["exact"]["4"]["us"] / steps(4)
            found["start_us"] = found[link]["hop"]["4"]["us"] - hop_steps(4) * step
    found["nvlink"]["source"] = "allreduce_2gpus, allreduce_4gpus, psum_small_2gpus, psum_2gpus_nvlink, psum_nvlink"
    found["host"]["source"] = "psum_2gpus_host, psum_host, moves_2gpus (its sums)"
    return found


def _sent(codec: str, n: int, ranks: int) -> float:
    return CODECS[codec].wire_bytes(n) * (1 if ranks == 2 else 2 * (ranks - 1) / ranks)


def _line(rows: list[tuple[float, float]], other: dict | None, factor: float, *, one_size: bool) -> tuple[dict, float]:
    """(latency and rate, largest error) of (bytes, us) rows.

    Sums of one size alone say nothing of a latency: they take that of two ranks, `factor` times.
    """
    if one_size:
        us = 0.0 if other is None else other["us"] * factor
        (per_byte,), _ = fit([(b,) for b, _ in rows], [t - us for _, t in rows])
        worst = max(abs((us + b * per_byte) / t - 1) for b, t in rows)
    else:
        (us, per_byte), worst = fit([(1, b) for b, _ in rows], [t for _, t in rows])
    return {"us": us, "gb_s": 1 / per_byte / 1e3}, worst


def record() -> dict:
    """Returns what codecs cost in loss: relative changes with their standard errors, and where they are from."""
    training, prompts = {}, {}
    for name, row in summary("codec_ablation")["gpt2_124m"].items():
        source = f"codec_ablation: GPT-2 124M at tp 4, {row['steps']} steps"
        training[name] = {"change": row["difference"], "error": None, "runs": row["runs"], "source": source}
    found = summary("accuracy")
    for name, row in found["gpt2_124m"].items():
        source = f"accuracy: GPT-2 124M at tp 2, {row['steps']} steps"
        training[name] = {"change": row["difference"], "error": row["standard_error"], "runs": row["pairs"],
                          "source": source}  # fmt: skip
    for name, row in summary("perplexity_smollm2").items():
        source = "perplexity_smollm2: SmolLM2-135M at tp 3, perplexity"
        if "change" in row:
            prompts[name] = {"change": row["change"], "error": row["error"], "runs": 1, "source": source}
    for rows in (training, prompts):
        rows.pop("none", None)
    stages, gradients = other_axes()
    axes = {"stages": stages, "gradients": gradients, "weights": weights()}
    return {"bound": found["bound"], "training": training, "first_token": prompts} | axes


def other_axes() -> tuple[dict, dict]:
    """Returns what stages and data parallelism send, from runs in which all axes were compressed at once."""
    variants = summary("three_axes")["runs"]
    exact = variants["exact"]
    stages, gradients = {}, {}
    for variant, runs_ in variants.items():
        seeds = sorted(runs_.keys() & exact.keys())
        changes = [runs_[seed]["validation_loss"] / exact[seed]["validation_loss"] - 1 for seed in seeds]
        if variant == "exact" or not changes:
            continue
        tp, forward, backward, over_dp = three_axes_study.VARIANTS[variant]
        error = statistics.stdev(changes) / len(changes) ** 0.5 if len(changes) > 1 else None
        source = f"three_axes: 0.85M parameters, dp 2 x pp 2 x tp 2, all axes at once ({tp} over tp), 240 steps"
        row = {"change": statistics.mean(changes), "error": error, "runs": len(changes), "source": source}
        stages[f"{forward}:{backward}"], gradients[over_dp] = row, gradients.get(over_dp, row)
    return stages, gradients


def weights() -> dict:
    """Returns what codecs cost of the weights that ZeRO-1 sends back; nothing before weights_study.py has been run."""
    found = {}
    path = RESULTS / "weights" / "summary.json"
    for name, row in summary("weights").items() if path.is_file() else ():
        source = f"weights: 2.5M parameters, dp 4 with ZeRO-1, all else exact, {row['steps']} steps"
        found[name] = {key: row[key] for key in ("change", "error", "runs")} | {"source": source}
    found.pop("none", None)
    return found


def pruned(value):
    """Numbers to five digits, so that another machine's last bits write the same file."""
    if isinstance(value, dict):
        return {key: pruned(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [pruned(v) for v in value]
    return float(f"{value:.5g}") if isinstance(value, float | np.floating) else value


def main(arguments: Sequence[str]) -> int:
    parser = runs.parser(__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the file would change")
    args = parser.parse_args(arguments)
    try:
        kernels, copies = codecs(), memory()
        constants = {
            "product": products(), "attention": attention(), "memory": copies, "codec": kernels,
            "feedback": feedback(copies["share_of_sheet"]["H200"]), "links": links(kernels["gb_s"]["H200"]),
            "nvlink_gb_s": 450,
        }  # fmt: skip
        recorded = pruned(record())
        files = {
            PACKAGE / "constants.json": constants, PACKAGE / "record.json": recorded,
            RECOMMENDED: recommend.of_record(recorded),
        }  # fmt: skip
    except (OSError, KeyError, ValueError) as error:
        raise ConfigError(f"{RESULTS}: lacks what the fit reads ({error!r}); take a whole checkout") from None
    return write_files(files, args.check)


def write_files(files: dict[Path, dict], check: bool) -> int:
    """Writes the package's files, or says which would change. Returns the exit code."""
    changed = 0
    for path, content in files.items():
        text = json.dumps(pruned(content), indent=1) + "\n"
        if path.is_file() and path.read_text() == text:
            continue
        changed = 1
        if check:
            print(f"{path.relative_to(ROOT)} is not what the results say: python experiments/fit_forecast.py")
        else:
            path.write_text(text)
            print(f"wrote {path.relative_to(ROOT)}")
    return changed if check else 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
