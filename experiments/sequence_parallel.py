"""Measures what sequence parallelism saves by length and by what is recomputed: memory of the step, and bytes sent.

    python experiments/sequence_parallel.py --config experiments/qwen7b.py --out experiments/results/sequence_parallel

Compiles the trainer's step with and without it for each of --remats and --lengths, as the dry run does (nothing is
allocated or run); other flags go to the trainer. Memory is XLA's temporaries, in which gradients are.

output    OUT/README.md (hardware, commit, command, table), OUT/summary.json
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import runs

from taco_jax.config import TrainConfig, cli
from taco_jax.config.checks import REMAT

OWN = {
    "sequence-parallel": "the study compares both",
    "data.sequence-length": "the lengths are those of --lengths",
    "remat": "the modes are those of --remats",
}


def measure(config: TrainConfig, remat: str, length: int, on: bool) -> dict[str, float]:
    from taco_jax.mesh import make_mesh
    from taco_jax.train import dry_run, step

    data = dataclasses.replace(config.data, sequence_length=length)
    config = dataclasses.replace(config, data=data, remat=remat, sequence_parallel=on)
    program = step.build(config, make_mesh(config.mesh.dp, 1, config.mesh.tp))
    memory = dry_run.memory(program)
    rows = program.table.rows()
    return {
        "temporary_gb": memory.temporary / 1e9,
        "peak_gb": memory.peak / 1e9,
        "activations_mb": sum(r.bytes for r in rows if r.kind == "activation") / 1e6,
        "other_tp_mb": sum(r.bytes for r in rows if r.kind == "other" and r.axis == ("tp",)) / 1e6,
    }


def table(found: dict[str, dict]) -> list[str]:
    names = ("temporaries, GB", "activations sent over tp, MB", "other over tp, MB")
    lines = ["| remat | tokens | " + " | ".join(f"{name} | with" for name in names) + " | memory saved |"]
    lines.append("|---" * 9 + "|")
    for case, by in found.items():
        remat, length = case.split("-")
        cells, off, on = [remat, length], by["off"], by["on"]
        for key in ("temporary_gb", "activations_mb", "other_tp_mb"):
            cells += [f"{off[key]:.1f}", f"{on[key]:.1f}"]
        cells.append(f"{by['saved']:.1%}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main(arguments: Sequence[str]) -> None:
    parser = runs.parser(__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lengths", default="512,2048")
    parser.add_argument("--remats", default="none,full")
    parser.add_argument("--commit", default=None, help="commit to name where there is no git")
    args, flags = parser.parse_known_args(arguments)
    lengths, remats = runs.numbers("--lengths", args.lengths, 1), runs.choices("--remats", args.remats, REMAT)
    runs.file("--config", Path(args.config), "name an experiment, such as experiments/qwen7b.py")
    config = runs.experiment(args.config, flags, OWN, validated=False)
    mesh = config.mesh
    runs.require(mesh.tp > 1 and mesh.pp == 1, "mesh", f"pp {mesh.pp}, tp {mesh.tp}", "needs pp 1 and tp 2 or more")
    for length in lengths:
        runs.require(length % mesh.tp == 0, "--lengths", length, f"must be a multiple of mesh.tp={mesh.tp}")
    runs.folder("--out", args.out)
    cli.select_devices(config.devices)
    found: dict[str, dict] = {}
    for remat, length in itertools.product(remats, lengths):
        off, on = (measure(config, remat, length, on) for on in (False, True))
        saved = 1 - on["temporary_gb"] / off["temporary_gb"]
        found[f"{remat}-{length}"] = {"off": off, "on": on, "saved": saved}
        sequences = config.global_batch // (mesh.dp * config.accumulation)
        title = f"{Path(args.config).stem}: sequence parallelism, tp {mesh.tp}, {sequences} sequences on a device"
        lines = [*runs.header(title, args.commit), *table(found)]
        (args.out / "README.md").write_text("\n".join(lines) + "\n")
        (args.out / "summary.json").write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(table(found)), flush=True)


if __name__ == "__main__":
    sys.exit(cli.run(main))
