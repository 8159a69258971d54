"""Shapes of published models, by name: `PRESETS["qwen2p5_7b"]`, or `preset(name)` with a helpful error.

Sizes are those of the models' own published configurations. `gpt2_1p5b_24h` is ours: tp 2 and 4 do not divide the 25
heads of GPT-2 XL, so this one drops a head and keeps every other size. GPT-3's sparse attention layers are dense here.
"""

from __future__ import annotations

import dataclasses

from taco_jax.errors import did_you_mean
from taco_jax.models.config import ModelConfig


def _gpt(d_model: int, n_layers: int, n_heads: int, **changes) -> ModelConfig:
    """GPT-2 and GPT-3: LayerNorm, learned positions, GELU, biases everywhere, tied head."""
    shape = {
        "vocab_size": 50_257, "d_model": d_model, "n_layers": n_layers, "n_heads": n_heads, "n_kv_heads": n_heads,
        "head_dim": d_model // n_heads, "d_mlp": 4 * d_model, "norm": "layernorm", "norm_eps": 1e-5,
        "positions": "learned", "max_length": 1024, "activation": "gelu_tanh", "gated_mlp": False,
        "qkv_bias": True, "out_bias": True, "mlp_bias": True, "tied_head": True,
    }  # fmt: skip
    return ModelConfig(**{**shape, **changes})


_QWEN2_0P5B = ModelConfig(
    vocab_size=151_936, d_model=896, n_layers=24, n_heads=14, n_kv_heads=2, head_dim=64, d_mlp=4864,
    norm_eps=1e-6, rope_theta=1e6, max_length=131_072, qkv_bias=True, tied_head=True,
)  # fmt: skip

_GPT2_1P5B = _gpt(1600, 48, 25)

PRESETS: dict[str, ModelConfig] = {
    "gpt2_124m": _gpt(768, 12, 12),
    "gpt2_350m": _gpt(1024, 24, 16),
    "gpt2_1p5b": _GPT2_1P5B,
    "gpt2_1p5b_24h": dataclasses.replace(_GPT2_1P5B, n_heads=24, n_kv_heads=24),
    "gpt3_6p7b": _gpt(4096, 32, 32, max_length=2048),
    "qwen2_0p5b": _QWEN2_0P5B,
    "qwen2p5_7b": dataclasses.replace(
        _QWEN2_0P5B, vocab_size=152_064, d_model=3584, n_layers=28, n_heads=28, n_kv_heads=4, head_dim=128,
        d_mlp=18_944, tied_head=False,
    ),
    "qwen3_0p6b": ModelConfig(
        vocab_size=151_936, d_model=1024, n_layers=28, n_heads=16, n_kv_heads=8, head_dim=128, d_mlp=3072,
        norm_eps=1e-6, rope_theta=1e6, max_length=40_960, qk_norm=True, tied_head=True,
    ),
    "smollm2_135m": ModelConfig(  # a small model of the Llama type
        vocab_size=49_152, d_model=576, n_layers=30, n_heads=9, n_kv_heads=3, head_dim=64, d_mlp=1536,
        norm_eps=1e-5, rope_theta=1e5, max_length=8192, tied_head=True,
    ),
    "tinyllama_1p1b": ModelConfig(
        vocab_size=32_000, d_model=2048, n_layers=22, n_heads=32, n_kv_heads=4, head_dim=64, d_mlp=5632,
        norm_eps=1e-5, rope_theta=1e4, max_length=2048,
    ),
}  # fmt: skip


def preset(name: str) -> ModelConfig:
    """The shape called `name`.

    Raises:
        ValueError: no such preset; names the nearest one.
    """
    if name not in PRESETS:
        raise ValueError(f"model preset {name!r}: there is none of that name; {did_you_mean(name, PRESETS)}")
    return PRESETS[name]
