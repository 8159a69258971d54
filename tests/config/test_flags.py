"""Flags and experiment files: what is accepted, and the one line that says what is not."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import taco_jax.config
import taco_jax.models.config
from taco_jax.config import (
    CompressionConfig,
    ConfigError,
    MeshConfig,
    TrainConfig,
    cli,
    keys,
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
        (["--pretrained", "a"], "unknown option --pretrained; --help lists them all"),
        (["--optimizer.lr", "1"], "unknown option --optimizer.lr; --help lists them all"),
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
    assert run.stderr == "error: --steps: 'abc' is no whole number, such as 2; --help describes every option\n"


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
        ("import numpy\nconfig = TrainConfig(chains=numpy.int64(2))", "must be of type int, is int64; 2 would do"),
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
    with pytest.raises(ConfigError, match="folder.py: is a folder; give a .py file"):
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
            "run: is the workdir of a run; give the experiment file that it was started with, and --workdir .*/run",
        ),
        ("run/config.json", "config.json: is no experiment file; give a Python file that assigns a TrainConfig"),
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


def test_help_lists_every_key(run_python):
    text = run_python(["-m", "taco_jax.train", "--help"]).stdout
    assert "--config FILE.py" in text
    for key in keys(TrainConfig()):
        assert f"--{key.replace('_', '-')}" in text, key


def test_exit_code_without_traceback(run_python):
    result = run_python(["-m", "taco_jax.train", "--mesh.pt", "4"], check=2)
    assert result.stderr == "error: unknown option --mesh.pt; did you mean --mesh.tp?\n" and not result.stdout
