"""Quickstart: a small Qwen-architecture model on real English text, on any machine with two CPU cores.

trains     2.5M parameters (3 layers, width 256, RMSNorm, RoPE, grouped kv heads, SwiGLU, qkv bias) on the bytes of
           Jane Austen's novels, which come with the package; every tensor-parallel message is compressed in both
           directions
hardware   8 emulated CPU devices, dp 2 x tp 4; two cores and 4 GB of memory
takes      under 3 minutes on two idle x86-64 cores (with taco in the place of int8h 2 min 40 s; 4 min of CPU time)
reaches    validation loss 1.656 nats per byte, 1.654 uncompressed (means of three seeds,
           experiments/results/quickstart; a byte bigram reaches 2.39, a trigram 1.88)
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
        # 1/sqrt(256), about: so few steps learn more from there than from GPT-2's 0.02.
        init_std=0.05,
    ),
    mesh=MeshConfig(dp=2, tp=4),
    # The one thing that is compressed is what tensor-parallel ranks send: by auto, the default, in int8h both ways.
    data_parallel=DataParallelConfig(gradients="none"),
    data=DataConfig(train="austen", sequence_length=128),
    # Small batches: for the same time many steps learn more than large ones. A message has 4 x 128 x 256 elements: each
    # of the four ranks' parts is 33 KiB on the wire, 32 of codes and 1/2 of scales.
    global_batch=8,
    optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=40),
    steps=340,
    checkpoint=CheckpointConfig(every=170, keep=2),
    # All of the held-out text, once at the end: it takes as long as 50 steps.
    evaluation=EvalConfig(every=340),
    workdir="runs/quickstart",
    devices="cpu:8",
)
