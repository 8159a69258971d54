"""Step time, loss and memory of one experiment with several codecs over several links, side by side.

Runs the trainer once per link and codec, in turn, each in its own process, and writes one table.

    python experiments/link_study.py --config experiments/qwen7b.py --out experiments/results/qwen7b_tp4

links     nvlink: as the machine is. host: NCCL_P2P_DISABLE=1, through host memory. socket: NCCL_SHM_DISABLE=1 too.
output    OUT/README.md (hardware, commit, command, table), OUT/summary.json, OUT/<link>-<codec>.jsonl (metrics)
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

LINKS = {
    "nvlink": {},
    "host": {"NCCL_P2P_DISABLE": "1"},
    "socket": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
}
WARM_UP = 5  # steps that the median leaves out: allocation, autotuning, first collectives


def run(config: str, link: str, codec: str, workdir: Path, extra: list[str], timeout: float) -> list[dict]:
    """The metrics of one training run, one record a step. RuntimeError with the end of its output if it fails."""
    command = [sys.executable, "-m", "taco_jax.train", "--config", config, "--workdir", str(workdir)]
    command += ["--compression.forward", codec, "--compression.backward", codec, *extra]
    environment = os.environ | LINKS[link] | {"PYTHONUNBUFFERED": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    print(done.stdout[-1500:], flush=True)
    if done.returncode:
        raise RuntimeError(f"{link}/{codec}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def summarise(records: list[dict]) -> dict:
    """Median step time after the warm-up, its spread, first and last loss, and the peak memory of the device."""
    # The last step is waited for at once, out of the phase of the others.
    times = [r["step_seconds"] for r in records[WARM_UP:-1]] or [r["step_seconds"] for r in records]
    peaks = [r["peak_memory_bytes"] for r in records if r.get("peak_memory_bytes")]
    return {
        "ms": 1e3 * statistics.median(times),
        "spread": 1e3 * (max(times) - min(times)),
        "first": records[0]["loss"],
        "last": records[-1]["loss"],
        "steps": records[-1]["step"],
        "peak_gb": max(peaks) / 1e9 if peaks else float("nan"),
        "comm_mb": records[-1]["comm_bytes"] / 1e6,
    }


def table(results: dict[tuple[str, str], dict], codecs: list[str]) -> str:
    """Markdown; speed-up is against the first codec on the same link."""
    rows = [
        "| link | codec | step ms (median) | spread ms | speed-up | loss first | loss last | peak GB | MB sent a step |"
    ]
    rows.append("|---|---|---|---|---|---|---|---|---|")
    for (link, codec), r in results.items():
        base = results.get((link, codecs[0]))
        ratio = f"{base['ms'] / r['ms']:.2f}x" if base else "n/a"
        rows.append(
            f"| {link} | {codec} | {r['ms']:.1f} | {r['spread']:.1f} | {ratio} | {r['first']:.4f} | {r['last']:.4f} | "
            f"{r['peak_gb']:.1f} | {r['comm_mb']:.1f} |"
        )
    return "\n".join(rows)


def nested(results: dict[tuple[str, str], dict], codecs: list[str]) -> dict:
    """The table as {link: {codec: values}}, with "speedup" against the first codec on the same link."""
    out: dict = {}
    for (link, codec), r in results.items():
        base = results.get((link, codecs[0]))
        out.setdefault(link, {})[codec] = r | ({"speedup": base["ms"] / r["ms"]} if base else {})
    return out


def hardware() -> str:
    """What the runs ran on, as JAX and the driver say. In a process of its own, so that no memory is taken here."""
    code = "import jax; d = jax.devices(); print(len(d), 'x', d[0].device_kind, '/ jax', jax.__version__)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--links", default="nvlink,host")
    parser.add_argument("--codecs", default="none,taco")
    parser.add_argument("--commit", default=None, help="commit to name where there is no git")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each run")
    args, extra = parser.parse_known_args()
    codecs = args.codecs.split(",")
    args.out.mkdir(parents=True, exist_ok=True)
    commit = args.commit or subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    results, failures = {}, []
    for link in args.links.split(","):
        for codec in codecs:
            with tempfile.TemporaryDirectory() as folder:
                workdir = Path(folder) / "run"
                try:
                    records = run(args.config, link, codec, workdir, extra, args.timeout)
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    failures.append(f"{link}/{codec}: {error}")
                    print("FAILED", failures[-1], flush=True)
                    continue
                shutil.copy(workdir / "metrics.jsonl", args.out / f"{link}-{codec}.jsonl")
            results[link, codec] = summarise(records)
            text = [
                f"# {Path(args.config).stem}: codecs over links",
                "",
                f"date {datetime.date.today()}, commit {commit}, {hardware()}",
                "",
                f"    python {' '.join(sys.argv)}",
                "",
                f"Medians over the steps after the first {WARM_UP}, without the last. Speed-up: against `{codecs[0]}`, same link.",
                "",
                table(results, codecs),
                "",
                *(f"failed: {f.splitlines()[0]}" for f in failures),
            ]
            (args.out / "README.md").write_text("\n".join(text).rstrip() + "\n")
            (args.out / "summary.json").write_text(json.dumps(nested(results, codecs), indent=1) + "\n")
            print(table(results, codecs), flush=True)
    if failures:
        sys.exit(1)


if __name__ == "__main__":
    main()
