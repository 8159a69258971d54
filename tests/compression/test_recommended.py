"""`auto`: the rule by which codecs are recommended, its file against the record, and what auto becomes in each use."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from model_helpers import GEMMA, QWEN2

import taco_jax
from taco_jax import Compression, Plan
from taco_jax.codec import CODECS
from taco_jax.compression import recommended, tuned
from taco_jax.compression.compression import as_compression, codec_pair
from taco_jax.config import (
    CompressionConfig,
    ConfigError,
    DataParallelConfig,
    PipelineConfig,
    TrainConfig,
    to_dict,
    with_codecs,
    with_compression,
)
from taco_jax.config.checks import check
from taco_jax.config.stored import own_codecs
from taco_jax.dropin.plan import parse_plan
from taco_jax.forecast import recommend, record
from taco_jax.forecast.constants import load
from taco_jax.inference.settings import Settings
from taco_jax.mesh import make_mesh

USES = {
    "training": ("int8h", "int8h"),
    "first_token": ("int8h", "int8h"),
    "first_token_feedback": ("int6h", "int6h"),
    "stages": ("int8_token", "e4m3h"),
    "gradients": ("int8h", "int8h"),
    "weights": ("none", "none"),
}


# The rule


def row(change, error, runs=3):
    return record.Loss(change, error, runs, "")


@pytest.mark.parametrize(
    "rows, best",
    [
        ({"int8h": row(0.001, 0.001), "int6h": row(0.002, 0.001)}, "int6h"),  # fewer bytes
        ({"int8h": row(0.001, 0.001), "int6h": row(0.004, 0.002)}, "int8h"),  # within the bound by its mean alone
        ({"int8h": row(0.001, 0.001), "int6h": row(0.001, None, 1)}, "int8h"),  # one pair
        ({"int8h": row(0.001, 0.001), "taco": row(0.002, 0.001)}, "int8h"),  # bytes alike, and a smaller change
        ({"int8h": row(0.002, 0.001), "taco": row(0.001, 0.001)}, "taco"),
        ({"int8h": row(0.002, 0.001), "mixed": row(0.0, 0.0)}, "int8h"),  # no preset
        ({"int8h": row(0.002, 0.001), "int8h:int4h": row(0.003, 0.001)}, "int8h:int4h"),  # the mean of both
        ({"int8h": row(0.006, 0.001)}, None),
        ({}, None),
    ],
)
def test_the_rule(rows, best):
    assert recommend.choose(rows, 0.005) == best


def test_the_file_is_what_the_rule_makes_of_the_record():
    content = recommended.load()
    found = recommend.of_record(load(record.FILE))
    assert {use: (r["forward"], r["backward"], r["record"]) for use, r in content.items()} == {
        use: (r["forward"], r["backward"], r["record"]) for use, r in found.items()
    }
    assert {use: recommended.recommended(use) for use in content} == USES


def test_a_bit_count_is_that_of_both_directions():
    assert recommend.bits("int8h:int4h") == (CODECS["int8h"].bits + CODECS["int4h"].bits) / 2
    assert recommend.bits("int8_token") == 8 + 16 / recommend.WIDTH


# Compression, collectives, plans


def test_auto_is_named_where_a_message_is_sent():
    auto = Compression("auto", link="nccl")
    assert auto.forward == auto.backward == Compression().forward == "auto" and not auto.is_exact
    assert [codec.name for codec in auto.codecs] == ["int8h", "int8h"]
    assert as_compression(auto) == Compression("int8h", link="nccl")
    assert as_compression("auto:int4h") == Compression("int8h", backward="int4h")
    assert auto.for_use("stages") == Compression("int8_token", backward="e4m3h", link="nccl")
    assert Plan({"a": "auto"}, "int6h:auto").resolve(["a", "b"]) == {
        "a": Compression("int8h"), "b": Compression("int6h", backward="int8h"),
    }  # fmt: skip
    (rule,) = parse_plan({"tensor": "auto"}).rules
    assert rule.compression == Compression("int8h")
    assert codec_pair("auto") == ("auto", "auto")


def test_a_sum_in_auto_is_that_in_int8h():
    mesh = make_mesh(tp=4)
    x = jax.random.normal(jax.random.key(0), (4, 256))
    total = lambda codec: jax.jit(
        jax.shard_map(lambda x: taco_jax.psum(x, "tp", compression=codec), mesh=mesh, in_specs=P("tp"), out_specs=P())
    )(x)
    np.testing.assert_array_equal(total("auto"), total("int8h"))
    assert np.any(total("auto") != total("taco"))


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: Compression("auto,block=32"), "forward='auto,block=32': fields of 'auto' cannot be changed; name a"),
        (
            lambda: Compression("int8h", between_hosts="auto"),
            "between_hosts='auto': takes the codec of a use, and ther",
        ),
        (lambda: taco_jax.codec.as_codec("auto"), "codec='auto': takes the codec of a use, and there is no use here; "),
        (lambda: codec_pair("auto:"), "compression='auto:': lacks a codec beside ':'"),
        (lambda: Compression("autoo"), "forward='autoo' is unknown: did you mean 'auto'?"),
    ],
)
def test_what_auto_cannot_be(make, said):
    with pytest.raises(ValueError) as error:
        make()
    assert str(error.value).startswith(said) and "\n" not in str(error.value)


# Training


def named(config):
    c, p, d = config.compression, config.pipeline, config.data_parallel
    return (c.forward, c.backward), (p.forward, p.backward), (d.gradients, d.parameters)


def test_a_run_names_its_codecs():
    auto = ("int8h", "int8h"), ("int8_token", "e4m3h"), ("int8h", "none")
    assert named(check(TrainConfig())) == auto
    asked = TrainConfig(
        pipeline=PipelineConfig(forward="auto", backward="auto"),
        data_parallel=DataParallelConfig("auto", zero1=True, parameters="auto"),
    )
    asked_auto = (*auto[:2], ("int8h", USES["weights"][0]))
    assert named(check(asked)) == asked_auto
    # None is exact where tp is; auto is not.
    exact = CompressionConfig("none", "none")
    assert named(check(TrainConfig(compression=exact))) == (("none",) * 2,) * 3
    assert named(check(dataclasses.replace(asked, compression=exact)))[1:] == asked_auto[1:]
    assert named(check(with_compression(TrainConfig(), "auto:int4h")))[0] == ("int8h", "int4h")
    plan = {"head": "auto", "embed": "int6h:auto", "layers/*": "int4h"}
    resolved = check(TrainConfig(compression=CompressionConfig(plan=plan)))
    assert resolved.compression.plan == {"head": "int8h", "embed": "int6h:int8h", "layers/*": "int4h"}


def test_a_run_that_goes_on_keeps_its_codecs(tmp_path):
    asked = TrainConfig(
        workdir=str(tmp_path),
        compression=CompressionConfig(plan={"head": "auto"}),
        data_parallel=DataParallelConfig(zero1=True, parameters="auto"),
    )

    def goes_on(config=asked, **codecs):
        values = to_dict(check(config))
        for key, value in codecs.items():
            part, _, name = key.partition("__")
            values[part][name] = value
        (tmp_path / "config.json").write_text(json.dumps(values))
        return check(with_codecs(config, own_codecs(config.workdir)))

    assert own_codecs("") == own_codecs(str(tmp_path / "gone")) == {}
    own = goes_on(
        compression__forward="taco", compression__backward="int6h", compression__plan={"head": "taco"},
        pipeline__forward="tah4", data_parallel__gradients="int4h", data_parallel__parameters="int8h",
    )  # fmt: skip
    assert named(own) == (("taco", "int6h"), ("tah4", "e4m3h"), ("int4h", "int8h"))
    assert own.compression.plan == {"head": "taco"}
    # What is given counts, and what was exact because all was does not.
    given = dataclasses.replace(asked, compression=CompressionConfig("int4h", "int4h"))
    assert named(goes_on(given, compression__forward="taco"))[0] == ("int4h", "int4h")
    none = {"compression__forward": "none", "compression__backward": "none", "pipeline__forward": "none"}
    assert named(goes_on(given, **none))[1] == ("int8_token", "e4m3h")
    assert named(goes_on(**none))[:2] == (("none", "none"),) * 2
    # Without ZeRO-1 no weights are sent.
    alone = dataclasses.replace(asked, data_parallel=DataParallelConfig(parameters="auto"))
    assert goes_on(alone, data_parallel__parameters="int8h").data_parallel.parameters == "none"
    for content in ("no json", "[]", '{"model": 1}', '{"compression": {"forward": "auto"}}'):
        (tmp_path / "config.json").write_text(content)
        assert own_codecs(str(tmp_path)) == {}


def test_weights_that_nobody_sends_are_refused():
    with pytest.raises(ConfigError, match="data_parallel.parameters='int8h': without data_parallel.zero1"):
        DataParallelConfig(parameters="int8h")


# Inference


def codecs_of(model=QWEN2, decoding=False, compression="auto", plan=None):
    return Settings(4, compression, plan or {}).layout(model, jax.devices()[0], decoding=decoding).codecs


def test_the_first_token_has_another_codec_where_sums_take_errors_along(monkeypatch):
    assert codecs_of() == codecs_of(decoding=True) == "int6h with error feedback"
    assert codecs_of(compression=Compression("auto", link="nccl")) == "int6h with error feedback"
    assert codecs_of(compression=Compression("auto", error_feedback=False)) == "int8h"
    assert codecs_of(GEMMA) == "int8h"  # norms behind its sums
    assert codecs_of(plan={"layers/mlp/down": "int4h"}) == "int6h with error feedback, int4h with error feedback"
    assert codecs_of(compression=None, plan={"layers/mlp/down": "auto"}) == "int6h with error feedback"
    assert codecs_of(compression=None) == "none"
    monkeypatch.setattr(tuned, "in_one_kernel", lambda device, link: link != "nccl")
    assert codecs_of() == "int8h"
    assert codecs_of(compression=Compression("auto", link="nccl")) == "int6h with error feedback"
    assert codecs_of(compression=Compression("auto", error_feedback=True)) == "int6h with error feedback"
