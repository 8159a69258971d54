"""Quickstart: a small Qwen-architecture model on real English text, on any machine with two CPU cores.

trains     2.5M parameters (3 layers, width 256, RMSNorm, RoPE, grouped kv heads, SwiGLU, qkv bias) on the bytes of
           Jane Austen's novels, which come with the package; every tensor-parallel message is compressed in both
           directions
hardware   8 emulated CPU devices, dp 2 x tp 4; two cores and 4 GB of memory
takes      3 minutes on two idle x86-64 cores (2 min 57 s, 5 min 26 s of CPU time)
reaches    validation loss 1.66 nats per byte, exact and compressed alike (experiments/results/quickstart; a byte
           bigram reaches 2.39, a trigram 1.88)
command    python -m taco_jax.train --config experiments/quickstart.py

The uncompressed twin: add `--compression.forward none --compression.backward none --workdir runs/quickstart-none`,
then `python -m taco_jax.plot runs/quickstart runs/quickstart-none`.
"""

from taco_jax.config import (
    CheckpointConfig,
    DataConfig,
    DataParallelConfig,
    EvalConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)

config = TrainConfig(
    model=ModelConfig(
        vocab_size=256,
        d_model=256,
        n_layers=3,
        n_heads=8,
        n_kv_heads=4,
        head_dim=32,
        d_mlp=768,
        max_length=256,
        qkv_bias=True,
    ),
    mesh=MeshConfig(dp=2, tp=4),
    # The one thing that is compressed is what tensor-parallel ranks send.
    data_parallel=DataParallelConfig(gradients="none"),
    # A message has 16 x 128 x 256 elements: each of the four ranks' parts fills whole 1,024-byte tiles of the wire.
    data=DataConfig(train="austen", sequence_length=128),
    global_batch=32,
    optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=40),
    steps=180,
    checkpoint=CheckpointConfig(every=90, keep=2),
    evaluation=EvalConfig(every=90),
    workdir="runs/quickstart",
    devices="cpu:8",
)
