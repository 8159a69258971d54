"""llama.cpp's GGUF files as checkpoints: weights of any quantisation that the `gguf` package knows, dequantised as they
are read; config and tokenizer come from the same file. Architectures: llama, qwen2, qwen3.

GGUF has its own names for the tensors. Those of `llama` hold the rows of q and k in the order of interleaved rotary
pairs (x[2i], x[2i + 1]); they are put back into halves (x[i], x[i + H/2]) here.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from taco_jax.config import ConfigError
from taco_jax.inference import gguf_header
from taco_jax.inference.gguf_rope import rope_scaling
from taco_jax.inference.templates import Template
from taco_jax.inference.tensors import check_sizes
from taco_jax.inference.text import CONTROL, PRE, Tokenizer, byte_level_bpe
from taco_jax.models import huggingface
from taco_jax.models.config import ModelConfig

if TYPE_CHECKING:
    from taco_jax.inference.loading import Checkpoint

ARCHITECTURES = ("llama", "qwen2", "qwen3")
# The file's names -> those of Hugging Face.
TOP = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
IN_LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
# Factors of rotary frequencies: Llama 3.1's, and others, which are refused below.
LLAMA3_FACTORS = "rope_freqs.weight"
FACTORS = (LLAMA3_FACTORS, "rope_factors_long.weight", "rope_factors_short.weight")
# Tokens that llama.cpp ends texts at by their names, because files rarely say that they do.
ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>",
    "<|eom_id|>",
)  # fmt: skip
# Keys of an architecture that change what it computes, and the values at which they change nothing here. All others
# that are not read below are refused.
NEUTRAL = {
    "attention.causal": (True,), "attention.clamp_kqv": (0,), "attention.max_alibi_bias": (0,),
    "attn_logit_softcapping": (0,), "embedding_scale": (0, 1), "expert_count": (0,),
    "expert_used_count": (0,), "final_logit_softcapping": (0,), "logit_scale": (0, 1), "nextn_predict_layers": (0,),
    "residual_scale": (0, 1), "rope.scaling.alpha": (0,), "rope.scaling.attn_factor": (0, 1),
    "rope.scaling.yarn_attn_factor": (0, 1), "tensor_data_layout": ("Meta AI original pth",),
    "use_parallel_residual": (False,),
}  # fmt: skip
READ = {
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.layer_norm_rms_epsilon",
    "attention.scale", "attention.sliding_window", "attention.value_length", "block_count", "context_length",
    "embedding_length", "feed_forward_length", "rope.dimension_count", "rope.freq_base", "rope.scale_linear",
    "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.type", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow", "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_log_multiplier", "vocab_size",
}  # fmt: skip
# No part of the forward pass.
UNUSED = {"pooling_type", "rope.scaling.finetuned"}


def open_file(path: Path) -> tuple[ModelConfig, GGUFTensors, Tokenizer | None, frozenset[int], Template | None]:
    """(config, tensors, tokenizer, ids that end a text, chat template) of a file.

    Raises:
      ConfigError: names file and key.
    """
    try:
        import gguf
    except ImportError:
        raise ConfigError(f"--model {path}: needs the package gguf: pip install 'taco-jax[gguf]'") from None
    try:
        gguf_header.check(path)
        reader = gguf.GGUFReader(str(path))
    except Exception as error:  # ValueError, IndexError, KeyError: whatever a damaged file leads to
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path}: is no complete GGUF file ({reason}); was it cut off in a download?") from None
    fields = _Fields(path, reader)
    kind = fields.get("general.architecture", of=str)
    if kind not in ARCHITECTURES:
        raise ConfigError(f"{path}: general.architecture={kind!r}: must be one of {', '.join(ARCHITECTURES)}")
    if (parts := fields.get("split.count", 1, of=int)) > 1:
        raise ConfigError(f"{path}: is one of {parts} parts; make one file of them: llama-gguf-split --merge")
    tensors = GGUFTensors(path, reader, gguf.quants.dequantize)
    config = _config(fields, kind, tensors)
    check_sizes(config, tensors, path)
    if kind == "llama":
        tensors.interleaved = {"self_attn.q_proj": config.n_heads, "self_attn.k_proj": config.n_kv_heads}
    return config, tensors, _tokenizer(fields), _ends(fields), _template(fields)


class _Fields:
    """The file's keys. `get` raises ConfigError for one that is missing, without a default, or of another type."""

    def __init__(self, path: Path, reader: Any):
        self.path, self._reader = path, reader

    def names(self, prefix: str) -> list[str]:
        return sorted(name.removeprefix(prefix) for name in self._reader.fields if name.startswith(prefix))

    def get(self, key: str, *default: Any, of: type = object) -> Any:
        field = self._reader.fields.get(key)
        if field is None and not default:
            raise ConfigError(f"{self.path}: has no key {key}")
        if field is None:
            return default[0]
        try:
            value = field.contents()
        except ValueError as error:
            raise ConfigError(f"{self.path}: {key} cannot be read ({error})") from None
        fits = isinstance(value, of) or (of is float and isinstance(value, int))
        if not fits or (isinstance(value, bool) and of in (int, float)):
            shown = repr(value) if len(repr(value)) < 60 else f"a {type(value).__name__} of {len(value)}"
            name = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}.get(of, of.__name__)
            raise ConfigError(f"{self.path}: {key}={shown}: must be {name}")
        return value


