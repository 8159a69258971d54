"""Keys of `config.json` for what families of models differ in, both ways: rotary positions, windows, Gemma's parts.

`rope_fields`, `window_fields` and `gemma_fields` read them as transformers 5 does, the older spelling too: rope_theta
and rope_scaling beside rope_parameters. `feature_keys` writes the older one, which transformers 4 and 5 both read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from taco_jax.errors import did_you_mean
from taco_jax.models.config import MOST_LAYERS, ModelConfig

GEMMA = ("gemma", "gemma2", "gemma3_text")
_NAMES = ("rope_type", "type")
_SCALED = {
    "factor": "rope_factor", "original_max_position_embeddings": "rope_original_length",
    "low_freq_factor": "rope_low_frequency", "high_freq_factor": "rope_high_frequency", "beta_fast": "rope_beta_fast",
    "beta_slow": "rope_beta_slow", "attention_factor": "rope_attention_factor", "truncate": "rope_truncate",
}  # fmt: skip
"""Their keys of scaled rotary positions -> fields of ModelConfig."""
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate",
        "mscale", "mscale_all_dim",
    ),
}  # fmt: skip
_NO_EFFECT = ("finetuned",)  # in files of the first YaRN models; transformers does not read it


def get(hf: Mapping[str, Any], key: str, kind: type, *default: Any) -> Any:
    """A value of the type that it must have; null is as good as none where there is a default."""
    value = hf.get(key) if default else hf[key]
    if value is None and default:
        return default[0]
    fits = isinstance(value, kind) or (kind is float and isinstance(value, int))
    if not fits or (isinstance(value, bool) and kind is not bool):
        name = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}.get(kind, kind.__name__)
        raise ValueError(f"{key}={value!r}: must be {name}")
    try:
        return float(value) if kind is float else value
    except OverflowError:
        raise ValueError(f"{key}=a number of {value.bit_length()} bits: must be one that a float holds") from None


def require(key: str, value: Any, *allowed: Any) -> None:
    if value not in allowed:
        raise ValueError(f"{key}={value!r}: this decoder has only {key}={allowed[0]!r}")


# Rotary positions.


def rope_fields(hf: Mapping[str, Any], kind: str, max_length: int) -> dict[str, Any]:
    """The fields of ModelConfig that begin with rope_, but for rope_local_theta where no layer has a window."""
    if kind == "gemma3_text":
        return _two_ropes(hf, max_length)
    theta = beside = get(hf, "rope_theta", float, 10_000.0)
    fields: dict[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):  # as in transformers: the last that says anything, and it alone
        if rope := get(hf, key, dict, {}):
            fields, theta = _scaled(rope, key, hf, max_length), _inside(rope, key, "rope_theta", float, beside)
    return {"rope_theta": theta} | fields


def _two_ropes(hf: Mapping[str, Any], max_length: int) -> dict[str, Any]:
    """Gemma 3's fields: layers with a window have wavelengths of their own, which are not scaled."""
    both = get(hf, "rope_parameters", dict, {})
    if extra := set(both) - {"full_attention", "sliding_attention"}:
        raise ValueError(f"rope_parameters.{min(extra)}: its keys must be full_attention and sliding_attention")
    full, local = (get(both, key, dict, {}) for key in ("full_attention", "sliding_attention"))
    where, full = "rope_parameters.full_attention", full | get(hf, "rope_scaling", dict, {})
    if get(hf, "rope_scaling", dict, {}):
        where = "rope_scaling"
    local_fields = _scaled(local, "rope_parameters.sliding_attention", hf, max_length)
    require("rope_parameters.sliding_attention.rope_type", local_fields.get("rope_type", "default"), "default")
    beside = get(hf, "rope_theta", float, 1e6), get(hf, "rope_local_base_freq", float, 1e4)
    return {
        "rope_theta": _inside(full, where, "rope_theta", float, beside[0]),
        "rope_local_theta": _inside(local, "rope_parameters.sliding_attention", "rope_theta", float, beside[1]),
        **_scaled(full, where, hf, max_length),
    }


def _inside(rope: Mapping[str, Any], where: str, key: str, kind: type, *default: Any) -> Any:
    """`get`, with where the key stands in the message."""
    try:
        return get(rope, key, kind, *default)
    except KeyError:
        raise ValueError(f"{where}.{key}: is missing, and this rope_type needs it") from None
    except ValueError as error:
        raise ValueError(f"{where}.{error}") from None


