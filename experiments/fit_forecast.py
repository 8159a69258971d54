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
from taco_jax.forecast.cost import limited
from taco_jax.forecast.links import hop_steps, steps

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results"
PACKAGE = ROOT / "taco_jax" / "forecast"
RECOMMENDED = ROOT / "taco_jax" / "compression" / recommended.FILE
MEGA, KILO = 1 << 20, 1 << 10
H200_PEAK, H200_SMS, H200_SHEET_GB_S, H100_SHEET_GB_S = 989.4e12, 132, 4800, 3350
# Tiles of products of bf16 on Hopper: cuBLAS's (nvjet ... in overlap_2gpus/trace.txt) and XLA's own, and parts of k.
TILES = (
    (128, 256), (256, 128), (128, 192), (192, 128), (128, 128), (64, 256), (256, 64), (128, 64), (64, 128), (64, 64),
)  # fmt: skip
SPLITS = (1, 2, 4, 8, 16)
TILE_OF_PAIRS = 128
LOADS = (0, 4, 8, 16, 24, 32, 48, 64)  # FLOPs' worth of each value that a step of k brings: tried one by one
LONG_MATTERS = 0.75  # a step's time is that of its long products
BOUND_BY_MEMORY = 0.75  # of the time, that memory traffic alone would take


def summary(folder: str) -> dict:
    return json.loads((RESULTS / folder / "summary.json").read_text())


def fit(terms: Sequence[Sequence[float]], times: Sequence[float], power: float = 1.0) -> tuple[np.ndarray, float]:
    """(constants, largest relative error) of times = terms @ constants.

    power: errors count by times^power; 1 for relative errors, less where long times matter more.
    """
    a, t = np.array(terms, float), np.array(times, float)
    scale, weight = np.abs(a).max(axis=0), t**power
    constants = nnls(a / scale / weight[:, None], t / weight)[0] / scale
    return constants, float(np.max(np.abs(a @ constants / t - 1)))


def alone(folder: str = "kernels_h200") -> dict[str, list[dict]]:
    """Kernels timed alone (experiments/bench_kernels.py), the mean of two GPUs of one host."""
    first, second = summary(folder), summary(f"{folder}_second")
    mean = lambda row, other: row | {"us": (row["us"] + other["us"]) / 2}
    return {kind: [mean(*pair) for pair in zip(rows, second[kind], strict=True)] for kind, rows in first.items()}


def starts() -> dict:
    """Microseconds from one small kernel's end to the next one's, in a straight program."""
    us = {row["what"]: row["us"] for row in alone()["starts"]}
    return {
        "us": us["straight"], "host_us": us["from host to host"],
        "source": "kernels_h200: kernels of 4 kB, one after the other; a program of one from the host to the host",
    }  # fmt: skip


def sums(share: float) -> dict:
    """Sums of an array over its first dim: microseconds of each and the share of the fastest copy's bandwidth."""
    rows = [row for row in alone()["passes"] if row["what"] == "sum"]
    terms = [(1.0, row["bytes"] / (share * H200_SHEET_GB_S * 1e3)) for row in rows]
    (us, slower), worst = fit(terms, [row["us"] for row in rows])
    return {"us": us, "share_of_copy": 1 / max(slower, 1.0), "worst": worst, "source": "kernels_h200"}


def sustained() -> list[dict]:
    """Rows of products beside passes after seconds of load."""
    return alone("kernels_sustained")["mixed"]


def limit_of_power(mixed: Sequence[dict]) -> dict:
    """How many times as long products take where much of the time is multiplication, as measured, by activity.

    Activity is FLOP/s, the mean over all of the time without that limit, as a share of the peak.
    """
    rows = sorted(mixed, key=lambda row: -row["passes"])
    (pass_us,) = (row["us"] for row in alone()["passes"]
                  if row["what"] == "elementwise" and row["bytes"] * rows[0]["passes"] == rows[0]["bytes"])  # fmt: skip
    fast = min(row["us"] - row["passes"] * pass_us for row in alone()["mixed"])
    activity = [2e6 * row["m"] ** 3 / (fast + row["passes"] * pass_us) / H200_PEAK for row in rows]
    slower = [max(1.0, (row["us"] - row["passes"] * pass_us) / fast) for row in rows]
    source = "kernels_sustained: a product of 8,192^3 with passes over memory behind it, after seconds of load"
    return {"activity": activity, "slower": slower, "alone": slower[-1], "source": source}


