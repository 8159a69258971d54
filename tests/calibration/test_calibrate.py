"""From the command to what uses its plan: a training run, and inference with the run's weights."""

import dataclasses
import json

import pytest
from helpers import REPOSITORY, make_mesh
from model_helpers import QWEN2
from run_folders import save_run

from taco_jax import evaluate
from taco_jax.calibration import command
from taco_jax.compression import plan_file
from taco_jax.config import ConfigError, cli, to_dict
from taco_jax.config.checks import check
from taco_jax.inference.settings import Settings
from taco_jax.models.decoder import site_names
from taco_jax.train import loop
from taco_jax.train.site_plan import resolve_plan

BYTES = dataclasses.replace(QWEN2, vocab_size=256, init_std=0.2, max_length=256)
TEXT = "It is a truth universally acknowledged, that a single man in possession of a good fortune. " * 20
CONFIG = """
from taco_jax.config import *
config = TrainConfig(
    model=ModelConfig(vocab_size=256, d_model=32, n_layers=2, n_heads=8, n_kv_heads=2, head_dim=8, d_mlp=64,
                      qkv_bias=True, max_length=256, init_std=0.2),
    mesh=MeshConfig(tp=2), data=DataConfig(train="austen", sequence_length=32), global_batch=16, steps=3,
    evaluation=EvalConfig(batches=0), workdir="run",
)
"""
FEW = ("--codecs", "int4h;int6h")


@pytest.fixture
def here(tmp_path, monkeypatch):
    make_mesh(tp=2)  # skips where there are too few devices
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.py").write_text(CONFIG)
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("runs") / "bytes", BYTES, tp=2)


def test_a_run_takes_the_plan_and_keeps_it(here, trained, capsys):
    own = ["--config", "tiny.py", "--model", str(trained), "--bits", "6", "--out", "plan.json", "--tokens", "64"]
    assert cli.run(command.main, [*own, "--length", "32", *FEW]) == 0
    plan = plan_file.read("plan.json")
    printed = capsys.readouterr().out
    assert "plan plan.json; picture plan.png" in printed and (here / "plan.png").stat().st_size > 10_000
    assert plan.made["use"] == "training" and plan.made["bits"] <= 6
    sent = [(s, d) for s, of in plan.sites.items() for d in ("forward", "backward") if getattr(of, f"{d}_measured")]
    assert sent == [
        ("embed", "forward"), ("layers/attn/qkv", "backward"), ("layers/attn/out", "forward"),
        ("layers/mlp/up", "backward"), ("layers/mlp/down", "forward"), ("head", "backward"),
    ]  # fmt: skip
    for site, direction in sent:
        measured = getattr(plan.sites[site], f"{direction}_measured")
        assert measured["gradient_sensitivity"] > 0 and measured["kurtosis"] > 1
        assert ("sensitivity" in measured) == (direction == "forward")
        codec = getattr(plan.sites[site], direction)
        assert codec in FEW[1].split(";") and measured["guard_snr_db"] == pytest.approx(measured["snr_db"] - 3)
        assert f"{site:24}{direction:10}" in printed

    # What the trainer makes of it: these codecs, and the options of the configuration.
    flags = ["--config", "tiny.py", "--compression.plan", "plan.json", "--compression.min-bytes", "0"]
    config = cli.parse(flags)
    resolved = resolve_plan(config)
    assert {site: (c.forward, c.backward, c.min_bytes) for site, c in resolved.items()} == {
        site: (of.forward, of.backward, 0) for site, of in plan.sites.items()
    }
    (here / "run").mkdir()
    (here / "run/config.json").write_text(json.dumps(to_dict(config)))
    (here / "plan.json").unlink()
    assert cli.parse(flags) == config
    with pytest.raises(ConfigError, match="plan.json: not found; write it anew"):
        cli.parse([*flags, "--workdir", "other"])
    with pytest.raises(ConfigError, match="d_model is 32 in the plan and 64 in this model"):
        resolve_plan(cli.parse([*flags, "--model.d-model", "64"]))


