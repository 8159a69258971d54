"""Runs that start from weights: a Hugging Face folder, a GGUF file, another run. transformers says what they reach."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
import token_writers
from checkpoints import VOCAB, reference_logits, saved_once, write_tokenizer
from helpers import make_mesh, run_python
from model_folders import CONFIG, EMBED, SINGLE, UP, arrays, write
from programs import shared_programs

from taco_jax import data
from taco_jax.config import ConfigError, DataConfig, EvalConfig, ModelConfig, TrainConfig, cli, with_compression
from taco_jax.config.checks import check
from taco_jax.data.tokens import DataError
from taco_jax.train import init_from, model_files
from taco_jax.train.checkpoint import Checkpoints
from taco_jax.train.loop import main, train
from taco_jax.train.step import build

torch = pytest.importorskip("torch", reason="the reference: pip install 'taco-jax[test]'")
pytest.importorskip("transformers", reason="the reference: pip install 'taco-jax[test]'")

LENGTH, BATCH = 32, 8


@pytest.fixture(scope="module", autouse=True)
def programs():
    with shared_programs():
        yield


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return saved_once(tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """A token file of ids below the models' vocabulary."""
    path = tmp_path_factory.mktemp("tokens") / "ids.u16.bin"
    np.random.default_rng(0).integers(0, VOCAB, 64 * LENGTH + 1).astype("<u2").tofile(path)
    return path


def settings(source, tokens, workdir="", flags=()) -> TrainConfig:
    """A run in float32 whose messages are exact, with the source's model."""
    default = TrainConfig(
        init_from=str(source),
        workdir=str(workdir),
        compute_dtype="float32",
        steps=3,
        global_batch=BATCH,
        data=DataConfig(str(tokens), str(tokens), sequence_length=LENGTH),
        evaluation=EvalConfig(batches=2),
    )
    config = cli.parse_flags(default, list(flags), prog="", description="")
    return check(init_from.with_model(with_compression(config, "none")))


def windows(tokens) -> np.ndarray:
    """The validation windows of `settings`, int[16, L + 1]."""
    ids, count = np.fromfile(tokens, "<u2").astype(np.int64), 2 * BATCH
    return np.stack([ids[i * LENGTH : (i + 1) * LENGTH + 1] for i in range(count)])


def loss_of_transformers(model, tokens) -> float:
    rows = windows(tokens)
    logits = torch.as_tensor(reference_logits(model, rows[:, :-1])).double()
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.as_tensor(rows[:, 1:]).flatten()))


def start(config):
    """(program, its first state, where that is from), without a step."""
    program = build(config, make_mesh(config.mesh.dp, config.mesh.pp, config.mesh.tp))
    return program, *init_from.first_state(config, program)


def leaves(tree) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(p): np.asarray(x) for p, x in jax.tree_util.tree_flatten_with_path(tree)[0]}


def loss_of(program, state, config) -> float:
    nll, count = 0.0, 0.0
    mixture, _ = data.open_data(config.data, config.model.vocab_size)
    for batch in data.evaluation_batches(config, mixture.sources[0].tokens):
        part = program.eval_step(state, data.device_batch(batch, program.batch_sharding))
        nll, count = nll + float(part[0]), count + float(part[1])
    return nll / count


ZERO1 = ["--data-parallel.zero1", "--data-parallel.parameters", "int8h"]
STAGES = ["--mesh.pp", "2", "--pipeline.microbatches", "2"]


@pytest.mark.parametrize(
    "name, flags",
    [
        ("gpt2", []),
        ("llama", ["--mesh.dp", "2", "--mesh.tp", "2"]),
        ("qwen3", ["--mesh.dp", "2", *STAGES, "--mesh.tp", "2", *ZERO1]),
        pytest.param("smollm", ["--mesh.tp", "3"], marks=pytest.mark.slow),
        pytest.param("qwen2", ["--mesh.tp", "2", *STAGES, "--pipeline.schedule", "1f1b"], marks=pytest.mark.slow),
        *[
            pytest.param(name, flags, marks=pytest.mark.slow)
            for name in ("gpt2", "llama", "qwen2", "qwen3")
            for flags in ([], ["--mesh.dp", "2", "--mesh.tp", "2"], ["--mesh.dp", "4", "--mesh.tp", "2", *ZERO1])
            if (name, len(flags)) not in (("gpt2", 0), ("llama", 4))
        ],
    ],
)
def test_the_first_loss_is_that_of_transformers(sources, tokens, name, flags):
    folder, model = sources(name)
    config = settings(folder, tokens, flags=flags)
    program, state, _ = start(config)
    assert loss_of(program, state, config) == pytest.approx(loss_of_transformers(model, tokens), rel=1e-5)


