"""Step time, loss and memory of one experiment with several codecs over several links, side by side.

    python experiments/link_study.py --config experiments/qwen7b.py --out experiments/results/qwen7b_tp4

Runs the trainer once per link and codec, in turn, each in its own process; other flags go to the trainer.

links     nvlink: as the machine is. host: NCCL_P2P_DISABLE=1, through host memory. socket: NCCL_SHM_DISABLE=1 too.
codecs    as of the trainer, or free: the exact program without its sums over tp, the ceiling (free_communication.py)
output    OUT/README.md (hardware, commit, command, table), OUT/summary.json, OUT/<link>-<codec>.jsonl (metrics)
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import runs

from taco_jax.config import cli

HERE = Path(__file__).parent
LINKS = {
    "nvlink": {},
    "host": {"NCCL_P2P_DISABLE": "1"},
    "socket": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
}
WARM_UP = 5  # steps that the median leaves out: allocation, autotuning, first collectives


def summarise(records: list[dict]) -> dict:
    """Median step time after the warm-up, its spread, first and last loss, and the peak memory of the device."""
    # The last step is waited for at once, out of the phase of the others.
    times = [r["step_seconds"] for r in records[WARM_UP:-1]] or [r["step_seconds"] for r in records]
    peaks = [r["peak_memory_bytes"] for r in records if r.get("peak_memory_bytes")]
    return {
        "ms": 1e3 * statistics.median(times),
        "spread_ms": 1e3 * (max(times) - min(times)),
        "first_loss": records[0]["loss"],
        "last_loss": records[-1]["loss"],
        "steps": records[-1]["step"],
        "peak_gb": max(peaks) / 1e9 if peaks else float("nan"),
        "comm_mb": records[-1]["comm_bytes"] / 1e6,
    }


def with_speedup(results: dict[str, dict[str, dict]], codecs: list[str]) -> dict[str, dict[str, dict]]:
    """{link: {codec: values}} with "speedup" against the first codec on the same link."""
    for of_link in results.values():
        if codecs[0] in of_link:
            for values in of_link.values():
                values["speedup"] = of_link[codecs[0]]["ms"] / values["ms"]
    return results


def table(results: dict[str, dict[str, dict]]) -> str:
    columns = ("step ms (median)", "spread ms", "speed-up", "first loss", "last loss", "peak GB", "MB sent a step")
    lines = [f"| link | codec | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
    for link, of_link in results.items():
        for codec, r in of_link.items():
            ratio = f"{r['speedup']:.2f}x" if "speedup" in r else "n/a"
            # A loss that was not finite is null in the metrics.
            losses = ["n/a" if r[key] is None else f"{r[key]:.4f}" for key in ("first_loss", "last_loss")]
            lines.append(
                f"| {link} | {codec} | {r['ms']:.1f} | {r['spread_ms']:.1f} | {ratio} | {' | '.join(losses)} | "
                f"{r['peak_gb']:.1f} | {r['comm_mb']:.1f} |"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    parser = runs.parser(__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--links", default="nvlink,host")
    parser.add_argument("--codecs", default="none,taco")
    parser.add_argument("--commit", default=None, help="commit to name where there is no git")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each run")
    args, flags = parser.parse_known_args(arguments)
    codecs, links = runs.codecs(args.codecs, more=["free"]), runs.choices("--links", args.links, LINKS)
    runs.file("--config", Path(args.config), "name an experiment, such as experiments/qwen7b.py")
    timeout = runs.limit("--timeout", args.timeout)
    runs.experiment(args.config, flags, {"metrics.every": "the medians are over steps"}, validated=False)
    runs.folder("--out", args.out)
    results, failures = {}, []
    for link in links:
        for codec in codecs:
            with tempfile.TemporaryDirectory() as folder:
                workdir = Path(folder) / "run"
                try:
                    program = [str(HERE / "free_communication.py")] if codec == "free" else runs.TRAINER
                    own = runs.codec_flags("none" if codec == "free" else codec)
                    records = runs.train(
                        args.config, workdir, [*own, *flags], env=LINKS[link], timeout=timeout, program=program
                    )
                except runs.FAILURES as error:
                    failures.append(f"{link}/{codec}: {error}")
                    print("FAILED", failures[-1], flush=True)
                    continue
            runs.keep(records, args.out / f"{link}-{codec.replace(':', '-')}.jsonl")
            results.setdefault(link, {})[codec] = summarise(records)
            report = [
                *runs.header(f"{Path(args.config).stem}: codecs over links", args.commit),
                f"Medians over the steps after the first {WARM_UP}, without the last.",
                f"Speed-up: against `{codecs[0]}` on the same link.",
                "",
                table(with_speedup(results, codecs)),
                *(f"\nfailed: {f.splitlines()[0]}" for f in failures),
            ]
            runs.write(args.out, report, results)
            print(table(results), flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
