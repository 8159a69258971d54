"""Exported runs: what transformers makes of them, how they are cut into files, and what is refused in one line."""

import dataclasses
import json
import os
import resource
import textwrap

import numpy as np
import pytest
from checkpoints import write_tokenizer
from model_helpers import GPT2, LLAMA, QWEN2, QWEN3, Run
from run_folders import save_run

from taco_jax.config import ConfigError, cli
from taco_jax.inference import export as module
from taco_jax.inference.export import export
from taco_jax.inference.loading import open_checkpoint
from taco_jax.models.config import ModelConfig
from taco_jax.models.huggingface import config_from_hf
from taco_jax.models.huggingface_config import config_to_hf
from taco_jax.models.presets import PRESETS

torch = pytest.importorskip("torch", reason="reads what is written: pip install 'taco-jax[test]'")
transformers = pytest.importorskip("transformers", reason="reads what is written: pip install 'taco-jax[test]'")

LENGTH, NEW = 24, 6
LARGE = {"init_std": 0.2}  # logits far enough apart for one token to be the most likely
FAMILIES = {
    "gpt2 tied": dataclasses.replace(GPT2, **LARGE),
    "gpt2": dataclasses.replace(GPT2, tied_head=False, d_mlp=96, activation="relu", **LARGE),
    "llama": dataclasses.replace(LLAMA, rope_theta=5e5, **LARGE),
    "llama tied": dataclasses.replace(LLAMA, tied_head=True, n_kv_heads=2, head_dim=16, **LARGE),
    "llama, biases": dataclasses.replace(LLAMA, qkv_bias=True, out_bias=True, mlp_bias=True, **LARGE),
    "qwen2": dataclasses.replace(QWEN2, head_dim=16, activation="gelu_tanh", **LARGE),
    "qwen2 tied": dataclasses.replace(QWEN2, tied_head=True, norm_eps=1e-3, **LARGE),
    "qwen3": dataclasses.replace(QWEN3, tied_head=False, head_dim=16, qkv_bias=True, out_bias=True, **LARGE),
    "qwen3 tied": dataclasses.replace(QWEN3, **LARGE),
}
SLOW = ("gpt2", "llama tied", "llama, biases", "qwen2 tied", "qwen3 tied")


def slow(names):
    return [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in names]


@pytest.fixture(scope="session")
def exported_run(tmp_path_factory):
    """name of a family -> its run, trained at dp 2 x tp 4; made once."""
    folder = tmp_path_factory.mktemp("exported")

    def of(name):
        path = folder / name.replace(", ", "-").replace(" ", "-")
        return path if path.exists() else save_run(path, FAMILIES[name], dp=2, tp=4)

    return of


def from_folder(folder, **options):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(info.values()), info  # missing, unexpected, mismatched
    return model.eval()


def loss(logits, tokens):
    logits = logits[:, :-1].astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    chosen = np.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
    return float((np.log(np.exp(logits).sum(-1)) - chosen).mean())


