"""Settings: the rules of fields and between them, and what follows from them."""

import dataclasses
import json
import math
import re

import numpy as np
import pytest
from helpers import REPOSITORY

from taco_jax.codec import CODECS
from taco_jax.compression.compression import codec_pair
from taco_jax.config import (
    CompressionConfig,
    ConfigError,
    DataConfig,
    MeshConfig,
    TrainConfig,
    cli,
    flatten,
    keys,
    remat,
    sequence_parallel,
    to_dict,
)
from taco_jax.config.checks import REMAT, check


def test_defaults_are_valid_and_serialisable():
    config = check(TrainConfig(gpu_memory_gb=80))
    assert json.loads(json.dumps(to_dict(config)))["compression"]["forward"] == "int8h"


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
        ({"optimizer.name": "adam"}, "optimizer.name='adam': did you mean 'adamw'? (one of adamw, lion, muon)"),
        ({"optimizer.schedule": "step"}, "optimizer.schedule='step': must be one of cosine, linear, wsd, constant"),
        ({"optimizer.schedule": "wsp"}, "optimizer.schedule='wsp': did you mean 'wsd'?"),
        ({"optimizer.decay_fraction": 0.0}, "optimizer.decay_fraction=0.0: must be above 0 and at most 1"),
        ({"optimizer.momentum": 1.0}, "optimizer.momentum=1.0: must be at least 0 and below 1"),
        ({"optimizer.moment_dtype": "bf16"}, "optimizer.moment_dtype='bf16': did you mean 'bfloat16'?"),
        ({"profile": "3"}, "profile='3': must be START:STOP, the first and the last step, such as 10:12"),
        ({"profile": "5:4"}, "profile='5:4': START must be at least 1 and at most STOP"),
        ({"profile": "0:4"}, "profile='0:4': START must be at least 1"),
        ({"profile": "8:9", "stop_after": 7}, "profile='8:9': the run ends at step 7; trace steps up to that"),
        ({"log_file": ""}, "log_file='': must be the path of a file"),
        ({"metrics.run_name": "a/b"}, "metrics.run_name='a/b': must be a name of 1 to 120 characters without /"),
        ({"metrics.run_name": ".."}, "metrics.run_name='..': must be a name"),
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
        ({"pipeline.forward": "int8x"}, "pipeline.forward='int8x' is unknown: did you mean 'int8h'"),
        ({"pipeline.backward": "e4m3s"}, "pipeline.backward='e4m3s' is unknown: did you mean 'e4m3"),
        ({"model.d_mlp": 770, "mesh.tp": 4}, "mlp width 770: tp 4 does not divide 770; try 1 or 2"),
        ({"compression.forward": "tacco"}, "compression.forward='tacco' is unknown: did you mean 'taco'?"),
        ({"compression.backward": "int9h"}, "compression.backward='int9h' is unknown: did you mean 'int"),
        ({"compression.plan": {"*": "taco:e4m3g"}}, "compression.plan '*'='e4m3g' is unknown: did you mean 'e4m3"),
        ({"compression.plan": {"*": "taco:"}}, "compression.plan '*'='taco:': lacks a codec beside ':'; must be"),
        ({"compression.link": "nvlnk"}, "compression.link='nvlnk' is unknown: did you mean 'nvlink'?"),
        ({"compression.backend": "mosiac"}, "compression.backend='mosiac' is unknown: did you mean 'mosaic'?"),
        ({"compression.exchange": "rings"}, "compression.exchange='rings' is unknown: did you mean 'ring'?"),
        ({"compression.chunks": 0}, "compression.chunks=0: must be an integer from 1 to 1024, or None"),
        ({"compression.chunks": 1025}, "compression.chunks=1025: must be an integer from 1 to 1024, or None"),
        (
            {"data_parallel.gradients": "spd4"},
            "data_parallel.gradients='spd4' is unknown: did you mean 'sdp4'",
        ),
        (
            {"data_parallel.gradients": "int8_token"},
            "data_parallel.gradients='int8_token': has one scale a token, and gradients and weights have no tokens",
        ),
        ({"data_parallel.gradients": "bfloat16"}, "data_parallel.gradients='bfloat16' is unknown"),
        (
            {"data_parallel.parameters": "int44h", "data_parallel.zero1": True},
            "data_parallel.parameters='int44h' is unknown: did you mean 'int4h'",
        ),
        (
            {"data_parallel.parameters": "int8h"},
            "data_parallel.parameters='int8h': without data_parallel.zero1 no weights are sent; set ",
        ),
        ({"data_parallel.bucket_mb": 0.0}, "data_parallel.bucket_mb=0.0: must be above 0"),
        ({"compression.between_hosts": "int4"}, "compression.between_hosts='int4' is unknown: did you mean"),
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
            {"compression.link": "copy", "mesh.tp": 4},
            "compression.link='copy': is for sums of two GPUs, not mesh.tp=4; use 'auto' or 'nccl'",
        ),
        (
            {"compression.backward_link": "copy", "mesh.tp": 2, "mesh.pp": 2},
            "compression.backward_link='copy': is for programs without stages, not mesh.pp=2; use 'auto' or 'nccl'",
        ),
        (
            {"compression.error_feedback": True, "compression.forward": "none"},
            "compression.error_feedback=True: sums of compression.forward='none' lose nothing; set a codec, or leave",
        ),
        (
            {"compression.backward_error_feedback": True, "chains": 2},
            "compression.backward_error_feedback=True: is never used with chains=2 (the gradients' sums of one chain "
            "take errors along); set chains=1, or leave compression.backward_error_feedback out",
        ),
        (
            {"compression.error_feedback": True, "sequence_parallel": True},
            "compression.error_feedback=True: is never used with sequence_parallel=True",
        ),
        (
            {"compression.backward_error_feedback": True, "compression.backward": "none"},
            "compression.backward_error_feedback=True: sums of compression.backward='none' lose nothing; set a codec",
        ),
        (
            {"compression.backward_error_feedback": True, "mesh.pp": 2},
            "compression.backward_error_feedback=True: is never used with mesh.pp=2 (stages hand no errors on)",
        ),
        (
            {"compression.backward_error_feedback": True, "sequence_parallel": True},
            "compression.backward_error_feedback=True: is never used with sequence_parallel=True",
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
        ({"chains": 0}, "chains=0: must be at least 1, or auto"),
        ({"chains": "two"}, "chains='two': must be at least 1, or auto: two where the link is slow"),
        (
            {"global_batch": 24, "mesh.dp": 2, "accumulation": 2, "chains": 4},
            "chains=4: must divide the 6 sequences of a device's microbatch (global_batch / (mesh.dp x accumulation)); "
            "try 1, 2, 3 or 6",
        ),
        ({"global_batch": 1, "chains": 2}, "chains=2: must divide the 1 sequences"),
        ({"data.sequence_length": 250, "sequence_parallel": True, "mesh.tp": 4}, "try 248"),
        ({"data.end_token_id": 5}, "data.end_token_id=5: is used with data.document_mask alone"),
        (
            {"data.end_token_id": 256, "data.document_mask": True},
            "data.end_token_id=256: must be below model",
        ),
        ({"data.end_token_id": -1}, "data.end_token_id=-1: must not be negative, or None to take that of the data"),
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
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        config = TrainConfig()
        for key, value in changes.items():
            group, _, name = key.rpartition(".")
            new = dataclasses.replace(getattr(config, group) if group else config, **{name: value})
            config = dataclasses.replace(config, **{group: new}) if group else new
        check(config)
    assert "\n" not in str(error.value)


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


@pytest.mark.parametrize(
    "changes, mode, why",
    [
        ({}, "none", "no stages"),
        ({"mesh": MeshConfig(pp=2)}, "dots", "with stages"),
        ({"mesh": MeshConfig(pp=2), "remat": "none"}, "none", "as configured"),
        ({"remat": "full"}, "full", "as configured"),
    ],
)
def test_what_the_backward_pass_recomputes(changes, mode, why):
    got, reason = remat(TrainConfig(**changes))
    assert got == mode and why in reason


def test_names_shared_with_other_modules():
    from taco_jax.models.run_config import REMAT as models_remat

    assert set(REMAT) == set(models_remat)
    assert {"taco", "none"} <= set(CODECS)
    assert codec_pair("int8h:int6h") == ("int8h", "int6h") and codec_pair("taco") == ("taco", "taco")


def test_flatten_keeps_a_plan_whole():
    config = TrainConfig(compression=CompressionConfig(plan={"a.b": "taco"}))
    assert flatten(to_dict(config))["compression.plan"] == {"a.b": "taco"}
    assert "mesh.tp" in keys(config) and "model.d_model" in keys(config)


def test_config_starts_no_backend(run_python):
    code = """
from taco_jax.config.cli import parse
from taco_jax.config.checks import check
check(parse(["--mesh.tp", "2"]))
from jax._src import xla_bridge
print(xla_bridge.backends_are_initialized())
"""
    assert run_python(code).stdout == "False\n"
