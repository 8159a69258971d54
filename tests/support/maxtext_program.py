"""MaxText as its package is, in a small dense configuration on emulated devices."""

import importlib.util
import json
import sys
from pathlib import Path

from helpers import run_python

MODULE = "maxtext.trainers.pre_train.train"
PLANS = {  # axes -> what goes compressed
    "tensor 4": ({"ici_tensor_parallelism": 4}, ["tensor=int8h"]),
    "fsdp 2 x tensor 2": (
        {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2},
        ["tensor=int8h", "fsdp=int8h"],
    ),
}


def settings(folder: Path, axes: dict[str, int], steps: int, **more) -> list[str]:
    """The program's arguments: its base configuration, made small, without a network, caches or other services."""
    base = Path(importlib.util.find_spec("maxtext").origin).parent / "configs" / "base.yml"
    values = {
        "run_name": "run", "base_output_directory": folder, "dataset_type": "synthetic", "hardware": "cpu",
        "steps": steps, "metrics_file": folder / "metrics.jsonl", "jax_cache_dir": "", "attention": "dot_product",
        "skip_jax_distributed_system": True, "enable_checkpointing": False, "enable_goodput_recording": False,
        "monitor_goodput": False, "async_checkpointing": False, "base_num_decoder_layers": 2, "base_emb_dim": 128,
        "base_mlp_dim": 256, "base_num_query_heads": 4, "base_num_kv_heads": 4, "head_dim": 32, "vocab_size": 512,
        "max_target_length": 64, "per_device_batch_size": 2,
    } | axes | more  # fmt: skip
    return [str(base), *(f"{key}={str(v).lower() if isinstance(v, bool) else v}" for key, v in values.items())]


def run(folder: Path, axes: dict[str, int], steps: int, plan: list[str] | None = None, **more) -> list[float]:
    """Runs MaxText's own command, with a plan through `taco_jax.run`. Returns the loss of every step.

    folder: gets its metrics, the report of what was compressed (report.txt), and its compiled programs (hlo/).
    """
    folder.mkdir(exist_ok=True)
    program = ["-m", MODULE, *settings(folder, axes, steps, **more)]
    if plan is not None:
        report = ["--min-bytes", "0", "--require", "0.95", "--report", folder / "report.txt"]
        program = ["-m", "taco_jax.run", "--compress", *plan, *report, "--", *program]
    dump = f"--xla_dump_to={folder / 'hlo'} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=jit_train_step"
    flags = f"--xla_force_host_platform_device_count=4 {dump}"
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "DECOUPLE_GCLOUD": "TRUE"}
    run_python(program, devices=None, env=environment, cwd=folder)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["learning/loss"] for line in lines]


def compiled_step(folder: Path) -> str:
    """The text of the compiled training step of a run."""
    (path,) = (folder / "hlo").glob("*jit_train_step*cpu_after_optimizations.txt")
    return path.read_text()


def gradients(arguments: list[str], plan: list[str]) -> None:
    """Prints, of MaxText's own loss: losses and slopes of gradients, exact and compressed, and whether the exact
    gradients afterwards are those before, bit for bit."""
    import jax
    import numpy as np
    from flax import nnx
    from maxtext.trainers.pre_train import train
    from maxtext.utils import train_utils

    import taco_jax

    config, recorder = train.initialize(["", *arguments])
    _, _, _, _, mesh, _, _, loader, _, _, state = train_utils.setup_train_loop(config, recorder)
    graph, params, rest = nnx.split(state.model, nnx.Param, ...)
    batch = loader.load_next_batch()

    def loss(params, rest, batch):
        return train.loss_fn(nnx.merge(graph, params, rest, copy=True), config, batch, None, None, is_train=True)[0]

    step = jax.jit(jax.value_and_grad(loss))
    axes: dict[str, dict[str, str] | str] = {}
    for name, codec in (entry.split("=") for entry in plan):
        axis, _, operation = name.partition("/")
        axes[axis] = {operation: codec} if operation else codec
    with jax.set_mesh(mesh):
        before = step(params, rest, batch)
        with taco_jax.compressed(axes, min_bytes=0, require=0.9):
            inside = step(params, rest, batch)
        after = step(params, rest, batch)
    flat = lambda tree: [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)]
    slopes = [float(x @ y / (x @ x)) for x, y in zip(flat(before[1]), flat(inside[1]))]
    errors = [float(np.linalg.norm(x - y) / np.linalg.norm(x)) for x, y in zip(flat(before[1]), flat(inside[1]))]
    same = all((x == y).all() for x, y in zip(flat(before), flat(after)))
    found = {"losses": [float(before[0]), float(inside[0])], "slopes": slopes, "errors": errors, "same": same}
    print("FOUND", json.dumps(found))


if __name__ == "__main__":
    gradients(sys.argv[2:], sys.argv[1].split())