def test_a_device_reads_its_own_part_once(sources, tokens, monkeypatch):
    """dp 4 x tp 2: 4 ranks hold the same half of a matrix, which is read from the file once."""
    from taco_jax.inference.tensors import SafetensorsFolder

    read, original = {}, SafetensorsFolder.read

    def spy(self, name, index):
        part = original(self, name, index)
        read.setdefault(name, []).append(part.shape)
        return part

    monkeypatch.setattr(SafetensorsFolder, "read", spy)
    start(settings(sources("llama")[0], tokens, flags=["--mesh.dp", "4", "--mesh.tp", "2"]))
    assert read["model.layers.1.mlp.up_proj.weight"] == [(48, 48)] * 2
    assert read["model.norm.weight"] == [(48,)]


@pytest.fixture(scope="module")
def run(sources, tokens, tmp_path_factory):
    """(folder, model, source) of a run at dp 2 x tp 2 with a step of three, whose source is gone then."""
    place = tmp_path_factory.mktemp("run")
    source = place / "source"
    shutil.copytree(sources("llama")[0], source)
    flags = ["--mesh.dp", "2", "--mesh.tp", "2", "--stop-after", "1"]
    train(settings(source, tokens, place / "run", flags))
    kept = source.rename(place / "elsewhere")
    return place / "run", sources("llama")[1], kept


def state_of(run, step) -> dict[str, np.ndarray]:
    import orbax.checkpoint as ocp

    return ocp.StandardCheckpointer().restore((run / "checkpoints" / str(step) / "state").absolute())


def test_what_a_run_keeps_of_its_source(run):
    folder, _, source = run
    written = json.loads((folder / "config.json").read_text())
    assert written["init_from"] == str(source.with_name("source")) and written["model"]["d_model"] == 48
    model = folder / "model"
    for kept, theirs in (("source_config.json", "config.json"), ("tokenizer.json", "tokenizer.json")):
        assert (model / kept).read_bytes() == (source / theirs).read_bytes()
    origin = json.loads((model / "source.json").read_text())
    assert origin["from"] == written["init_from"] and origin["kind"] == "Hugging Face" and origin["step"] is None
    assert len(origin["digests"]) == 12 and not [p for p in folder.iterdir() if p.name.startswith(".model")]
    record = json.loads((folder / "checkpoints" / "1" / "run" / "metadata").read_text())
    assert record["started_from"] == init_from.lineage(origin)


def test_a_run_that_goes_on_needs_no_source(run, tokens, tmp_path, capsys):
    """Its own checkpoint, and the model of its config.json; the command is the same."""
    folder = shutil.copytree(run[0], tmp_path / "run")
    source = json.loads((folder / "config.json").read_text())["init_from"]
    flags = ["--mesh.dp", "2", "--mesh.tp", "2", "--workdir", str(folder)]
    train(settings(source, tokens, folder, flags))
    out = capsys.readouterr().out
    assert "resumed from step 1\n" in out and "is not read again" in out and "step 0:" not in out
    assert "optimizer.warmup_steps=100 is longer than the run of 3 steps: the learning rate ends at 3% of" in out
    assert "first run: stop_after" not in out and "first run: init_from" not in out
    record = json.loads((folder / "checkpoints" / "3" / "run" / "metadata").read_text())
    assert record["started_from"]["from"] == source
    # Another source is remarked on, and one of another model refused.
    train(settings(run[2], tokens, folder, flags))
    assert f"first run: init_from {source} -> {run[2]}" in capsys.readouterr().out
    wider = {EMBED: np.zeros((VOCAB, 8), np.float32)}
    config = dataclasses.replace(
        settings(source, tokens, folder, flags), init_from=None, model=ModelConfig(vocab_size=VOCAB)
    )
    with pytest.raises(ConfigError, match=f"use the same model .--init-from {source} again. or another"):
        train(config)
    with pytest.raises(ConfigError, match=f"its run began with --init-from {source}, and the model of this command is"):
        init_from.with_model(config)
    other = write(tmp_path / "other", CONFIG | {"vocab_size": VOCAB}, {SINGLE: arrays() | wider})
    with pytest.raises(ConfigError, match="holds another model .model.d_model 48 -> 8"):
        train(settings(other, tokens, folder, flags))


