"""Flags and experiment files: what is accepted, and the one line that says what is not."""

import dataclasses
import importlib
import inspect
import json
import re
from pathlib import Path

import pytest

import taco_jax.config
import taco_jax.models.config
from taco_jax.config import (
    CheckpointConfig,
    CompressionConfig,
    ConfigError,
    MeshConfig,
    TrainConfig,
    cli,
    keys,
    to_dict,
    with_codecs,
    with_compression,
)
from taco_jax.config.checks import check


def experiment(tmp_path, text, name="run.py"):
    path = tmp_path / name
    path.write_text("from taco_jax.config import *\n" + text)
    return str(path)


EXPERIMENTS = (
    "quickstart", "qwen7b", "gpt3_6p7b", "gpt2_1p5b", "gpt2_1p5b_24h", "gpt2_350m", "gpt2_124m", "qwen2_0p5b",
    "three_axes",
)  # fmt: skip


def test_every_key_has_a_sentence():
    """The help of a field is the string under it, which tyro reads from the source."""
    modules = taco_jax.config.settings, taco_jax.config.lora, taco_jax.models.config
    source = "".join(map(inspect.getsource, modules))
    for key in keys(TrainConfig()):
        name = key.rpartition(".")[2]
        assert re.search(rf'^    {name}: [^\n]*\n    """[A-Z\'][^\n]*\."""$', source, re.M), key


PROGRAMS = {
    "taco_jax.inference.generate": "GenerateConfig",
    "taco_jax.inference.evaluate": "PerplexityConfig",
    "taco_jax.inference.serve": "ServeConfig",
    "taco_jax.inference.export": "ExportConfig",
    "taco_jax.dropin.command": "RunConfig",
    "taco_jax.tuning.settings": "TuneConfig",
}


@pytest.mark.parametrize("module", PROGRAMS)
def test_every_flag_of_other_programs_has_a_sentence_in_one_line(module):
    """tyro keeps the line breaks of the string under a field, in the middle of the help's lines."""
    cls = getattr(importlib.import_module(module), PROGRAMS[module])
    source = "".join(inspect.getsource(base) for base in cls.__mro__[:-1])
    for field in dataclasses.fields(cls):
        assert re.search(rf'^    {field.name}: [^\n]*\n    """[A-Z\'0-9][^\n]*\."""$', source, re.M), field.name


def test_paragraphs_of_a_description_fit_the_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    description = f"First.\n\n{'many words ' * 30}\n--flag is the end."
    with pytest.raises(SystemExit):
        cli.parse_flags(MeshConfig(), ["--help"], prog="x", description=description)
    lines = capsys.readouterr().out.splitlines()
    assert " First." in lines and max(map(len, lines)) <= 100
    assert sum(line.count("many words") for line in lines) >= 25 and "--flag is the end." in " ".join(lines)


def test_file_then_flags(tmp_path):
    path = experiment(tmp_path, "config = TrainConfig(steps=7, mesh=MeshConfig(dp=2), seed=3)")
    config = cli.parse(["--config", path, "--mesh.tp", "4", "--compression.forward", "int8h", "--seed=5",
                        "--compression.plan", "layers/mlp/*", "int8h:int6h", "--optimizer.clip_norm", "None",
                        "--deterministic", "--checkpoint.no-enabled"])  # fmt: skip
    assert (config.steps, config.mesh, config.seed) == (7, MeshConfig(dp=2, tp=4), 5)
    assert config.compression == CompressionConfig(forward="int8h", plan={"layers/mlp/*": "int8h:int6h"})
    assert config.optimizer.clip_norm is None and config.deterministic and not config.checkpoint.enabled
    assert check(config) == with_codecs(config)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiments(name, repository):
    path = repository / "experiments" / f"{name}.py"
    config = check(cli.load(path))
    assert config.workdir == f"runs/{name}"
    card = path.read_text().split('"""')[1]
    for entry in (
        "trains ",
        "hardware ",
        "takes ",
        "reaches ",
        f"python -m taco_jax.train --config experiments/{name}.py",
    ):
        assert entry in card


