"""llama.cpp's GGUF files as checkpoints: weights of any quantisation that the `gguf` package knows, dequantised as they
are read; config and tokenizer come from the same file. Architectures: llama, qwen2, qwen3.

GGUF has its own names for the tensors. Those of `llama` hold the rows of q and k in the order of interleaved rotary
pairs (x[2i], x[2i + 1]); they are put back into halves (x[i], x[i + H/2]) here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from taco_jax.config import ConfigError
from taco_jax.inference.templates import Template
from taco_jax.inference.text import Tokenizer, byte_level_bpe
from taco_jax.models import huggingface
from taco_jax.models.config import ModelConfig

ARCHITECTURES = ("llama", "qwen2", "qwen3")
# The file's names -> those of Hugging Face.
TOP = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
IN_LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
# Factors of rotary frequencies: a scaling that the decoder does not have, refused below by its keys.
IGNORED = ("rope_freqs.weight",)


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
        reader = gguf.GGUFReader(str(path))
    except Exception as error:  # ValueError, IndexError, struct.error: whatever a cut-off file leads to
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path}: is no complete GGUF file ({reason}); was it cut off in a download?") from None
    fields = _Fields(path, reader)
    kind = fields.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise ConfigError(f"{path}: general.architecture={kind!r}: must be one of {', '.join(ARCHITECTURES)}")
    tensors = GGUFTensors(path, reader, gguf.quants.dequantize)
    config = _config(fields, kind, tensors)
    if kind == "llama":
        tensors.interleaved = {"self_attn.q_proj": config.n_heads, "self_attn.k_proj": config.n_kv_heads}
    eos = fields.get("tokenizer.ggml.eos_token_id", None)
    ends = frozenset([] if eos is None else [int(eos)])
    return config, tensors, _tokenizer(fields), ends, _template(fields)


class _Fields:
    def __init__(self, path: Path, reader: Any):
        self.path, self._reader = path, reader

    def get(self, key: str, *default: Any) -> Any:
        field = self._reader.fields.get(key)
        if field is None and not default:
            raise ConfigError(f"{self.path}: has no key {key}")
        return default[0] if field is None else field.contents()


def _config(fields: _Fields, kind: str, tensors: GGUFTensors) -> ModelConfig:
    of = lambda key, *default: fields.get(f"{kind}.{key}", *default)
    if of("rope.scaling.type", "none") != "none" or tensors.ignored:
        raise ConfigError(f"{fields.path}: has scaled rotary positions; this decoder has only plain ones")
    names, heads, width = set(tensors.names()), of("attention.head_count"), of("embedding_length")
    try:
        return huggingface.config_from_hf(
            {
                "model_type": kind, "vocab_size": tensors.shape("embed_tokens.weight")[0], "hidden_size": width,
                "num_hidden_layers": of("block_count"), "num_attention_heads": heads,
                "num_key_value_heads": of("attention.head_count_kv", heads),
                "head_dim": of("attention.key_length", width // heads),
                "intermediate_size": of("feed_forward_length"), "hidden_act": "silu",
                "rms_norm_eps": of("attention.layer_norm_rms_epsilon"), "rope_theta": of("rope.freq_base", 10_000.0),
                "max_position_embeddings": of("context_length"), "tie_word_embeddings": "lm_head.weight" not in names,
                "attention_bias": kind == "llama" and "layers.0.self_attn.o_proj.bias" in names,
            }
        )  # fmt: skip
    except ValueError as error:
        raise ConfigError(f"{fields.path}: {error}") from None


class GGUFTensors:
    """The file's tensors under their Hugging Face names. interleaved: {part of a name: heads} whose rows are turned."""

    def __init__(self, path: Path, reader: Any, dequantize: Any):
        self._path, self._dequantize = path, dequantize
        self._tensors = {_name(tensor.name): tensor for tensor in reader.tensors if tensor.name not in IGNORED}
        self.ignored = len(reader.tensors) - len(self._tensors)
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

    def _read(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        try:
            array = self._dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(self.shape(name))
        except (NotImplementedError, ValueError) as error:
            kind = getattr(tensor.tensor_type, "name", tensor.tensor_type)
            raise ConfigError(f"{self._path}: the tensor {tensor.name!r} is of type {kind}: {error}") from None
        for part, heads in self.interleaved.items():
            if part in name:
                rows = array.reshape(heads, -1, 2, *array.shape[1:])
                array = np.swapaxes(rows, 1, 2).reshape(array.shape)
        return array


def _name(theirs: str) -> str:
    """ "blk.3.attn_q.weight" -> "layers.3.self_attn.q_proj.weight"; what is unknown stays, and is refused later."""
    stem, _, last = theirs.rpartition(".")
    if stem.startswith("blk."):
        _, layer, part = stem.split(".", 2)
        return f"layers.{layer}.{IN_LAYER.get(part, part)}.{last}"
    return f"{TOP.get(stem, stem)}.{last}"


def _tokenizer(fields: _Fields) -> Tokenizer | None:
    """The byte-level BPE of the file; None without the library, as everywhere."""
    try:
        import tokenizers  # noqa: F401
    except ImportError:
        return None
    kind = fields.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ConfigError(f"{fields.path}: tokenizer.ggml.model={kind!r}: only gpt2 (byte-level BPE) is read from GGUF")
    of = lambda key, *default: fields.get(f"tokenizer.ggml.{key}", *default)
    bos = of("bos_token_id") if of("add_bos_token", False) else None
    try:
        return byte_level_bpe(of("tokens"), of("merges"), of("token_type"), of("pre", "default"), bos)
    except ValueError as error:
        raise ConfigError(f"{fields.path}: {error}") from None


def _template(fields: _Fields) -> Template | None:
    source = fields.get("tokenizer.chat_template", None)
    if source is None:
        return None
    words = fields.get("tokenizer.ggml.tokens", [])
    ids = {name: fields.get(f"tokenizer.ggml.{name}_id", None) for name in ("bos_token", "eos_token")}
    return Template(source, {name: words[i] for name, i in ids.items() if i is not None and i < len(words)})
