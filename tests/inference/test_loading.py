"""Checkpoints that are sharded, in other types, partial or damaged: what is read, and the one line that says what is
wrong, with exit code 2."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import edit_json, save
from helpers import make_mesh

from taco_jax.config import ConfigError
from taco_jax.inference.loading import load_params, open_checkpoint
from taco_jax.inference.tensors import INDEX
from taco_jax.models import huggingface

torch = pytest.importorskip("torch", reason="writes the checkpoints: pip install 'taco-jax[test]'")
pytest.importorskip("transformers", reason="writes the checkpoints: pip install 'taco-jax[test]'")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """name -> (transformers' weights as numpy, folder), with options of `save_pretrained`."""
    cache = {}

    def build(name: str, **options):
        key = (name, *options.items())
        if key not in cache:
            folder = tmp_path_factory.mktemp(name)
            model = save(name, folder, **options)
            cache[key] = {k: v.float().numpy() for k, v in model.state_dict().items()}, folder
        return cache[key]

    return build


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of a sharded qwen2 that a test may damage."""
    return shutil.copytree(saved("qwen2", max_shard_size="60KB")[1], tmp_path / "model")


def _load(folder, tp: int = 1, dtype=jnp.float32):
    return load_params(open_checkpoint(folder), make_mesh(tp=tp), dtype)


@pytest.mark.parametrize("name, tp", [("gpt2", 4), ("qwen2", 4), ("smollm", 3), ("llama", 1)])
def test_parameters_read_shard_by_shard_equal_those_read_whole(saved, name, tp):
    state, folder = saved(name)
    config = open_checkpoint(folder).config
    want, got = huggingface.params_from_hf(state, config, tp), _load(folder, tp)
    for path, leaf in huggingface._flatten(want).items():
        np.testing.assert_array_equal(huggingface._flatten(got)[path], leaf, err_msg=path)


def test_several_files_and_an_index(saved, folder):
    assert len(list(folder.glob("*.safetensors"))) > 2
    want = huggingface.params_from_hf(saved("qwen2")[0], open_checkpoint(folder).config)
    np.testing.assert_array_equal(
        _load(folder)["layers"]["mlp"]["down"]["kernel"], want["layers"]["mlp"]["down"]["kernel"]
    )


def test_bfloat16_files_and_the_compute_dtype(saved, tmp_path):
    from safetensors.torch import save_file

    state, folder = saved("qwen3")
    folder = shutil.copytree(folder, tmp_path / "model")
    save_file(
        {k: torch.tensor(v).bfloat16() for k, v in state.items() if k != "lm_head.weight"}, folder / "model.safetensors"
    )
    params = _load(folder, dtype=jnp.bfloat16)
    assert params["layers"]["mlp"]["up"]["kernel"].dtype == jnp.bfloat16
    assert params["layers"]["attn_norm"]["scale"].dtype == jnp.float32
    want = state["model.layers.1.mlp.up_proj.weight"].T.astype(jnp.bfloat16)
    np.testing.assert_array_equal(params["layers"]["mlp"]["up"]["kernel"][1], want)


def _shard_of(folder, tensor: str):
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][tensor]


def _without(folder, tensor: str, **others):
    from safetensors.numpy import load_file, save_file

    shard = _shard_of(folder, tensor)
    arrays = load_file(shard)
    del arrays[tensor]
    save_file(arrays | others, shard)


DOWN = "model.layers.1.mlp.down_proj.weight"


def test_a_tensor_that_the_index_promises(folder):
    _without(folder, DOWN)
    with pytest.raises(ConfigError, match=rf"{INDEX}: says that model-0\S+ holds the tensor '{DOWN}', which no file"):
        _load(folder)


def test_a_tensor_that_nobody_promises(folder):
    _without(folder, DOWN)
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"][DOWN]
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="missing layers.1.mlp.down_proj.weight; left over none"):
        _load(folder)


def test_a_tensor_of_another_shape(folder):
    _without(folder, DOWN, **{DOWN: np.zeros((48, 95), np.float32)})
    shard = _shard_of(folder, DOWN).name
    with pytest.raises(
        ConfigError, match=rf"{shard}: the tensor '{DOWN}' has shape \[48, 95\], config.json needs \[48, 96\]"
    ):
        _load(folder)


def test_a_type_that_is_not_read(folder):
    _without(folder, DOWN, **{DOWN: np.zeros((48, 96), np.int8)})
    with pytest.raises(ConfigError, match=f"the tensor '{DOWN}' is of type I8; must be one of F32, F16, BF16"):
        _load(folder)


def test_a_shard_that_is_not_there(folder):
    _shard_of(folder, DOWN).unlink()
    with pytest.raises(ConfigError, match=f"there is no such file; {INDEX} names it"):
        _load(folder)


def test_a_shard_that_is_cut_off(folder):
    shard = _shard_of(folder, DOWN)
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(ConfigError, match=rf"{shard.name}: is no complete safetensors file .*cut off"):
        _load(folder)


@pytest.mark.parametrize(
    "file, content, message",
    [
        ("config.json", None, r"config.json: cannot be read \(No such file"),
        ("config.json", "{", "config.json: is no JSON file"),
        ("config.json", "[]", "config.json: must hold a JSON object, not a list"),
        ("config.json", '{"model_type": "qwen2"}', "config.json: has no key 'num_attention_heads'"),
        ("config.json", '{"model_type": "mixtral"}', "config.json: model_type='mixtral': must be one of gpt2, llama"),
        (INDEX, "{}", "is no index of a sharded checkpoint"),
        ("tokenizer.json", "{}", "tokenizer.json: tokenizers cannot read it"),
    ],
)
def test_files_that_are_not_what_they_should_be(folder, file, content, message):
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_text(content)
    with pytest.raises(ConfigError, match=message):
        open_checkpoint(folder)


def test_no_model_at_all(tmp_path):
    with pytest.raises(ConfigError, match=r"must be a Hugging Face folder \(config.json.* there is nothing"):
        open_checkpoint(tmp_path / "nowhere")
    (tmp_path / "weights.bin").write_text("")
    with pytest.raises(ConfigError, match="there is a file of another kind"):
        open_checkpoint(tmp_path / "weights.bin")


def test_the_command_says_it_in_one_line(folder, run_python):
    edit_json(folder / "config.json", intermediate_size=95)
    command = ["-m", "taco_jax.generate", "--model", folder, "--prompt", "a", "--devices", "cpu:1"]
    result = run_python(command, check=2)
    assert result.stdout == "" and "Traceback" not in result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert "has shape [48, 96], config.json needs [48, 95]" in line