def _config(fields: _Fields, kind: str, tensors: GGUFTensors) -> ModelConfig:
    of = lambda key, *default, of=int: fields.get(f"{kind}.{key}", *default, of=of)
    names, heads, width = set(tensors.names()), of("attention.head_count"), of("embedding_length")
    if "embed_tokens.weight" not in names:
        raise ConfigError(f"{fields.path}: has no tensor token_embd.weight")
    head_dim = of("attention.key_length", width // max(heads, 1))
    if len(table := tensors.shape("embed_tokens.weight")) != 2:
        raise ConfigError(f"{fields.path}: the tensor token_embd.weight has shape {list(table)}: must have two dims")
    vocabulary = table[0]
    _refuse_unknown(fields, kind, head_dim, vocabulary)
    if others := [name for name in tensors.factors if name != LLAMA3_FACTORS]:
        raise ConfigError(f"{fields.path}: has {others[0]}: this decoder has no scaling of rotary positions by it")
    longest = of("context_length")
    scaling = rope_scaling(fields, kind, longest, head_dim, tensors.read_factors(LLAMA3_FACTORS))
    window = of("attention.sliding_window", 0)
    window = window if 0 < window < longest else None  # a longer one leaves nothing out
    if window and kind != "llama":
        raise ConfigError(
            f"{fields.path}: {kind}.attention.sliding_window={window}: the file does not say which layers have it; its "
            f"Hugging Face folder does"
        )
    try:
        return huggingface.config_from_hf(
            {
                "model_type": "mistral" if window else kind, "sliding_window": window, "rope_scaling": scaling,
                "vocab_size": vocabulary, "hidden_size": width,
                "num_hidden_layers": of("block_count"), "num_attention_heads": heads,
                "num_key_value_heads": of("attention.head_count_kv", heads), "head_dim": head_dim,
                "intermediate_size": of("feed_forward_length"), "hidden_act": "silu",
                "rms_norm_eps": of("attention.layer_norm_rms_epsilon", of=float),
                "rope_theta": of("rope.freq_base", 10_000.0, of=float),
                "max_position_embeddings": longest, "tie_word_embeddings": "lm_head.weight" not in names,
                "attention_bias": kind == "llama" and "layers.0.self_attn.o_proj.bias" in names,
            }
        )  # fmt: skip
    except ConfigError:  # of a key, with the file's name already
        raise
    except ValueError as error:
        raise ConfigError(f"{fields.path}: {error}") from None


def _refuse_unknown(fields: _Fields, kind: str, head_dim: int, vocabulary: int) -> None:
    """Raises ConfigError for a key that changes the model and that nobody reads."""
    allowed = NEUTRAL | {
        "attention.value_length": (head_dim,),
        "rope.dimension_count": (head_dim,),
        "vocab_size": (vocabulary,),
    }
    for name in fields.names(f"{kind}."):
        key = f"{kind}.{name}"
        if name == "attention.scale":  # 0 is the usual one, 1 / sqrt(head_dim)
            value = fields.get(key, of=float)
            if value and not abs(value * head_dim**0.5 - 1) < 1e-3:  # nor is NaN
                raise ConfigError(f"{fields.path}: {key}={value}: this decoder has only {head_dim**-0.5:.6g}")
        elif name in allowed:
            value = fields.get(key)
            if value not in allowed[name]:
                raise ConfigError(f"{fields.path}: {key}={value!r}: this decoder has only {key}={allowed[name][0]!r}")
        elif name not in READ | UNUSED:
            raise ConfigError(f"{fields.path}: has the key {key}, whose meaning is not known here")


class GGUFTensors:
    """The file's tensors under their Hugging Face names. interleaved: {part of a name: heads} whose rows are turned.

    factors: those that scale rotary positions, by their own names.
    """

    def __init__(self, path: Path, reader: Any, dequantize: Any):
        self._path, self._dequantize = path, dequantize
        self.factors = {tensor.name: tensor for tensor in reader.tensors if tensor.name in FACTORS}
        self._tensors = {_name(tensor.name): tensor for tensor in reader.tensors if tensor.name not in FACTORS}
        if len(self._tensors) + len(self.factors) < len(reader.tensors):
            names = sorted(_name(tensor.name) for tensor in reader.tensors)
            twice = next(a for a, b in itertools.pairwise(names) if a == b)
            raise ConfigError(f"{path}: has the tensor {twice} under two names")
        self.interleaved: dict[str, int] = {}
        self._whole = functools.lru_cache(maxsize=1)(self._read)

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def where(self, name: str) -> str:
        return str(self._path)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(size) for size in self._tensors[name].shape[::-1])

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        # Whole, because quantised blocks lie across columns; kept, because the next shard asks for another part of it.
        return self._whole(name)[index]

    def check_types(self) -> None:
        """Does nothing: what can be dequantised shows when it is read."""

    def read_factors(self, name: str) -> np.ndarray | None:
        """One of `factors`, float32[n]; None where there is none of that name."""
        return self._dequantised(self.factors[name]).reshape(-1) if name in self.factors else None

    def _dequantised(self, tensor: Any) -> np.ndarray:
        try:
            with np.errstate(all="ignore"):  # of infinite scales, which are refused when it is on its way to a device
                return self._dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        except (NotImplementedError, ValueError) as error:
            kind = getattr(tensor.tensor_type, "name", tensor.tensor_type)
            raise ConfigError(f"{self._path}: the tensor {tensor.name!r} is of type {kind}: {error}") from None

    def _read(self, name: str) -> np.ndarray:
        array = self._dequantised(self._tensors[name]).reshape(self.shape(name))
        for part, heads in self.interleaved.items():
            if part in name:
                rows = array.reshape(heads, -1, 2, *array.shape[1:])
                array = np.swapaxes(rows, 1, 2).reshape(array.shape)
        return array