def _scaled(rope: Mapping[str, Any], where: str, hf: Mapping[str, Any], max_length: int) -> dict[str, Any]:
    """The fields of a dict of rotary positions, without its theta."""
    named = [(name, rope[name]) for name in _NAMES if rope.get(name) is not None]
    if len({str(value) for _, value in named}) > 1:
        raise ValueError(f"{where}.type={rope['type']!r}: is another name of rope_type={rope['rope_type']!r}; keep one")
    name, kind = named[0] if named else ("rope_type", "default")
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        raise ValueError(f"{where}.{name}={kind!r}: this decoder has {', '.join(_ROPE_KEYS)}")
    for key, value in rope.items():
        if value is None or key in (*_NAMES, "rope_theta", *_NO_EFFECT) or key in _ROPE_KEYS[kind]:
            continue
        if key == "partial_rotary_factor":
            require(f"{where}.{key}", value, 1)
            continue
        takes = ", ".join(_ROPE_KEYS[kind]) or "nothing"
        owners = [other for other, keys in _ROPE_KEYS.items() if key in keys]
        hint = f"is of {owners[0]}" if owners else did_you_mean(key, (*_ROPE_KEYS[kind], "rope_theta"))
        raise ValueError(f"{where}.{key}={value!r}: {name}={kind!r} takes {takes} beside rope_theta; {hint}")
    if kind == "default":
        return {}
    of = lambda key, kind, *default: _inside(rope, where, key, kind, *default)
    fields: dict[str, Any] = {"rope_type": kind}
    if kind == "linear":
        return fields | {"rope_factor": of("factor", float)}
    said = get(hf, "original_max_position_embeddings", int, None)  # beside it, it counts more
    original = of("original_max_position_embeddings", int, max_length) if said is None else said
    fields["rope_original_length"] = original
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        return fields | {_SCALED[key]: of(key, float) for key in names}
    factor = of("factor", float, *[None] * ("factor" in rope))  # null is the ratio of both lengths
    factor = max_length / original if factor is None and original > 0 else factor
    fields |= {"rope_factor": factor, "rope_truncate": of("truncate", bool, True)}
    fields |= {
        "rope_beta_fast": of("beta_fast", float, 0.0) or 32.0,
        "rope_beta_slow": of("beta_slow", float, 0.0) or 1.0,
    }
    attention, over, under = (of(key, float, None) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if attention is None and over and under:
        scale = lambda mscale: 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1
        attention = scale(over) / scale(under)
    return fields | {"rope_attention_factor": attention}


# Windows.


def window_fields(hf: Mapping[str, Any], kind: str, layers: int) -> dict[str, Any]:
    """sliding_window and attention_pattern of ModelConfig, none where no layer has a window."""
    types = get(hf, "layer_types", list, None)
    for i, layer in enumerate(types or []):
        if layer not in ("full_attention", "sliding_attention") or (layer != "full_attention" and kind == "llama"):
            raise ValueError(f"layer_types[{i}]={layer!r}: this decoder has only layer_types[{i}]='full_attention'")
    if types is not None and len(types) != layers:
        raise ValueError(f"layer_types: names {len(types)} layers, must be num_hidden_layers={layers}")
    if kind in ("llama", "gemma"):
        require("use_sliding_window", get(hf, "use_sliding_window", bool, False), False)
        slides = lambda layer: False
        slides_at_all = False
    elif kind == "mistral":
        slides_at_all, slides = True, lambda layer: True
        if types is not None and hf.get("sliding_window", 4096) is not None and "full_attention" in types:
            raise ValueError("layer_types: has 'full_attention', but every layer of a mistral has the sliding window")
    elif kind in ("qwen2", "qwen3"):
        slides_at_all = get(hf, "use_sliding_window", bool, False)
        full = get(hf, "max_window_layers", int, 28) if slides_at_all else 0
        slides = lambda layer: layer >= full
    else:
        period = get(hf, "sliding_window_pattern", int, 6) if kind == "gemma3_text" else 2
        if period < 1:
            raise ValueError(f"sliding_window_pattern={period}: must be at least 1")
        slides_at_all, slides = True, lambda layer: (layer + 1) % period > 0
    # Every family's class has 4096 where the file says nothing; null is no window.
    window = get({"sliding_window": hf.get("sliding_window", 4096)}, "sliding_window", int, None)
    if not slides_at_all or window is None:
        if types is not None and "sliding_attention" in types:
            at = types.index("sliding_attention")
            raise ValueError(f"layer_types[{at}]='sliding_attention': needs use_sliding_window and a sliding_window")
        return {}
    if types is None and kind == "mistral":
        return {"sliding_window": window}
    if layers > MOST_LAYERS:
        raise ValueError(
            f"num_hidden_layers={layers}: must be at most {MOST_LAYERS} where layers differ in their windows"
        )
    of = [slides(i) for i in range(layers)] if types is None else [layer == "sliding_attention" for layer in types]
    pattern = "".join("s" if slides else "f" for slides in of)
    return {"sliding_window": window, "attention_pattern": pattern} if "s" in pattern else {}


# Gemma.


def gemma_fields(hf: Mapping[str, Any], kind: str, head_dim: int) -> dict[str, Any]:
    """The fields that Gemma's families set; none for others."""
    if kind not in GEMMA:
        return {}
    fields = {"norm_plus_one": True, "scale_embedding": True}
    if kind == "gemma":
        return fields
    scalar = get(hf, "query_pre_attn_scalar", float, 256.0)
    if not scalar > 0:
        raise ValueError(f"query_pre_attn_scalar={scalar}: must be above 0")
    cap = lambda key, usual: get({key: hf.get(key, usual)}, key, float, None)
    caps = {"logit_softcap": cap("final_logit_softcapping", 30.0 if kind == "gemma2" else None)}
    if kind == "gemma2":
        caps["attention_softcap"] = cap("attn_logit_softcapping", 50.0)
    else:
        require("attn_logit_softcapping", hf.get("attn_logit_softcapping"), None)
    return fields | {"post_norms": True, "attention_scale": None if scalar == head_dim else scalar**-0.5} | caps


# Back.


def model_type(config: ModelConfig) -> str:
    """The family whose `config.json` can say all that the config does.

    Raises:
      ValueError: a mixture that no family has, with its fields.
    """
    if config.positions == "learned":
        kind = "gpt2"
    elif config.norm_plus_one:
        kind = "gemma" if not config.post_norms else "gemma3_text" if config.qk_norm else "gemma2"
    elif config.qk_norm:
        kind = "qwen3"
    elif config.qkv_bias and not config.out_bias:
        kind = "qwen2"
    else:
        kind = "llama" if config.sliding_window is None else "mistral"
    gemma, later = kind in GEMMA, kind in GEMMA[1:]
    biases = config.qkv_bias or config.out_bias or config.mlp_bias
    unfit = {
        "norm_plus_one": config.norm_plus_one != gemma,
        "scale_embedding": config.scale_embedding != gemma,
        "post_norms": config.post_norms != later,
        "attention_scale": config.attention_scale is not None and not later,
        "attention_softcap": config.attention_softcap is not None and kind != "gemma2",
        "logit_softcap": config.logit_softcap is not None and not later,
        "sliding_window": config.sliding_window is not None
        and (kind in ("gpt2", "gemma") or (kind == "mistral" and biases)),
        "attention_pattern": config.attention_pattern != "s" and kind == "mistral",
        "rope_local_theta": (config.rope_local_theta is not None) != (kind == "gemma3_text" and bool(config.windows)),
    }
    if wrong := [key for key, is_so in unfit.items() if is_so]:
        said = ", ".join(f"{key}={getattr(config, key)!r}" for key in wrong)
        raise ValueError(f"{said}: no Hugging Face model has it with the rest of this config; {kind} is the nearest")
    return kind


def feature_keys(config: ModelConfig) -> dict[str, Any]:
    """Keys of `config.json` for model_type, rotary positions, windows and Gemma's parts, read by `config_from_hf`.

    Sizes, biases and the names of activations are not among them.

    Raises:
      ValueError: a mixture that no Hugging Face family has.
    """
    kind = model_type(config)
    keys: dict[str, Any] = {"model_type": kind}
    if kind == "gpt2":
        return keys
    keys["rope_theta"] = config.rope_theta
    if config.rope_type != "default":
        named = {"rope_type": config.rope_type}
        values = {key: getattr(config, field) for key, field in _SCALED.items() if key in _ROPE_KEYS[config.rope_type]}
        keys["rope_scaling"] = named | {key: value for key, value in values.items() if value is not None}
    if kind == "mistral":
        keys["sliding_window"] = config.sliding_window
    elif kind not in ("llama", "gemma"):
        slides = config.windows if isinstance(config.windows, tuple) else (config.windows,) * config.n_layers
        keys["layer_types"] = ["sliding_attention" if slide else "full_attention" for slide in slides]
        keys["sliding_window"] = config.sliding_window
        if kind not in GEMMA:
            keys["use_sliding_window"] = config.sliding_window is not None
            keys["max_window_layers"] = _first_window(slides)
    if kind in GEMMA[1:]:
        scale = config.attention_scale
        scalar = config.head_dim if scale is None else scale**-2
        keys["query_pre_attn_scalar"] = round(scalar) if abs(scalar - round(scalar)) < 1e-6 else scalar
        keys |= {"final_logit_softcapping": config.logit_softcap, "attn_logit_softcapping": config.attention_softcap}
    if kind == "gemma3_text":
        keys["rope_local_base_freq"] = 1e4 if config.rope_local_theta is None else config.rope_local_theta
    return keys


def _first_window(slides: tuple[bool, ...]) -> int:
    """Returns max_window_layers: the layers before the first one with a window."""
    return slides.index(True) if True in slides else len(slides)