@pytest.mark.parametrize("name", slow(FAMILIES))
def test_transformers_has_the_same_loss_and_greedy_tokens(exported_run, tmp_path, name):
    config = FAMILIES[name]
    folder = export(exported_run(name), tmp_path / "hf", max_shard_gb=2e-5)
    model = from_folder(folder)
    assert model.config.model_type == name.split(" ")[0].strip(",") and model.dtype == torch.float32
    assert model.config.tie_word_embeddings == config.tied_head and model.config.vocab_size == 300
    assert model.get_input_embeddings().weight.shape == (300, 32)  # without padding
    compiled, params = Run(config, length=LENGTH), Run(config).params(seed=3)
    tokens = np.random.default_rng(0).integers(0, 300, (8, LENGTH)).astype(np.int32)
    ours = np.asarray(compiled.logits(params, tokens))
    with torch.no_grad():
        theirs = model(torch.as_tensor(tokens, dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-5 * np.abs(ours).max())
    assert loss(theirs, tokens) == pytest.approx(loss(ours, tokens), abs=1e-5)

    generated = model.generate(torch.as_tensor(tokens[:1, :5]), max_new_tokens=NEW, do_sample=False)[0].numpy()
    greedy = np.zeros((8, LENGTH), np.int32)
    greedy[:, :5] = tokens[:, :5]
    for at in range(5, 5 + NEW):
        greedy[:, at] = np.asarray(compiled.logits(params, greedy))[:, at - 1].argmax(-1)
    assert generated.tolist() == greedy[0, : 5 + NEW].tolist()
    assert model.config.eos_token_id is None


def test_files_of_a_size(exported_run, tmp_path):
    """As many tensors as fit; one that is larger has a file of its own; the index has all of them."""
    said = []
    folder = export(exported_run("llama"), tmp_path / "many", max_shard_gb=2e-5, say=said.append)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))] and len(files) > 3
    assert {path.name for path in folder.glob("*.safetensors")} == set(files)
    one = export(exported_run("llama"), tmp_path / "one")
    assert {path.name for path in one.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}
    whole, total = {}, 0
    for file in files:
        tensors = _tensors(folder / file)
        size = sum(array.nbytes for array in tensors.values())
        assert size <= 20_000 or len(tensors) == 1
        assert all(index["weight_map"][name] == file for name in tensors)
        whole, total = whole | tensors, total + size
    assert index["metadata"]["total_size"] == total and said[0].startswith(f"{files[0]}: 1 tensors, ")
    assert " MB in float32" in said[0]
    assert said[-1] == f"no tokenizer: the run has none in {exported_run('llama') / 'model'}"
    of_one = _tensors(one / "model.safetensors")
    assert whole.keys() == of_one.keys()
    for name, array in of_one.items():
        np.testing.assert_array_equal(whole[name], array)
    mask = os.umask(0)
    os.umask(mask)
    assert all(path.stat().st_mode & 0o777 == 0o666 & ~mask for path in folder.iterdir())


def _tensors(path):
    from safetensors.numpy import load_file

    return load_file(path)


def test_what_the_model_came_with(tmp_path):
    """Type, model_type and other keys of the source's config.json; the tokenizer's files; ids that end texts."""
    source = config_to_hf(QWEN2) | {
        "eos_token_id": 7, "dtype": "bfloat16", "use_cache": False, "attention_dropout": 0.25, "vocab_size": 320,
        "initializer_range": 0.01,
    }  # fmt: skip
    files = {
        "source_config.json": source, "generation_config.json": {"eos_token_id": [7, 8], "top_p": 0.8},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "!"},
        "chat_template.jinja": "{{ messages[0].content }}", "notes.txt": "mine",
    }  # fmt: skip
    run = save_run(tmp_path / "run", QWEN2, tp=2, files=files)
    write_tokenizer(run / "model")
    folder = export(run, tmp_path / "hf")
    model, tokenizer = from_folder(folder), transformers.AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    config = json.loads((folder / "config.json").read_text())
    assert (config["use_cache"], config["attention_dropout"], config["eos_token_id"]) == (False, 0.25, 7)
    assert config["vocab_size"] == 300 and "dtype" not in config and config["torch_dtype"] == "bfloat16"
    assert model.generation_config.eos_token_id == [7, 8] and model.generation_config.top_p == 0.8
    assert not (folder / "notes.txt").exists() and not (folder / "source_config.json").exists()
    text = "It is a truth, naïve 日本!"
    assert tokenizer(text)["input_ids"] == open_checkpoint(folder).tokenizer.encode(text)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab"
    half = _tensors(folder / "model.safetensors")
    exact = _tensors(export(run, tmp_path / "exact", dtype="float32") / "model.safetensors")
    for name, array in exact.items():
        np.testing.assert_array_equal(half[name], array.astype(half[name].dtype))
    assert open_checkpoint(folder).eos == {7, 8, ord("!") - 33}  # the id of "!" in that tokenizer
    # A source of another model gives nothing but its ids.
    other = dataclasses.replace(QWEN2, rope_theta=5e5)
    described = config_to_hf(other, source)
    assert "attention_dropout" not in described and config_from_hf(described) == _plain(other)


