"""Config, command line and experiment files: what is accepted, and the one line that says what is not."""

import dataclasses
import inspect
import io
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import REPOSITORY

import taco_jax.config
import taco_jax.models.config
from taco_jax.codec import CODECS
from taco_jax.config import (
    CompressionConfig,
    ConfigError,
    DataConfig,
    MeshConfig,
    TrainConfig,
    cli,
    codec_pair,
    flatten,
    keys,
    parse_devices,
    sequence_parallel,
    to_dict,
    with_codecs,
    with_compression,
)
from taco_jax.config.checks import REMAT, check

EXPERIMENTS = (
    "quickstart", "qwen7b", "gpt3_6p7b", "gpt2_1p5b", "gpt2_1p5b_24h", "gpt2_350m", "gpt2_124m", "qwen2_0p5b",
    "three_axes",
)  # fmt: skip


def experiment(tmp_path, text, name="run.py"):
    path = tmp_path / name
    path.write_text("from taco_jax.config import *\n" + text)
    return str(path)


def test_defaults_are_valid_and_serialisable():
    config = check(TrainConfig(gpu_memory_gb=80))
    assert json.loads(json.dumps(to_dict(config)))["compression"]["forward"] == "taco"


def test_every_key_has_a_sentence():
    """The help of a field is the string under it, which tyro reads from the source."""
    source = inspect.getsource(taco_jax.config.settings) + inspect.getsource(taco_jax.models.config)
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
    with pytest.raises(ConfigError, match="compression.forward='nonne': no such codec preset; did you mean 'none'"):
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
        (["--config"], "--config: needs the path"),
        (["--config", "a.py", "--config=b.py"], "given 2 times"),
    ],
)
def test_bad_command_line(args, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        cli.parse(args)
    assert "\n" not in str(error.value)


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


def test_the_floor_of_the_learning_rate_follows_it():
    config = check(cli.parse(["--optimizer.learning-rate", "1e-6"]))
    assert config.optimizer.floor == pytest.approx(1e-7)
    flags = ["--optimizer.learning-rate", "1e-6", "--optimizer.min-learning-rate-ratio", "0.5"]
    assert check(cli.parse(flags)).optimizer.floor == pytest.approx(5e-7)
    assert check(cli.parse([*flags, "--optimizer.min-learning-rate", "1e-8"])).optimizer.floor == 1e-8
    quickstart = ["--config", str(REPOSITORY / "experiments/quickstart.py"), "--optimizer.learning-rate", "1e-6"]
    assert check(cli.parse(quickstart)).optimizer.floor == pytest.approx(1e-7)
    assert np.float32(TrainConfig().optimizer.floor) == np.float32(3e-5)  # as it was when it was a number


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"optimizer.min_learning_rate_ratio": 1.5}, "optimizer.min_learning_rate_ratio=1.5: must be from 0 to 1"),
        ({"mesh.tp": 3}, "8 heads, 4 kv heads: tp 3 does not divide 8; try 1, 2, 4 or 8"),
        ({"mesh.tp": 16}, "try 1, 2, 4 or 8"),
        ({"mesh.dp": 0}, "mesh.dp=0: must be at least 1"),
        ({"steps": 1 << 31}, "steps=2147483648: must be below 2**31"),
        ({"compression.plan": {"layers/*": 5}}, "compression.plan 'layers/*': 5: both must be texts, such as"),
        ({"mesh.pp": 3}, "mesh.pp=3: must divide the 4 layers of the model (model.n_layers); try 1, 2 or 4"),
        ({"pipeline.schedule": "1f1"}, "pipeline.schedule='1f1': did you mean '1f1b'? (one of gpipe, circular, 1f1b)"),
        ({"pipeline.microbatches": 0}, "pipeline.microbatches=0: must be at least 1"),
        ({"pipeline.chunks": 0}, "pipeline.chunks=0: must be at least 1"),
        (
            {"mesh.pp": 2, "mesh.dp": 2, "global_batch": 24, "pipeline.microbatches": 5},
            "pipeline.microbatches=5: must divide the 12 sequences of a device (global_batch / (mesh.dp x "
            "accumulation)); try 1, 2, 3, 4, 6 or 12",
        ),
        (
            {"mesh.pp": 2, "pipeline.schedule": "circular", "pipeline.chunks": 3},
            "pipeline.chunks=3: must divide the 2 layers of a stage (model.n_layers / mesh.pp); try 1 or 2",
        ),
        (
            {"mesh.pp": 2, "chains": 3, "pipeline.microbatches": 4},
            "chains=3: must divide the 8 sequences of a device's microbatch (global_batch / (mesh.dp x accumulation x "
            "pipeline.microbatches)); try 1, 2, 4 or 8",
        ),
        ({"pipeline.forward": "int8x"}, "pipeline.forward='int8x': no such codec preset; did you mean 'int8h'"),
        ({"pipeline.backward": "e4m3s"}, "pipeline.backward='e4m3s': no such codec preset; did you mean 'e4m3"),
        ({"model.d_mlp": 770, "mesh.tp": 4}, "mlp width 770: tp 4 does not divide 770; try 1 or 2"),
        ({"compression.forward": "tacco"}, "compression.forward='tacco': no such codec preset; did you mean 'taco'?"),
        ({"compression.backward": "int9h"}, "compression.backward='int9h': no such codec preset; did you mean 'int"),
        ({"compression.plan": {"*": "taco:e4m3g"}}, "compression.plan '*' (backward)='e4m3g'"),
        ({"compression.link": "nvlnk"}, "compression.link='nvlnk': did you mean 'nvlink'?"),
        ({"compression.backend": "mosiac"}, "compression.backend='mosiac': did you mean 'mosaic'?"),
        ({"compression.exchange": "rings"}, "compression.exchange='rings': did you mean 'ring'?"),
        ({"compression.chunks": 0}, "compression.chunks=0: must be from 1 to 1024, or None"),
        ({"compression.chunks": 1025}, "compression.chunks=1025: must be from 1 to 1024, or None"),
        (
            {"data_parallel.gradients": "spd4"},
            "data_parallel.gradients='spd4': no such codec preset; did you mean 'sdp4'",
        ),
        (
            {"data_parallel.gradients": "int8_token"},
            "data_parallel.gradients='int8_token': has one scale a token, and gradients and weights have no tokens",
        ),
        ({"data_parallel.gradients": "bfloat16"}, "data_parallel.gradients='bfloat16': no such codec preset"),
        (
            {"data_parallel.parameters": "int44h", "data_parallel.zero1": True},
            "data_parallel.parameters='int44h': no such codec preset; did you mean 'int4h'",
        ),
        (
            {"data_parallel.parameters": "int8h"},
            "data_parallel.parameters='int8h': without data_parallel.zero1 no weights are sent; set ",
        ),
        ({"data_parallel.bucket_mb": 0.0}, "data_parallel.bucket_mb=0.0: must be above 0"),
        ({"compression.between_hosts": "int4"}, "compression.between_hosts='int4': no such codec preset; did you mean"),
        (
            {"compression.between_hosts": "none"},
            "compression.between_hosts='none': must be a codec that compresses, such as 'int4h', or None",
        ),
        (
            {"compression.between_hosts": "int4h", "compression.algorithm": "two_shot"},
            "compression.between_hosts='int4h': algorithm='two_shot' sends everything in one codec; use 'auto' or",
        ),
        (
            {"compression.with_product": True, "chains": 2},
            "compression.with_product=True: is never used with chains=2 (sums of chains travel beside other products); "
            "set chains=1, or leave compression.with_product out",
        ),
        (
            {"compression.with_product": True, "sequence_parallel": True},
            "compression.with_product=True: is never used with sequence_parallel=True",
        ),
        (
            {"compression.with_product": True, "mesh.pp": 2},
            "compression.with_product=True: is never used with mesh.pp=2 (stages run no kernel over NVLink)",
        ),
        (
            {"compression.error_feedback": True, "compression.forward": "none"},
            "compression.error_feedback=True: sums of compression.forward='none' lose nothing; set a codec, or leave",
        ),
        (
            {"compression.error_feedback": True, "chains": 2},
            "compression.error_feedback=True: is never used with chains=2 (the sums of one chain take errors along); "
            "set chains=1, or leave compression.error_feedback out",
        ),
        (
            {"compression.error_feedback": True, "sequence_parallel": True},
            "compression.error_feedback=True: is never used with sequence_parallel=True",
        ),
        ({"mesh.devices_per_host": 0}, "mesh.devices_per_host=0: must be at least 1, or None"),
        (
            {"mesh.dp": 8, "mesh.devices_per_host": 3},
            "mesh.devices_per_host=3: must divide the 8 devices of the mesh (dp x pp x tp), else hosts' ranks are in "
            "no order; try 1, 2, 4 or 8",
        ),
        ({"compute_dtype": "bf16"}, "compute_dtype='bf16'"),
        ({"remat": "ful"}, "remat='ful': did you mean 'full'?"),
        (
            {"global_batch": 30, "mesh.dp": 2, "accumulation": 4},
            "global_batch=30: mesh.dp=2 x accumulation=4 must divide",
        ),
        ({"chains": 0}, "chains=0: must be at least 1"),
        (
            {"global_batch": 24, "mesh.dp": 2, "accumulation": 2, "chains": 4},
            "chains=4: must divide the 6 sequences of a device's microbatch (global_batch / (mesh.dp x accumulation)); "
            "try 1, 2, 3 or 6",
        ),
        ({"global_batch": 1, "chains": 2}, "chains=2: must divide the 1 sequences"),
        ({"data.sequence_length": 250, "sequence_parallel": True, "mesh.tp": 4}, "try 248"),
        ({"model.positions": "learned", "model.max_length": 128}, "data.sequence_length=256: the model has learned"),
        ({"optimizer.clip_norm": 0.0}, "optimizer.clip_norm=0.0"),
        ({"optimizer.min_learning_rate": 1.0}, "optimizer.min_learning_rate=1.0: must not exceed learning_rate=0.0003"),
        ({"devices": "tpu"}, "devices='tpu': must be 'cpu:N'"),
        ({"steps": 0}, "steps=0: must be at least 1"),
        ({"steps": "7"}, "steps='7': must be of type int, is str; 7 would do"),
        ({"stop_after": True}, "stop_after=True: must be of type int or None, is bool"),
        ({"mesh": 4}, "mesh=4: must be of type MeshConfig, is int"),
        ({"compression.plan": ["taco"]}, "compression.plan=['taco']: must be of type dict, is list"),
        ({"optimizer.beta1": "0.9"}, "optimizer.beta1='0.9': must be of type float, is str; 0.9 would do"),
        ({"stop_after": 0}, "stop_after=0"),
        ({"evaluation.batches": -1}, "evaluation.batches=-1"),
        ({"optimizer.beta2": 1.0}, "optimizer.beta2=1.0: must be at least 0 and below 1"),
        ({"optimizer.learning_rate": math.nan}, "optimizer.learning_rate=nan: must be above 0"),
        ({"optimizer.weight_decay": -0.1}, "optimizer.weight_decay=-0.1: must be 0 or more"),
        ({"model.norm_eps": 0.0}, "model.norm_eps=0.0: must be above 0"),
        ({"gpu_memory_gb": 0}, "gpu_memory_gb=0: must be above 0"),
        ({"loss_chunk": 0}, "loss_chunk=0: must be at least 1"),
        ({"seed": 1 << 32}, "seed=4294967296: must be below 2**32"),
    ],
)
def test_rules(changes, message):
    config = TrainConfig()
    for key, value in changes.items():
        group, _, name = key.rpartition(".")
        new = dataclasses.replace(getattr(config, group) if group else config, **{name: value})
        config = dataclasses.replace(config, **{group: new}) if group else new
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        check(config)
    assert "\n" not in str(error.value)


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


