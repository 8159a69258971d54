"""GGUF files against the Hugging Face folder of the same model: weights, config, tokenizer, refusals."""

import numpy as np
import pytest
from checkpoints import save
from helpers import make_mesh

from taco_jax.config import ConfigError
from taco_jax.inference.loading import load_params, open_checkpoint
from taco_jax.models.huggingface import _flatten

gguf = pytest.importorskip("gguf", reason="the extra gguf: pip install 'taco-jax[gguf]'")
pytest.importorskip("torch", reason="writes the checkpoint: pip install 'taco-jax[test]'")
pytest.importorskip("transformers", reason="writes the checkpoint: pip install 'taco-jax[test]'")

NAMES = {
    "embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v",
    "o_proj": "attn_output", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm", "gate_proj": "ffn_gate",
    "up_proj": "ffn_up", "down_proj": "ffn_down",
}  # fmt: skip
MERGES = ["a b", "ab c", "Ġ ab"]


def write(name: str, folder, *, quantise: bool = False, **changes):
    """`save(name)` and, beside it, the same as GGUF: (folder, file). `changes` replace what the file says."""
    model = save(name, folder)
    hf, kind = model.config, {"smollm": "llama"}.get(name, name)
    writer = gguf.GGUFWriter(folder / "model.gguf", changes.get("architecture", kind))
    writer.add_block_count(hf.num_hidden_layers)
    writer.add_context_length(hf.max_position_embeddings)
    writer.add_embedding_length(hf.hidden_size)
    writer.add_feed_forward_length(hf.intermediate_size)
    writer.add_head_count(hf.num_attention_heads)
    writer.add_head_count_kv(hf.num_key_value_heads)
    writer.add_key_length(hf.head_dim)
    writer.add_layer_norm_rms_eps(hf.rms_norm_eps)
    writer.add_rope_freq_base((getattr(hf, "rope_parameters", None) or {"rope_theta": 1e4})["rope_theta"])
    from tokenizers import pre_tokenizers

    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "abc", "Ġab"]
    words += [f"<unused{i}>" for i in range(hf.vocab_size - len(words) - 1)] + ["<end>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.get("pre", "smollm"))
    writer.add_token_list(words)
    writer.add_token_merges(MERGES)
    writer.add_token_types([1] * (len(words) - 1) + [3])
    writer.add_eos_token_id(len(words) - 1)
    if "rope_freqs" in changes:
        writer.add_tensor("rope_freqs.weight", changes["rope_freqs"])
    for theirs, weight in model.state_dict().items():
        array, parts = weight.numpy(), theirs.removeprefix("model.").split(".")
        if hf.tie_word_embeddings and parts[0] == "lm_head":
            continue
        prefix = f"blk.{parts[1]}." if parts[0] == "layers" else ""
        if kind == "llama" and parts[-2] in ("q_proj", "k_proj"):  # as llama.cpp's converter writes them
            heads = hf.num_attention_heads if parts[-2] == "q_proj" else hf.num_key_value_heads
            array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        stored = f"{prefix}{NAMES[parts[-2]]}.{parts[-1]}"
        if quantise and array.ndim == 2 and array.shape[1] % 32 == 0:
            kind_of = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(stored, gguf.quants.quantize(array, kind_of), raw_dtype=kind_of)
        else:
            writer.add_tensor(stored, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder, folder / "model.gguf"


@pytest.mark.parametrize("name, tp", [("llama", 2), ("smollm", 3), ("qwen2", 1), ("qwen3", 2)])
def test_weights_and_config_equal_those_of_the_folder(name, tp, tmp_path):
    folder, file = write(name, tmp_path)
    want, got = open_checkpoint(folder), open_checkpoint(file)
    assert got.config.norm_eps == pytest.approx(want.config.norm_eps)
    keep = {"norm_eps": want.config.norm_eps}
    assert {**vars(got.config), **keep} == vars(want.config)
    mesh = make_mesh(tp=tp)
    want, got = (_flatten(load_params(checkpoint, mesh, np.float32)) for checkpoint in (want, got))
    assert got.keys() == want.keys()
    for path, leaf in want.items():
        np.testing.assert_array_equal(got[path], leaf, err_msg=path)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_factors_of_llama_3_1(tmp_path, factor):
    """Written as llama.cpp's converter does, from transformers' own frequencies."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    saved = open_checkpoint(write("llama", tmp_path)[0]).config
    width, theta = saved.head_dim, saved.rope_theta
    rope = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 8192, "rope_theta": theta}
    hf = LlamaConfig(head_dim=width, max_position_embeddings=1 << 17, rope_parameters=rope)
    plain = theta ** (-np.arange(width // 2) / (width // 2))
    factors = (plain / ROPE_INIT_FUNCTIONS["llama3"](hf)[0].numpy()).astype(np.float32)
    config = open_checkpoint(write("llama", tmp_path, rope_freqs=factors)[1]).config
    assert (config.rope_type, config.rope_original_length, config.rope_high_frequency) == ("llama3", 8192, 4.0)
    assert config.rope_factor == pytest.approx(factor) and factors.max() > 1.5
    with pytest.raises(ConfigError, match="rope_freqs.weight, whose factors are not Llama 3.1's"):
        open_checkpoint(write("llama", tmp_path, rope_freqs=factors[::-1].copy())[1])
    assert open_checkpoint(write("llama", tmp_path, rope_freqs=np.ones_like(factors))[1]).config.rope_type == "default"


def test_quantised_weights(tmp_path):
    folder, file = write("llama", tmp_path, quantise=True)
    want, got = (_flatten(load_params(open_checkpoint(path), make_mesh(), np.float32)) for path in (folder, file))
    down = "layers/mlp/down/kernel"  # 96 wide, so it is quantised
    error = np.abs(np.asarray(got[down]) - np.asarray(want[down]))
    assert 0 < error.max() < 0.01 * np.abs(want[down]).max()


def test_a_quantised_weight_whose_scale_is_infinite(tmp_path, recwarn):
    file, name = write("llama", tmp_path, quantise=True)[1], "blk.0.ffn_down.weight"
    at = next(int(t.data_offset) for t in gguf.GGUFReader(str(file)).tensors if t.name == name)
    content = bytearray(file.read_bytes())
    content[at : at + 3] = np.float16("inf").tobytes() + b"\0"  # of Q8_0: the scale of a block and its first code
    file.write_bytes(content)
    recwarn.clear()
    with pytest.raises(ConfigError, match="'layers.0.mlp.down_proj.weight' holds NaN or infinities"):
        load_params(open_checkpoint(file), make_mesh(), np.float32)
    assert not recwarn.list  # the error is the only line


def test_tokenizer(tmp_path):
    checkpoint = open_checkpoint(write("llama", tmp_path)[1])
    tokenizer, words = checkpoint.tokenizer, 256
    assert tokenizer.encode("abc ab") == [words + 1, words + 2]
    assert tokenizer.encode("a<end>")[-1] == 299 and checkpoint.eos == {299}
    assert len(tokenizer.encode("12")) == 2
    for text in ("naïve café 12345\n\n\tif x == 3:  # ok", "量子コンピュータ 😀 done"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        stream = tokenizer.stream([])
        assert "".join(stream.add(i) for i in tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"architecture": "mamba"}, "general.architecture='mamba': must be one of llama, qwen2, qwen3"),
        ({"pre": "tekken"}, "tokenizer.ggml.pre='tekken': must be one of gpt-2"),
    ],
)
def test_what_is_not_read(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        open_checkpoint(write("llama", tmp_path, **changes)[1])


def test_a_file_that_is_cut_off(tmp_path):
    file = write("llama", tmp_path)[1]
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ConfigError, match=r"model.gguf: is no complete GGUF file"):
        load_params(open_checkpoint(file), make_mesh(), np.float32)