@pytest.mark.slow
def test_a_run_goes_on_without_the_file(here, capsys):
    """From a model without weights; a second start brings a plan that the first one had not."""
    own = ["--config", "tiny.py", "--bits", "6", "--out", "plan.json", "--tokens", "64", "--steps", "1", *FEW]
    assert cli.run(command.main, own) == 0
    assert "trained 1 steps first" in capsys.readouterr().out
    train = lambda *flags: cli.run(
        lambda args: loop.train(check(cli.parse(args))) and 0, ["--config", "tiny.py", *flags]
    )
    assert train("--stop-after", "1") == 0
    planned = ("--compression.plan", "plan.json")
    assert train(*planned, "--stop-after", "2") == 0
    assert "compression.plan {} -> {'plan.json': '{" in capsys.readouterr().out
    (here / "plan.json").unlink()
    assert json.loads((here / "run/checkpoints/2/run/metadata").read_text())["plan"].keys() == {"plan.json"}
    assert train(*planned) == 0
    assert "step 3/3" in capsys.readouterr().out


def test_a_plan_for_inference_by_layer(here, trained, capsys):
    own = ["--model", str(trained), "--data", "text.txt", "--mesh.tp", "2", "--length", "256", "--tokens", "512"]
    assert cli.run(command.main, [*own, "--bits", "6", "--out", "plan.json", *FEW]) == 0
    plan = plan_file.read("plan.json")
    assert plan.made["use"] == "first_token" and list(plan.sites) == [
        f"layers/{i}/{row}" for i in range(2) for row in ("attn/out", "mlp/down")
    ]
    assert {of.error_feedback for of in plan.sites.values()} == {True}
    assert plan.sites["layers/1/mlp/down"].forward == "int4h"  # what it loses is added exactly
    capsys.readouterr()
    own = ["perplexity", "--model", str(trained), "--text", "text.txt", "--context", "256", "--tp", "2"]
    more = ["--max-tokens", "256", "--codec", "plan.json", "int4h", "--json", "out.json"]
    assert cli.run(evaluate.main, [*own, *more]) == 0
    measured = json.loads((here / "out.json").read_text())
    assert measured["plan.json"]["error_feedback"]
    assert measured["plan.json"]["ratio"] == pytest.approx(16 / plan.made["bits"], rel=0.05)
    assert abs(measured["plan.json"]["change"]) < abs(measured["int4h"]["change"]) + measured["int4h"]["error"]

    layout = lambda config, **options: Settings(2, "plan.json", **options).layout(config, _device(), decoding=False)
    chosen = dict(layout(BYTES, plan={"layers/0/attn/out": "mxint8"}).par.plan)
    first = next(c for site, c in chosen.items() if site.endswith("attn/out"))
    assert first.forward == "mxint8"  # a pattern goes before the file
    with pytest.raises(ConfigError, match="plan.json: is a plan of another model: n_layers is 2 in the plan and 3 in"):
        layout(dataclasses.replace(BYTES, n_layers=3))
    gone = dataclasses.replace(plan, model={**plan.model, "sites": [*plan.model["sites"], "layers/9/attn/out"]})
    plan_file.write(gone, "plan.json")
    with pytest.raises(ConfigError, match="its model's sites have changed .gone: layers/9/attn/out"):
        layout(BYTES)


def test_a_trainers_plan_serves_inference(here):
    """With the codecs of its forward sums in layers; its own sites must be this model's all the same."""
    names = site_names(BYTES, 2)
    sites = {name: plan_file.SitePlan("int6h", "int4h") for name in names}
    model = {"shape": plan_file.shape_of(BYTES), "sites": list(names)}
    plan = plan_file.PlanFile(sites, model, {"use": "training"})
    plan_file.write(plan, "plan.json")
    layout = lambda: Settings(2, "plan.json").layout(BYTES, _device(), decoding=False)
    sent = {site: c.forward for site, c in layout().par.plan if c is not None and not c.is_exact}
    assert sent and set(sent.values()) == {"int6h"} and {site.split("/", 1)[-1] for site in sent} <= {
        "attn/out", "mlp/down", "0/attn/out", "0/mlp/down", "1/attn/out", "1/mlp/down",
    }  # fmt: skip
    plan_file.write(dataclasses.replace(plan, model={**model, "sites": [*names, "other"]}), "plan.json")
    with pytest.raises(ConfigError, match="its model's sites have changed .gone: other.;"):
        layout()


def _device():
    return make_mesh(tp=2).devices.flat[0]


