"""Qwen2 0.5B.

trains     494M parameters (24 layers, width 896, 14 heads, 2 kv heads, tied head), vocabulary 151,936, sequences of
           2,048
hardware   4 GPUs of 40 GB or more, dp 2 x tp 2 (14 heads and 2 kv heads fit tp 1 and 2)
takes      not measured yet
reaches    not measured yet
command    python -m taco_jax.train --config experiments/qwen2_0p5b.py

The text is the packaged corpus as bytes, so that the command works anywhere and measures speed and memory; for a
model of use name token files: --data.train train.u32.bin --data.validation val.u32.bin (Qwen's tokenizer, uint32).
"""

from taco_jax.config import CheckpointConfig, DataConfig, EvalConfig, MeshConfig, OptimizerConfig, TrainConfig
from taco_jax.models.presets import preset

config = TrainConfig(
    model=preset("qwen2_0p5b"),
    mesh=MeshConfig(dp=2, tp=2),
    data=DataConfig(train="austen", sequence_length=2048),
    global_batch=32,
    accumulation=4,
    optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=700),
    steps=10_000,
    checkpoint=CheckpointConfig(every=1000),
    evaluation=EvalConfig(every=500),
    workdir="runs/qwen2_0p5b",
)
