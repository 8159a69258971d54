"""Weights and configs of Hugging Face `transformers` models <-> ours: GPT-2, Llama, Mistral, Qwen and Gemma, as tables.

Works on plain dicts (`config.json`, state dicts of numpy arrays), so neither torch nor transformers is needed:

    config = config_from_hf(json.load(open("config.json")))
    params = params_from_hf(safetensors.numpy.load_file("model.safetensors"), config, tp=4)

A row of a table names their array, our leaves, and whether theirs is stored as [out, in]. Ours are [in, out] and
stacked over layers; theirs are one array a layer, "{}" in the name. Several leaves in a row are joined in theirs along
the last dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from taco_jax.models.config import ModelConfig
from taco_jax.models.huggingface_features import GEMMA, gemma_fields, rope_fields, window_fields
from taco_jax.models.huggingface_features import get as _get
from taco_jax.models.huggingface_features import require as _require


class _Row(NamedTuple):
    theirs: str
    ours: tuple[str, ...]
    out_in: bool = False


def _pair(theirs: str, ours: str, names: tuple[str, str]) -> list[_Row]:
    """Rows of a weight and a bias."""
    return [_Row(f"{theirs}.weight", (f"{ours}/{names[0]}",)), _Row(f"{theirs}.bias", (f"{ours}/{names[1]}",))]


_NORM, _DENSE = ("scale", "bias"), ("kernel", "bias")

GPT2_PREFIX = "transformer."
GPT2 = [
    _Row("wte.weight", ("embed/table",)),
    _Row("wpe.weight", ("embed/positions",)),
    *_pair("h.{}.ln_1", "layers/attn_norm", _NORM),
    *(
        _Row(f"h.{{}}.attn.c_attn.{theirs}", tuple(f"layers/attn/{part}/{ours}" for part in "qkv"))
        for theirs, ours in (("weight", "kernel"), ("bias", "bias"))
    ),
    *_pair("h.{}.attn.c_proj", "layers/attn/out", _DENSE),
    *_pair("h.{}.ln_2", "layers/mlp_norm", _NORM),
    *_pair("h.{}.mlp.c_fc", "layers/mlp/up", _DENSE),
    *_pair("h.{}.mlp.c_proj", "layers/mlp/down", _DENSE),
    *_pair("ln_f", "final_norm", _NORM),
]

LLAMA_PREFIX = "model."
LLAMA = [
    _Row("embed_tokens.weight", ("embed/table",)),
    _Row("layers.{}.input_layernorm.weight", ("layers/attn_norm/scale",)),
    *(
        row
        for theirs, ours in (
            ("self_attn.q_proj", "attn/q"), ("self_attn.k_proj", "attn/k"), ("self_attn.v_proj", "attn/v"),
            ("self_attn.o_proj", "attn/out"), ("mlp.gate_proj", "mlp/gate"), ("mlp.up_proj", "mlp/up"),
            ("mlp.down_proj", "mlp/down"),
        )
        for row in (
            _Row(f"layers.{{}}.{theirs}.weight", (f"layers/{ours}/kernel",), out_in=True),
            _Row(f"layers.{{}}.{theirs}.bias", (f"layers/{ours}/bias",)),
        )
    ),
    _Row("layers.{}.self_attn.q_norm.weight", ("layers/attn/q_norm/scale",)),
    _Row("layers.{}.self_attn.k_norm.weight", ("layers/attn/k_norm/scale",)),
    _Row("layers.{}.post_attention_layernorm.weight", ("layers/mlp_norm/scale",)),
    _Row("norm.weight", ("final_norm/scale",)),
]  # fmt: skip
# Of Gemma 2 and 3, where Llama's post_attention_layernorm is another norm.
POST_NORMS = [
    _Row("layers.{}.post_attention_layernorm.weight", ("layers/attn_post_norm/scale",)),
    _Row("layers.{}.pre_feedforward_layernorm.weight", ("layers/mlp_norm/scale",)),
    _Row("layers.{}.post_feedforward_layernorm.weight", ("layers/mlp_post_norm/scale",)),
]
HEAD = _Row("lm_head.weight", ("head/kernel",), out_in=True)

# Buffers that some checkpoints carry although they hold no weights.
BUFFERS = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")
_ACTIVATIONS = {name: name for name in ("gelu", "relu", "silu")} | {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a `config.json` of a model_type of MODEL_TYPES.

    Raises:
        KeyError: a size that is not there.
        ValueError: another model_type, a feature that the decoder does not have (dynamic rotary positions, another
          activation), a value of another type or out of range.
    """
    kind = hf.get("model_type")
    if kind not in MODEL_TYPES:
        raise ValueError(f"model_type={kind!r}: must be one of {', '.join(MODEL_TYPES)}")
    for key, neutral in NEUTRAL.items():
        if kind not in GEMMA[1:] or key not in SOFTCAPS:
            _require(key, hf.get(key, neutral), neutral, None)
    if kind == "gpt2":
        return _gpt2_config(hf)
    heads, width = _get(hf, "num_attention_heads", int), _get(hf, "hidden_size", int)
    attention_bias = _get(hf, "attention_bias", bool, False)
    layers, longest = _get(hf, "num_hidden_layers", int), _get(hf, "max_position_embeddings", int)
    head_dim = _get(hf, "head_dim", int, 256 if kind in GEMMA else width // max(heads, 1))
    features = rope_fields(hf, kind, longest) | window_fields(hf, kind, layers) | gemma_fields(hf, kind, head_dim)
    if "sliding_window" not in features:
        features.pop("rope_local_theta", None)
    return ModelConfig(
        vocab_size=_get(hf, "vocab_size", int),
        d_model=width,
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=_get(hf, "num_key_value_heads", int, heads),
        head_dim=head_dim,
        d_mlp=_get(hf, "intermediate_size", int),
        norm="rmsnorm",
        norm_eps=_get(hf, "rms_norm_eps", float),
        positions="rope",
        max_length=longest,
        activation=_llama_activation(hf, kind),
        gated_mlp=True,
        qkv_bias=kind == "qwen2" or attention_bias,
        out_bias=kind != "qwen2" and attention_bias,
        mlp_bias=_get(hf, "mlp_bias", bool, False),
        qk_norm=kind in ("qwen3", "gemma3_text"),
        tied_head=_get(hf, "tie_word_embeddings", bool, kind in GEMMA),
        **features,
    )


def _gpt2_config(hf: Mapping[str, Any]) -> ModelConfig:
    for key, value in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
        _require(key, hf.get(key, value), value)
    hf = {GPT2_NAMES[key]: value for key, value in hf.items() if key in GPT2_NAMES} | dict(hf)
    for other, key in GPT2_NAMES.items():
        if other in hf and hf[other] not in (None, hf[key]):
            raise ValueError(f"{other}={hf[other]!r}: is another name of {key}={hf[key]!r}; keep the right one")
    width, heads = _get(hf, "n_embd", int), _get(hf, "n_head", int)
    return ModelConfig(
        vocab_size=_get(hf, "vocab_size", int),
        d_model=width,
        n_layers=_get(hf, "n_layer", int),
        n_heads=heads,
        n_kv_heads=heads,
        head_dim=width // max(heads, 1),
        d_mlp=_get(hf, "n_inner", int, 4 * width),
        norm="layernorm",
        norm_eps=_get(hf, "layer_norm_epsilon", float),
        positions="learned",
        max_length=_get(hf, "n_positions", int),
        activation=_activation(_get(hf, "activation_function", str)),
        gated_mlp=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied_head=_get(hf, "tie_word_embeddings", bool, True),
    )


MODEL_TYPES = ("gpt2", "llama", "mistral", "qwen2", "qwen3", *GEMMA)
SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")
GPT2_NAMES = {
    "hidden_size": "n_embd", "max_position_embeddings": "n_positions", "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}  # fmt: skip
"""Other names that transformers takes GPT-2's sizes by; of two values the last in the file counts there."""

NEUTRAL = {
    "is_causal": True, "use_bidirectional_attention": False, "add_cross_attention": False,
    "is_encoder_decoder": False, "partial_rotary_factor": 1, "rotary_pct": 1, "attention_multiplier": None,
    "attention_scale": None, "embedding_multiplier": 1, "residual_multiplier": 1, "logits_scaling": 1, "logit_scale": 1,
    "attn_logit_softcapping": None, "final_logit_softcapping": None, "clip_qkv": None, "quantization_config": None,
}  # fmt: skip
"""Keys of config.json that change what a model computes and that the decoder has not, with the value that changes
nothing; null does neither. Keys that transformers does not read for these models are not looked at."""


def _llama_activation(hf: Mapping[str, Any], kind: str) -> str:
    if kind in GEMMA[1:]:
        return _activation(_get(hf, "hidden_activation", str, "gelu_pytorch_tanh"))
    name = _get(hf, "hidden_act", str)
    return "gelu_tanh" if kind == "gemma" and name == "gelu" else _activation(name)  # as transformers reads it


def _activation(name: str) -> str:
    if name not in _ACTIVATIONS:
        raise ValueError(f"activation {name!r}: must be one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _table(config: ModelConfig) -> tuple[str, list[_Row]]:
    """(prefix of their names, rows) for the model that `config` describes."""
    parts = (config.norm, config.positions, config.gated_mlp)
    if parts == ("layernorm", "learned", False):
        prefix, rows = GPT2_PREFIX, GPT2
    elif parts == ("rmsnorm", "rope", True):
        prefix, rows = LLAMA_PREFIX, LLAMA
        if config.post_norms:
            rows = [row for row in LLAMA if row.ours != ("layers/mlp_norm/scale",)] + POST_NORMS
    else:
        raise ValueError(
            f"norm={parts[0]!r}, positions={parts[1]!r}, gated_mlp={parts[2]}: no Hugging Face model has this mixture; "
            "GPT-2 is layernorm, learned, False; Llama and Qwen are rmsnorm, rope, True"
        )
    absent = {
        "attn/q/bias": not config.qkv_bias, "attn/k/bias": not config.qkv_bias, "attn/v/bias": not config.qkv_bias,
        "attn/out/bias": not config.out_bias, "mlp/gate/bias": not config.mlp_bias, "mlp/up/bias": not config.mlp_bias,
        "mlp/down/bias": not config.mlp_bias, "attn/q_norm/scale": not config.qk_norm,
        "attn/k_norm/scale": not config.qk_norm,
    }  # fmt: skip
    rows = [row for row in rows if not absent.get(row.ours[0].removeprefix("layers/"), False)]
    return prefix, rows if config.tied_head else [*rows, HEAD]


def params_from_hf(arrays: Mapping[str, Any], config: ModelConfig, tp: int = 1) -> dict[str, Any]:
    """Our parameters (numpy, float32, the vocabulary padded for `tp`) from a state dict of numpy arrays.

    Names may lack the models' own prefix ("transformer.", "model."), as those of a model without its head do.

    Raises:
        ValueError: arrays that are missing, left over or of another shape, by name.
    """
    names = match_names(arrays, config)
    shapes = _shapes(config, tp)
    flat: dict[str, np.ndarray] = {}
    for row in _table(config)[1]:
        per_layer = [np.asarray(arrays[names[name]]).astype(np.float32) for name in _names(row, config)]
        per_layer = [array.T if row.out_in else array for array in per_layer]
        joined = np.stack(per_layer) if "{}" in row.theirs else per_layer[0]
        for path, part in zip(row.ours, np.split(joined, len(row.ours), axis=-1)):
            flat[path] = _fit(part, shapes[path], path, config)
    return _nest(flat)


class Source(NamedTuple):
    """Where one of our leaves comes from.

    names: their arrays' (without prefix), one a layer where `stacked`, else one. out_in: theirs is transposed.
    part, parts: ours is this one of so many equal pieces of theirs along its last dim.
    """

    names: tuple[str, ...]
    stacked: bool
    out_in: bool
    part: int
    parts: int


def sources(config: ModelConfig) -> dict[str, Source]:
    """{path of a leaf of ours, "layers/attn/q/kernel": Source}, for who reads a checkpoint piece by piece."""
    return {
        path: Source(tuple(_names(row, config)), "{}" in row.theirs, row.out_in, part, len(row.ours))
        for row in _table(config)[1]
        for part, path in enumerate(row.ours)
    }


def match_names(given: Iterable[str], config: ModelConfig) -> dict[str, str]:
    """{name as in `Source`: the name as given}, of all arrays that the model has.

    Raises:
        ValueError: arrays that are missing, left over, or there under two names.
    """
    prefix, rows = _table(config)
    names: dict[str, str] = {}
    for name in given:
        if not name.endswith(BUFFERS) and (other := names.setdefault(name.removeprefix(prefix), name)) != name:
            raise ValueError(f"state dict has one array under two names, {other} and {name}; keep the right one")
    if config.tied_head:
        head = names.pop("lm_head.weight", None)
        if head is not None:  # one name of a tied table is enough, whichever a writer kept
            names.setdefault(rows[0].theirs, head)
    expected = {name for row in rows for name in _names(row, config)}
    missing, extra = sorted(expected - names.keys()), sorted(names.keys() - expected)
    if missing or extra:
        raise ValueError(f"state dict does not fit the config: missing {_some(missing)}; left over {_some(extra)}")
    return names


def params_to_hf(params: Mapping[str, Any], config: ModelConfig) -> dict[str, np.ndarray]:
    """A state dict (numpy, float32, with their prefixes) from our parameters: the inverse of `params_from_hf`.

    A tied head is not written, as transformers itself does not.
    """
    flat = _flatten(params)
    return {
        name: np.ascontiguousarray(array, dtype=np.float32)
        for target in targets(config)
        for name, array in zip(
            target.names, target.arrays([_unpad(np.asarray(flat[path]), path, config) for path in target.ours])
        )
    }


class Target(NamedTuple):
    """Where some of our leaves go, for who writes a checkpoint piece by piece.

    names: their arrays' (with prefix), one a layer where `stacked`, else one. ours: paths of our leaves, which are
    joined in each of them along the last dim. out_in: theirs is transposed.
    """

    names: tuple[str, ...]
    stacked: bool
    out_in: bool
    ours: tuple[str, ...]

    def arrays(self, leaves: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
        """Yields their arrays, in the order of `names`, of our leaves without padding of the vocabulary."""
        for layer in range(len(self.names)):
            parts = [leaf[layer] if self.stacked else leaf for leaf in leaves]
            joined = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
            yield joined.T if self.out_in else joined

    def shape(self, leaves: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Returns the shape of each of their arrays, of those of our leaves without padding of the vocabulary."""
        one = [shape[1:] if self.stacked else shape for shape in leaves]
        joined = (*one[0][:-1], sum(shape[-1] for shape in one))
        return joined[::-1] if self.out_in else joined


def targets(config: ModelConfig) -> list[Target]:
    """Returns the targets of all leaves, each leaf in one. Raises ValueError for a mixture that no model has."""
    prefix, rows = _table(config)
    full = lambda row, name: name if row is HEAD else prefix + name
    return [
        Target(tuple(full(row, name) for name in _names(row, config)), "{}" in row.theirs, row.out_in, row.ours)
        for row in rows
    ]


def _names(row: _Row, config: ModelConfig) -> list[str]:
    return [row.theirs.format(i) for i in range(config.n_layers)] if "{}" in row.theirs else [row.theirs]


def _some(names: list[str]) -> str:
    return (", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")) or "none"


VOCAB_DIM = {"embed/table": 0, "head/kernel": 1}


def _shapes(config: ModelConfig, tp: int) -> dict[str, tuple[int, ...]]:
    import jax

    from taco_jax.models.params import init_params

    tree = jax.eval_shape(lambda: init_params(config, jax.random.key(0), tp))
    return {path: leaf.shape for path, leaf in _flatten(tree).items()}


def _fit(array: np.ndarray, shape: tuple[int, ...], path: str, config: ModelConfig) -> np.ndarray:
    """`array`, its vocabulary padded with zeros to `shape`."""
    dim = VOCAB_DIM.get(path)
    want = tuple(config.vocab_size if i == dim else size for i, size in enumerate(shape))
    if array.shape != want:
        raise ValueError(f"{path}: the state dict has shape {array.shape}, the config needs {want}")
    return np.pad(array, [(0, size - have) for size, have in zip(shape, array.shape)])


def _unpad(array: np.ndarray, path: str, config: ModelConfig) -> np.ndarray:
    dim = VOCAB_DIM.get(path)
    return array if dim is None else np.take(array, range(config.vocab_size), axis=dim)


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flatten(value, f"{prefix}{name}/") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, last = path.split("/")
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = value
    return tree
