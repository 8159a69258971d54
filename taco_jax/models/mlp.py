"""The mlp of a decoder layer, plain or gated: one column-parallel product, one row-parallel product.

Dims: B batch, L length, D model, F mlp. F is local, 1/tp of the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from taco_jax.models.config import ModelConfig
from taco_jax.models.parallel import Parallel
from taco_jax.models.projections import column, row
from taco_jax.scales import SiteScales


def activation(name: str) -> Callable[[jax.Array], jax.Array]:
    """The elementwise function called `name` in a ModelConfig."""
    return {
        "silu": jax.nn.silu,
        "relu": jax.nn.relu,
        "gelu": lambda x: jax.nn.gelu(x, approximate=False),
        "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    }[name]


def mlp(x_BLD: jax.Array, params: Mapping[str, Any], config: ModelConfig, par: Parallel,
        state: Mapping[str, SiteScales | None]) -> jax.Array:  # fmt: skip
    """This rank's term of `act(x gate) * (x up)) down`, or of `act(x up) down` without a gate.

    Site layers/mlp/up; the sum of the ranks' terms, layers/mlp/down, is the caller's.
    """
    act = activation(config.activation)
    if config.gated_mlp:
        gate_BLF, up_BLF = column(x_BLD, (params["gate"], params["up"]), par, state, "layers/mlp/up")
        hidden_BLF = act(gate_BLF) * up_BLF
    else:
        (up_BLF,) = column(x_BLD, (params["up"],), par, state, "layers/mlp/up")
        hidden_BLF = act(up_BLF)
    return row(hidden_BLF, params["down"], par)
