"""The mlp of a decoder layer, plain or gated, up to its last product.

Dims: B batch, L length, D model, F mlp. F is local, 1/tp of the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from taco_jax.models.config import ModelConfig
from taco_jax.models.projections import column
from taco_jax.models.run_config import Parallel


def activation(name: str) -> Callable[[jax.Array], jax.Array]:
    """The elementwise function called `name` in a ModelConfig."""
    return {
        "silu": jax.nn.silu,
        "relu": jax.nn.relu,
        "gelu": lambda x: jax.nn.gelu(x, approximate=False),
        "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    }[name]


def mlp(x_BLD: jax.Array, params: Mapping[str, Any], config: ModelConfig, par: Parallel) -> jax.Array:
    """This rank's part of `act(x gate) * (x up)`, or of `act(x up)` without a gate, for an x that has entered."""
    act = activation(config.activation)
    if config.gated_mlp:
        gate_BLF, up_BLF = column(x_BLD, (params["gate"], params["up"]), par)
        return act(gate_BLF) * up_BLF
    (up_BLF,) = column(x_BLD, (params["up"],), par)
    return act(up_BLF)
