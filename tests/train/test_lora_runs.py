"""Runs of adapters: what they leave in their folder, how they go on, what reads and exports them. transformers and PEFT
say what the exported files are."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoints import VOCAB, reference_logits, saved_once
from helpers import make_mesh
from model_helpers import GPT2, Run, by_path
from programs import shared_programs
from run_folders import save_run

from taco_jax import data, load_run
from taco_jax.config import (
    CompressionConfig,
    ConfigError,
    DataConfig,
    DataParallelConfig,
    EvalConfig,
    LoraConfig,
    MeshConfig,
    OptimizerConfig,
    TrainConfig,
)
from taco_jax.config.checks import check
from taco_jax.config.lora import MATRICES
from taco_jax.inference.export import export
from taco_jax.inference.run_folder import open_run
from taco_jax.nn.vocab_parallel import pad_vocab
from taco_jax.train import dry_run, init_from, model_files, step
from taco_jax.train.checkpoint import Checkpoints, _json_digest
from taco_jax.train.digests import of_params
from taco_jax.train.loop import train
from taco_jax.train.step import build
from taco_jax.train.workdir import open_workdir

torch = pytest.importorskip("torch", reason="the reference: pip install 'taco-jax[test]'")
transformers = pytest.importorskip("transformers", reason="the reference: pip install 'taco-jax[test]'")

LENGTH = 32
EXACT = TrainConfig(
    lora=LoraConfig(4, alpha=12.0),
    mesh=MeshConfig(dp=2, tp=2),
    compression=CompressionConfig("none", "none"),
    data_parallel=DataParallelConfig(zero1=True, gradients="none", parameters="none"),
    optimizer=OptimizerConfig(learning_rate=0.02, warmup_steps=0),
    compute_dtype="float32",
    steps=4,
    global_batch=8,
    evaluation=EvalConfig(batches=1),
)


@pytest.fixture(scope="module", autouse=True)
def programs():
    with shared_programs():
        yield


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokens") / "ids.u16.bin"
    np.random.default_rng(0).integers(0, VOCAB // 8, 64 * LENGTH + 1).astype("<u2").tofile(path)
    return DataConfig(str(path), str(path), sequence_length=LENGTH)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return saved_once(tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="module")
def settings(sources, tokens):
    """The settings of a run that starts from a source."""
    return lambda name: dataclasses.replace(EXACT, init_from=str(sources(name)[0]), data=tokens)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, settings):
    """A run's folder as the trainer makes it, with adapters that were drawn in the place of training."""
    folder, made = tmp_path_factory.mktemp("runs"), {}

    def of(name):
        if name not in made:
            made[name] = _saved(dataclasses.replace(settings(name), workdir=str(folder / name)))
        return made[name]

    return of


def _saved(config):
    config = check(init_from.with_model(config))
    program = build(config, make_mesh(2, 1, 2))
    state, start = init_from.first_state(config, program)
    open_workdir(config)
    digest = program.base.keep(state.base, config)
    model_files.keep(config, start)
    random = lambda a: jax.device_put(0.1 * np.random.default_rng(a.size).standard_normal(a.shape, "f"), a.sharding)
    stored = program.stored.pack(dataclasses.replace(state, params=jax.tree.map(random, state.params)))
    batches = data.batches(config, data.open_data(config.data, VOCAB)[0])
    run, vocabulary = {"data": batches.state(), "seed": 0, "base": digest}, (VOCAB, pad_vocab(VOCAB, 2))
    with Checkpoints(Path(config.workdir) / "checkpoints", config.checkpoint) as checkpoints:
        checkpoints.save(4, stored, run, vocabulary=vocabulary)
    return Path(config.workdir)


def pad(params, config):
    """Tables padded for one rank."""
    rows = pad_vocab(config.vocab_size, 1) - config.vocab_size
    params = dict(params, embed=dict(params["embed"], table=np.pad(params["embed"]["table"], ((0, rows), (0, 0)))))
    if "head" in params:
        params["head"] = {"kernel": np.pad(params["head"]["kernel"], ((0, 0), (0, rows)))}
    return params


