"""GGUF files, byte by byte: headers that claim more than the file holds, keys that change the model, llama.cpp's
defaults for keys that are not there."""

import struct
import time

import pytest

from taco_jax.config import ConfigError
from taco_jax.inference import gguf_header
from taco_jax.inference.loading import open_checkpoint

pytest.importorskip("gguf", reason="the extra gguf: pip install 'taco-jax[gguf]'")
pytest.importorskip("tokenizers", reason="the extra inference: pip install 'taco-jax[inference]'")


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(dims, kind=0, offset=0, name=b"token_embd.weight") -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def header(*parts: bytes, tensors: int = 0, keys: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + b"".join(parts)


UINT32, STRING, ARRAY = 4, 8, 9


@pytest.mark.parametrize(
    "content, message",
    [
        (header(tensor([1 << 40]), bytes(64), tensors=1), "the tensor 'token_embd.weight' ends at byte 4398046511"),
        (header(tensor([1 << 32, 1 << 32]), bytes(64), tensors=1), "ends at byte"),  # whose product is 0 in 64 bits
        (header(tensor([4], offset=1 << 50), bytes(64), tensors=1), "ends at byte"),
        (header(tensor([1] * 5), bytes(64), tensors=1), "has 5 dims; at most 4"),
        (header(tensor([4], kind=999), bytes(64), tensors=1), "is of type 999"),
        (header(bytes(64), tensors=1 << 60), "claims 1152921504606846976 tensors, but 64 bytes are left"),
        (header(bytes(64), keys=1 << 60), "claims 1152921504606846976 keys"),
        (header(struct.pack("<Q", 1 << 60), bytes(64), keys=1), "claims 1152921504606846976 bytes of a key"),
        (header(key(b"a", ARRAY, struct.pack("<IQ", UINT32, 1 << 40)), keys=1), "claims 1099511627776 elements of 'a'"),
        (header(key(b"a", ARRAY, struct.pack("<IQ", STRING, 1 << 40)), keys=1), "claims 1099511627776 elements of 'a'"),
        (header(key(b"a", ARRAY, struct.pack("<IQ", ARRAY, 1) + bytes(16)), keys=1), "'a' is an array of kind 9"),
        (header(key(b"a", 77, bytes(4)), keys=1), "'a' is of kind 77"),
        (header(key(b"general.alignment", UINT32, bytes(4)), keys=1), "general.alignment=0: must be a power of two"),
        (
            header(key(b"general.alignment", UINT32, b"\x08\0\0\0"), tensor([4], 0, 12), bytes(64), tensors=1, keys=1),
            "the tensor 'token_embd.weight' begins at byte 12: must be a multiple of 8",
        ),
        (
            header(tensor([9], offset=32, name=b"b"), tensor([16], name=b"a"), bytes(128), tensors=2),
            "the tensor 'b' begins at byte 32, before 'a' ends, at 64",
        ),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(64), "its numbers are big-endian"),
        (b"GGML" + bytes(60), "does not begin with GGUF"),
        (b"GG", "claims 4 bytes of a magic number, but 2 are left"),
        (b"", "empty file"),
    ],
)
def test_gguf_headers_that_claim_more_than_they_hold(tmp_path, content, message):
    path, begin = tmp_path / "model.gguf", time.process_time()
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{path}: is no complete GGUF file .*{message}"):
        open_checkpoint(path)
    assert time.process_time() - begin < 2


def test_gguf_arrays_of_more_elements_than_readers_can_take(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_header, "MOST_ELEMENTS", 10)
    path = tmp_path / "model.gguf"
    path.write_bytes(header(key(b"a", ARRAY, struct.pack("<IQ", 0, 11) + bytes(11)), keys=1))
    with pytest.raises(ConfigError, match="its arrays have more than 10 elements together, with 'a'"):
        open_checkpoint(path)


def value(of) -> tuple[int, bytes]:
    """(kind, bytes) of a value: a list is of the kind of its first."""
    if isinstance(of, list):
        kinds, contents = zip(*map(value, of))
        return ARRAY, struct.pack("<IQ", kinds[0], len(of)) + b"".join(contents)
    if isinstance(of, str):
        return STRING, text(of.encode())
    kind, code = {bool: (7, "?"), int: (5, "i"), float: (6, "f")}[type(of)]
    return kind, struct.pack("<" + code, of)


WORDS = [*"abcdefgh", "ab", "abc", "<s>", "<|im_end|>", "</s>", *(f"[{i}]" for i in range(11))]
GGUF = {
    "general.architecture": "llama", "llama.block_count": 1, "llama.context_length": 64, "llama.embedding_length": 8,
    "llama.feed_forward_length": 16, "llama.attention.head_count": 2, "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": WORDS, "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.token_type": [3 if word[0] == "<" else 1 for word in WORDS],
    "tokenizer.ggml.bos_token_id": 10, "tokenizer.ggml.eos_token_id": 12,
}  # fmt: skip


