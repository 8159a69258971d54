"""Folders that are mixed up, damaged or made to harm: the right value, or one line."""

import json
import struct

import numpy as np
import pytest
from model_folders import CONFIG, EMBED, HEAD, UP, arrays, load, up, write

from taco_jax.config import ConfigError
from taco_jax.inference.loading import open_checkpoint
from taco_jax.inference.tensors import INDEX, SINGLE

pytest.importorskip("safetensors", reason="the extra inference: pip install 'taco-jax[inference]'")


# Weight files.


def halves(tensors):
    """(two files, their index)."""
    names = sorted(tensors)
    files = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    index = {name: file for file, of in files.items() for name in of}
    return {file: {name: tensors[name] for name in of} for file, of in files.items()}, index


def test_shards_beside_a_single_file_are_of_another_download(tmp_path):
    stale, index = halves(arrays(1))
    folder = write(tmp_path / "model", files=stale | {SINGLE: arrays(0)}, index=index)
    np.testing.assert_array_equal(up(load(folder)), arrays(0)[UP])
    (folder / SINGLE).unlink()
    np.testing.assert_array_equal(up(load(folder)), arrays(1)[UP])


def test_tensors_that_the_index_does_not_name(tmp_path):
    files, index = halves(arrays())
    del index[UP]
    with pytest.raises(ConfigError, match=f"holds the tensor '{UP}', which {INDEX} does not name"):
        open_checkpoint(write(tmp_path / "model", files=files, index=index))
    files, index = halves(arrays())
    next(iter(files.values()))["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)
    load(write(tmp_path / "buffers", files=files, index=index))  # no weight: nobody misses it


@pytest.mark.parametrize("which", [0, 1])
def test_a_tensor_in_two_shards(tmp_path, which):
    """The index names one; the other may be older, whichever is read last."""
    files, index = halves(arrays())
    shard, other = sorted(files)[which], sorted(files)[1 - which]
    name = next(iter(files[other]))
    files[shard][name] = np.ones((8, 8), np.float32)
    with pytest.raises(ConfigError, match=f"{shard}: holds the tensor '{name}', which {INDEX} says to be in '{other}'"):
        open_checkpoint(write(tmp_path / "model", files=files, index=index))


def test_a_tensor_under_two_names(tmp_path):
    tensors = arrays()
    folder = write(tmp_path / "model", files={SINGLE: tensors | {"norm.weight": tensors["model.norm.weight"]}})
    with pytest.raises(ConfigError, match="one array under two names, (model.)?norm.weight and (model.)?norm.weight"):
        load(folder)


def test_an_index_that_names_a_file_that_cannot_be(tmp_path):
    files, index = halves(arrays())
    with pytest.raises(ConfigError, match=f"there is no such file; {INDEX} names it"):
        open_checkpoint(write(tmp_path / "model", files=files, index=index | {"more": "x" * 300}))


@pytest.mark.parametrize("name", ["../{}", "/tmp/{}", "sub/{}", "..", "", 3, None, "..\\{}"])
def test_an_index_that_names_files_outside_the_folder(tmp_path, name):
    files, index = halves(arrays())
    outside = name.format(index[UP]) if isinstance(name, str) else name
    folder = write(tmp_path / "model", files=files, index=index | {UP: outside})
    with pytest.raises(ConfigError, match=rf"weight_map\['{UP}'\]=.*must be the name of a file in the same folder"):
        open_checkpoint(folder)


def test_a_tied_table_under_either_name(tmp_path):
    tensors = arrays()
    want = load(write(tmp_path / "embed"))["embed"]["table"]
    tensors[HEAD] = tensors.pop(EMBED)
    np.testing.assert_array_equal(load(write(tmp_path / "head", files={SINGLE: tensors}))["embed"]["table"], want)


def test_a_tied_model_that_holds_two_tables(tmp_path):
    """As transformers: equal ones are one; where they differ the config is wrong."""
    tensors = arrays()
    same = open_checkpoint(write(tmp_path / "same", files={SINGLE: tensors | {HEAD: tensors[EMBED]}}))
    assert same.config.tied_head
    other = write(tmp_path / "other", files={SINGLE: tensors | {HEAD: -tensors[EMBED]}})
    params = load(other)
    np.testing.assert_array_equal(params["head"]["kernel"][:, :24], -tensors[EMBED].T)
    np.testing.assert_array_equal(params["embed"]["table"][:24], tensors[EMBED])


@pytest.mark.parametrize("row", [5, 599])
def test_a_tied_model_whose_tables_differ_in_one_row(tmp_path, row):
    table = np.random.default_rng(0).standard_normal((600, 8)).astype(np.float32)
    head = table.copy()
    head[row] += 1
    tensors = arrays() | {EMBED: table, HEAD: head}
    assert not open_checkpoint(write(tmp_path, CONFIG | {"vocab_size": 600}, {SINGLE: tensors})).config.tied_head


@pytest.mark.parametrize("shape", [(24, 9), (23, 8), (24,), ()])
def test_a_tied_model_whose_tables_have_two_shapes(tmp_path, shape):
    folder = write(tmp_path / "model", files={SINGLE: arrays() | {HEAD: np.zeros(shape, np.float32)}})
    with pytest.raises(
        ConfigError, match=r"ties the head to the table, but .* has shape \[24, 8\] and 'lm_head.weight'"
    ):
        open_checkpoint(folder)


# Files that claim more than they hold.

DEEP = "[" * 200_000


@pytest.mark.parametrize("file", ["config.json", INDEX, "generation_config.json", "tokenizer_config.json"])
def test_json_that_is_nested_too_deeply(tmp_path, file):
    files, index = halves(arrays())
    folder = write(tmp_path / "model", files=files, index=index)
    (folder / file).write_text(DEEP)
    with pytest.raises(ConfigError, match=f"{file}: is nested too deeply"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "file", ["config.json", INDEX, "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
)
def test_texts_that_are_too_large_to_be_read(tmp_path, file):
    pytest.importorskip("tokenizers", reason="the extra inference: pip install 'taco-jax[inference]'")
    folder = write(tmp_path / "model", files={} if file == INDEX else None)
    with (folder / file).open("ab") as sparse:
        sparse.truncate(1 << 36)
    with pytest.raises(ConfigError, match=f"^{folder / file}: has {1 << 36} bytes; at most {1 << 28} are read$"):
        open_checkpoint(folder)


def test_templates_whose_names_are_no_texts(tmp_path):
    folder = write(tmp_path / "model")
    templates = [{"name": ["x"], "template": "y"}, {"name": "default", "template": "z"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert open_checkpoint(folder).template.source == "z"


def test_json_with_half_a_character(tmp_path):
    folder = write(tmp_path / "model")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "\\ud800", "bos_token": "\\ud83d\\ude00"}')
    with pytest.raises(ConfigError, match="tokenizer_config.json: is no JSON file .*surrogates not allowed"):
        open_checkpoint(folder)
    (folder / "tokenizer_config.json").write_text('{"bos_token": "\\ud83d\\ude00"}')
    open_checkpoint(folder)


def test_a_tokenizer_that_is_nested_too_deeply(tmp_path):
    pytest.importorskip("tokenizers")
    folder = write(tmp_path / "model")
    (folder / "tokenizer.json").write_text('{"added_tokens":' + DEEP)
    with pytest.raises(ConfigError, match="tokenizer.json: tokenizers cannot read it"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "header",
    [
        b'{"a":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4398046511104]}}',
        b'{"a":' + DEEP.encode(),
    ],
)
def test_safetensors_that_claim_more_than_they_hold(tmp_path, header):
    folder = write(tmp_path / "model")
    (folder / SINGLE).write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(ConfigError, match=f"{SINGLE}: is no complete safetensors file"):
        open_checkpoint(folder)


def test_a_safetensors_header_longer_than_its_file(tmp_path):
    folder = write(tmp_path / "model")
    (folder / SINGLE).write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
    with pytest.raises(ConfigError, match=f"{SINGLE}: is no complete safetensors file"):
        open_checkpoint(folder)


# Paths that are no model.


def test_paths_that_are_no_model(tmp_path):
    from taco_jax.config import TrainConfig, to_dict

    model = write(tmp_path / "model")
    run = tmp_path / "runs" / "first"
    (run / "checkpoints").mkdir(parents=True)
    (steps := tmp_path / "runs" / "second" / "checkpoints" / "3").mkdir(parents=True)
    for folder in (run, steps.parents[1]):
        (folder / "config.json").write_text(json.dumps(to_dict(TrainConfig())))
    (tmp_path / "some.yaml").write_text("model: x")
    (tmp_path / "ggufs").mkdir()
    (tmp_path / "ggufs" / "a.gguf").write_text("")
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "adapter_config.json").write_text("{}")
    for path, message in (
        (run, r"first: has no checkpoint \(its training has saved none yet\); a run saves one at its end"),
        (f"{run}@2", r"first: has no checkpoint \("),
        (steps.parents[1], "second/checkpoints/3: cannot be read"),
        (run / "config.json", f"config.json: is the config of a training run; name its folder: --model {run}"),
        (run / "checkpoints", f"checkpoints: holds the checkpoints of a training run; name the run: --model {run}"),
        (steps, f"3: is a checkpoint of a training run; name it so: --model {steps.parents[1]}@3"),
        (run.parent, f"runs: holds workdirs of training runs; name one: --model {run}"),
        (model / "config.json", f"config.json: is a file of a model; name its folder: --model {model}"),
        (model / SINGLE, f"is a file of a model; name its folder: --model {model}"),
        (tmp_path / "some.yaml", "some.yaml: is a file of settings; must be a Hugging Face folder"),
        (tmp_path / "ggufs", "has no config.json; name one of its GGUF files: --model .*a.gguf"),
        (tmp_path / "adapters", "adapters: holds adapters alone, and no model; name a run of adapters, a folder that"),
        (tmp_path, f"has no config.json; name a model in it: --model {model}"),
        ("x" * 300, r"--model x+: cannot be read \(File name too long\)"),
        ("~no such user/model", r"--model ~no such user/model: cannot be read \(Could not determine home"),
        ("Qwen/Qwen2.5-0.5B", "there is nothing; if it is a name on the Hugging Face hub, download it first: hf down"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_checkpoint(path)
