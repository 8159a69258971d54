"""The page that `python -m taco_jax.train --help` prints: the flags that most runs need. `--help-all` prints all."""

from __future__ import annotations

from typing import Any

from taco_jax.config.derived import get

PAGE = """usage: python -m taco_jax.train [--config FILE] [--compression CODECS] [flags]

Train a language model with compressed tensor parallelism. Flags override the file of --config, a Python file that is
executed, or the config.json of a run, which goes on where no other --workdir is given. In brackets: the values in
force. --help-all lists every flag; docs/training.md explains them.
"""

# Groups of (key, what it is).
GROUPS: dict[str, tuple[tuple[str, str], ...]] = {
    "run": (
        ("workdir", "folder of the run; an existing one is resumed"),
        ("init_from", "start from a Hugging Face folder, a .gguf or another run's weights"),
        ("steps", "optimiser steps of the whole run"),
        ("stop_after", "stop and save at this step, with the schedule unchanged"),
        ("seed", "of the parameters and of the order of the data"),
        ("dry_run", "print memory and messages, and train nothing"),
        ("profile", "START:STOP: trace these steps for xprof"),
        ("log_file", "the printed lines go into this file as well"),
        ("devices", "cpu:8 emulates eight devices on the CPU"),
    ),
    "data and batch": (
        ("data.train", "training data: folders and files, several with weights"),
        ("data.validation", "validation data; None holds out a part of the training data"),
        ("data.sequence_length", "tokens of a sequence"),
        ("global_batch", "sequences of a step, over all devices"),
        ("accumulation", "parts of a batch whose gradients are added"),
    ),
    "model": (
        ("model.n_layers", "layers; --help-all lists the other sizes and kinds"),
        ("model.d_model", "width"),
        ("lora.rank", "train low-rank adapters of so many columns, not the weights"),
        ("compute_dtype", "bfloat16, float32 or float16"),
        ("remat", "what the backward pass recomputes: auto, none, dots or full"),
    ),
    "devices and messages": (
        ("mesh.tp", "devices that share every layer"),
        ("mesh.dp", "copies of the model that share the batch"),
        ("mesh.pp", "stages of layers"),
        ("compression.forward", "codec of activations: auto, int8h, ..., none (docs/codecs.md)"),
        ("compression.backward", "codec of their gradients; --compression F:B sets both, none every axis"),
        ("data_parallel.gradients", "codec of the gradients' sum over dp"),
        ("data_parallel.zero1", "each rank of dp keeps a share of the optimiser's state"),
    ),
    "optimiser": (
        ("optimizer.name", "adamw, lion or muon"),
        ("optimizer.learning_rate", "the highest one"),
        ("optimizer.schedule", "cosine, linear, wsd or constant"),
        ("optimizer.warmup_steps", "steps in which it rises"),
        ("optimizer.weight_decay", "of matrices"),
    ),
    "checkpoints and metrics": (
        ("checkpoint.every", "steps between checkpoints"),
        ("checkpoint.keep", "checkpoints that stay; None keeps all"),
        ("evaluation.every", "steps between validations"),
        ("metrics.tensorboard", "also TensorBoard event files"),
        ("metrics.wandb", "also Weights & Biases"),
        ("metrics.run_name", "the run's name in both; None: that of its folder"),
    ),
}
WIDTH = 120


def page(config: Any) -> str:
    """Returns the page with the values of `config`, at most 50 lines of at most WIDTH characters."""
    lines = [PAGE]
    for group, flags in GROUPS.items():
        lines.append(f"{group}:")
        for key, what in flags:
            value = get(config, key)
            flag = f"--{key.replace('_', '-')}"
            line = f"  {flag:29} {what} [{value}]"
            lines.append(line if len(line) <= WIDTH else f"{line[: WIDTH - 4]}...]")
    return "\n".join(lines)