@pytest.mark.parametrize(
    "changes, on, why",
    [
        (
            {"mesh": MeshConfig(tp=4)},
            True,
            "2048 tokens a sequence: what is kept between layers takes 1/4 of the memory",
        ),
        ({"mesh": MeshConfig(tp=4), "sequence_parallel": False}, False, "as configured"),
        ({"mesh": MeshConfig(dp=4)}, False, "tp is 1"),
        ({"mesh": MeshConfig(tp=3)}, False, "tp 3 does not divide the 2048 tokens of a sequence"),
        ({"mesh": MeshConfig(tp=2), "chains": 2}, False, "chains put messages beside products"),
        (
            {"mesh": MeshConfig(tp=2), "data": DataConfig(sequence_length=1024)},
            False,
            "1024 tokens a sequence, below 2048",
        ),
        ({"mesh": MeshConfig(tp=2), "remat": "full"}, False, "remat full leaves little memory to save"),
        ({"mesh": MeshConfig(tp=2), "data": DataConfig(), "sequence_parallel": True}, True, "as configured"),
        (
            {"mesh": MeshConfig(pp=2, tp=2), "data": DataConfig(sequence_length=128)},
            True,
            "each of the 2 ranks of a stage sends 1/2 of its activations",
        ),
        ({"mesh": MeshConfig(pp=2, tp=4), "data": DataConfig(sequence_length=126)}, False, "does not divide the 126"),
    ],
)
def test_sequence_parallelism_is_on_where_it_pays(changes, on, why):
    config = dataclasses.replace(TrainConfig(data=DataConfig(sequence_length=2048)), **changes)
    got, reason = sequence_parallel(config)
    assert got is on and why in reason