@pytest.mark.parametrize("optimizer", [False, True])
def test_another_run_on_another_mesh_has_its_bits(run, tokens, optimizer):
    """dp 2 x tp 2 -> dp 2 x pp 2 x tp 1 with shares of the optimiser, and another padding of the vocabulary."""
    folder = run[0]
    flags = ["--mesh.dp", "2", *STAGES, *ZERO1, "--steps", "50", *(["--init-optimizer"] if optimizer else [])]
    config = settings(folder, tokens, flags=flags)
    program, state, begun = start(config)
    stored, saved = program.stored.pack(state), state_of(folder, 1)
    ours, theirs = leaves(stored.params), leaves(saved["params"])
    assert ours.keys() == theirs.keys()
    real = lambda leaf: leaf[tuple(slice(VOCAB) if n >= VOCAB else slice(None) for n in leaf.shape)]
    for name, leaf in ours.items():
        np.testing.assert_array_equal(real(leaf), real(theirs[name]), err_msg=name)
    of_adam, schedule = stored.opt_state[1][0], stored.opt_state[1][2]
    assert int(state.step) == 0 and int(schedule.count) == 0 and int(of_adam.count) == int(optimizer)
    moments = leaves(of_adam.nu), leaves(saved["opt_state"][1][0]["nu"])
    assert any(leaf.any() for leaf in moments[1].values())
    for name, leaf in moments[0].items():
        np.testing.assert_array_equal(real(leaf), real(moments[1][name]) if optimizer else np.zeros_like(real(leaf)))
    assert begun.origin["step"] == 1 and begun.origin["optimizer"] == optimizer


def test_a_damaged_checkpoint_starts_nothing(run, tokens, monkeypatch):
    monkeypatch.setattr("taco_jax.train.checkpoint.take_damaged", lambda *_: ["state.params.embed.table"])
    monkeypatch.setattr(Checkpoints, "steps", lambda self: [0, 1])
    before = f"go on from the one before with --init-from {run[0]}@0"
    with pytest.raises(ConfigError, match=f"1: is damaged: not as saved are state.params.embed.table; {before}"):
        start(settings(run[0], tokens))


def test_a_second_phase_keeps_the_first_ones_tokenizer(run, tokens, tmp_path):
    source = init_from.open_source(config := settings(f"{run[0]}@1", tokens, tmp_path))
    begun = init_from.Start(source, {"from": str(run[0]), "digests": {"a": 1}})
    assert model_files.keep(config, begun) == []
    for name in ("tokenizer.json", "source_config.json"):
        assert (tmp_path / "model" / name).read_bytes() == (run[0] / "model" / name).read_bytes()


def test_other_weights_before_the_first_checkpoint_are_remarked(run, tokens, tmp_path):
    source = init_from.open_source(config := settings(run[2], tokens, tmp_path))
    begin = lambda digest: init_from.Start(source, {"from": str(run[2]), "digests": {"a": digest}})
    assert model_files.keep(config, begin(1)) == [] == model_files.keep(config, begin(1))
    (tmp_path / ".model.1").mkdir()
    (tmp_path / ".model.1" / "half").touch()  # of a process that was killed
    (remark,) = model_files.keep(config, begin(2))
    assert not (tmp_path / ".model.1").exists()
    assert f"was first started from {run[2]}; its weights are not those of init_from={run[2]}" in remark
    assert json.loads((tmp_path / "model" / "source.json").read_text())["digests"] == {"a": 2}
    assert json.loads((tmp_path / "model.aside-1" / "source.json").read_text())["digests"] == {"a": 1}


