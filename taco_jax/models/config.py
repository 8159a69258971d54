"""The shape of a decoder: one dataclass that covers GPT-2/GPT-3, Llama, Mistral, Qwen2/Qwen2.5/Qwen3 and Gemma models.

Ready-made shapes are in `taco_jax.models.presets`. Nothing here needs a JAX backend.
"""

from __future__ import annotations

import dataclasses
import math

from taco_jax.errors import listed

NORMS = ("rmsnorm", "layernorm")
POSITIONS = ("rope", "learned")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
_LENGTHS = ("rope_factor", "rope_original_length")
ROPE_TYPES = {
    "default": (),
    "linear": ("rope_factor",),
    "llama3": (*_LENGTHS, "rope_low_frequency", "rope_high_frequency"),
    "yarn": (*_LENGTHS, "rope_beta_fast", "rope_beta_slow", "rope_attention_factor", "rope_truncate"),
}
"""Scaling of rotary positions -> the fields that it reads."""
LARGEST_SIZE = 2**31 - 1
MOST_LAYERS = 1000  # whose windows may differ
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
    rope_type: str = "default"
    """Scaling of rotary positions for longer sequences: default (none), linear, llama3 (Llama 3.1) or yarn."""
    rope_factor: float = 1.0
    """How many times longer sequences become by the scaling; used with any rope_type but default."""
    rope_original_length: int | None = None
    """Longest sequence before the scaling; llama3 and yarn need it."""
    rope_low_frequency: float = 1.0
    """With llama3, wavelengths above rope_original_length over this are scaled whole."""
    rope_high_frequency: float = 4.0
    """With llama3, wavelengths below rope_original_length over this are not scaled."""
    rope_beta_fast: float = 32.0
    """With yarn, pairs that turn more often than this within rope_original_length are not scaled."""
    rope_beta_slow: float = 1.0
    """With yarn, pairs that turn less often than this within rope_original_length are scaled whole."""
    rope_attention_factor: float | None = None
    """With yarn, factor of rotated queries and keys; None: 0.1 ln(rope_factor) + 1."""
    rope_truncate: bool = True
    """With yarn, round the ends of the ramp between scaled and unscaled pairs outwards to whole pairs."""
    rope_local_theta: float | None = None
    """Base of the wavelengths in layers with a sliding window, which are never scaled (Gemma 3); None: as in others."""
    sliding_window: int | None = None
    """Positions that attention looks back at, its own included (Mistral); None: all of them."""
    attention_pattern: str = "s"
    """Layers that have sliding_window: a letter for each, s (window) or f (full), such as sf, repeated over all."""
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
    norm_plus_one: bool = False
    """Every RMSNorm scales by 1 + its weights, which start at 0 (Gemma)."""
    post_norms: bool = False
    """Also normalise what attention and mlp add to the residual stream (Gemma 2 and 3)."""
    scale_embedding: bool = False
    """Multiply the embedding by the root of d_model, as rounded to the compute dtype (Gemma)."""
    attention_scale: float | None = None
    """Factor of attention scores; None: 1 / sqrt(head_dim)."""
    attention_softcap: float | None = None
    """Scores s become c tanh(s / c) with this c (Gemma 2); None: they stay as they are."""
    logit_softcap: float | None = None
    """Logits l become c tanh(l / c) with this c (Gemma 2); None: they stay as they are."""
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
        for field in dataclasses.fields(self):  # a file may hold anything
            value = getattr(self, field.name)
            if type(field.default) is bool and not isinstance(value, bool):
                raise ValueError(f"{field.name}={value!r}: must be True or False")
            if type(field.default) is float and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise ValueError(f"{field.name}={value!r}: must be a number, such as {field.default}")
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
        self._check_rope()
        self._check_windows()
        for key, usual in (("attention_scale", 0.125), ("attention_softcap", 50.0), ("logit_softcap", 30.0)):
            self._positive(key, usual)
        for key in ("norm_plus_one", "post_norms"):
            if getattr(self, key) and self.norm != "rmsnorm":
                raise ValueError(f"{key}=True: needs norm='rmsnorm', not {self.norm!r}")

    def _positive(self, key: str, usual: float, least: float = 0.0) -> None:
        value = getattr(self, key)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is None and getattr(type(self), key) is None:  # its default
            return
        if not (number and least <= value < LARGEST_THETA and value):  # NaN is not either
            rule = f"at least {least:g}" if least else "above 0"
            raise ValueError(f"{key}={value!r}: must be {rule} and finite, such as {usual}")

    def _check_rope(self) -> None:
        kind = self.rope_type
        if kind not in ROPE_TYPES:
            raise ValueError(f"rope_type={kind!r}: must be one of {', '.join(ROPE_TYPES)}")
        if kind != "default" and self.positions != "rope":
            raise ValueError(f"rope_type={kind!r}: needs positions='rope', not {self.positions!r}")
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for key in dict.fromkeys(key for keys in ROPE_TYPES.values() for key in keys):
            if key not in ROPE_TYPES[kind] and getattr(self, key) != defaults[key]:
                others = [other for other, keys in ROPE_TYPES.items() if key in keys]
                raise ValueError(f"{key}={getattr(self, key)!r}: is of rope_type={listed(others)}, not of {kind!r}")
        if "rope_original_length" in ROPE_TYPES[kind]:
            length = self.rope_original_length
            if type(length) is not int or not 1 <= length <= LARGEST_SIZE:
                rule = "must be the longest sequence before the scaling, such as 8192"
                raise ValueError(f"rope_original_length={length!r}: {rule}, with rope_type={kind!r}")
        if kind == "yarn" and self.rope_theta <= 1:
            raise ValueError(f"rope_theta={self.rope_theta!r}: must be above 1 with rope_type='yarn'")
        self._positive("rope_factor", 8.0, least=1.0)
        usual = {"rope_low_frequency": 1.0, "rope_high_frequency": 4.0, "rope_beta_fast": 32.0, "rope_beta_slow": 1.0}
        for key, value in (usual | {"rope_attention_factor": 1.2, "rope_local_theta": 1e4}).items():
            self._positive(key, value, least=1.0 if key == "rope_local_theta" else 0.0)
        for low, high in (("rope_low_frequency", "rope_high_frequency"), ("rope_beta_slow", "rope_beta_fast")):
            if getattr(self, low) >= getattr(self, high):
                raise ValueError(f"{low}={getattr(self, low)!r}: must be below {high}={getattr(self, high)!r}")
        if self.rope_local_theta is not None and (self.sliding_window is None or kind == "yarn"):
            rule = "is of layers with a sliding_window, beside any rope_type but yarn"
            raise ValueError(f"rope_local_theta={self.rope_local_theta!r}: {rule}")

    def _check_windows(self) -> None:
        window, pattern = self.sliding_window, self.attention_pattern
        if window is not None and (type(window) is not int or not 1 <= window <= LARGEST_SIZE):
            raise ValueError(f"sliding_window={window!r}: must be an integer of at least 1, or None for no window")
        if not isinstance(pattern, str) or not pattern or set(pattern) - {"s", "f"}:
            raise ValueError(f"attention_pattern={pattern!r}: must be letters s (window) and f (full), such as sf")
        if pattern == "s":
            return
        if window is None:
            raise ValueError(f"attention_pattern={pattern!r}: is of a model with a sliding_window; set that too")
        if self.n_layers > MOST_LAYERS:
            raise ValueError(f"n_layers={self.n_layers}: must be at most {MOST_LAYERS} with an attention_pattern")
        over = lambda letters: (letters * self.n_layers)[: self.n_layers]
        layers = over(pattern)
        if "s" not in layers:
            raise ValueError(f"attention_pattern={pattern!r}: leaves no layer a window; leave sliding_window out")
        # The shortest one that says the same, so that equal models have equal configs.
        period = next(n for n in range(1, len(layers) + 1) if over(layers[:n]) == layers)
        object.__setattr__(self, "attention_pattern", layers[:period])

    @property
    def windows(self) -> tuple[bool, ...] | bool:
        """Returns which layers have the sliding window, or one bool where all are alike."""
        if self.sliding_window is None or self.attention_pattern == "s":
            return self.sliding_window is not None
        pattern = self.attention_pattern
        return tuple(pattern[layer % len(pattern)] == "s" for layer in range(self.n_layers))


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
