"""GPT-3 6.7B.

trains     6.7B parameters (32 layers, width 4,096, 32 heads; dense attention), vocabulary 50,257, sequences of 2,048
hardware   4 GPUs of 80 GB, dp 1 x tp 4
takes      not measured yet
reaches    not measured yet
command    python -m taco_jax.train --config experiments/gpt3_6p7b.py

Twenty steps, to measure loss, time and memory; a longer run sets --steps, --optimizer.warmup-steps and
--checkpoint.enabled (a checkpoint is about 80 GB). The text is the packaged corpus as bytes, so that the command
works anywhere and measures speed and memory; for a useful model, name token files: --data.train train.bin
--data.validation val.bin (GPT-2's tokenizer, uint16).
"""

from taco_jax.config import CheckpointConfig, DataConfig, EvalConfig, MeshConfig, OptimizerConfig, TrainConfig
from taco_jax.models.presets import preset

config = TrainConfig(
    model=preset("gpt3_6p7b"),
    mesh=MeshConfig(dp=1, tp=4),
    data=DataConfig(train="austen", sequence_length=2048),
    global_batch=8,
    optimizer=OptimizerConfig(learning_rate=1.2e-4, warmup_steps=5),
    steps=20,
    remat="full",
    checkpoint=CheckpointConfig(enabled=False),
    evaluation=EvalConfig(batches=4),
    workdir="runs/gpt3_6p7b",
)