def without_limit(us: float, flops: float, power: dict) -> float:
    """Microseconds that a kernel of so many FLOPs, alone all the time, would take at its highest clocks."""
    low, high = us / 2, us
    for _ in range(50):
        middle = (low + high) / 2
        activity = 1e6 * flops / middle / H200_PEAK
        low, high = (middle, high) if middle * limited(activity, power) < us else (low, middle)
    return high


def products(start_us: float, share: float, power: dict) -> dict:
    """The constants of `taco_jax.forecast.cost._product`, of which each product takes the tile that is its fastest.

    Fit and choice alternate until no choice changes, for each of LOADS; the load that leaves the least error is taken.
    Products that are bound by memory say nothing of tiles.
    """
    per_us = share * H200_SHEET_GB_S * 1e3
    rows = [(r["m"], r["n"], r["k"], 4 if r["form"] == "dw" else 2,
             without_limit(r["us"], 2.0 * r["m"] * r["n"] * r["k"], power)) for r in alone()["products"]]  # fmt: skip
    of_tiles = [row for row in rows if _moved_us(row[:4], per_us) < BOUND_BY_MEMORY * row[-1]]
    found = min((_tiles(of_tiles, load, start_us, per_us=per_us) for load in LOADS), key=lambda c: c["squares"])
    errors = [(_product_us(found, row[:4], per_us) + start_us) / row[-1] - 1 for row in rows]
    return {
        "tiles": TILES, "splits": SPLITS, "peak": H200_PEAK, "share_of_peak": found["share"], "k0": found["k0"],
        "load": found["load"], "memory": found["memory"], "start_us": found["start_us"],
        "worst": max(map(abs, errors)), "median": statistics.median(map(abs, errors)), "rows": len(rows),
        "source": "kernels_h200: products of bf16 on one H200, without the limit of power",
    }  # fmt: skip


def _tiles(rows: Sequence[tuple], load: float, start_us: float, *, per_us: float) -> dict:
    found = {"share": 0.75, "k0": 100.0, "load": load, "memory": 0.3, "start_us": 3.0}
    seen = set()
    while True:
        terms, times, chosen = [], [], []
        for *shape, us in rows:
            options = [(_tile_us(found, *term), tile, split, term) for tile in TILES for split in SPLITS
                       for term in [_tile_terms(*shape[:3], tile, split, per_us=per_us)]]  # fmt: skip
            _, tile, split, (flops, areas, loads, parts) = min(options)
            chosen.append((tile, split))
            terms.append((flops + load * loads, areas, _moved_us(shape, per_us), 1.0))
            times.append(us - start_us - parts)
        (per_flop, k0, beside, more), _ = fit(terms, times, LONG_MATTERS)
        found = {
            "share": H200_SMS / per_flop / 1e-6 / H200_PEAK, "k0": k0 / per_flop, "load": load,
            "memory": min(1.0, beside), "start_us": more,
        }  # fmt: skip
        expected = [_product_us(found, shape, per_us) + start_us for *shape, _ in rows]
        found["squares"] = sum(((t - row[-1]) / row[-1] ** LONG_MATTERS) ** 2 for t, row in zip(expected, rows))
        if tuple(chosen) in seen:
            return found
        seen.add(tuple(chosen))


