"""GPT-2 1.5B, with its own 25 heads.

trains     1.56B parameters (48 layers, width 1,600, 25 heads), vocabulary 50,257, sequences of 1,024
hardware   4 GPUs of 80 GB, dp 4 x tp 1: 25 heads fit tp 1, 5 and 25 only, so 4 GPUs share no layer and nothing is
           compressed
takes      not measured yet
reaches    not measured yet
command    python -m taco_jax.train --config experiments/gpt2_1p5b.py

For compressed tensor parallelism on 2 or 4 GPUs take gpt2_1p5b_24h.py; on 5, --mesh.dp 1 --mesh.tp 5. The text is the
packaged corpus as bytes, so that the command works anywhere and measures speed and memory; for a useful model, name
token files: --data.train train.bin --data.validation val.bin (GPT-2's tokenizer, uint16).
"""

from taco_jax.config import CheckpointConfig, DataConfig, EvalConfig, MeshConfig, OptimizerConfig, TrainConfig
from taco_jax.models.presets import preset

config = TrainConfig(
    model=preset("gpt2_1p5b"),
    mesh=MeshConfig(dp=4, tp=1),
    data=DataConfig(train="austen", sequence_length=1024),
    global_batch=64,
    accumulation=4,
    optimizer=OptimizerConfig(learning_rate=2e-4, warmup_steps=700),
    steps=10_000,
    remat="full",
    checkpoint=CheckpointConfig(every=1000),
    evaluation=EvalConfig(every=500),
    workdir="runs/gpt2_1p5b",
)
