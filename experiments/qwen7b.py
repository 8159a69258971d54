"""Qwen2.5-7B, exactly.

trains     7.6B parameters (28 layers, width 3,584, mlp 18,944, 28 heads, 4 kv heads, untied head), vocabulary
           152,064, sequences of 2,048
hardware   4 GPUs of 80 GB, dp 1 x tp 4
takes      on 4 x H200: 0.46 s a step of 16,384 tokens over NVLink, exact or compressed; over host memory
           (NCCL_P2P_DISABLE=1) 1.18 s exact, 0.78 s with taco, 0.69 s with int6h, 0.59 s with int4h; 39 GB of a
           device's memory (experiments/results/qwen7b_tp4_kernels)
reaches    training loss 4.2 nats after 20 steps on the packaged bytes, exact, taco and int6h alike; 4.9 with int4h
command    python -m taco_jax.train --config experiments/qwen7b.py

Twenty steps, to measure loss, time and memory; a longer run sets --steps, --optimizer.warmup-steps and
--checkpoint.enabled (a checkpoint is 91 GB). The text is the packaged corpus as bytes, so that the command works
anywhere and measures speed and memory; for a useful model, name token files: --data.train train.u32.bin
--data.validation val.u32.bin (Qwen's tokenizer, uint32).
"""

from taco_jax.config import CheckpointConfig, DataConfig, EvalConfig, MeshConfig, OptimizerConfig, TrainConfig
from taco_jax.models.presets import preset

config = TrainConfig(
    model=preset("qwen2p5_7b"),
    mesh=MeshConfig(dp=1, tp=4),
    data=DataConfig(train="austen", sequence_length=2048),
    global_batch=8,
    optimizer=OptimizerConfig(learning_rate=1.2e-4, warmup_steps=5),
    steps=20,
    remat="full",
    checkpoint=CheckpointConfig(enabled=False),
    evaluation=EvalConfig(batches=4),
    workdir="runs/qwen7b",
)