def losses(run):
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_needs_its_own_folder_alone(saved, settings, sources, tmp_path, capfd):
    """Moved, and its source gone, it has the loss of the merged model. What it cannot go on from is one line."""
    run, (source, _) = tmp_path / "moved", sources("llama")
    shutil.copytree(saved("llama"), run)
    merged = transformers.AutoModelForCausalLM.from_pretrained(export(run, tmp_path / "merged", merge=True)).eval()
    source.rename(tmp_path / "gone")
    try:
        config = dataclasses.replace(settings("llama"), workdir=str(run))
        record = train(config)
        lines = capfd.readouterr().out
        assert f"adapters of rank 4, scale 3, on {', '.join(MATRICES)}: 0.01M parameters are trained" in lines
        assert "already at step 4 of 4" in lines
        ids = np.fromfile(config.data.validation, "<u2")[: 8 * LENGTH + 1].astype(np.int64)
        rows = np.stack([ids[i : i + LENGTH + 1] for i in range(0, 8 * LENGTH, LENGTH)])
        logits = torch.as_tensor(reference_logits(merged, rows[:, :-1])).flatten(0, 1)
        want = torch.nn.functional.cross_entropy(logits, torch.as_tensor(rows[:, 1:]).flatten())
        assert record["validation_loss"] == pytest.approx(float(want), rel=1e-5)

        # Checkpoints have adapters alone; the base lies in the folder once, as it came.
        opened = open_run(run)
        assert {name.rpartition("/")[2] for name in opened.trained.shapes} == {"lora_a", "lora_b"}
        digests = json.loads((run / "model" / "source.json").read_text())["digests"]
        assert of_params(_tree(opened), VOCAB) == digests

        refused = lambda message: pytest.raises(ConfigError, match=message)
        with refused(r"holds another model \(lora.alpha 12.0 -> 6.0\)"):
            train(dataclasses.replace(config, lora=LoraConfig(4, alpha=6.0)))
        with refused(r"holds another model \(lora.rank 4 -> None, lora.alpha 12.0 -> None\)"):
            train(dataclasses.replace(config, lora=LoraConfig()))
        (run / "base").rename(tmp_path / "base")
        for attempt in (lambda: train(config), lambda: open_run(run)):
            with refused(rf"{run / 'base'}: has no whole weights, to which the run's adapters belong"):
                attempt()
    finally:
        (tmp_path / "gone").rename(source)


@pytest.mark.slow
def test_a_run_goes_on_as_in_one_go(settings, tmp_path):
    """To the bit; the dry run shows its memory."""
    config = settings("llama")
    train(dataclasses.replace(config, workdir=str(tmp_path / "one")))
    train(dataclasses.replace(config, workdir=str(tmp_path / "two"), stop_after=2))
    train(dataclasses.replace(config, workdir=str(tmp_path / "two")))
    want = losses(tmp_path / "one")
    assert losses(tmp_path / "two") == want and want[3] < want[0] - 0.1
    first, second = (by_path(load_run(tmp_path / name)[1]) for name in ("one", "two"))
    assert all((first[name] == second[name]).all() for name in first)
    text = dry_run._memory_text(config, step.build(init_from.with_model(config), make_mesh(2, 1, 2)))
    assert "parameters (float32, without gradient or optimiser)" in text and "adapters (float32 master" in text


def _tree(run):
    """The weights of a run without its adapters."""
    bare, cpu = dataclasses.replace(run, adapters=None), jax.sharding.SingleDeviceSharding(jax.devices()[0])
    tree = {}
    for name in bare.names():
        *parents, last = name.split("/")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = bare.read(name, cpu)
    return tree


def test_moments_of_adapters_are_not_those_of_weights(saved, tokens, tmp_path):
    start = dict(init_from=str(saved("llama")), init_optimizer=True, data=tokens, workdir=str(tmp_path / "a"))
    full = dataclasses.replace(EXACT, lora=LoraConfig(), **start)
    with pytest.raises(ConfigError, match="init_optimizer=True: .*llama has trained adapters, and moments"):
        init_from.with_model(full)


def test_a_damaged_base_says_what_helps(saved, settings, tmp_path):
    """To what reads the run, and to the run itself."""
    run = tmp_path / "run"
    shutil.copytree(saved("llama"), run)
    config = init_from.with_model(dataclasses.replace(settings("llama"), workdir=str(run)))
    base, digest = build(config, make_mesh(2, 1, 2)).base, open_run(run).trained.record["base"]
    (run / "base" / "0" / "state" / "manifest.ocdbt").write_bytes(b"x")
    for read in (lambda: open_run(run).read("final_norm/scale"), lambda: base.read(config, digest)):
        with pytest.raises(ConfigError, match=r"base/0: cannot be read \(.*; copy the folder back from where the run"):
            read()