def _tile_terms(m: int, n: int, k: int, tile: tuple[int, int], split: int, *, per_us: float) -> tuple[float, ...]:
    """Returns what a product's time is linear in (FLOPs, areas of tiles, values loaded), and us of adding up parts."""
    rows, columns = tile
    waves, steps_of_k = -(-(-(-m // rows) * -(-n // columns) * split) // H200_SMS), -(-k // split)
    area = 2 * rows * columns * waves
    parts = 8 * split * m * n / per_us if split > 1 else 0.0
    return area * steps_of_k, area, steps_of_k * (rows + columns) * waves, parts


def _tile_us(c: dict, flops: float, areas: float, loads: float, parts: float) -> float:
    per_flop = 1e6 * H200_SMS / (c["share"] * H200_PEAK)
    return per_flop * (flops + c["k0"] * areas + c["load"] * loads) + parts


def _moved_us(shape: Sequence[int], per_us: float) -> float:
    m, n, k, out = shape
    return (2 * (m * k + k * n) + out * m * n) / per_us


def _product_us(c: dict, shape: Sequence[int], per_us: float) -> float:
    terms = [_tile_terms(*shape[:3], tile, split, per_us=per_us) for tile in TILES for split in SPLITS]
    moved = _moved_us(shape, per_us)
    return max(moved, min(_tile_us(c, *term) for term in terms) + c["memory"] * moved) + c["start_us"]


def attention(start_us: float) -> dict:
    """Picoseconds a FLOP and a pair of query and key of cuDNN's kernels, causal: half of the pairs, and those of the
    diagonal's tiles."""
    constants = {"source": "kernels_h200: cuDNN's two kernels on one H200"}
    for what, products_ in (("forward", 2), ("backward", 5)):
        terms, times = [], []
        for row in alone()["attention"]:
            if row["what"] == what:
                length = row["length"]
                pairs = row["sequences"] * row["heads"] * length * (length + min(TILE_OF_PAIRS, length)) / 2
                terms.append((2 * products_ * pairs * row["width"], pairs, 1.0))
                times.append(row["us"] - start_us)
        (per_flop, per_pair, us), worst = fit(terms, times)
        constants[what] = {"ps_per_flop": 1e6 * per_flop, "ps_per_pair": 1e6 * per_pair, "us": us, "worst": worst}
    return constants


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
    """Bytes of memory for each element that error feedback reads and writes more, and microseconds of a sum."""
    rows, times = [], []
    for m, row in json.loads((RESULTS / "chains_2gpus_host" / "feedback.json").read_text()).items():
        for name, value in row.items():
            if name.endswith("sum, feedback"):
                more = value["us"] - row[name.removesuffix(", feedback")]["us"]
                rows.append((int(m) * 3584 / (share * H200_SHEET_GB_S * 1e3), 1.0))
                times.append(more)
    (per_element, us), worst = fit(rows, times)
    source = "chains_2gpus_host: sums of int4h after their product, over host memory"
    return {"bytes_per_element": per_element, "us": us, "worst": worst, "source": source}


def codec_us(codec: str, n: int, ranks: int, kinds: dict) -> float:
    """Microseconds of the codec's kernels of a sum of n values of bf16: `taco_jax.forecast.cost.codec_seconds`."""
    wire, rates = CODECS[codec].wire_bytes(n), kinds[codec]["mosaic"]
    encode, decode = (2 * n + wire) / rates["encode"], (2 * n + wire) / rates["decode"]
    if ranks == 2:
        return (encode + (2 * n + 2 * n + wire) / rates["decode"]) / 1e3
    return (encode + decode + (wire + wire / ranks) / rates["reduce"]) / 1e3


def of_a_step(start_us: float, share: float) -> dict:
    """Kernels by their names in traces of steps.

    Zeros as a share of the fastest copy's bandwidth; GELU; how much longer what goes beside messages takes, as a share
    of these; copies by copy engines; how much longer products take where two GPUs wait for the slower one.
    """
    found = summary("kernels_in_step")
    per_us = share * H200_SHEET_GB_S * 1e3
    zeros = statistics.median(row["bytes"] / row["us"] / per_us for row in found["zeros"])
    (gelu,) = found["gelu"]
    source = "kernels_in_step: lengths of kernels, not of the step"
    ways = found["beside_messages"]
    longer = (sum(ways["none"].values()) - sum(ways["free"].values())) / ways["hidden"]
    (host,) = found["beside_messages_over_host"]
    sent = [(1.0, CODECS[row["codec"]].wire_bytes(row["values"])) for row in found["copies"]]
    (copy_us, per_byte), _ = fit(sent, [row["us"] for row in found["copies"]])
    return {
        "beside": {"longer": longer, "over_host": host["us"] / host["alone_us"] - 1, "source": source},
        "copy": {"us": copy_us, "gb_s": 1 / per_byte / 1e3, "source": source},
        "slowest": {"longer": statistics.median(row["longer"] for row in found["slowest"]), "source": source},
        "zeros": {"share_of_copy": zeros, "source": source},
        "gelu": {"ps_per_value": 1e6 * (gelu["us"] - start_us) / gelu["values"], "source": source},
    }  # fmt: skip


def measured_sums() -> list[tuple[str, int, str, int, float]]:
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
    rows, found = measured_sums(), {}
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
        kernels, copies, start = codecs(), memory(), starts()
        share, power = copies["share_of_sheet"]["H200"], limit_of_power(alone()["mixed"])
        constants = {
            "start": start, "power": limit_of_power(sustained()), "product": products(start["us"], share, power),
            "attention": attention(start["us"]), "sum": sums(share), **of_a_step(start["us"], share),
            "memory": copies, "codec": kernels,
            "feedback": feedback(share), "links": links(kernels["gb_s"]["H200"]),
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
