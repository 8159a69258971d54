"""`config_to_hf`: the `config.json` of a ModelConfig, the inverse of `huggingface.config_from_hf`.

A family is chosen by trying: of those in `FAMILIES` the first whose config.json reads back as the same ModelConfig.
What no family has can so never be lost on the way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from taco_jax.models.config import ModelConfig
from taco_jax.models.huggingface import config_from_hf
from taco_jax.models.huggingface_features import feature_keys

_ACTIVATIONS = {"gelu_tanh": "gelu_pytorch_tanh"}
_UNTRANSFERABLE = ("_name_or_path", "auto_map", "quantization_config", "dtype", "torch_dtype", "transformers_version")
"""Keys of a source's config.json that are of its files, not of the model."""


class Family(NamedTuple):
    """A model_type: the class that transformers makes, and its keys of a ModelConfig."""

    architecture: str
    keys: Callable[[ModelConfig], dict[str, Any]]


def _gpt2(config: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size, "n_embd": config.d_model, "n_layer": config.n_layers,
        "n_head": config.n_heads, "n_positions": config.max_length,
        "n_inner": None if config.d_mlp == 4 * config.d_model else config.d_mlp,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": "gelu_new" if config.activation == "gelu_tanh" else config.activation,
        "tie_word_embeddings": config.tied_head,
        # Runs train without dropout; transformers' own default is 0.1.
        "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
    }  # fmt: skip


def _llama(config: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size, "hidden_size": config.d_model, "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads, "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim, "intermediate_size": config.d_mlp, "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta, "max_position_embeddings": config.max_length,
        "hidden_act": _ACTIVATIONS.get(config.activation, config.activation),
        "tie_word_embeddings": config.tied_head, "attention_bias": config.out_bias, "mlp_bias": config.mlp_bias,
    }  # fmt: skip


def _without(config: ModelConfig, *keys: str) -> dict[str, Any]:
    return {key: value for key, value in _llama(config).items() if key not in keys}


def _qwen2(config: ModelConfig) -> dict[str, Any]:
    usual = config.head_dim * config.n_heads == config.d_model
    return _without(config, "attention_bias", "mlp_bias", *(["head_dim"] if usual else [])) | {
        "use_sliding_window": False
    }


def _qwen3(config: ModelConfig) -> dict[str, Any]:
    return _without(config, "mlp_bias") | {"use_sliding_window": False}


def _mistral(config: ModelConfig) -> dict[str, Any]:
    return _without(config, "attention_bias", "mlp_bias") | {"sliding_window": None}


def _gemma(config: ModelConfig) -> dict[str, Any]:
    return _without(config, "mlp_bias")


def _later_gemma(config: ModelConfig) -> dict[str, Any]:
    keys = _gemma(config)
    return keys | {"hidden_activation": keys.pop("hidden_act")}


def _features(config: ModelConfig, kind: str) -> dict[str, Any]:
    """Returns the keys of scaled positions, windows and Gemma's parts, {} for a family that cannot have them."""
    try:
        keys = feature_keys(config)
    except ValueError:
        return {}
    return keys if keys["model_type"] == kind else {}


FAMILIES = {
    "gpt2": Family("GPT2LMHeadModel", _gpt2),
    "llama": Family("LlamaForCausalLM", _llama),
    "qwen2": Family("Qwen2ForCausalLM", _qwen2),
    "qwen3": Family("Qwen3ForCausalLM", _qwen3),
    "mistral": Family("MistralForCausalLM", _mistral),
    "gemma": Family("GemmaForCausalLM", _gemma),
    "gemma2": Family("Gemma2ForCausalLM", _later_gemma),
    "gemma3_text": Family("Gemma3ForCausalLM", _later_gemma),
}


def config_to_hf(config: ModelConfig, source: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the config.json of a model, without types and token ids.

    Args:
      source: the config.json that the model came with. Its model_type comes first, and its other keys stay where it
        describes the same model but for the sizes of vocabulary and positions, the head's tie and initial values.

    Raises:
      ValueError: one line: the fields that no family has.
    """
    source = dict(source or {})
    first = [kind for kind in FAMILIES if kind == source.get("model_type")]
    nearest: tuple[list[str], str, ModelConfig] | None = None
    tried: list[str] = []
    for kind in [*first, *(kind for kind in FAMILIES if kind not in first)]:
        family = FAMILIES[kind]
        own = {
            "model_type": kind,
            "architectures": [family.architecture],
            **family.keys(config),
            **_features(config, kind),
        }
        own["initializer_range"] = config.init_std
        kept = _kept(source, config) if kind in first else {}
        for described in (kept | own, own) if kept else (own,):
            try:
                read = config_from_hf(described)
            except (KeyError, ValueError):
                continue
            tried.append(kind)
            differing = _differing(config, read)
            if (
                kind == "gpt2"
                and config.n_heads * config.head_dim != config.d_model
                and differing in ([], ["head_dim"])
            ):
                raise ValueError(
                    f"model.head_dim={config.head_dim}: the heads of Hugging Face's gpt2 are together as wide as the "
                    f"model, but n_heads * head_dim is {config.n_heads * config.head_dim} and d_model {config.d_model}"
                )
            if not differing:
                return described
            if nearest is None or len(differing) < len(nearest[0]):
                nearest = differing, kind, read
    assert nearest is not None, "config_from_hf reads what every family writes"
    fields, kind, read = nearest
    said = lambda of: ", ".join(f"{field}={getattr(of, field)!r}" for field in fields)
    families = ", ".join(dict.fromkeys(tried))
    raise ValueError(
        f"model.{said(config)}: no supported family of Hugging Face's ({families}) has that with the other fields; the "
        f"nearest, {kind}, has {said(read)}"
    )


def _kept(source: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
    """Returns the keys of a source that describes this model, {} of any other."""
    try:
        read = config_from_hf(source)
    except (KeyError, ValueError):
        return {}
    sizes = {field: getattr(config, field) for field in ("vocab_size", "max_length", "tied_head")}
    if _differing(config, dataclasses.replace(read, **sizes)):
        return {}
    return {key: value for key, value in source.items() if key not in _UNTRANSFERABLE}


def _differing(config: ModelConfig, read: ModelConfig) -> list[str]:
    """Returns the fields in which two configs compute different things."""
    unused = {"init_std"} | ({"rope_theta"} if config.positions == "learned" else set())
    names = [field.name for field in dataclasses.fields(config) if field.name not in unused]
    return [name for name in names if getattr(config, name) != getattr(read, name)]
