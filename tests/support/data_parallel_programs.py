"""The model and the settings with which sums over dp are tested."""

import jax
import numpy as np

from taco_jax.config import (
    CompressionConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)

# Three layers of width 36: most leaves have a dim that 2, 4 or 8 ranks divide, norms have none that 8 do.
MODEL = ModelConfig(
    vocab_size=300, d_model=36, n_layers=3, n_heads=4, n_kv_heads=4, head_dim=8, d_mlp=64, gated_mlp=False,
    activation="gelu_tanh", mlp_bias=True, max_length=64,
)  # fmt: skip
# With a large eps AdamW's step is the gradient's mean times learning_rate / eps; what has almost no gradient stays.
SGD = OptimizerConfig(
    learning_rate=100, min_learning_rate=100, warmup_steps=0, eps=1e3, weight_decay=1e-5, clip_norm=None
)
ADAM = OptimizerConfig(learning_rate=3e-3, warmup_steps=0, eps=1e-5, clip_norm=0.1)
CONFIG = TrainConfig(
    model=MODEL,
    compression=CompressionConfig("none", "none"),
    data=DataConfig(sequence_length=16),
    optimizer=SGD,
    global_batch=8,
    steps=20,
    compute_dtype="float32",
)


def batch(p, step=0):
    shape = (p.config.global_batch, p.config.data.sequence_length + 1)
    tokens = np.random.default_rng(step).integers(0, p.config.model.vocab_size // 4, shape, np.int32)
    return {"tokens": jax.device_put(tokens, p.batch_sharding)}