def test_a_model_of_bytes_gets_a_tokenizer(tmp_path):
    config = dataclasses.replace(GPT2, vocab_size=256, n_layers=1)
    folder = export(save_run(tmp_path / "run", config, data={"end_token_id": 0}), tmp_path / "hf")
    tokenizer, text = transformers.AutoTokenizer.from_pretrained(folder), "It is  a truth,\n naïve 日本 <s>\x00"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode()), clean_up_tokenization_spaces=False) == text
    assert from_folder(folder).generation_config.eos_token_id == 0


# config.json.


def _plain(config):
    return dataclasses.replace(config, init_std=ModelConfig.init_std)


@pytest.mark.parametrize("name", [name for name in PRESETS if not name.endswith("24h")])
def test_presets_have_a_config_json(name):
    described = config_to_hf(PRESETS[name])
    assert config_from_hf(described) == _plain(PRESETS[name])
    assert transformers.AutoConfig.for_model(**described).to_dict().items() >= {"use_cache": True}.items()


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"norm": "layernorm"},
            r"model.norm='layernorm': no supported family .* the nearest, llama, has norm='rmsnorm'",
        ),
        ({"positions": "learned"}, "model.positions='learned': no supported family .* has positions='rope'"),
        ({"gated_mlp": False}, "model.gated_mlp=False: no supported family .* has gated_mlp=True"),
        ({"out_bias": True}, "model.qkv_bias=False: no supported family .* has qkv_bias=True"),
        ({"qk_norm": True, "mlp_bias": True}, "model.qk_norm=True: no supported family .* has qk_norm=False"),
        (
            dataclasses.asdict(PRESETS["gpt2_1p5b_24h"]),
            "model.head_dim=64: the heads of Hugging Face's gpt2 are together as wide as the model, but n_heads",
        ),
    ],
)
def test_models_that_no_family_has(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        config_to_hf(dataclasses.replace(ModelConfig(), **changes))
    assert "\n" not in str(error.value)


# What is refused, and what is left behind.


@pytest.fixture
def small(tmp_path):
    return save_run(tmp_path / "run", dataclasses.replace(QWEN2, vocab_size=256, n_layers=1, head_dim=8), steps=(2, 3))


def test_refusals_are_one_line(small, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    (tmp_path / "file").write_text("")
    hf = export(small, tmp_path / "hf")
    save_run(tmp_path / "mixture", dataclasses.replace(QWEN2, norm="layernorm", n_layers=1))
    for args, message in (
        ([], "a run's folder: is needed, for example python -m taco_jax.export runs/x --to folder"),
        (["run"], "--to: is needed"),
        (["run", "--to", "full"], "full: is there and not empty; name another folder, or empty this one"),
        (["run", "--to", "file"], "file: is there and no folder"),
        (["run", "--to", "file/x"], "--to file/x: cannot be written (File exists)"),
        (["run", "--to", "new", "--dtype", "int8"], "dtype='int8': must be one of float32, bfloat16, float16"),
        (["run", "--to", "new", "--max-shard-gb", "0"], "max_shard_gb=0.0: must be a number above 0, such as 5"),
        (["run", "--to", "new", "--max-shard-gb", "x"], "--max-shard-gb: 'x' is no number"),
        (["run", "--dtpye", "new"], "unknown option --dtpye; did you mean --dtype?"),
        (["mixture", "--to", "new"], "mixture@3: model.norm='layernorm': no supported family"),
        (["run@5", "--to", "new"], "run@5: there is no checkpoint of this step; present: 2, 3"),
        (["run/checkpoints", "--to", "new"], "holds the checkpoints of a run; name the run: run"),
        (["run/checkpoints/3", "--to", "new"], "is a checkpoint; name its run and step: run@3"),
        ([str(hf), "--to", "new"], "hf: is a model's folder already; must be the workdir of a training run"),
        ([str(tmp_path), "--to", "new"], "holds workdirs of training runs; name one: "),
        (["nothing", "--to", "new"], "nothing: must be the workdir of a training run, such as runs/x or runs/x@100"),
    ):
        assert cli.run(module.main, args) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error
    assert not (tmp_path / "new").exists() and not list(tmp_path.glob(".*"))


def test_an_empty_folder_is_filled(small, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    export(f"{small}@2", tmp_path / "link")
    assert open_checkpoint(tmp_path / "empty").config.d_model == 32


@pytest.mark.parametrize("fault", ["full disk", "full disk, weights", "not finite", "taken meanwhile"])
def test_a_failed_export_leaves_nothing(small, tmp_path, monkeypatch, request, fault):
    import errno

    if fault == "not finite":
        # Beyond float16, as a model may be that was trained in bfloat16.
        small = save_run(tmp_path / "large", dataclasses.replace(QWEN2, n_layers=1, init_std=1e6))
        message = r"large@3: the tensor .* holds numbers beyond what float16 reaches; use dtype bfloat16 or float32"
    elif fault == "full disk":
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        monkeypatch.setattr(module, "_write_tokenizer", lambda *args: (_ for _ in ()).throw(full))
        message = "--to .*: cannot be written .No space left on device"
    elif fault == "full disk, weights":
        # Files may grow to 20 kB.
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits))
        message = "--to .*: cannot be written .model.safetensors: .*File too large"
    else:
        real = module._write_json

        def write(path, content):
            real(path, content)
            (tmp_path / "hf").mkdir(exist_ok=True)
            (tmp_path / "hf" / "mine").write_text("")

        monkeypatch.setattr(module, "_write_json", write)
        message = "hf: something was put there meanwhile"
    with pytest.raises(ConfigError, match=message):
        export(small, tmp_path / "hf", dtype="float16")
    assert not list(tmp_path.glob(".*"))
    assert [path.name for path in tmp_path.glob("hf/*")] == (["mine"] if fault == "taken meanwhile" else [])


KILLED = """
    import os, signal, sys
    import jax, orbax.checkpoint, safetensors.numpy, tokenizers  # here, once; no backend has started
    from taco_jax.inference import export, run_folder

    run, parent, places = sys.argv[1], sys.argv[2], int(sys.argv[3])

    def attempt(target, end):
        '''Exports in a process of its own, killed at its `end`-th change of a file beside or in target. Returns how
        many there were, None where it was killed.'''
        read, write = os.pipe()
        child = os.fork()
        if child:
            os.close(write)
            with os.fdopen(read) as pipe:
                said = pipe.read()
            os.waitpid(child, 0)
            return int(said) if said else None
        count = 0

        def hook(event, args):
            nonlocal count
            changes = event in ("os.rename", "os.mkdir", "os.chmod", "shutil.copyfile") or (
                event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            )
            if changes and any(isinstance(a, (str, os.PathLike)) and str(a).startswith(parent + "/") for a in args):
                count += 1
                if count == end:
                    os.kill(os.getpid(), signal.SIGKILL)

        def say(text):
            '''After each file of weights, which no event of Python's tells of.'''
            hook("os.mkdir", (parent + "/",))

        sys.addaudithook(hook)
        export.export(run, target, max_shard_gb=2e-5, say=say)
        os.write(write, str(count).encode())
        os._exit(0)

    total = attempt(parent + "/whole", 0)
    ends = sorted({1 + i * (total - 1) // (places - 1) for i in range(places)})
    for end in ends:
        assert attempt(f"{parent}/killed", end) is None
        left = [name for name in os.listdir(parent) if name.startswith(".killed")]
        print(end, os.path.exists(f"{parent}/killed"), sorted(os.listdir(f"{parent}/{left[0]}")) if left else None)
    print(total, attempt(f"{parent}/killed", 0), sorted(os.listdir(parent)))
"""


def test_killed_at_ten_places(small, tmp_path, run_python):
    """Nothing of the target's name is there, what is beside has no config.json but in the last moment, when it is
    whole, and the next export of that name clears it away."""
    parent = tmp_path / "out"
    parent.mkdir()
    result = run_python(["-c", textwrap.dedent(KILLED), small, parent, 10])
    *lines, last = result.stdout.splitlines()
    assert len(lines) == 10
    whole = sorted(path.name for path in (parent / "whole").iterdir())
    for line in lines:
        end, there, left = line.split(" ", 2)
        assert there == "False", line
        files = eval(left) or []
        assert "config.json" not in files or files == whole, line
    total, again, names = last.split(" ", 2)
    assert total == again and eval(names) == ["killed", "whole"]
    for name in whole:
        assert (parent / "killed" / name).read_bytes() == (parent / "whole" / name).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ["--mesh.dp", "2", "--mesh.tp", "4"],
        ["--mesh.dp", "2", "--mesh.pp", "2", "--mesh.tp", "2", "--global-batch", "16"],
        ["--mesh.dp", "4", "--mesh.tp", "2", "--data-parallel.zero1", "--global-batch", "16"],
    ],
)
def test_the_trainer_s_own_loss(tmp_path, flags):
    """Its last validation loss, on the same text, is that of transformers."""
    from programs import FILE, FLAGS

    from taco_jax.train.loop import main
    from taco_jax.train.metrics import read_records

    text = "It is a truth universally acknowledged, that a single man in possession of a good fortune. " * 40
    (tmp_path / "text.txt").write_text(text)
    more = ["--data.validation", str(tmp_path / "text.txt"), "--compute-dtype", "float32", "--steps", "5"]
    more += ["--evaluation.every", "5", "--evaluation.batches", "3", "--workdir", str(tmp_path / "run")]
    config = cli.parse(["--compression", "none", "--config", str(FILE), *FLAGS, *flags, *more])
    main(["--compression", "none", "--config", str(FILE), *FLAGS, *flags, *more])
    (said,) = [
        r["validation_loss"] for r in read_records(tmp_path / "run" / "metrics.jsonl") if r.get("validation_loss")
    ]
    model = from_folder(export(tmp_path / "run", tmp_path / "hf"))
    length, batch = config.data.sequence_length, config.global_batch
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
    windows = np.stack([ids[i * length : (i + 1) * length + 1] for i in range(3 * batch)])
    with torch.no_grad():
        logits = model(torch.as_tensor(windows)).logits.numpy()
    assert loss(logits, windows) == pytest.approx(said, abs=1e-5)


