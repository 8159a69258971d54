"""A run's folder as a model: what is read of a checkpoint, onto which mesh, and what is refused in one line."""

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_mesh
from model_helpers import GPT2, QWEN2, Run, by_path, unpadded
from run_folders import save_run

import taco_jax
from taco_jax import evaluate, generate
from taco_jax.config import ConfigError, cli
from taco_jax.inference.flags import ModelFlags
from taco_jax.inference.in_memory import by_name
from taco_jax.inference.loading import load_params, open_checkpoint
from taco_jax.inference.run_folder import model_config, open_run
from taco_jax.inference.text import ByteTokenizer

BYTES = dataclasses.replace(QWEN2, vocab_size=256, init_std=0.2, max_length=64)
PROMPT = "It is a truth "


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run at dp 2 x tp 4 with two checkpoints, of a vocabulary that is padded there."""
    return save_run(tmp_path_factory.mktemp("runs") / "first", QWEN2, dp=2, tp=4, steps=(2, 3))


@pytest.fixture(scope="module")
def of_bytes(tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("runs") / "bytes", BYTES, tp=2)


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "copy")


@pytest.mark.parametrize("name, step", [("", 3), ("@2", 2), ("@3", 3)])
def test_load_run_returns_what_was_trained(run, name, step):
    config, params = taco_jax.load_run(f"{run}{name}")
    assert config == QWEN2
    want = by_path(unpadded(Run(QWEN2).params(seed=step), QWEN2))
    got = by_path(params)
    assert got.keys() == want.keys()
    for path, leaf in want.items():
        assert got[path].dtype == np.float32
        np.testing.assert_array_equal(got[path], leaf, err_msg=path)


@pytest.mark.parametrize(
    "tp, dtype", [(1, jnp.float32), pytest.param(2, jnp.bfloat16, marks=pytest.mark.slow), (8, jnp.bfloat16)]
)
def test_shards_on_another_mesh(run, tp, dtype):
    """Padding of the vocabulary is cut, kept or added, and every device has its own part alone."""
    params = by_name(load_params(open_checkpoint(run), make_mesh(tp=tp), dtype))
    want = by_path(Run(QWEN2, tp=tp).params(seed=3))
    for path, leaf in want.items():
        vector = leaf.ndim - path.startswith("layers/") == 1
        np.testing.assert_array_equal(params[path], leaf.astype(jnp.float32 if vector else dtype), err_msg=path)
    assert params["layers/mlp/up/kernel"].addressable_shards[0].data.shape == (2, 32, 64 // tp)


def test_nothing_in_the_folder_changes(run):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    taco_jax.load_run(run)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_a_model_of_bytes_goes_on_with_text(of_bytes, capsys, tmp_path, monkeypatch):
    """The commands on a run without a tokenizer: the tokens of full recomputation, the loss of the decoder."""
    made, load = [], ModelFlags.generator
    # Once: compiling is what takes time.
    monkeypatch.setattr(ModelFlags, "generator", lambda flags: made[0] if made else made.append(load(flags)) or made[0])
    compiled, params = Run(BYTES, length=32, batch=1), Run(BYTES).params(seed=3)
    ids = list(PROMPT.encode())
    while len(ids) < len(PROMPT) + 5:
        ids.append(int(compiled.logits(params, _filled(ids))[0, len(ids) - 1].argmax()))
    flags = ["--model", str(of_bytes), "--max-tokens", "5", "--dtype", "float32"]
    assert cli.run(generate.main, [*flags, "--prompt", PROMPT]) == 0
    assert capsys.readouterr().out == bytes(ids).decode("utf-8", "replace") + "\n"
    assert cli.run(generate.main, [*flags, "--prompt-ids", " ".join(map(str, PROMPT.encode()))]) == 0
    assert capsys.readouterr().out == " ".join(map(str, ids)) + "\n"

    (tmp_path / "text.txt").write_text("It is a truth universally known")
    flags = ["--model", f"{of_bytes}@3", "--text", str(tmp_path / "text.txt")]
    longest = BYTES.max_length
    assert cli.run(evaluate.main, ["perplexity", *flags, "--context", str(longest + 1)]) == 2
    assert f"context={longest + 1}: the model's longest sequence has {longest}; use at most" in capsys.readouterr().err
    assert cli.run(evaluate.main, ["perplexity", *flags, "--json", str(tmp_path / "out.json")]) == 0
    assert f", context {longest}, tp 1" in capsys.readouterr().out and longest < 1024
    logits = compiled.logits(params, _filled(text := list(b"It is a truth universally known")))[0].astype(np.float64)
    nll = [np.log(np.exp(row).sum()) - row[target] for row, target in zip(logits, text[1:])]
    measured = json.loads((tmp_path / "out.json").read_text())["none"]
    assert measured["tokens"] == len(nll) and measured["loss"] == pytest.approx(np.mean(nll), abs=1e-5)


def _filled(ids):
    tokens = np.zeros((1, 32), np.int32)
    tokens[0, : len(ids)] = ids
    return tokens


def test_bytes_as_a_tokenizer():
    """The same as the `tokenizers` library with the file that an export gets."""
    tokenizers = pytest.importorskip("tokenizers")
    ours = ByteTokenizer()
    library = tokenizers.Tokenizer.from_str(ours.library.to_str())
    assert library.get_vocab_size() == 256
    for text in ("It is", " a  truth\n\n", "naïve 日本 🙂\x00\x7f", "<|endoftext|> <s>"):
        assert library.encode(text).ids == ours.encode(text) == list(text.encode())
        assert library.decode(ours.encode(text)) == ours.decode(ours.encode(text)) == text
    stream = ours.stream("naï".encode()[:3])
    assert [stream.add(b) for b in "ïv".encode()[1:]] == ["ï", "v"] and stream.flush() == ""


def test_bytes_need_no_library(of_bytes, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    tokenizer = open_checkpoint(of_bytes).tokenizer
    assert tokenizer.encode("aä") == [97, 195, 164] and tokenizer.stream([]).add(97) == "a"


def test_the_server_takes_a_tokenizer_of_bytes():
    pytest.importorskip("tokenizers")
    from taco_jax.inference.serving.control import ControlTokens

    control = ControlTokens(ByteTokenizer())
    assert control.encode_text("a <s>") == control.encode("a <s>", {}) == list(b"a <s>")
    control.check_ids(range(256))


def test_files_that_the_model_came_with(tmp_path):
    """The tokenizer, the ids that end texts, and the chat template of the folder `model`."""
    pytest.importorskip("tokenizers")
    folder = save_run(
        tmp_path / "run", dataclasses.replace(QWEN2, n_layers=1), data={"end_token_id": 9},
        files={
            "tokenizer.json": ByteTokenizer().library.to_str(), "generation_config.json": {"eos_token_id": [7, 8]},
            "source_config.json": {"model_type": "qwen2", "eos_token_id": 6}, "chat_template.jinja": "{{ messages }}",
            "tokenizer_config.json": {"eos_token": "!"},
        },
    )  # fmt: skip
    checkpoint = open_checkpoint(folder)
    assert checkpoint.eos == {6, 7, 8, 9, ord("!")} and checkpoint.template.source == "{{ messages }}"
    assert checkpoint.tokenizer.encode("ab") == [97, 98]
    settings = json.loads((folder / "config.json").read_text())
    for of_data, of_folder, want in (
        (None, {"text": "<end>", "id": 5}, 5),
        (4, {"id": 5}, 4),
        (None, {"id": 300}, None),
    ):
        settings["data"]["end_token_id"] = of_data
        run = dataclasses.replace(open_run(folder), settings=settings)
        (folder / "model" / "meta.json").write_text(json.dumps({"end_token": of_folder}))
        assert run.end_token == want


def test_what_cannot_be_read_is_one_line(copy, run, tmp_path):
    checkpoints = copy / "checkpoints"

    def refused(path, message):
        with pytest.raises(ConfigError) as error:
            open_checkpoint(path)
            taco_jax.load_run(path)
        assert message in str(error.value) and "\n" not in str(error.value), str(error.value)

    refused(f"{copy}@7", "copy@7: there is no checkpoint of this step; present: 2, 3")
    refused(f"{copy}@last", "'last' must be a step of")
    refused(f"{tmp_path}/none@3", "there is nothing")
    (checkpoints / "7.orbax-checkpoint-tmp").mkdir()
    refused(f"{copy}@7", "copy@7: this checkpoint is not finished (it is being written, or was cut off); present: 2, 3")

    # The arrays of another step under this one's record.
    shutil.rmtree(checkpoints / "3" / "state")
    shutil.copytree(checkpoints / "2" / "state", checkpoints / "3" / "state")
    refused(f"{copy}@3", "checkpoints/3: is damaged: not as saved is embed/table; " + f"{copy}@2 is the one before it")
    shutil.copytree(run / "checkpoints" / "2", checkpoints / "5")
    refused(copy, "checkpoints/5: is that of step 2, under another name")
    shutil.rmtree(checkpoints / "5")
    for file in (checkpoints / "2" / "state").rglob("d/*"):
        file.write_bytes(file.read_bytes()[:-20])
    refused(f"{copy}@2", "checkpoints/2: cannot be read")
    shutil.rmtree(checkpoints / "2")
    shutil.rmtree(checkpoints / "3")
    refused(copy, "copy: has no checkpoint (the only one, of step 7, is not finished)")
    shutil.rmtree(checkpoints)
    refused(copy, "copy: has no checkpoint (its training has saved none yet); a run saves one at its end")


@pytest.mark.parametrize(
    "model, message",
    [
        ({"d_mlp": 96}, "'layers/mlp/down/kernel' has shape [2, 64, 32], config.json needs [2, 96, 32]"),
        ({"qkv_bias": False}, "the checkpoint has beside the model's parameters 'layers/attn/k/bias'"),
        ({"tied_head": True}, "the checkpoint has beside the model's parameters 'head/kernel'"),
        ({"qk_norm": True}, "the checkpoint lacks 'layers/attn/k_norm/scale'"),
        ({"d_modle": 3}, "model.d_modle: there is no such field here; did you mean 'd_model'?"),
        ({"n_kv_heads": 3}, "model.n_kv_heads=3: must divide n_heads=8"),
        ({"vocab_size": 4000}, "'embed/table' has shape"),
    ],
)
def test_settings_of_another_model(copy, model, message):
    file = copy / "config.json"
    settings = json.loads(file.read_text())
    settings["model"] |= model
    file.write_text(json.dumps(settings))
    for step in ("2", "3"):  # of no run: the digest of its settings is another
        (copy / "checkpoints" / step / "run" / "metadata").write_text(json.dumps({"step": int(step)}))
    with pytest.raises(ConfigError) as error:
        open_run(copy)
    assert message in str(error.value) and "\n" not in str(error.value), str(error.value)


@pytest.mark.parametrize("model", [None, [], "llama"])
def test_settings_without_a_model(model):
    with pytest.raises(ConfigError, match="config.json: is not that of a training run, which has a part 'model'"):
        model_config({"model": model}, Path("config.json"))


def test_a_run_of_text_without_a_tokenizer(run, capsys):
    assert cli.run(generate.main, ["--model", str(run), "--prompt", "a"]) == 2
    assert "model: has no tokenizer.json, so a prompt must be token ids" in capsys.readouterr().err
    for flags, message in (
        (["--prompt", "a", "--prompt-ids", "1"], "--prompt and --prompt-ids: both give prompts"),
        (["--prompt-ids", "1 x"], "prompt_ids='1 x': must be token ids, such as '5 17 200'"),
        (["--prompt-ids", "1 300"], "prompt: token id 300 is not in the vocabulary of 300"),
    ):
        assert cli.run(generate.main, ["--model", str(run), *flags]) == 2
        assert message in capsys.readouterr().err


def test_weights_that_are_not_finite(tmp_path):
    folder = save_run(tmp_path / "run", dataclasses.replace(GPT2, n_layers=1, norm_eps=0.5, init_std=1e6))
    with pytest.raises(ConfigError, match=r"run@3: the tensor '.*' holds numbers beyond what float16 reaches"):
        load_params(open_checkpoint(folder), make_mesh(), jnp.float16)


@pytest.mark.slow
def test_the_server_takes_a_run(of_bytes):
    httpx = pytest.importorskip("httpx")
    from served import LIMIT, Process

    server = Process(of_bytes, "--tp", "2", "--dtype", "float32", "--batch", "2")
    try:
        assert server.name == "bytes"
        body = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=LIMIT).json()
    finally:
        server.kill()
    generator = taco_jax.Generator(of_bytes, tp=2, dtype="float32")
    assert answer["choices"][0]["text"] == generator.complete([PROMPT], max_tokens=5)[0]
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)