def test_names_shared_with_other_modules():
    from taco_jax.models.run_config import REMAT as models_remat

    assert set(REMAT) == set(models_remat)
    assert {"taco", "none"} <= set(CODECS)
    assert codec_pair("int8h:int6h") == ("int8h", "int6h") and codec_pair("taco") == ("taco", "taco")


def test_flatten_keeps_a_plan_whole():
    config = TrainConfig(compression=CompressionConfig(plan={"a.b": "taco"}))
    assert flatten(to_dict(config))["compression.plan"] == {"a.b": "taco"}
    assert "mesh.tp" in keys(config) and "model.d_model" in keys(config)


def test_parse_devices():
    assert parse_devices("cpu:8") == ("cpu", 8)
    assert parse_devices("cpu") == ("cpu", None)
    assert parse_devices("gpu") == parse_devices("cuda") == ("cuda", None)
    assert parse_devices(None) == (None, None)
    with pytest.raises(ConfigError, match="devices='cpu:9999999': at most 4096 devices are emulated; try 'cpu:8'"):
        parse_devices("cpu:9999999")


@pytest.mark.parametrize(
    "before, after",
    [
        (None, ["--xla_force_host_platform_device_count=3", "--xla_cpu_collective_call_terminate_timeout_seconds=600"]),
        (
            "--xla_cpu_collective_call_terminate_timeout_seconds=50 --xla_force_host_platform_device_count=2",
            ["--xla_cpu_collective_call_terminate_timeout_seconds=50", "--xla_force_host_platform_device_count=3"],
        ),
    ],
)
def test_devices_are_chosen_before_the_backend_starts(run_python, before, after):
    """Also when jax is imported already; other flags of the user stay."""
    code = """
import os, jax
from taco_jax.config import cli
cli.select_devices("cpu:3", deterministic=True)
print(len(jax.devices()), jax.devices()[0].platform, os.environ["XLA_FLAGS"])
"""
    out = run_python(code, devices=None, env={"XLA_FLAGS": before}).stdout.split()
    assert out == ["3", "cpu", *after, "--xla_gpu_deterministic_ops=true"]