def _name(theirs: str) -> str:
    """ "blk.3.attn_q.weight" -> "layers.3.self_attn.q_proj.weight"; what is unknown stays, and is refused later."""
    stem, _, last = theirs.rpartition(".")
    if stem.startswith("blk."):
        _, layer, part = (*stem.split(".", 2), "")[:3]
        return f"layers.{layer}.{IN_LAYER.get(part, part)}.{last}"
    return f"{TOP.get(stem, stem)}.{last}"


def tokenizer_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    """{name: content} of a Hugging Face tokenizer: the file's vocabulary, its chat template, the ids that end texts.

    Empty where the package tokenizers is missing. The same file gives the same bytes.
    """
    if checkpoint.tokenizer is None:
        return {}
    library, template = checkpoint.tokenizer.library, checkpoint.template
    special = dict(template.tokens) if template else {}
    if len(checkpoint.eos) == 1:
        special.setdefault("eos_token", library.id_to_token(*checkpoint.eos))
    files = {
        "tokenizer.json": library.to_str(pretty=True).encode(),
        "tokenizer_config.json": _json({"tokenizer_class": "PreTrainedTokenizerFast"} | special),
    }
    if checkpoint.eos:
        files["generation_config.json"] = _json({"eos_token_id": sorted(checkpoint.eos)})
    if template is not None:
        files["chat_template.jinja"] = template.source.encode()
    return files


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


def _tokenizer(fields: _Fields) -> Tokenizer | None:
    """The byte-level BPE of the file; None without the library, as everywhere."""
    try:
        import tokenizers  # noqa: F401
    except ImportError:
        return None
    kind = fields.get("tokenizer.ggml.model", of=str)
    if kind != "gpt2":
        raise ConfigError(f"{fields.path}: tokenizer.ggml.model={kind!r}: only gpt2 (byte-level BPE) is read from GGUF")
    of = lambda key, *default, of: fields.get(f"tokenizer.ggml.{key}", *default, of=of)
    for key in ("add_sep_token", "normalizer.lowercase", "normalizer.strip_accents", "suppress_tokens"):
        if value := of(key, None, of=object):
            raise ConfigError(f"{fields.path}: tokenizer.ggml.{key}={value!r}: this tokenizer has it not")
    pre = of("pre", "default", of=str)
    puts_bos = of("add_bos_token", pre in PRE and PRE[pre].bos, of=bool)
    before = [of("bos_token_id", of=int)] if puts_bos else []
    after = [of("eos_token_id", of=int)] if of("add_eos_token", False, of=bool) else []
    lists = of("tokens", of=list), of("merges", of=list), of("token_type", of=list)
    try:
        return byte_level_bpe(*lists, pre, before, after)
    except ValueError as error:
        raise ConfigError(f"{fields.path}: {error}") from None


def _ends(fields: _Fields) -> frozenset[int]:
    """The ids that a text or a turn ends with, as in llama.cpp: those of the keys, and those of ENDS by their names."""
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    ids = {fields.get(key, None, of=int) for key in keys} - {None}
    tokens, types = (fields.get(f"tokenizer.ggml.{key}", [], of=list) for key in ("tokens", "token_type"))
    named = {i for i, (token, kind) in enumerate(zip(tokens, types)) if kind == CONTROL and token in ENDS}
    return frozenset(ids | named)


def _template(fields: _Fields) -> Template | None:
    source = fields.get("tokenizer.chat_template", None, of=str)
    if source is None:
        return None
    words = fields.get("tokenizer.ggml.tokens", [], of=list)
    ids = {name: fields.get(f"tokenizer.ggml.{name}_id", None, of=int) for name in ("bos_token", "eos_token")}
    return Template(source, {name: words[i] for name, i in ids.items() if i is not None and 0 <= i < len(words)})
