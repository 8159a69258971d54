"""Does compressing all three axes at once change the loss? Pairs of runs by seed, on emulated devices.

    python experiments/three_axes_study.py --out experiments/results/three_axes

Trains experiments/three_axes.py (dp 2, pp 2, tp 2) once for each seed and variant, in a process of its own; other flags
go to the trainer of every run. Runs that OUT/summary.json has are kept, so a study can be continued or extended.

variant     exact: nothing compressed. compressed: tp in int8h, stages in int8_token forward and e4m3h backward,
            gradients over dp in int8h. taco: as compressed, tp in taco. tah4: as compressed, activations between stages
            in 3 or 4 bits. All with ZeRO-1
criterion   as in seed_study.py: paired by seed, mean difference to `exact` within 0.5 %, or means within one standard
            deviation of its losses
output      OUT/summary.json (every run and the comparison), OUT/README.md (hardware, commit, command, table),
            OUT/loss.png
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import runs
from seed_study import compared, summarise

from taco_jax.config import ConfigError, cli

CONFIG = Path(__file__).parent / "three_axes.py"
BASE = "exact"
# (tp both ways, stages forward, stages backward, gradients over dp)
VARIANTS = {
    BASE: ("none", "none", "none", "none"),
    "compressed": ("int8h", "int8_token", "e4m3h", "int8h"),
    "taco": ("taco", "int8_token", "e4m3h", "int8h"),
    "tah4": ("int8h", "tah4", "e4m3h", "int8h"),
}
# Flags of the trainer that the study sets itself, beside runs.NOT_HANDED_ON.
OWN = {
    "seed": "the seeds are those of --seeds",
    "pipeline.forward": "it is the variant's",
    "pipeline.backward": "it is the variant's",
    "data-parallel.gradients": "it is the variant's",
    "checkpoint.enabled": "a run's folder is gone after it",
}
EVERY = 10  # steps between the points of a curve
KEYS = ("validation_loss", "seconds", "comm_bytes", "comm_bytes_bf16", "steps", "curve")


def flags_of(variant: str) -> list[str]:
    tp, forward, backward, gradients = VARIANTS[variant]
    return [
        *runs.codec_flags(tp), "--pipeline.forward", forward, "--pipeline.backward", backward,
        "--data-parallel.gradients", gradients, "--data-parallel.zero1",
    ]  # fmt: skip


def train(flags: Sequence[str], timeout: float | None) -> dict:
    """One run: what the summary keeps of it. Raises runs.FAILURES."""
    with tempfile.TemporaryDirectory() as folder:
        records = runs.train(str(CONFIG), Path(folder) / "run", flags, timeout=timeout)
    last = records[-1]
    if not runs.is_number(last.get("validation_loss")):
        raise RuntimeError(f"no validation loss at its last step, {last['step']}: not kept")
    numbers = {key: last[key] for key in ("validation_loss", "comm_bytes", "comm_bytes_bf16")}
    seconds = statistics.median(r["step_seconds"] for r in records)
    curve = [[r["step"], r["loss"]] for r in records if r["step"] % EVERY == 0]
    return numbers | {"seconds": seconds, "steps": last["step"], "curve": curve}


def read(path: Path) -> dict[str, dict[str, dict]]:
    """{variant: {seed: run}} of a summary; nothing where there is none. Raises ConfigError if it is no summary."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text())["runs"]
        whole = all(key in run for by_seed in found.values() for run in by_seed.values() for key in KEYS)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: is no summary of this study ({error!r}); delete it to start again") from None
    runs.require(whole and set(found) <= set(VARIANTS), path, "...", "holds other runs; delete it to start again")
    return found


def report(out: Path, found: dict[str, dict[str, dict]], named_commit: str | None) -> None:
    """Writes what there is; the comparison and the picture once `exact` has a run."""
    found = {variant: found[variant] for variant in VARIANTS if found.get(variant)}
    losses = {v: {seed: run["validation_loss"] for seed, run in by.items()} for v, by in found.items()}
    comparison = summarise(losses, BASE) if BASE in found else {}
    for variant, row in comparison.items():
        last = list(found[variant].values())[-1]
        row["ratio"] = last["comm_bytes_bf16"] / (last["comm_bytes"] or 1)
    part = out / "summary.part"
    part.write_text(json.dumps({"runs": found, "comparison": comparison}, indent=1) + "\n")
    part.replace(out / "summary.json")
    if not comparison:
        return
    lines = [*runs.header("Three axes compressed at once: losses by seed", named_commit), *table(comparison)]
    (out / "README.md").write_text("\n".join([*lines, "", "![loss](loss.png)"]) + "\n")
    print("\n".join(table(comparison)), flush=True)
    plot(found, out / "loss.png")


def table(comparison: dict) -> list[str]:
    lines = ["| variant | tp | pp forward, backward | dp gradients | traffic of tp and pp | validation loss | std | "
             "difference | equal | by seed |", "|---" * 10 + "|"]  # fmt: skip
    for variant, row in comparison.items():
        tp, forward, backward, gradients = VARIANTS[variant]
        seeds = ", ".join(f"{seed}: {loss:.4f}" for seed, loss in row["seeds"].items())
        lines.append(
            f"| {variant} | {tp} | {forward}, {backward} | {gradients} | {row['ratio']:.2f}x less | {row['mean']:.4f} "
            f"| {row['std']:.4f} | {compared(row)} {seeds} |"
        )
    return lines


def plot(found: dict[str, dict[str, dict]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    for k, (variant, by_seed) in enumerate(found.items()):
        for run in by_seed.values():
            label = variant if run is next(iter(by_seed.values())) else None
            left.plot(*zip(*run["curve"]), color=f"C{k}", alpha=0.6, label=label)
        right.plot([k] * len(by_seed), [run["validation_loss"] for run in by_seed.values()], "o", color=f"C{k}")
    left.set_xlabel("step")
    left.set_ylabel("training loss, nats per byte")
    left.legend()
    right.set_xticks(range(len(found)), list(found))
    right.set_ylabel("validation loss at the end")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments: Sequence[str]) -> int:
    parser = runs.parser(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--variants", default="exact,compressed")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--commit", default=None, help="commit to name where there is no git")
    parser.add_argument("--timeout", type=float, default=None, help="seconds for each run; default: no limit")
    args, flags = parser.parse_known_args(arguments)
    variants = runs.choices("--variants", args.variants, VARIANTS)
    seeds = [str(seed) for seed in runs.numbers("--seeds", args.seeds, 0)]
    runs.experiment(str(CONFIG), flags, OWN)
    timeout = runs.limit("--timeout", args.timeout)
    found, failures = read(args.out / "summary.json"), 0
    runs.folder("--out", args.out)
    for seed in seeds:
        for variant in variants:
            if seed in found.get(variant, {}):
                continue
            try:
                run = train([*flags_of(variant), "--seed", seed, "--checkpoint.no-enabled", *flags], timeout)
            except runs.FAILURES as error:
                failures += 1
                print(f"FAILED {variant}, seed {seed}: {error}", file=sys.stderr, flush=True)
                continue
            found.setdefault(variant, {})[seed] = run
            report(args.out, found, args.commit)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