def test_exit_code_without_traceback(run_python):
    result = run_python(["-m", "taco_jax.train", "--mesh.pt", "4"], check=2)
    assert result.stderr == "error: unknown option --mesh.pt; did you mean --mesh.tp?\n" and not result.stdout


def test_help_lists_every_key(run_python):
    text = run_python(["-m", "taco_jax.train", "--help"]).stdout
    assert "--config FILE.py" in text
    for key in keys(TrainConfig()):
        assert f"--{key.replace('_', '-')}" in text, key


def test_config_starts_no_backend(run_python):
    code = """
from taco_jax.config.cli import parse
from taco_jax.config.checks import check
check(parse(["--mesh.tp", "2"]))
from jax._src import xla_bridge
print(xla_bridge.backends_are_initialized())
"""
    assert run_python(code).stdout == "False\n"


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
@pytest.mark.parametrize(
    "env, keeps",
    [({}, True), pytest.param({"MALLOC_TOP_PAD_": "131072"}, False, marks=pytest.mark.slow)],
)
def test_emulated_devices_keep_the_memory_of_a_step(run_python, env, keeps):
    """64 MB that every call takes and frees are not cleared by the kernel each time, unless the user has set malloc."""
    code = """
import resource
from taco_jax.config import cli
cli.select_devices("cpu:2")
import jax, jax.numpy as jnp
double, x = jax.jit(lambda x: x * 2), jnp.ones(1 << 24)
for call in range(60):  # the first ones find holes between what stays
    if call == 40:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    jax.block_until_ready(double(x))
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize() >> 20)
"""
    cleared = int(run_python(code, devices=None, env=env).stdout)
    assert cleared <= 256 if keeps else cleared >= 1024, f"{cleared} MB of new pages for 20 calls"


