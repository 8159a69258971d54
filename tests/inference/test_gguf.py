"""GGUF files against the Hugging Face folder of the same model: weights, config, tokenizer, refusals."""

import numpy as np
import pytest
from helpers import make_mesh

from taco_jax.config import ConfigError
from taco_jax.inference.loading import load_params, open_checkpoint
from taco_jax.models.huggingface import _flatten

gguf = pytest.importorskip("gguf", reason="the extra gguf: pip install 'taco-jax[gguf]'")
pytest.importorskip("torch", reason="writes the checkpoint: pip install 'taco-jax[test]'")
pytest.importorskip("transformers", reason="writes the checkpoint: pip install 'taco-jax[test]'")
from gguf_files import write  # noqa: E402


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
