"""A plan's file: what is written is read again, and what is none is refused in one line."""

import copy
import dataclasses
import json

import pytest

from taco_jax.compression import plan_file
from taco_jax.compression.compression import Compression
from taco_jax.compression.plan_file import CollectivePlan, PlanFile, SitePlan
from taco_jax.errors import ConfigError
from taco_jax.models.config import ModelConfig
from taco_jax.models.decoder import site_names

MODEL = ModelConfig(d_model=8)
MEASURED = {"snr_db": 31.4, "kurtosis": 3.1, "outlying_channels": 2, "bits": 6.125, "elements": 512}
SITES = {name: SitePlan("int8h", "none", backward_measured=None) for name in site_names(MODEL, 2)}
SITES["layers/mlp/down"] = SitePlan("int4h,block=32", "int6h", True, MEASURED, {"snr_db": 20.0})
PLAN = PlanFile(
    SITES,
    {"shape": plan_file.shape_of(MODEL), "sites": list(SITES)},
    {"budget": "4.5 bits", "tokens": 512},
    (CollectivePlan("tensor", "all_reduce", "*mlp*", "int6h", 30.0, 4096),),
    {"order": [1, 0, 3, 2, 5, 4, 7, 6]},
)


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "new" / "plan.json"
    plan_file.write(PLAN, path)
    found = plan_file.read(path)
    assert found == PLAN and found.source == str(path)
    assert [name.name for name in path.parent.iterdir()] == ["plan.json"]  # nothing temporary is left
    plan_file.write(dataclasses.replace(found, arrangement=None), path)
    assert plan_file.read(path) == dataclasses.replace(PLAN, arrangement=None)


def test_its_plan_has_the_codecs_and_the_other_options_of_the_base():
    found = PLAN.plan(Compression("taco", link="nccl", min_bytes=5)).resolve(SITES)
    down = Compression("int4h,block=32", backward="int6h", error_feedback=True, link="nccl", min_bytes=5)
    assert found["layers/mlp/down"] == down
    assert found["embed"] == Compression("int8h", backward="none", error_feedback=False, link="nccl", min_bytes=5)
    assert PlanFile({"embed": SitePlan()}).plan().resolve(["embed"]) == {"embed": None}


def test_a_plan_is_of_one_model():
    PLAN.check_model(plan_file.shape_of(MODEL), SITES)
    longer = dataclasses.replace(MODEL, init_std=0.5, max_length=4096)
    PLAN.check_model(plan_file.shape_of(longer))  # of no consequence for what is sent
    with pytest.raises(ConfigError, match=r"^plan: is a plan of another model: d_model is 8 in the plan and 16 in th"):
        PLAN.check_model(plan_file.shape_of(dataclasses.replace(MODEL, d_model=16)), SITES)
    changed = ["embed2", *(name for name in SITES if name != "embed")]
    with pytest.raises(ConfigError, match=r"sites have changed \(gone: embed; new: embed2\); write it anew"):
        PLAN.check_model(plan_file.shape_of(MODEL), changed)
    with pytest.raises(ConfigError, match="of a program that is not taco_jax's own"):
        dataclasses.replace(PLAN, model=None).check_model(plan_file.shape_of(MODEL))


def _changed(*keys, to):
    content = copy.deepcopy(PLAN.as_dict())
    *way, last = keys
    inner = content
    for key in way:
        inner = inner[key]
    if to is None and last in inner:
        del inner[last]
    else:
        inner[last] = to
    return json.dumps(content)


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[1]", "is no plan: lacks 'format'"),
        (_changed("format", to="other"), "is no plan"),
        (_changed("version", to=2), "version=2: must be 1"),
        (_changed("sites", to=None), "lacks the key 'sites'"),
        (_changed("site", to={}), "no such key 'site'; did you mean 'sites'"),
        (_changed("sites", to=[]), r"sites=\[\]: must be an object"),
        (_changed("sites", "head", "forward", to="int8x"), "site 'head': forward='int8x'"),
        (_changed("sites", "head", "forward", to="int8h:taco"), "site 'head': forward='int8h:taco'"),
        (_changed("sites", "head", "backward", to=3), "backward=3: must be a codec as a text"),
        (_changed("sites", "head", "backward", to=None), "site 'head': lacks the key 'backward'"),
        (_changed("sites", "head", "forwards", to="none"), "no such key 'forwards'; did you mean 'forward'"),
        (_changed("sites", "head", "error_feedback", to="yes"), "error_feedback='yes': must be true or false"),
        (_changed("sites", "head", "forward_measured", to={"snr_db": float("nan")}), "an object of finite numbers"),
        (_changed("sites", "head", "forward_measured", to={"snr_db": 10**400}), "an object of finite numbers"),
        (_changed("sites", "haed", to={"forward": "none", "backward": "none"}), "did you mean 'head'"),
        (_changed("model", to={"shape": {}}), "model=.*must be null, or have an object 'shape'"),
        (_changed("collectives", 0, "codec", to="int9"), r"collectives\[0\]: codec='int9'"),
        (_changed("collectives", 0, "axis", to=1), r"collectives\[0\]: axis=1: must be a text"),
        (_changed("arrangement", to={"order": [0, 0]}), "a permutation of 0 to d_model - 1"),
        (_changed("arrangement", to={"order": [1, 0]}), "arrangement.order='2 integers': must be d_model=8"),
    ],
)
def test_a_file_that_is_no_plan_is_one_line(tmp_path, text, message):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as raised:
        plan_file.read(path)
    assert str(raised.value).startswith(f"{path}: ") and "\n" not in str(raised.value)


def test_files_that_cannot_be_read_or_written(tmp_path):
    with pytest.raises(ConfigError, match=r"none.json: not found; write it anew with python -m taco_jax.calibrate"):
        plan_file.read(tmp_path / "none.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/plan.json: cannot be written \("):
        plan_file.write(PLAN, tmp_path / "file" / "plan.json")
    with pytest.raises(ConfigError, match="forward='int8x'"):
        plan_file.write(PlanFile({"embed": SitePlan("int8x")}), tmp_path / "plan.json")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