def write_gguf(path, changes=None, more=(), table=(8, 24)):
    """A file whose tensors are all zeros; `changes` replace keys, None takes one away."""
    shapes = {"token_embd": table, "output_norm": (8,)}
    shapes |= {f"blk.0.attn_{name}": (8, 8) for name in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_gate": (8, 16), "blk.0.ffn_up": (8, 16), "blk.0.ffn_down": (16, 8)}
    shapes |= {"blk.0.attn_norm": (8,), "blk.0.ffn_norm": (8,)} | dict.fromkeys(more, (4,))
    keys = {name: of for name, of in (GGUF | (changes or {})).items() if of is not None}
    parts = [key(name.encode(), *value(of)) for name, of in keys.items()]
    size = 4 * 24 * 8  # of the largest
    for place, (name, shape) in enumerate(shapes.items()):
        parts.append(tensor(shape, offset=place * size, name=f"{name}.weight".encode()))
    whole = header(*parts, tensors=len(shapes), keys=len(keys))
    path.write_bytes(whole + bytes(-len(whole) % 32) + bytes(len(shapes) * size))
    return path


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type='longrope': this decoder has none, linear"),
        ({"llama.rope.scaling.factor": 0.5}, "rope_factor=0.5: must be at least 1"),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 2.0,
                "llama.rope.scaling.yarn_ext_factor": 0.5,
            },
            "llama.rope.scaling.yarn_ext_factor=0.5: this decoder has only 1",
        ),
        ({"llama.rope.scaling.attn_factor": 2.0}, "llama.rope.scaling.attn_factor=2.0"),
        ({"llama.rope.dimension_count": 2}, "llama.rope.dimension_count=2: this decoder has only .*=4"),
        ({"llama.attention.value_length": 8}, "llama.attention.value_length=8: this decoder has only .*=4"),
        ({"llama.attention.scale": 0.7}, "llama.attention.scale=0.69.*: this decoder has only 0.5"),
        ({"llama.attention.scale": float("nan")}, "llama.attention.scale=nan: this decoder has only 0.5"),
        ({"llama.attention.causal": False}, "llama.attention.causal=False"),
        ({"llama.attention.sliding_window": "x"}, "llama.attention.sliding_window='x': must be a whole number"),
        ({"llama.final_logit_softcapping": 30.0}, "llama.final_logit_softcapping=30.0"),
        ({"llama.logit_scale": 0.5}, "llama.logit_scale=0.5"),
        ({"llama.expert_count": 8}, "llama.expert_count=8"),
        ({"llama.vocab_size": 99}, "llama.vocab_size=99: this decoder has only llama.vocab_size=24"),
        ({"llama.something.new": 1}, "has the key llama.something.new, whose meaning is not known here"),
        ({"llama.rope.freq_base": 0.0}, "rope_theta=0.0: must be at least 1"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "norm_eps=nan: must be at least 0"),
        ({"llama.attention.head_count": [2, 2]}, r"llama.attention.head_count=\[2, 2\]: must be a whole number"),
        ({"llama.attention.head_count_kv": [2, 2]}, r"llama.attention.head_count_kv=\[2, 2\]: must be a whole number"),
        ({"llama.feed_forward_length": None}, "has no key llama.feed_forward_length"),
        ({"llama.block_count": 10**9}, "says 1000000000 layers, but the files hold 11 tensors in all"),
        ({"llama.block_count": None}, "has no key llama.block_count"),
        ({"split.count": 3}, "is one of 3 parts; make one file of them: llama-gguf-split --merge"),
        (
            {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 99},
            r"tokenizer.ggml: the ids \[99\] around every",
        ),
        ({"tokenizer.ggml.merges": ["a zz"]}, "tokenizer.ggml.merges: .*zz"),
        ({"tokenizer.ggml.merges": ["ab"]}, "tokenizer.ggml.merges: holds 'ab'; must be two tokens with a space"),
        ({"tokenizer.ggml.merges": [1]}, "tokenizer.ggml.merges: holds 1; must be a list of texts"),
        ({"tokenizer.ggml.tokens": [1] * 24}, "tokenizer.ggml.tokens: holds 1; must be a list of texts"),
        ({"tokenizer.ggml.token_type": ["3"] * 24}, "tokenizer.ggml.token_type: holds '3'; must be a list of whole"),
        ({"tokenizer.ggml.token_type": [3]}, "tokenizer.ggml.token_type: has 1 entries; must have 24, one a token"),
        ({"tokenizer.ggml.eos_token_id": "x"}, "tokenizer.ggml.eos_token_id='x': must be a whole number"),
        ({"tokenizer.ggml.suppress_tokens": [3]}, r"tokenizer.ggml.suppress_tokens=\[3\]: this tokenizer has it not"),
    ],
)
def test_keys_of_a_gguf_file(tmp_path, changes, message):
    path = write_gguf(tmp_path / "model.gguf", changes)
    with pytest.raises(ConfigError, match=f"^{path}: {message}"):
        open_checkpoint(path)


