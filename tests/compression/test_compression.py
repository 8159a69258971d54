"""Compression and Plan: which site uses what, and errors that name the nearest valid thing."""

import copy
import dataclasses
import pickle
import re

import pytest

from taco_jax import CODECS, Codec, Compression, Plan
from taco_jax.compression.compression import as_compression, refuse_options

SITES = ("embed", "layers/attn/qkv", "layers/attn/out", "layers/mlp/up", "layers/mlp/down", "head")


def test_first_match_wins():
    down = Compression("int6h", backward="taco")
    plan = Plan({"layers/*/down": down, "layers/*": "int8h", "head": None, "*": "taco"})
    resolved = plan.resolve(SITES)
    assert resolved == {
        "embed": Compression("taco"),
        "layers/attn/qkv": Compression("int8h"),
        "layers/attn/out": Compression("int8h"),
        "layers/mlp/up": Compression("int8h"),
        "layers/mlp/down": down,
        "head": None,
    }
    assert list(resolved) == list(SITES)


def test_sites_without_a_pattern_are_exact_or_the_default():
    assert Plan({"head": "taco"}).resolve(SITES)["embed"] is None
    with_default = Plan({"head": None}, default="int8h").resolve(SITES)
    assert with_default["embed"] == Compression("int8h") and with_default["head"] is None
    assert Plan({}).resolve(SITES) == dict.fromkeys(SITES)


def test_patterns_are_case_sensitive_globs():
    assert Plan({"layers/[am]*/*": "taco"}).resolve(SITES)["layers/mlp/up"] is not None
    with pytest.raises(ValueError, match="plan pattern 'Head' matches no site"):
        Plan({"Head": "taco"}).resolve(SITES)


def test_a_pattern_that_matches_nothing_names_the_nearest_site():
    with pytest.raises(
        ValueError, match=r"plan pattern 'layers/mlp/dwn' matches no site: did you mean 'layers/mlp/down'"
    ):
        Plan({"layers/mlp/dwn": "taco", "*": "taco"}).resolve(SITES)
    with pytest.raises(ValueError, match="sites are embed, layers/attn/qkv"):
        Plan({"zzz*": "taco"}).resolve(SITES)


def test_as_compression():
    assert as_compression(None) is None
    assert as_compression("none") is None and as_compression(CODECS["none"]) is None
    assert as_compression(Compression("none")) is None
    assert as_compression("taco") == Compression("taco")
    codec = Codec("int6", 64, "hadamard")
    assert as_compression(codec) == Compression(codec)
    assert as_compression("int4h,block=32:taco") == Compression("int4h,block=32", backward="taco")
    assert Compression("int4h,block=32").codecs == (dataclasses.replace(CODECS["int4h"], block=32),) * 2
    with pytest.raises(
        ValueError, match="compression='int4h,blok=32': 'blok=32' must be FIELD=VALUE; did you mean 'blo"
    ):
        as_compression("int4h,blok=32")
    with pytest.raises(ValueError, match="head='taco:': lacks a codec beside ':'; must be CODEC or FORWARD:BACKWARD"):
        as_compression("taco:", "head")
    with pytest.raises(TypeError, match="compression=8: must be a preset's name, a Codec, a Compression or None"):
        as_compression(8)
    one_way = Compression("taco", backward="none")
    assert as_compression(one_way) is one_way and not one_way.is_exact


@pytest.mark.parametrize(
    "text,message",
    [
        ("int4h,block=\u00b2", "block='\u00b2': must be a power of two from 8 to 512"),
        ("int4h,block=32,block=64", "compression='int4h,block=32,block=64': block is given twice; give it once"),
        ("taco:int8h:int4h", "compression='taco:int8h:int4h': has more than two codecs; must be CODEC or FORWARD:B"),
    ],
)
def test_texts_of_codecs_that_cannot_be(text, message):
    with pytest.raises(ValueError, match=f"{re.escape(message)}[^\n]*$"):
        as_compression(text)