def test_a_program_goes_on_without_its_output(monkeypatch, capfd):
    """A reader that has gone, as after `| head`, and a device that is full: one line, and what follows is dropped."""
    read, write = os.pipe()
    os.close(read)
    for descriptor, reason in ((write, "Broken pipe"), (os.open("/dev/full", os.O_WRONLY), "No space left on device")):
        with open(descriptor, "w") as stream, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream)
            for number in range(3):
                cli.say(f"step {number}")
            assert os.readlink(f"/proc/self/fd/{descriptor}") == os.devnull
        assert capfd.readouterr().err == f"standard output: {reason}; it goes on without\n"


def _prints(flush: bool, after: Exception | None = None):
    def main(args):
        print("text", flush=flush)
        if after:
            raise after
        return 0

    return main


@pytest.mark.parametrize(
    "reader_has_gone, main, code, line",
    [
        (True, _prints(flush=True), 141, ""),
        (True, _prints(flush=False), 141, ""),
        (True, _prints(flush=False, after=SystemExit(0)), 141, ""),
        (True, _prints(flush=False, after=ConfigError("x=1: no")), 2, "error: x=1: no\n"),
        (False, _prints(flush=True), 1, "error: standard output: No space left on device\n"),
    ],
    ids=["printing", "at its end", "help", "bad setting", "full"],
)
@pytest.mark.parametrize("unbuffered", [False, True])
def test_a_program_ends_with_its_output(monkeypatch, capfd, reader_has_gone, main, code, line, unbuffered):
    """One that is of no use without: in silence where its reader has gone, as after `| head`, else in one line."""
    if unbuffered and code == 2:
        code, line = 141, ""  # it has ended before it comes to that
    read, descriptor = os.pipe() if reader_has_gone else (None, os.open("/dev/full", os.O_WRONLY))
    if reader_has_gone:
        os.close(read)
    with open(descriptor, "wb", buffering=0 if unbuffered else -1) as raw:
        stream = io.TextIOWrapper(raw, write_through=unbuffered)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream)
            assert cli.run(main, []) == code
            assert sys.stdout is stream
            stream.flush()  # as Python does at its end
    assert capfd.readouterr().err == line


def test_errors_of_files_are_not_those_of_standard_output(tmp_path):
    with pytest.raises(FileNotFoundError):
        cli.run(lambda args: open(tmp_path / "absent"), [])


def test_standard_streams_that_are_closed_are_nobody_elses(tmp_path):
    """A file that is opened never has the number at which native code writes what it has to say."""
    code = (
        "import os, sys; from taco_jax.config import cli; "
        f"print_to = lambda args: open({str(tmp_path / 'file')!r}, 'w').write(f'{{os.open(os.devnull, 0)}}'); "
        "sys.exit(cli.run(lambda args: print_to(args) and sys.stderr.flush(), []))"
    )
    argv = ["sh", "-c", '"$0" -c "$1" <&- >&- 2>&-', sys.executable, code]
    assert subprocess.run(argv, cwd=REPOSITORY, timeout=120).returncode == 0
    assert int((tmp_path / "file").read_text()) > 2