@pytest.mark.parametrize("more", ["rope_factors_long", "rope_factors_short"])
def test_gguf_tensors_that_scale_rotary_positions(tmp_path, more):
    with pytest.raises(ConfigError, match=f"has {more}.weight: this decoder has no scaling of rotary positions by it"):
        open_checkpoint(write_gguf(tmp_path / "model.gguf", more=[more]))


def test_gguf_factors_that_are_no_formula_s(tmp_path):
    with pytest.raises(ConfigError, match="rope_freqs.weight, whose factors are not Llama 3.1's of 8192 positions"):
        open_checkpoint(write_gguf(tmp_path / "model.gguf", more=["rope_freqs"]))


@pytest.mark.parametrize(
    "keys, fields",
    [
        ({"rope.scaling.factor": 4.0}, {"rope_type": "linear", "rope_factor": 4.0}),
        ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "rope_factor": 4.0}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}, {"rope_type": "default"}),
        ({"rope.scaling.type": "yarn"}, {"rope_type": "default"}),
        (
            {
                "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16,
                "rope.scaling.yarn_beta_fast": 8.0,
            },
            {"rope_type": "yarn", "rope_factor": 4.0, "rope_original_length": 16, "rope_beta_fast": 8.0},
        ),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, {"rope_original_length": 64}),
        ({"attention.sliding_window": 32}, {"sliding_window": 32, "attention_pattern": "s"}),
        ({"attention.sliding_window": 64}, {"sliding_window": None}),
    ],
)  # fmt: skip
def test_gguf_keys_of_positions_and_windows(tmp_path, keys, fields):
    changes = {f"llama.{name}": of for name, of in keys.items()}
    config = open_checkpoint(write_gguf(tmp_path / "model.gguf", changes)).config
    assert {name: getattr(config, name) for name in fields} == fields


def test_gguf_tensors_under_two_names_and_tables_of_other_dims(tmp_path):
    path = tmp_path / "model.gguf"
    with pytest.raises(ConfigError, match="has the tensor embed_tokens.weight under two names"):
        open_checkpoint(write_gguf(path, more=["embed_tokens"]))
    for table in ((), (24,), (2, 4, 24)):
        with pytest.raises(ConfigError, match=r"the tensor token_embd.weight has shape \[.*\]: must have two dims"):
            open_checkpoint(write_gguf(path, table=table))


def test_a_template_knows_no_token_by_an_id_that_is_none(tmp_path):
    changes = {"tokenizer.chat_template": "x", "tokenizer.ggml.bos_token_id": -1}
    assert open_checkpoint(write_gguf(tmp_path / "model.gguf", changes)).template.tokens == {"eos_token": "</s>"}


def test_keys_of_a_gguf_file_that_change_nothing(tmp_path):
    neutral = {
        "rope.scaling.type": "none", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 32,
        "rope.dimension_count": 4, "attention.key_length": 4, "attention.value_length": 4, "attention.scale": 0.5,
        "attention.causal": True, "expert_count": 0, "vocab_size": 24, "logit_scale": 0.0,
        "tensor_data_layout": "Meta AI original pth", "rope.freq_base": 5e5,
    }  # fmt: skip
    changes = {f"llama.{name}": of for name, of in neutral.items()} | {"general.name": "x"}
    assert open_checkpoint(write_gguf(tmp_path / "model.gguf", changes)).config.rope_theta == 5e5


@pytest.mark.parametrize(
    "changes, ids",
    [
        ({}, [8, 2]),  # a, b and c of gpt-2: the merges make no abc
        ({"pre": "llama-bpe"}, [10, 9]),
        ({"pre": "llama-bpe", "add_bos_token": False}, [9]),
        ({"pre": "qwen2", "add_bos_token": True}, [10, 8, 2]),
        ({"add_eos_token": True}, [8, 2, 12]),
    ],
)
def test_llama_cpp_s_defaults_of_a_pre_tokenizer(tmp_path, changes, ids):
    changes = {f"tokenizer.ggml.{name}": of for name, of in changes.items()}
    assert open_checkpoint(write_gguf(tmp_path / "model.gguf", changes)).tokenizer.encode("abc") == ids


@pytest.mark.parametrize(
    "changes, ends",
    [
        ({}, {11, 12}),  # <|im_end|> by its name
        ({"eot_token_id": 3, "eom_token_id": 4}, {3, 4, 11, 12}),
        ({"eos_token_id": None, "token_type": [1] * 24}, set()),
    ],
)
def test_ends_of_a_gguf_file(tmp_path, changes, ends):
    changes = {f"tokenizer.ggml.{name}": of for name, of in changes.items()}
    assert open_checkpoint(write_gguf(tmp_path / "model.gguf", changes)).eos == ends