@pytest.mark.parametrize(
    "source, special, said",
    [
        ({}, {"eos_token": "<|end|>", "pad_token": "<|pad|>"}, {"eos_token_id": 2, "pad_token_id": None}),
        ({}, {"eos_token": "<|pad|>"}, {"eos_token_id": None, "pad_token_id": None}),
        ({"pad_token_id": -1, "eos_token_id": [3, 5]}, {}, {"eos_token_id": [3], "pad_token_id": None}),
    ],
)
def test_tokens_that_the_model_lacks(tmp_path, source, special, said):
    """Some tokenizers have added tokens above the model's vocabulary, here 4 and 5."""
    vocabulary = ["a", "b", "<|end|>", "c", "d", "<|pad|>"]
    files = {
        "tokenizer.json": {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
            "pre_tokenizer": None, "post_processor": None, "decoder": None,
            "model": {"type": "WordLevel", "vocab": {text: i for i, text in enumerate(vocabulary)}, "unk_token": "a"},
        },
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"} | special,
        "source_config.json": source,
    }  # fmt: skip
    run = save_run(tmp_path / "run", dataclasses.replace(LLAMA, vocab_size=4), files=files)
    folder = export(run, tmp_path / "hf")
    written = json.loads((folder / "config.json").read_text())
    assert {key: written[key] for key in said} == said
    assert from_folder(folder).config.vocab_size == 4
