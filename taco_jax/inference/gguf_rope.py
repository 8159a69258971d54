"""Scaled rotary positions of GGUF files, as the rope_scaling of a `config.json`; llama.cpp's defaults for absent keys.

A file says a scaling by its type and factor, or, as Llama 3.1's does, by a tensor: the number that each pair's
frequency is divided by. The decoder has no such tensor. It is taken for Llama 3.1's formula where that gives it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from taco_jax.config import ConfigError
from taco_jax.models.config import ModelConfig
from taco_jax.models.rope import scaling

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_LENGTH = 8192
RAMP = {"fast": 32.0, "slow": 1.0}
# Keys that another factor or ramp would follow from, and the values at which they change nothing.
OF_YARN = {"yarn_ext_factor": (1, -1), "yarn_log_multiplier": (0,)}


def rope_scaling(fields: Any, kind: str, context: int, head_dim: int, factors: np.ndarray | None) -> dict[str, Any]:
    """rope_scaling of a file, {} for plain positions. factors: of the tensor rope_freqs, None without one.

    Raises:
      ConfigError: a type that the decoder has not, or factors that no formula gives.
    """
    of = lambda key, *default, of: fields.get(f"{kind}.rope.{key}", *default, of=of)
    name = of("scaling.type", "linear", of=str)
    factor = of("scaling.factor", 0.0, of=float) or of("scale_linear", 0.0, of=float) or 1.0
    if name not in ("none", "linear", "yarn"):
        raise ConfigError(f"{fields.path}: {kind}.rope.scaling.type={name!r}: this decoder has none, linear, yarn")
    scaled = name != "none" and factor != 1
    original = of("scaling.original_context_length", context, of=int)
    if factors is not None and not np.allclose(factors, 1):
        if scaled:
            raise ConfigError(
                f"{fields.path}: has rope_freqs.weight beside {kind}.rope.scaling.factor={factor}; keep one"
            )
        return _of_factors(fields, kind, head_dim, factors, original if original != context else LLAMA3_LENGTH)
    if not scaled:
        return {}
    if name == "linear":
        return {"rope_type": "linear", "factor": factor}
    for key, allowed in OF_YARN.items():
        if (value := of(f"scaling.{key}", allowed[0], of=float)) not in allowed:
            raise ConfigError(f"{fields.path}: {kind}.rope.scaling.{key}={value}: this decoder has only {allowed[0]}")
    ramp = {f"beta_{end}": of(f"scaling.yarn_beta_{end}", usual, of=float) for end, usual in RAMP.items()}
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original} | ramp


def _of_factors(fields: Any, kind: str, head_dim: int, factors: np.ndarray, original: int) -> dict[str, Any]:
    found = {"factor": float(factors.max()), "original_max_position_embeddings": original}
    theta = fields.get(f"{kind}.rope.freq_base", 10_000.0, of=float)
    try:
        config = ModelConfig(
            head_dim=head_dim, rope_theta=theta, rope_type="llama3", rope_factor=found["factor"],
            rope_original_length=original, rope_low_frequency=LLAMA3["low_freq_factor"],
            rope_high_frequency=LLAMA3["high_freq_factor"],
        )  # fmt: skip
        fits = factors.shape == (head_dim // 2,) and np.allclose(factors * scaling(config), 1, rtol=1e-3)
    except ValueError:
        fits = False
    if not fits:
        raise ConfigError(
            f"{fields.path}: has rope_freqs.weight, whose factors are not Llama 3.1's of {original} positions; this "
            f"decoder has no others"
        )
    return {"rope_type": "llama3"} | found | LLAMA3
