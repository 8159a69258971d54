"""GPT-2 350M.

trains     355M parameters (24 layers, width 1,024, 16 heads), vocabulary 50,257, sequences of 1,024
hardware   4 GPUs of 40 GB or more, dp 1 x tp 4
takes      not measured yet
reaches    not measured yet
command    python -m taco_jax.train --config experiments/gpt2_350m.py

The text is the packaged corpus as bytes, so that the command works anywhere and measures speed and memory; for a
model of use name token files: --data.train train.bin --data.validation val.bin (GPT-2's tokenizer, uint16).
"""

from taco_jax.config import CheckpointConfig, DataConfig, EvalConfig, MeshConfig, OptimizerConfig, TrainConfig
from taco_jax.models.presets import preset

config = TrainConfig(
    model=preset("gpt2_350m"),
    mesh=MeshConfig(dp=1, tp=4),
    data=DataConfig(train="austen", sequence_length=1024),
    global_batch=64,
    accumulation=4,
    optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=700),
    steps=10_000,
    checkpoint=CheckpointConfig(every=1000),
    evaluation=EvalConfig(every=500),
    workdir="runs/gpt2_350m",
)
