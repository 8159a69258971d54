"""The shape of a decoder: one dataclass that covers GPT-2/GPT-3, Qwen2/Qwen2.5/Qwen3 and Llama-type models.

Ready-made shapes are in `taco_jax.models.presets`. Nothing here needs a JAX backend.
"""

from __future__ import annotations

import dataclasses
import math

from taco_jax.errors import listed

NORMS = ("rmsnorm", "layernorm")
POSITIONS = ("rope", "learned")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
LARGEST_SIZE = 2**31 - 1
LARGEST_THETA = 1e38  # of float32, in which its powers are computed


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer with pre-normalisation; sizes are global, whatever the mesh."""

    vocab_size: int = 256
    """Number of token ids; tables are padded to the mesh and the padding is masked."""
    d_model: int = 256
    """Width of the residual stream."""
    n_layers: int = 4
    """Number of layers, each one attention and one mlp."""
    n_heads: int = 8
    """Query heads of an attention."""
    n_kv_heads: int = 4
    """Key and value heads; fewer than n_heads is grouped-query attention."""
    head_dim: int = 32
    """Width of one head; n_heads * head_dim need not be d_model."""
    d_mlp: int = 768
    """Width inside the mlp."""
    norm: str = "rmsnorm"
    """Normalisation: rmsnorm or layernorm."""
    norm_eps: float = 1e-6
    """Added to the variance in every normalisation."""
    positions: str = "rope"
    """How positions are told: rope (rotary) or learned (a table added to the embedding)."""
    rope_theta: float = 10_000.0
    """Base of the rotary wavelengths; used with positions=rope."""
    max_length: int = 2048
    """Longest sequence the model is meant for; the number of rows of a learned position table."""
    activation: str = "silu"
    """Non-linearity of the mlp: silu, gelu, gelu_tanh or relu."""
    gated_mlp: bool = True
    """Multiply the activation by a second projection (SwiGLU with silu)."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections."""
    out_bias: bool = False
    """Bias on the attention's output projection."""
    mlp_bias: bool = False
    """Biases on the mlp's projections."""
    qk_norm: bool = False
    """RMSNorm of every query and key head before the rotation (Qwen3)."""
    tied_head: bool = False
    """Use the embedding table as the output head."""
    init_std: float = 0.02
    """Standard deviation of the initial weights; over sqrt(2 * n_layers) for projections into the residual stream."""

    def __post_init__(self):
        for key in ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_mlp", "max_length"):
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{key}={value!r}: must be an integer of at least 1")
            if value > LARGEST_SIZE:
                shown = value if value < 10**30 else f"a number of {value.bit_length()} bits"
                raise ValueError(f"{key}={shown}: must be at most {LARGEST_SIZE}")
        for key, allowed in (("norm", NORMS), ("positions", POSITIONS), ("activation", ACTIVATIONS)):
            if getattr(self, key) not in allowed:
                raise ValueError(f"{key}={getattr(self, key)!r}: must be one of {', '.join(allowed)}")
        if self.n_heads % self.n_kv_heads:
            small = [k for k in range(1, math.isqrt(self.n_heads) + 1) if self.n_heads % k == 0]
            near = sorted({*small, *(self.n_heads // k for k in small)})
            raise ValueError(f"n_kv_heads={self.n_kv_heads}: must divide n_heads={self.n_heads}; try {listed(near)}")
        if self.positions == "rope" and self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: must be even with positions='rope'; try {self.head_dim + 1}")
        for key, least, below, usual in (("norm_eps", 0, 1, 1e-6), ("rope_theta", 1, LARGEST_THETA, 10_000.0)):
            value = getattr(self, key)
            if isinstance(value, int | float) and not least <= value < below:  # NaN is not either
                raise ValueError(f"{key}={value!r}: must be at least {least} and below {below}, such as {usual}")


def _problems(config: ModelConfig, tp: int) -> list[str]:
    """Returns the misfits of `config` and a tensor-parallel axis of `tp` devices; empty if everything fits."""
    heads, kv = config.n_heads, config.n_kv_heads
    problems = []
    if heads % tp:
        problems.append(f"{heads} heads, {kv} kv heads: tp {tp} does not divide {heads}")
    elif kv % tp and tp % kv:
        problems.append(f"{heads} heads, {kv} kv heads: tp {tp} neither divides {kv} nor is a multiple of it")
    if config.d_mlp % tp:
        problems.append(f"mlp width {config.d_mlp}: tp {tp} does not divide {config.d_mlp}")
    return problems


def valid_tp(config: ModelConfig) -> tuple[int, ...]:
    """The sizes of the tensor-parallel axis that fit `config`, ascending. tp = 1 always does."""
    return tuple(tp for tp in range(1, config.n_heads + 1) if not _problems(config, tp))


def validate(config: ModelConfig, tp: int) -> ModelConfig:
    """Returns `config` if it can be split over a tensor-parallel axis of `tp` devices.

    The rule: tp divides n_heads and d_mlp, and it divides n_kv_heads or is a multiple of them (kv heads are then
    replicated). The vocabulary is padded, so any size fits.

    Raises:
        ValueError: names the sizes that do not fit and lists every tp that does.
    """
    if tp < 1:
        raise ValueError(f"tp={tp}: must be at least 1; try {listed(valid_tp(config))}")
    problems = _problems(config, tp)
    if problems:
        raise ValueError(f"{'; '.join(problems)}; try {listed(valid_tp(config))}")
    return config