SEVEN = ("--config", str(REPOSITORY / "experiments/qwen7b.py"))
OUT = ("--out", "plan.json")
# Never trained: what is refused is refused before.
TINY = ("--config", "tiny.py", "--data", "text.txt", "--steps", "16777216")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((*SEVEN, *OUT), "--bits, --time, --loss: give one budget (none given)"),
        ((*SEVEN, *OUT, "--bits", "4", "--loss", "1%"), "give one budget (--bits and --loss given)"),
        ((*SEVEN, "--bits", "4"), "--out None: is needed and must end with .json"),
        ((*SEVEN, *OUT, "--bits", "0"), "--bits 0: must be above 0 and at most 32"),
        ((*SEVEN, *OUT, "--loss", "0.2"), "--loss '0.2': must be a share in percent, such as 0.2%"),
        ((*SEVEN, *OUT, "--time", "fast"), "--time 'fast': must be milliseconds or a share"),
        ((*SEVEN, *OUT, "--time", "80%"), "--time: needs --gpu and --link"),
        ((*SEVEN, *OUT, "--bits", "4", "--codecs", "int9"), "--codecs='int9' is unknown"),
        ((*SEVEN, *OUT, "--bits", "4", "--codecs", "none"), "--codecs none: exact messages are always among"),
        ((*SEVEN, *OUT, "--bits", "4", "--codecs", "int8_token"), "--codecs int8_token: has blocks of tokens"),
        ((*SEVEN, *OUT, "--bits", "4", "--tokens", "0"), "--tokens 0: must be at least 1"),
        ((*SEVEN, *OUT, "--bits", "4", "--by", "layer"), "--by layer: the trainer's layers are one scanned program"),
        ((*SEVEN, "--bits", "4", "--out", "text.txt/plan.json"), "--out text.txt/plan.json: cannot be written"),
        ((*TINY, *OUT, "--bits", "6", "--data", "none.txt"), "none.txt: no such data file; did you mean 'text.txt'?"),
        ((*TINY, *OUT, "--bits", "6", "--data", "tiny.py"), "--data tiny.py: needs the tokenizer of a model"),
        ((*TINY, *OUT, "--bits", "6", "--tokens", "99999"), "give more text, or a smaller --tokens or --length"),
        ((*SEVEN, *OUT, "--bits", "4", "--mesh.tp", "1"), "mesh.tp=1: one device sends nothing; set --mesh.tp"),
        ((*SEVEN, *OUT, "--bits", "4", "--arrange"), "--arrange: is of inference, which folds orders into weights"),
        ((*OUT, "--bits", "4", "--mesh.tp", "2"), "--config, --model: say what to measure"),
        ((*OUT, "--bits", "4", "--mesh.tp", "2", "--model", "none"), "--model none: "),
    ],
)  # fmt: skip
def test_refused_in_one_line(here, capsys, arguments, message):
    assert cli.run(command.main, arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_a_budget_below_all_codecs_is_refused_before_anything_runs(here, trained, capsys):
    own = ["--config", "tiny.py", "--model", str(trained), "--out", "plan.json", *FEW]
    assert cli.run(command.main, [*own, "--bits", "4"]) == 2
    out, error = capsys.readouterr()
    # Messages of 16 x 32 x 32 values: 4 bits each, and the scales of 128 blocks take 1,024 bytes.
    assert "--bits 4: no choice of codecs has so few; the least is 4.5 bits, everything in int4h" in error
    assert "batch 1" not in out


def test_a_plans_file_among_the_trainers_flags(here):
    plan_file.write(plan_file.PlanFile({"embed": plan_file.SitePlan("int8h")}), "plan.json")
    with pytest.raises(ConfigError, match="--compression.plan plan.json embed: give a plan's file alone, or pairs"):
        cli.parse(["--compression.plan", "plan.json", "embed"])
    pairs = cli.parse(["--compression.plan", "embed", "int8h"])
    assert pairs.compression.plan == {"embed": "int8h"} and pairs.compression.planned is None
    kept = cli.parse(["--compression.plan=plan.json"]).compression
    assert kept.planned.sites["embed"].forward == "int8h"
    with pytest.raises(ConfigError, match="is of a program that is not taco_jax's own"):
        resolve_plan(cli.parse(["--compression.plan", "plan.json"]))
    with pytest.raises(ConfigError, match="plan plan.json: is a whole plan; leave 'embed' out"):
        dataclasses.replace(kept, plan={**kept.plan, "embed": "none"})
    with pytest.raises(ConfigError, match="is a plan for inference; make one with"):
        plan_file.write(plan_file.PlanFile(made={"use": "first_token"}), "plan.json")
        resolve_plan(cli.parse(["--compression.plan", "plan.json"]))