def test_compression_none_means_every_axis(tmp_path):
    flags = ["--mesh.tp", "2", "--mesh.pp", "2", "--data-parallel.zero1", "--compression.plan", "layers/*", "int8h"]
    config = check(cli.parse([*flags, "--compression.error-feedback", "--data-parallel.parameters", "int8h"]))
    exact = with_compression(config, "none")
    assert {exact.compression.forward, exact.compression.backward, exact.pipeline.forward, exact.pipeline.backward,
            exact.data_parallel.gradients, exact.data_parallel.parameters} == {"none"}  # fmt: skip
    assert not exact.compression.plan and not exact.compression.error_feedback and check(exact)
    assert cli.parse(["--compression", "none"]) == with_compression(TrainConfig(), "none")
    # A field's own flag has the last word, wherever it stands.
    assert cli.parse(["--data-parallel.gradients", "sdp4", "--compression=none"]).data_parallel.gradients == "sdp4"
    config = cli.parse(["--compression", "int6h:int8h"])
    assert (config.compression.forward, config.compression.backward) == ("int6h", "int8h")
    assert config.data_parallel == TrainConfig().data_parallel
    with pytest.raises(ConfigError, match="compression='nonne' is unknown: did you mean 'none'"):
        check(cli.parse(["--compression", "nonne"]))


def test_both_codecs_none_is_exact_but_for_what_has_its_own():
    others = lambda config: (config.data_parallel.gradients, config.pipeline.forward, config.pipeline.backward)
    both = ["--mesh.dp", "2", "--compression.forward", "none", "--compression.backward", "none"]
    assert others(check(cli.parse(both))) == ("none",) * 3
    assert others(check(cli.parse([]))) == others(check(cli.parse(both[:4]))) == ("int8h", "int8_token", "e4m3h")
    own = cli.parse([*both, "--data-parallel.gradients", "sdp4", "--pipeline.backward", "int4h"])
    assert others(check(own)) == ("sdp4", "none", "int4h")


