"""`--lora.*`: the settings of low-rank adapters, and the names of the matrices that may have one.

A matrix has our name, which is the same in all models, and those of Hugging Face, of which one may be several of ours.
"""

from __future__ import annotations

import dataclasses

from taco_jax.config.rules import Checked
from taco_jax.errors import ConfigError, did_you_mean
from taco_jax.models.config import ModelConfig

MATRICES = ("attn/q", "attn/k", "attn/v", "attn/out", "mlp/gate", "mlp/up", "mlp/down")
HUGGING_FACE = {
    "q_proj": ("attn/q",), "k_proj": ("attn/k",), "v_proj": ("attn/v",), "o_proj": ("attn/out",),
    "gate_proj": ("mlp/gate",), "up_proj": ("mlp/up",), "down_proj": ("mlp/down",),
    "c_attn": ("attn/q", "attn/k", "attn/v"), "c_fc": ("mlp/up",), "c_proj": ("attn/out", "mlp/down"),
}  # fmt: skip
"""Names of Llama, Qwen and their like, then GPT-2's."""


@dataclasses.dataclass(frozen=True)
class LoraConfig(Checked):
    """Low-rank adapters, trained in the place of the model's own weights, which stay as they are."""

    PREFIX = "lora."

    rank: int | None = None
    """Rank of the adapters; None trains the model's own weights."""
    alpha: float | None = None
    """Adapters count alpha / rank times; None is twice the rank."""
    targets: tuple[str, ...] = ()
    """Matrices with adapters: attn/q, k, v, out, mlp/gate, up, down, or Hugging Face's names (q_proj); default: all."""

    @property
    def scale(self) -> float:
        return 2.0 if self.alpha is None else self.alpha / self.rank

    @property
    def named(self) -> tuple[str, ...]:
        """Our names of the matrices that `targets` names, each once; all of them where it names none."""
        chosen = {ours for name in self.targets or MATRICES for ours in HUGGING_FACE.get(name, (name,))}
        return tuple(name for name in MATRICES if name in chosen)

    def check_fields(self) -> None:
        self.at_least(1, "rank", or_none=" to train the model's own weights")
        known = (*MATRICES, *HUGGING_FACE)
        for name in self.targets:
            if name not in known:
                hint = did_you_mean(name, known, otherwise="no such matrix")
                raise ConfigError(f"lora.targets={name!r}: {hint} (one of {', '.join(known)})")
        for key, default in (("alpha", None), ("targets", ())):
            rule = "is used with lora.rank alone; set that too, such as 16, or leave it out"
            self.require(self.rank is not None or getattr(self, key) == default, key, rule)
        if self.alpha is not None:
            self.above_0("alpha")


def matrices(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """{name of a matrix that can have an adapter: (rows, columns)} of a model."""
    query, kv = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    sizes = {
        "attn/q": (model.d_model, query), "attn/k": (model.d_model, kv), "attn/v": (model.d_model, kv),
        "attn/out": (query, model.d_model), "mlp/gate": (model.d_model, model.d_mlp),
        "mlp/up": (model.d_model, model.d_mlp), "mlp/down": (model.d_mlp, model.d_model),
    }  # fmt: skip
    return {name: size for name, size in sizes.items() if name != "mlp/gate" or model.gated_mlp}
