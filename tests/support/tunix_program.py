"""A small Qwen3 of google-tunix, trained by its own trainer. It knows nothing of compressed sums.

python tunix_program.py train FSDP TP STEPS EVERY        checkpoints every so many steps, 0 for none
python tunix_program.py gradients FSDP TP PLAN...
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import AxisType
from tunix.models.qwen3 import model as qwen3
from tunix.sft import utils
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig, TrainingInput

CONFIG = qwen3.ModelConfig(
    num_layers=2, vocab_size=512, embed_dim=128, hidden_dim=256, num_heads=4, num_kv_heads=4, head_dim=32,
    norm_eps=1e-6, rope_theta=1_000_000, use_tied_embedding=True,
)  # fmt: skip
BATCH, LENGTH = 8, 64


def make_mesh(fsdp: int, tp: int):
    return jax.make_mesh((fsdp, tp), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)


@nnx.jit
def make_model():
    """The model, sharded by its own rules, with random MLPs: it makes them of zeros, for weights that are read."""
    model = qwen3.Qwen3(CONFIG, rngs=nnx.Rngs(params=0))
    rngs = nnx.Rngs(1)
    for layer in model.layers:
        for linear in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj):
            shape = linear.kernel.shape
            linear.kernel.value = jax.random.normal(rngs(), shape) * shape[0] ** -0.5
    state = nnx.state(model)
    nnx.update(model, jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
    return model


def batches(steps: int):
    """Sequences that count in steps of one to eight, modulo the vocabulary."""
    random = np.random.default_rng(0)
    for _ in range(steps):
        start, stride = random.integers(1, 512, (BATCH, 1)), random.integers(1, 9, (BATCH, 1))
        tokens = (start + stride * np.arange(LENGTH)) % 511 + 1
        yield TrainingInput(input_tokens=tokens.astype(np.int32), input_mask=np.ones(tokens.shape, bool))


def model_input(example: TrainingInput) -> dict:
    mask = example.input_tokens != 0
    return {
        "input_tokens": example.input_tokens,
        "input_mask": example.input_mask,
        "positions": utils.build_positions_from_mask(mask),
        "attention_mask": utils.make_causal_attn_mask(mask),
    }


def make_trainer(steps: int, every: int) -> PeftTrainer:
    """every: of a checkpoint; 0 writes and reads none."""
    config = TrainingConfig(
        eval_every_n_steps=steps,
        max_steps=steps,
        checkpoint_root_directory=str(Path("checkpoints").absolute()) if every else None,
        checkpointing_options=ocp.CheckpointManagerOptions(save_interval_steps=every) if every else None,
    )
    return PeftTrainer(make_model(), optax.adamw(1e-3), config).with_gen_model_input_fn(model_input)


def train(mesh, steps: int, every: int) -> None:
    """Writes the loss of every step to losses.json."""
    with mesh:
        trainer = make_trainer(steps, every)
        trainer.train(batches(steps))
    losses = trainer.metrics_logger.get_metric_history("", "loss", "train")
    Path("losses.json").write_text(json.dumps([float(loss) for loss in losses]))


def gradients(mesh, plan: list[str]) -> None:
    from trainers import compare_gradients

    with mesh:
        trainer = make_trainer(1, 0)
        graph, state = nnx.split(trainer.model)
        inputs = model_input(next(batches(1)))
        step = jax.jit(jax.value_and_grad(lambda state: trainer.loss_fn(nnx.merge(graph, state), **inputs)))
        compare_gradients(step, (state,), plan)


if __name__ == "__main__":
    what, fsdp, tp, *rest = sys.argv[1:]
    if what == "train":
        train(make_mesh(int(fsdp), int(tp)), *map(int, rest))
    else:
        gradients(make_mesh(int(fsdp), int(tp)), rest)