@pytest.mark.parametrize(
    "args, message",
    [
        (["--stepz", "5"], "unknown option --stepz; did you mean --steps?"),
        (["--tp", "5"], "did you mean --mesh.tp?"),
        (["--compression.foward=taco"], "unknown option --compression.foward; did you mean --compression.forward?"),
        (
            ["--no-checkpoint.enabled"],
            "unknown option --no-checkpoint.enabled; to switch it off, say --checkpoint.no-en",
        ),
        (["--no-mesh.tp"], "unknown option --no-mesh.tp; did you mean --mesh.tp?"),
        (["--pretrained", "a"], "unknown option --pretrained; --help-all lists them all"),
        (["--optimizer.lr", "1"], "unknown option --optimizer.lr; --help-all lists them all"),
        (["--learning-rte", "1"], "did you mean --optimizer.learning-rate?"),
        (["--steps", "abc"], "--steps: 'abc' is no whole number, such as 2"),
        (["--optimizer.beta1", "x"], "--optimizer.beta1: 'x' is no number, such as 0.1"),
        (["--compression.min-bytes", "x"], "--compression.min-bytes: 'x' must be None or a whole number"),
        (["--steps"], "Missing value for argument '--steps'"),
        (["five"], "Unrecognized options: five"),
        (["--model.n-heads", "0"], "n_heads=0: must be an integer of at least 1"),
        (["--mesh.dp", "0"], "mesh.dp=0: must be at least 1"),
        (["--compression", "taco:"], "compression='taco:': lacks a codec beside ':'; must be CODEC or"),
        (["--config"], "--config: needs the path"),
        (["--config", "a.py", "--config=b.py"], "given 2 times"),
    ],
)
def test_bad_command_line(args, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        cli.parse(args)
    assert "\n" not in str(error.value)


@dataclasses.dataclass(frozen=True)
class Lists:
    """Lists, as commands have them."""

    codecs: tuple[str, ...] = ()
    """Names."""
    plan: dict[str, str] = dataclasses.field(default_factory=dict)
    """Pairs."""
    tp: int = 1
    """A number."""


def test_a_list_in_several_flags_is_one():
    args = "--codecs a b --plan x 1 --tp 2 --codecs=c --tp 3 --plan y 2 --codecs d".split()
    found = cli.parse_flags(Lists(), args, prog="", description="")
    assert found == Lists(("a", "b", "c", "d"), {"x": "1", "y": "2"}, 3)


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_messages_have_no_frame_whatever_the_terminal(run_python, encoding):
    run = run_python(["-m", "taco_jax.train", "--steps", "abc"], env={"PYTHONIOENCODING": encoding}, check=2)
    assert run.stderr == "error: --steps: 'abc' is no whole number, such as 2; --help-all describes every option\n"


@pytest.mark.parametrize(
    "text, message",
    [
        ("config = TrainConfig(stepz=7)", "line 2: TrainConfig has no key 'stepz'; did you mean 'steps'?"),
        (
            "config = TrainConfig(model=ModelConfig(d_modl=7))",
            "ModelConfig has no key 'd_modl'; did you mean 'd_model'?",
        ),
        ("config = 3", "must assign a TrainConfig to the name 'config', found int"),
        ("configuration = TrainConfig()", "found nothing"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("config = (", "SyntaxError"),
        ("config = TrainConfig(model=ModelConfig(n_kv_heads=3))", "line 2: n_kv_heads=3: must divide n_heads=8"),
        (
            "import numpy\nconfig = TrainConfig(chains=numpy.int64(2))",
            "must be of type int or str, is int64; 2 would do",
        ),
        ("config = TrainConfig(steps=2.5)", "steps=2.5: must be of type int, is float; 2 would do"),
    ],
)
def test_bad_experiment_file(tmp_path, text, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        cli.load(experiment(tmp_path, text))
    assert "\n" not in str(error.value)


def test_missing_experiment_file_names_the_nearest(tmp_path):
    experiment(tmp_path, "config = TrainConfig()", "quickstart.py")
    (tmp_path / "quikstarts.py").write_text('"""Nearer by name, but no experiment."""\n')
    with pytest.raises(ConfigError, match=r"no such file; did you mean '.*quickstart\.py'"):
        cli.load(tmp_path / "quikstart.py")


@pytest.mark.parametrize(
    "text, line, why",
    [("import sys\nsys.exit()", 2, "None"), ("raise SystemExit('no data')", 1, "no data")],
)
def test_an_experiment_file_that_ends_python_is_no_success(tmp_path, text, line, why):
    path = tmp_path / "a.py"
    path.write_text(text)
    message = rf"a.py line {line}: ends Python \(SystemExit: {why}\) before it has assigned a TrainConfig"
    with pytest.raises(ConfigError, match=message):
        cli.load(path)


def test_folders_and_names_that_no_file_can_have(tmp_path, capsys):
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(ConfigError, match="folder.py: is a folder; give a .py file or the config.json of a run"):
        cli.load(tmp_path / "folder.py")
    with pytest.raises(ConfigError, match="other.py: no such file; give a .py file"):
        cli.load(tmp_path / "other.py")
    assert cli.run(lambda _: Path("x" * 300).stat(), []) == 2
    assert capsys.readouterr().err == f"error: {'x' * 300}: File name too long; use a shorter path\n"


def test_what_is_no_experiment_file_says_what_would_work(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    for name, message in (
        (
            "run",
            "run: is the workdir of a run; give .*run/config.json to go on with it, or to start another one with its",
        ),
        ("run/config.json", "config.json: is not the config.json of a run of this program, which has a part 'model'"),
        ("a.yaml", "a.yaml: no such file"),
        (".", "is a folder; did you mean|is a folder; give a .py file"),
    ):
        with pytest.raises(ConfigError, match=message) as error:
            cli.load(tmp_path / name)
        assert "\n" not in str(error.value)
    (tmp_path / "a.yaml").write_text("config: 1")
    with pytest.raises(ConfigError, match="a.yaml: is no experiment file; give a Python file"):
        cli.load(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    "flags, value",
    [
        ([], None),
        (["--sequence-parallel"], True),
        (["--sequence_parallel", "--seed", "3"], True),
        (["--no-sequence-parallel"], False),
        (["--sequence-parallel", "False"], False),
        (["--sequence-parallel", "None"], None),
    ],
)
def test_a_flag_that_may_be_none_can_stand_alone(flags, value):
    assert cli.parse(flags).sequence_parallel is value
    with pytest.raises(ConfigError, match="sequence-parallel"):
        cli.parse(["--sequence-parallel", "maybe"])


def test_all_help_lists_every_key(run_python):
    text = run_python(["-m", "taco_jax.train", "--help-all"]).stdout
    assert "--config FILE" in text
    for key in keys(TrainConfig()):
        assert f"--{key.replace('_', '-')}" in text, key


def test_help_is_one_page(tmp_path, capsys):
    """Its flags exist, and show the values of the file and of flags before it."""
    path = experiment(tmp_path, "config = TrainConfig(steps=7, workdir='x' * 300)")
    with pytest.raises(SystemExit) as stop:
        cli.parse(["--config", path, "--compression=int8h:none", "-h"])
    lines = capsys.readouterr().out.splitlines()
    assert stop.value.code == 0 and len(lines) <= 50 and max(map(len, lines)) <= 120
    named = [line.split()[0] for line in lines if line.startswith("  --")]
    known = {f"--{key.replace('_', '-')}" for key in keys(TrainConfig())}
    assert len(named) > 25 and set(named) <= known and len(set(named)) == len(named)
    text = "\n".join(lines)
    assert "of the whole run [7]" in text and "(docs/codecs.md) [int8h]" in text and "xxx...]" in text


# The config.json of a run


def stored(folder, config, **changes):
    folder.mkdir()
    (folder / "metrics.jsonl").touch()
    (folder / "config.json").write_text(json.dumps(to_dict(config) | changes))
    return str(folder / "config.json")


def test_a_stored_config_is_the_run_again(tmp_path):
    flags = ["--compression.plan", "layers/*", "int8h:int6h", "--mesh.tp", "2", "--optimizer.clip-norm", "None"]
    config = check(cli.parse([*flags, "--data-parallel.gradients", "sdp4", "--workdir", "elsewhere"]))
    once = dataclasses.replace(config, stop_after=5, profile="2:3", dry_run=True)
    once = dataclasses.replace(once, checkpoint=dataclasses.replace(once.checkpoint, resume_step=4, every=7))
    path = stored(tmp_path / "run", once)
    # It goes on in its own folder, wherever that is now; what was said for one start is not said again.
    want = dataclasses.replace(config, workdir=str(tmp_path / "run"), checkpoint=CheckpointConfig(every=7))
    assert check(cli.parse(["--config", path])) == want
    flags = ["--workdir", "other", "--seed", "3", "--compression", "none"]
    other = cli.parse(["--config", path, *flags])
    assert (other.workdir, other.seed, other.mesh.tp) == ("other", 3, 2)
    assert other.compression.forward == other.data_parallel.gradients == "none" and not other.compression.plan


def test_a_stored_config_of_no_run_needs_a_workdir(tmp_path):
    path = tmp_path / "copied.json"
    path.write_text(json.dumps({"model": {"n_layers": 2}}))  # an older version's: it lacks most keys
    assert cli.parse(["--config", str(path), "--workdir", "new"]).model.n_layers == 2
    assert cli.parse(["--config", str(path), "--dry-run"]).dry_run
    with pytest.raises(ConfigError, match="copied.json: its folder is no run's; say where this one works with --work"):
        cli.parse(["--config", str(path)])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"stepz": 3}, "config.json: stepz: no such key; did you mean 'steps'?"),
        ({"mesh": {"tq": 3}}, "config.json: mesh.tq: no such key; did you mean 'tp'?"),
        ({"mesh": 3}, "config.json: mesh=3: must be an object of keys"),
        ({"mesh": {"tp": "3"}}, "config.json: mesh.tp='3': must be of type int, is str; 3 would do"),
        ({"mesh": {"tp": 0}}, "config.json: mesh.tp=0: must be at least 1"),
        ({"model": {"n_kv_heads": 3}}, "config.json: model.n_kv_heads=3: must divide n_heads=8"),
        ({"model": {"norm_eps": None}}, "config.json: model.norm_eps=None: must be a number, such as 1e-06"),
        ({"model": {"init_std": "0.1"}}, "config.json: model.init_std='0.1': must be a number, such as 0.02"),
        ({"model": {"rope_theta": [1]}}, "config.json: model.rope_theta=[1]: must be a number"),
        ({"model": {"tied_head": "false"}}, "config.json: model.tied_head='false': must be True or False"),
        ({"model": {"qk_norm": None}}, "config.json: model.qk_norm=None: must be True or False"),
        ({"model": "llama"}, "is not the config.json of a run"),
    ],
)
def test_bad_stored_config(tmp_path, changes, message):
    path = stored(tmp_path / "run", TrainConfig(), **changes)
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        cli.parse(["--config", path])
    assert "\n" not in str(error.value)
    (tmp_path / "run" / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="config.json: cannot be read .no JSON: "):
        cli.parse(["--config", path])


def test_exit_code_without_traceback(run_python):
    result = run_python(["-m", "taco_jax.train", "--mesh.pt", "4"], check=2)
    assert result.stderr == "error: unknown option --mesh.pt; did you mean --mesh.tp?\n" and not result.stdout