@pytest.mark.parametrize(
    "args,fields,message",
    [
        (("taco", "int8h"), {}, "backward='int8h': all but the first are given by name: "
                                "compression=Compression('taco', backward='int8h')"),
        (("taco", "int8h", 0), {"link": "nccl"}, "Compression('taco', backward='int8h', min_bytes=0, link='nccl')"),
        ((), {"codec": "int4h", "backward_codec": "int8h"}, "Compression('int4h', backward='int8h')"),
        (("int4h",), {"backward_codec": "int8h"}, "Compression('int4h', backward='int8h')"),
    ],
)  # fmt: skip
def test_the_spelling_of_earlier_versions_is_refused_with_the_new_one(args, fields, message):
    with pytest.raises(TypeError, match=f"^Compression: .*{re.escape(message)}$"):
        Compression(*args, **fields)


def test_a_pair_is_no_codec():
    message = re.escape("forward='taco:int8h': is a pair; say Compression('taco', backward='int8h')")
    with pytest.raises(ValueError, match=message):
        Compression("taco:int8h", link="nccl")


@pytest.mark.parametrize(
    "given,message",
    [
        ("taco:int8h", "compression=Compression('taco', link='nccl', backward='int8h')"),
        (None, "compression=Compression('none', link='nccl')"),
        (Compression("int8h"), f"compression=dataclasses.replace({Compression('int8h')!r}, link='nccl')"),
    ],
)
def test_the_new_spelling_of_options_beside_a_compression(given, message):
    with pytest.raises(TypeError, match=f"{re.escape(message)}$") as error:
        refuse_options("psum", {"compression": given, "link": "nccl"}, ("link",))
    new = eval(str(error.value).split("compression=", 1)[1])
    assert as_compression(new) == (None if given is None else Compression("int8h" if given != "taco:int8h" else "taco",
                                                                         backward="int8h", link="nccl"))  # fmt: skip


def test_compression_is_a_hashable_value():
    assert copy.deepcopy(pickle.loads(pickle.dumps(Compression("int8h", chunks=2)))) == Compression("int8h", chunks=2)
    assert Compression() == Compression(forward="auto", backward="auto", min_bytes=None, algorithm="auto", link="auto")
    assert len({Compression(), Compression("auto"), Compression("int8h")}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        Compression().forward = "int8h"


@pytest.mark.parametrize(
    "arguments,message",
    [
        ({"forward": "tacoo"}, r"forward='tacoo' is unknown: did you mean 'taco'\?"),
        ({"backward": "int4"}, r"backward='int4' is unknown: did you mean 'int4h'\?"),
        (
            {"algorithm": "twoshot"},
            r"algorithm='twoshot' is unknown: did you mean 'two_shot'\? valid are auto, one_shot",
        ),
        ({"link": "ib"}, "link='ib' is unknown: valid are auto, nccl, nvlink, copy"),
        ({"backend": "mosiac"}, r"backend='mosiac' is unknown: did you mean 'mosaic'\?"),
        ({"exchange": "all2all"}, "exchange='all2all' is unknown"),
        ({"chunks": 0}, "chunks=0: must be an integer from 1 to 1024, or None"),
        ({"chunks": 1025}, "chunks=1025: must be an integer from 1 to 1024"),
        ({"min_bytes": -1}, "min_bytes=-1: must be an integer of 0 or more"),
    ],
)
def test_bad_values(arguments, message):
    with pytest.raises(ValueError, match=message):
        Compression(**arguments)


@pytest.mark.parametrize("arguments", [{"chunks": True}, {"chunks": 2.0}, {"min_bytes": 1.5}, {"min_bytes": "1"}])
def test_counts_are_integers(arguments):
    ((key, value),) = arguments.items()
    with pytest.raises(TypeError, match=f"{key}={value!r}: is of type {type(value).__name__}; must be an integer"):
        Compression(**arguments)


def test_a_plan_checks_its_values_at_once():
    with pytest.raises(ValueError, match=r"^plan '\*': compression='tacoo' is unknown"):
        Plan({"*": "tacoo"})
    for rules in ("int8h", None, {3: "int8h"}):
        with pytest.raises(TypeError, match=f"^{re.escape(f'plan={rules!r}')}: must be a mapping of patterns, such as"):
            Plan(rules)
    with pytest.raises(ValueError, match="a layer has no key for rounding='stochastic'"):
        Plan({"*": Compression("taco", backward=Codec("int8", rounding="stochastic"))})


@pytest.mark.parametrize("pattern", ["pp/act", "dp/*"])
def test_a_pattern_of_another_axis_names_its_settings(pattern):
    with pytest.raises(ValueError, match="pipeline.forward and .backward, gradients data_parallel.gradients"):
        Plan({pattern: "int8h"}).resolve(SITES)
