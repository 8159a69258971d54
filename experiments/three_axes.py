"""All three axes at once: data, pipeline and tensor parallelism on any machine with two CPU cores.

trains     0.85M parameters (4 layers, width 128, RMSNorm, RoPE, grouped kv heads, SwiGLU, qkv bias) on the bytes of
           Jane Austen's novels, which come with the package; tensor-parallel messages in taco, activations between
           stages in int8_token and back in e4m3h, gradients over dp in int8h with the optimiser's state in shares
hardware   8 emulated CPU devices, dp 2 x pp 2 x tp 2; two cores and 4 GB of memory
takes      11 to 26 minutes beside much other work on two x86-64 cores
reaches    validation loss 1.67 nats per byte, compressed or exact (experiments/results/three_axes)
command    python -m taco_jax.train --config experiments/three_axes.py

experiments/three_axes_study.py compares it with the exact twin, by seed.
"""

from taco_jax.config import (
    CheckpointConfig,
    CompressionConfig,
    DataConfig,
    DataParallelConfig,
    EvalConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
    TrainConfig,
)

config = TrainConfig(
    model=ModelConfig(
        vocab_size=256,
        d_model=128,
        n_layers=4,
        n_heads=4,
        n_kv_heads=2,
        head_dim=32,
        d_mlp=384,
        max_length=128,
        qkv_bias=True,
    ),
    mesh=MeshConfig(dp=2, pp=2, tp=2),
    # The codec of the runs in experiments/results/three_axes; auto, the default, takes int8h.
    compression=CompressionConfig("taco", "taco"),
    pipeline=PipelineConfig(microbatches=2),
    data_parallel=DataParallelConfig(gradients="int8h", zero1=True),
    data=DataConfig(train="austen", sequence_length=128),
    global_batch=32,
    optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=40),
    steps=240,
    checkpoint=CheckpointConfig(enabled=False),
    evaluation=EvalConfig(every=120),
    workdir="runs/three_axes",
    devices="cpu:8",
)
