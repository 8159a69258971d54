"""MaxText as its package is, in a small dense configuration on emulated devices."""

import importlib.util
import json
import sys
from pathlib import Path

import trainers

MODULE = "maxtext.trainers.pre_train.train"
TRAINER = trainers.Trainer(["-m", MODULE], "jit_train_step", {"DECOUPLE_GCLOUD": "TRUE"})
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
    """Runs MaxText's own command, as `trainers.Trainer.run`. Returns the loss of every step."""
    TRAINER.run(folder, settings(folder, axes, steps, **more), plan)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["learning/loss"] for line in lines]


def gradients(arguments: list[str], plan: list[str]) -> None:
    """`trainers.compare_gradients` of MaxText's own loss."""
    import jax
    from flax import nnx
    from maxtext.trainers.pre_train import train
    from maxtext.utils import train_utils

    config, recorder = train.initialize(["", *arguments])
    _, _, _, _, mesh, _, _, loader, _, _, state = train_utils.setup_train_loop(config, recorder)
    graph, params, rest = nnx.split(state.model, nnx.Param, ...)
    batch = loader.load_next_batch()

    def loss(params, rest, batch):
        return train.loss_fn(nnx.merge(graph, params, rest, copy=True), config, batch, None, None, is_train=True)[0]

    with jax.set_mesh(mesh):
        trainers.compare_gradients(jax.jit(jax.value_and_grad(loss)), (params, rest, batch), plan)


if __name__ == "__main__":
    gradients(sys.argv[2:], sys.argv[1].split())