def test_another_base_is_refused(saved, settings, tmp_path):
    """That of a run of the same settings with other weights."""
    run = saved("llama")
    shutil.copytree(run, tmp_path / "a")
    record = tmp_path / "a" / "base" / "0" / "run" / "metadata"
    content = json.loads(record.read_text())
    content["base"] ^= 1
    content.pop("record_digest")
    record.write_text(json.dumps(content | {"record_digest": _json_digest(content)}))
    refused = lambda: pytest.raises(ConfigError, match="base: holds other weights than those that the checkpoint's")
    with refused():
        open_run(tmp_path / "a")
    config = init_from.with_model(dataclasses.replace(settings("llama"), workdir=str(run)))
    base = build(config, make_mesh(2, 1, 2)).base
    digest = open_run(run).trained.record["base"]
    base.read(config, digest)
    with refused():
        base.read(config, digest ^ 1)


def test_all_that_reads_a_run_takes_the_merged_model(saved, sources):
    """On the host and on tp 2: base + alpha / rank * A B."""
    run, (_, model) = saved("llama"), sources("llama")
    opened, (config, params) = open_run(run), load_run(run)
    params = by_path(params)
    before = np.stack([layer.self_attn.o_proj.weight.detach().numpy().T for layer in model.model.layers])
    a, b = map(np.asarray, opened.adapter("attn/out"))
    want = before + 3.0 * a.astype(np.float64) @ b
    assert np.abs(want - before).max() > 0.01
    np.testing.assert_allclose(params["layers/attn/out/kernel"], want, atol=1e-6)
    for name, leaf in by_path(opened.place(config, make_mesh(tp=2), np.float32)).items():
        have = leaf[tuple(map(slice, params[name].shape))]
        np.testing.assert_allclose(have, params[name], atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_a_run_starts_from_merged_weights(saved, tokens, tmp_path):
    run = saved("llama")
    params = by_path(load_run(run)[1])
    full = dataclasses.replace(EXACT, lora=LoraConfig(), init_from=f"{run}@4", data=tokens, workdir=str(tmp_path / "a"))
    full = init_from.with_model(full)
    program = build(full, make_mesh(2, 1, 2))
    state, start = init_from.first_state(full, program)
    assert start.source.adapted and program.base is None
    for name, leaf in by_path(state.params).items():
        have = leaf[tuple(map(slice, params[name].shape))]
        np.testing.assert_allclose(have, params[name], atol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.slow), "gpt2"])
def test_peft_loads_what_is_exported(saved, sources, tmp_path, name):
    """Logits of transformers with PEFT's adapters are those of the merged model, and those of the decoder."""
    peft = pytest.importorskip("peft", reason="loads what is exported: pip install 'taco-jax[test]'")
    run, folder = saved(name), tmp_path / "adapters"
    export(run, folder)
    assert sorted(p.name for p in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(sources(name)[0])
    base = transformers.AutoModelForCausalLM.from_pretrained(settings["base_model_name_or_path"]).eval()
    ids = np.random.default_rng(1).integers(0, VOCAB, (2, 24))
    without = reference_logits(base, ids)
    got = reference_logits(peft.PeftModel.from_pretrained(base, folder).eval(), ids)
    merged = transformers.AutoModelForCausalLM.from_pretrained(export(run, tmp_path / "merged", merge=True)).eval()
    want = reference_logits(merged, ids)
    assert np.abs(got - without).max() > 0.1
    np.testing.assert_allclose(got, want, atol=1e-4)
    config, params = load_run(run)
    decoder = Run(config, batch=2, length=24)
    np.testing.assert_allclose(decoder.logits(pad(params, config), ids.astype(np.int32)), got, atol=1e-4)


def test_export_names_what_it_writes(saved, tmp_path):
    """Without PEFT: names, types and settings of a model whose q, k and v are one matrix elsewhere."""
    from safetensors.numpy import load_file

    folder = export(saved("gpt2"), tmp_path / "adapters", dtype="bfloat16")
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert settings["target_modules"] == ["attn.c_proj", "c_attn", "c_fc", "mlp.c_proj"]
    assert (settings["r"], settings["lora_alpha"], settings["fan_in_fan_out"]) == (4, 12, True)
    assert (settings["rank_pattern"], settings["alpha_pattern"]) == ({"c_attn": 12}, {"c_attn": 36})
    tensors = load_file(folder / "adapter_model.safetensors")
    prefix = "base_model.model.transformer.h.1.attn.c_attn"
    a, b = tensors[f"{prefix}.lora_A.weight"], tensors[f"{prefix}.lora_B.weight"]
    assert a.shape == (12, 48) and b.shape == (144, 12) and a.dtype.name == "bfloat16"
    assert not b[:48, 4:].any() and b[:48, :4].any() and not b[48:96, :4].any() and b[96:, 8:].any()
    with pytest.raises(ConfigError, match="merge=True: .* has no adapters to merge"):
        export(save_run(tmp_path / "full", GPT2), tmp_path / "merged", merge=True)