def test_a_gguf_file_starts_a_run(tokens, tmp_path):
    gguf_files = pytest.importorskip("gguf_files", reason="the extra gguf: pip install 'taco-jax[gguf]'")
    from tokenizers import Tokenizer

    folder, file = gguf_files.write("qwen3", tmp_path / "source")
    states = []
    for source in (folder, file):
        config = settings(source, tokens, tmp_path / "run", ["--mesh.tp", "2"])
        _, state, begun = start(config)
        states.append(leaves(state.params))
    for name, leaf in states[0].items():
        np.testing.assert_array_equal(leaf, states[1][name], err_msg=name)
    (tmp_path / "run").mkdir()
    assert model_files.keep(config, begun) == []
    kept = Tokenizer.from_file(str(tmp_path / "run" / "model" / "tokenizer.json"))
    text = "ab abc <end>"
    assert kept.encode(text).ids == begun.source.checkpoint.tokenizer.encode(text)
    assert kept.decode([VOCAB - 1]) == ""  # a special token stays one
    generation = json.loads((tmp_path / "run" / "model" / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [VOCAB - 1]}


def prepared(folder, size):
    return token_writers.prepared(folder, [[1, 0]], vocab_size=size)


def test_prepared_data(tmp_path):
    """Its tokenizer is kept where no source has one; its vocabulary must fit the model's."""
    folder, run = prepared(tmp_path / "mine", 24), tmp_path / "run"
    run.mkdir()
    config = TrainConfig(data=DataConfig(train=str(folder)), workdir=str(run))
    assert model_files.keep(config, None) == [] == model_files.keep(config, None)
    assert (run / "model" / "tokenizer.json").read_text() == "{}"
    assert (run / "model" / "meta.json").read_text() == (folder / "meta.json").read_text()

    source, run = write(tmp_path / "model"), tmp_path / "other"
    run.mkdir()
    config = dataclasses.replace(config, init_from=str(source), workdir=str(run))
    begin = lambda digest: init_from.Start(init_from.open_source(config), {"digests": {"a": digest}, "from": "x"})
    assert model_files.keep(config, begin(1)) == []  # the source has no tokenizer
    assert (run / "model" / "tokenizer.json").read_text() == "{}" and (run / "model" / "source_config.json").exists()
    write_tokenizer(source)
    _, remark = model_files.keep(config, begin(2))
    assert remark == f"{folder} was made with another tokenizer.json than that of init_from={source}"

    config = dataclasses.replace(config, data=DataConfig(train=str(prepared(tmp_path / "large", 25))))
    with pytest.raises(DataError, match="large: its tokenizer has 25 ids, the model of init_from=.* 24; prepare the"):
        init_from.with_model(config)


def test_a_dry_run_reads_no_weights(tmp_path, monkeypatch, capsys):
    from taco_jax.inference.tensors import SafetensorsFolder

    monkeypatch.setattr(SafetensorsFolder, "read", lambda *_: pytest.fail("weights are read"))
    monkeypatch.setattr("taco_jax.train.dry_run.report", lambda config, mesh: f"width {config.model.d_model}")
    source = write(tmp_path / "model")
    assert cli.run(main, ["--init-from", str(source), "--dry-run", "--workdir", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out == "width 8\n" and not (tmp_path / "run").exists()


def test_the_models_shape_starts_no_backend(tmp_path):
    """The command looks it up before it says what devices there are, and as the parent of several processes."""
    config = f"TrainConfig(init_from={str(write(tmp_path / 'model'))!r})"
    imports = "import jax; from taco_jax.config import TrainConfig; from taco_jax.train import init_from"
    code = f"{imports}; assert init_from.with_model({config}).model.d_model == 8"
    run_python(f"{code}; jax.config.update('jax_num_cpu_devices', 3); assert len(jax.devices()) == 3", devices=None,
               env={"JAX_PLATFORMS": "cpu"}, cwd=tmp_path)  # fmt: skip


def bfloat16(tensors):
    import ml_dtypes

    return {name: x if x.ndim == 1 else x.astype(ml_dtypes.bfloat16) for name, x in tensors.items()}


def test_norms_may_have_another_type_than_matrices(tmp_path, tokens):
    folder = write(tmp_path / "model", files={SINGLE: bfloat16(arrays())})
    config = dataclasses.replace(TrainConfig(), init_from=str(folder), global_batch=8)
    _, state, _ = start(check(init_from.with_model(config)))
    want = arrays()
    np.testing.assert_array_equal(state.params["final_norm"]["scale"], want["model.norm.weight"])
    np.testing.assert_array_equal(state.params["layers"]["mlp"]["up"]["kernel"][0], bfloat16(want)[UP].T.astype("f4"))


def _no_config(folder):
    write(folder)
    (folder / "config.json").unlink()


def _quantised(folder):
    write(folder, files={SINGLE: arrays() | {UP: arrays()[UP].astype(np.int8)}})


def _missing_shard(folder):
    parts = {"a.safetensors": {EMBED: arrays()[EMBED]}}
    write(folder, files=parts, index=dict.fromkeys(arrays(), "b.safetensors") | {EMBED: "a.safetensors"})


def _missing_tensor(folder):
    write(folder, files={SINGLE: {name: array for name, array in arrays().items() if name != UP}})


def _run_without_checkpoints(folder):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model": {}, "optimizer": {}}))


def _run_with_a_step(folder):
    _run_without_checkpoints(folder)
    (folder / "checkpoints" / "4").mkdir(parents=True)


@pytest.mark.parametrize(
    "make, source, flags, message",
    [
        (_no_config, "{}", [], "config.json: cannot be read (No such file or directory); a model's folder must have"),
        (_quantised, "{}", [], "'model.layers.0.mlp.up_proj.weight' is of type I8; must be one of F32, F16, BF16"),
        (_missing_shard, "{}", [], "b.safetensors: there is no such file; model.safetensors.index.json names it"),
        (_missing_tensor, "{}", [], "state dict does not fit the config: missing layers.0.mlp.up_proj.weight"),
        (write, "{}", ["--mesh.tp", "4"], "2 heads, 2 kv heads: tp 4 does not divide 2; try 1 or 2"),
        (write, "{}", ["--model.d-model", "64"], "model.d_model=64: init_from={} has 8, and the model's shape comes"),
        (write, "{}", ["--model.no-tied-head"], "model.tied_head=False: init_from={} has True"),
        (write, "{}", ["--init-optimizer"], "init_optimizer=True: {} is no run, and only runs have an optimiser"),
        (write, "{}@3", [], "init_from={}@3: {} is no run, and only runs have steps; leave @3 out"),
        (write, "{}/x@3", [], "init_from={}/x@3: there is no run {}/x; name a run's workdir, as runs/x@3"),
        (write, "{}", [], "austen: token id 66 at position 0 is outside the vocabulary; ids must be below model.vocab"),
        (_run_without_checkpoints, "{}", [], "init_from={}: the run has no checkpoint; wait for its first"),
        (_run_with_a_step, "{}@5", [], "init_from={}@5: the run has no checkpoint of step 5; present: 4"),
        (_run_with_a_step, "{}/checkpoints/4", [], "is a part of a run; name the run: --init-from {}@4"),
        (_run_with_a_step, "{}", ["--workdir", "{}"], "init_from={}: is the workdir itself"),
        (lambda folder: None, "{}", [], "there is nothing"),
        (lambda folder: None, "org/name", [], "--init-from org/name: must be a Hugging Face folder"),
    ],
)
def test_refused_in_one_line(tmp_path, capsys, make, source, flags, message):
    folder, fill = tmp_path / "source", lambda text: text.replace("{}", str(tmp_path / "source"))
    make(folder)
    before = sorted(tmp_path.rglob("*"))
    argv = ["--workdir", str(tmp_path / "run"), "--init-from", fill(source), *map(fill, flags)]
    assert cli.run(main, argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and fill(message) in line
    assert sorted(tmp_path.rglob("*")) == before


def test_an_optimiser_without_a_source():
    with pytest.raises(ConfigError, match="init_optimizer=True: takes the optimiser of the run that init_from names"):
        TrainConfig(init_optimizer=True)


def test_another_optimiser_is_refused(run, tokens):
    message = "has the optimiser's state of adamw, the run has optimizer.name='lion'; .*, or leave init_optimizer out"
    with pytest.raises(ConfigError, match=message):
        start(settings(run[0], tokens, flags=["--init-optimizer", "--seed", "7", "--optimizer.name", "lion"]))
