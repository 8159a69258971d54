"""The accuracy study: its test of equivalence, each row is of its own runs, and the runs are the trainer's."""

import dataclasses
import json

import pytest

from taco_jax.config import (
    CheckpointConfig,
    CompressionConfig,
    DataConfig,
    EvalConfig,
    MeshConfig,
    MetricsConfig,
    OptimizerConfig,
    TrainConfig,
    cli,
)
from taco_jax.models.config import ModelConfig
from taco_jax.train.metrics import read_records


@pytest.fixture
def study(monkeypatch, repository):
    monkeypatch.syspath_prepend(repository / "experiments")
    import accuracy

    return accuracy


def metrics(loss, step=1, **more):
    numbers = {"tokens_per_second": 1.0, "comm_bytes": 1, "comm_bytes_bf16": 2, "step_seconds": 1.0}
    return json.dumps({"step": step, "loss": loss, "validation_loss": loss} | numbers | more) + "\n"


def put(study, out, row, seed, loss, model="gpt2_124m", **more):
    (out / study.name_of(model, row, seed)).write_text(metrics(loss, **more))


def summary(out):
    return json.loads((out / "summary.json").read_text())["gpt2_124m"]


# The test of equivalence


def test_three_pairs_by_hand(study):
    found = study.accuracy_report.compare({"0": 2.02, "1": 4.0, "2": 8.04}, {"0": 2.0, "1": 4.0, "2": 8.0, "3": 9.0})
    # Differences 1 %, 0 and 0.5 %: mean 0.5 %, deviation 0.5 %, over sqrt(3); t of two degrees of freedom is 2.920.
    assert found["pairs"] == 3 and found["difference"] == pytest.approx(0.005)
    assert found["standard_error"] == pytest.approx(0.005 / 3**0.5)
    assert found["interval"] == pytest.approx([0.005 - 2.920 * 0.005 / 3**0.5, 0.005 + 2.920 * 0.005 / 3**0.5])


@pytest.mark.parametrize(
    "differences,verdict",
    [
        ([], "no pair"),
        ([0.0], "one pair: no test"),
        ([0.001, 0.002, 0.0015], "equivalent"),
        ([0.004, 0.005, 0.0045], "open"),  # the mean is within the bound, the interval is not
        ([-0.02, 0.02, 0.0], "open"),
        ([0.01, 0.011, 0.012], "not equivalent"),
        ([-0.01, -0.011, -0.012], "not equivalent"),
        ([0.001] * 20, "equivalent"),
    ],
)
def test_verdicts(study, differences, verdict):
    losses = {str(seed): 3.0 * (1 + d) for seed, d in enumerate(differences)}
    assert study.accuracy_report.compare(losses, dict.fromkeys(losses, 3.0))["verdict"] == verdict


def test_students_t_is_right(study):
    """Against the distribution itself, integrated."""
    import math

    for df, t in enumerate(study.accuracy_report.T95, 1):
        density = lambda x, n=df: (1 + x * x / n) ** (-(n + 1) / 2)
        constant = math.gamma((df + 1) / 2) / math.sqrt(df * math.pi) / math.gamma(df / 2)
        width = t / 2000
        mass = sum(density((i + 0.5) * width) for i in range(2000)) * width * constant
        assert mass == pytest.approx(0.45, abs=2e-4)


# What is kept, and the order


def test_no_row_takes_the_runs_of_another(study, tmp_path):
    rows = {row: 3.0 + i / 100 for i, (_, names, _) in enumerate(study.PLAN) for row in names}
    rows = {row: 3.0 + i / 100 for i, row in enumerate(rows)} | {"int6h:none": 4.0, "none_then_int6h:int8h": 5.0}
    for seed in ("0", "12"):
        for row, loss in rows.items():
            put(study, tmp_path, row, seed, loss + int(seed))
    assert len(list(tmp_path.iterdir())) == 2 * len(rows)
    for other in ("gpt2_124m-none-int6h-0", "gpt2_124m-none", "gpt2_124m-none-0-copy", "gpt2_124mm-none-1"):
        (tmp_path / f"{other}.jsonl").write_text(metrics(99.0))
    assert cli.run(study.main, ["--out", str(tmp_path), "--report"]) == 0
    found = summary(tmp_path)
    assert list(found) == list(rows)
    assert {row: r["seeds"] for row, r in found.items()} == {c: {"0": x, "12": x + 12} for c, x in rows.items()}


def test_rows_are_paired_by_the_seeds_that_both_have(study, tmp_path):
    put(study, tmp_path, "none", "0", 3.0)
    for row, seed, loss in (("taco", "0", 3.03), ("taco", "1", 9.0), ("int8h", "1", 4.0)):
        put(study, tmp_path, row, seed, loss, evaluated={"none": 2 * loss})
    assert cli.run(study.main, ["--out", str(tmp_path), "--report"]) == 0
    found = summary(tmp_path)
    assert found["taco"]["difference"] == pytest.approx(0.01) and found["taco"]["verdict"] == "one pair: no test"
    assert found["int8h"]["difference"] is None and found["int8h"]["mean"] == 4.0
    assert found["taco"]["evaluated"]["none"] == {"seeds": {"0": 6.06, "1": 18.0}, "difference": pytest.approx(1.0)}
    text = (tmp_path / "README.md").read_text()
    assert (
        "| taco | none | +100.000% | 0: 6.0600, 1: 18.0000 |" in text and "| +1.00% |  |  | one pair: no test |" in text
    )


def test_the_order_is_seed_by_seed_and_goes_on_where_it_stands(study, tmp_path):
    first = [("gpt2_124m", row, seed) for seed in (0, 1, 2) for row in ("none", "int8h", "int6h", "taco")]
    every = study.missing(study.PLAN, {})
    assert every[:12] == first
    assert every[12:15] == [("gpt2_124m", row, 0) for row in ("int4h_fed:int6h", "float32", "int4h")]
    assert every[15:17] == [("gpt2_350m", row, 0) for row in ("none", "int6h")]
    for model, row, seed in (*first[:5], first[9]):
        put(study, tmp_path, row, seed, 3.0, model)
    assert study.missing(study.PLAN, study.collect(tmp_path)) == [r for r in every[5:] if r != first[9]]


def test_the_plan_is_written_before_the_first_run(study, tmp_path):
    assert cli.run(study.main, ["--out", str(tmp_path), "--report"]) == 0
    text = (tmp_path / "README.md").read_text()
    assert "lies within +-0.5%" in text and "1. gpt2_124m, `none`, 0\n2. gpt2_124m, `int8h`, 0\n" in text


def test_readme_and_page_are_those_of_the_runs_that_are_there(study, repository):
    """After new runs: experiments/accuracy.py --out experiments/results/accuracy --report --page docs/accuracy.md"""
    folder, page = repository / "experiments/results/accuracy", repository / "docs/accuracy.md"
    found = study.collect(folder)
    report = study.accuracy_report
    assert report.readme(found, study.missing(study.PLAN, found)) == (folder / "README.md").read_text()
    assert report.page(page.read_text(), found) == page.read_text()
    written = json.loads((folder / "summary.json").read_text())
    assert json.loads(json.dumps({"bound": report.BOUND} | report.summaries(found))) == written


def test_a_page_keeps_what_is_outside_of_its_marks(study, tmp_path, capsys):
    put(study, tmp_path, "none", "0", 3.0)
    begin, end = study.accuracy_report.MARKS
    page, arguments = tmp_path / "page.md", ["--out", str(tmp_path), "--report", "--page", str(tmp_path / "page.md")]
    page.write_text(f"# A page\n{begin}\nold\n{end}\nmore\n")
    assert cli.run(study.main, arguments) == 0
    text = page.read_text()
    assert text.startswith(f"# A page\n{begin}\n\n### gpt2_124m\n") and text.endswith(f"\n{end}\nmore\n")
    assert "| none | 2.00 | 3.0000 | 0: 3.0000 |" in text and "old" not in text
    assert cli.run(study.main, arguments) == 0 and page.read_text() == text
    page.write_text("# A page\n")
    assert cli.run(study.main, arguments) == 2 and page.read_text() == "# A page\n"
    assert "has no line '<!-- begin: written by" in capsys.readouterr().err


def test_how_long_a_run_takes(study):
    one = lambda seconds, flops: [{"run": {"seconds": seconds, "flops": flops}}]
    assert study.expected_seconds(5.0, {}) is None
    found = {"gpt2_124m": {"none": {"0": one(10.0, 2.0), "1": one(30.0, 2.0)}}, "gpt2_350m": {"taco": {"0": [{}]}}}
    assert study.expected_seconds(5.0, found) == pytest.approx(1.05 * 50.0)


@pytest.fixture
def tokens(tmp_path):
    folder = tmp_path / "tokens"
    folder.mkdir()
    (folder / "train.bin").write_bytes(bytes(2 * (64 * 1024 * 3 + 1)))
    (folder / "val.bin").write_bytes(bytes(2))
    return folder


class Fake:
    """In the place of Study: notes what is run, fails where it is told to."""

    def __init__(self, study, bad=()):
        self.study, self.bad, self.asked, self.programs = study, bad, [], self

    def __call__(self, args, configs, flags):
        self.configs = configs
        return self

    def close(self):
        pass

    def run(self, model, row, seed, kept, ahead):
        self.asked.append((row, seed))
        if row in self.bad:
            raise RuntimeError("out of memory")
        kept.write_text(metrics(3.0, run={"seconds": 60.0, "flops": self.study.work(self.configs[model])}))


def test_what_the_runs_are_given(study, tokens, tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(study, "Study", lambda args, configs, flags: given.append(configs) or 1 / 0)
    monkeypatch.setattr(study.cli, "devices", lambda name: None)
    arguments = ["--out", str(tmp_path / "out"), "--tokens", str(tokens)]
    for more in ([], ["--model", "gpt2_124m", "--warmup", "2"], ["--data.sequence-length", "64"]):
        with pytest.raises(ZeroDivisionError):
            study.main([*arguments, *more])
    small, large = given[0]["gpt2_124m"], given[0]["gpt2_350m"]
    assert (small.steps, large.steps) == (9, 610)  # three passes; 40M tokens
    assert (small.optimizer.warmup_steps, large.optimizer.warmup_steps) == (1, 61)
    assert (small.mesh.tp, small.global_batch, large.evaluation.every) == (2, 64, 61)
    assert list(given[1]) == ["gpt2_124m"] and given[1]["gpt2_124m"].optimizer.warmup_steps == 2
    assert given[2]["gpt2_124m"].steps == 3 * 48


def test_runs_go_on_after_one_that_fails_and_are_kept(study, tokens, tmp_path, monkeypatch):
    monkeypatch.setattr(study.cli, "devices", lambda name: None)
    arguments = ["--out", str(tmp_path / "out"), "--tokens", str(tokens), "--rows", "none,int8h,taco", "--seeds", "0,1"]
    fake = Fake(study, bad=("int8h",))
    monkeypatch.setattr(study, "Study", fake)
    assert cli.run(study.main, arguments) == 1
    assert fake.asked == [(row, seed) for seed in (0, 1) for row in ("none", "int8h", "taco")]
    again = Fake(study)
    monkeypatch.setattr(study, "Study", again)
    # A run takes a minute, as those before it say.
    assert cli.run(study.main, [*arguments, "--minutes", "0.5"]) == 0 and again.asked == []
    assert cli.run(study.main, [*arguments, "--minutes", "1.5"]) == 0
    assert again.asked == [("int8h", 0), ("int8h", 1)]  # the fake ones end at once


@pytest.mark.parametrize(
    "part,forward,backward,fed,fed_backward",
    [
        ("none", "none", "none", False, False), ("float32", "none", "none", False, False),
        ("int8h", "int8h", "int8h", False, False), ("int4h_fed:int6h", "int4h", "int6h", True, False),
        ("int6h:none", "int6h", "none", False, False), ("int4h_fed", "int4h", "int4h", True, False),
        ("int4h_fed:int4h_fed", "int4h", "int4h", True, True), ("int6h:int4h_fed", "int6h", "int4h", False, True),
    ],
)  # fmt: skip
def test_what_a_row_sends(study, part, forward, backward, fed, fed_backward):
    c = study.configured(TrainConfig(), part).compression
    assert (c.forward, c.backward, c.error_feedback) == (forward, backward, fed)
    assert c.backward_error_feedback is fed_backward


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--rows", "tacoo"], "--rows='tacoo': did you mean 'taco'?"),
        (["--rows", "int6h:nonee"], "--rows='nonee': did you mean 'none'?"),
        (["--rows", "taco_then_nne"], "--rows='nne': did you mean 'none'?"),
        (["--rows", "taco_fedd"], "--rows='taco_fedd': did you mean"),
        (["--rows", "none,"], "--rows='': name at least one"),
        (["--seeds", "a"], "--seeds=a: must be integers of at least 0, separated by commas"),
        (["--steps", "0"], "--steps=0: must be above 0"),
        (["--minutes", "nan"], "--minutes=nan: must be above 0"),
        (["--warmup", "-1"], "--warmup=-1: must be 0 or more steps"),
        (["--report", "--minute", "5"], "--report=--minute 5: runs nothing, so it takes no flags of the trainer"),
        (["--report"], "no such folder, so there is nothing to report"),
        (["--page", "docs/accuracy.md"], "--page=docs/accuracy.md: goes with --report"),
        ([], "--tokens=None: needed: a folder with train.bin and val.bin"),
        (["--tokens", "nowhere"], "--tokens=nowhere/train.bin: no such file; tokenize_corpus.py makes one"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(study, arguments, message, tmp_path, capsys):
    assert cli.run(study.main, ["--out", str(tmp_path / "out"), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "flags,message",
    [
        (["--config", "experiments/quickstart.py"], "the study names the experiment itself"),
        (["--optimizer.warmup_steps=7"], "set --warmup"),
        (["--global-batch", "8"], "set --batch"),
        (["--data.train", "austen"], "set --tokens"),
        (["--checkpoint.enabled"], "a run's folder is gone after it"),
        (["--compression.no-error-feedback"], "name a row, such as int4h_fed:int6h"),
        (["--compression.backward_error_feedback"], "name a row, such as int4h_fed:int6h"),
        (["--stop-after", "2"], "set --steps"),
    ],
)
def test_flags_that_the_study_sets_are_refused(study, flags, message, tokens, tmp_path, capsys):
    assert cli.run(study.main, ["--out", str(tmp_path / "out"), "--tokens", str(tokens), *flags]) == 2
    assert capsys.readouterr().err.startswith(f"error: {' '.join(flags)}: no flag for a study's runs: {message}")
    assert not (tmp_path / "out").exists()


# The runs


TINY = TrainConfig(
    model=ModelConfig(vocab_size=256, d_model=32, n_layers=2, n_heads=4, n_kv_heads=4, head_dim=8, d_mlp=64),
    mesh=MeshConfig(tp=2),
    data=DataConfig(sequence_length=16),
    optimizer=OptimizerConfig(warmup_steps=2),
    checkpoint=CheckpointConfig(enabled=False),
    evaluation=EvalConfig(every=4, batches=2),
    metrics=MetricsConfig(snr_every=4),
    compression=CompressionConfig(min_bytes=0),
    global_batch=4,
    steps=8,
)


@pytest.fixture(scope="module")
def in_turn():
    import sys

    from helpers import REPOSITORY

    sys.path.insert(0, str(REPOSITORY / "experiments"))
    try:
        import accuracy
        import float32_sums
        import in_turn
    finally:
        sys.path.pop(0)
    from taco_jax.mesh import make_mesh

    in_turn.float32_sums = float32_sums
    config_of = lambda name: accuracy.configured(TINY, name)
    in_turn.made = in_turn.Programs(make_mesh(tp=2), config_of)
    yield in_turn
    in_turn.made.close()


def losses(records):
    return [{k: r[k] for k in ("step", "loss", "grad_norm", "validation_loss", "sites") if k in r} for r in records]


@pytest.mark.slow
@pytest.mark.parametrize("row", ["none", "taco"])
def test_a_run_is_the_trainers(in_turn, row, tmp_path):
    from taco_jax.train.loop import train

    compression = dataclasses.replace(TINY.compression, forward=row, backward=row)
    alone = dataclasses.replace(TINY, seed=3, workdir=str(tmp_path / "run"), compression=compression)
    train(alone)
    program = in_turn.made.get(row, to_train=True)
    records = in_turn.train(3, [(program, 8)])
    want = losses(read_records(tmp_path / "run" / "metrics.jsonl"))
    for record in want:
        if not record.get("sites"):  # of an exact run there is nothing to measure
            record.pop("sites", None)
    assert losses(records) == want and len(want) == 8
    assert losses(in_turn.train(4, [(program, 8)])) != want  # another seed, the same program


@pytest.mark.slow
def test_a_run_that_changes_in_the_middle(in_turn):
    taco, exact = (in_turn.made.get(row, to_train=True) for row in ("taco", "none"))
    whole = in_turn.train(3, [(taco, 8)])
    assert losses(in_turn.train(3, [(taco, 4), (taco, 8)])) == losses(whole)
    changed = in_turn.train(3, [(taco, 4), (exact, 6), (taco, 8)])
    assert losses(changed)[:4] == losses(whole)[:4] and losses(changed)[4] != losses(whole)[4]
    assert [r["comm_bytes"] == whole[0]["comm_bytes"] for r in changed] == [True] * 4 + [False] * 2 + [True] * 2
    assert changed[-1]["validation_loss"] == pytest.approx(whole[-1]["validation_loss"], rel=0.01)


@pytest.mark.slow
def test_evaluation_in_other_rows(in_turn, capsys):
    def broken():
        raise RuntimeError("no memory")

    taco = in_turn.made.get("taco", to_train=True)
    others = {row: (lambda row=row: in_turn.made.get(row, to_train=False)) for row in ("none", "int4h")}
    last = in_turn.train(3, [(taco, 8)], others | {"mxfp4": broken})[-1]
    found, own = last["evaluated"], last["validation_loss"]
    assert list(found) == ["none", "int4h"] and "not evaluated in mxfp4: RuntimeError" in capsys.readouterr().err
    assert 0 < abs(found["none"] / own - 1) < 0.01 and 0 < abs(found["int4h"] / own - 1) < 0.1
    exact = in_turn.train(3, [(in_turn.made.get("none", to_train=True), 8)], {"none": others["none"]})[-1]
    assert exact["evaluated"] == {"none": exact["validation_loss"]}


@pytest.mark.slow
def test_a_run_that_is_stopped_is_not_kept(in_turn, monkeypatch):
    monkeypatch.setattr(in_turn.StopRequests, "ask", lambda self: lambda: "SIGTERM")
    with pytest.raises(RuntimeError, match="stopped at step 1 by SIGTERM: not kept"):
        in_turn.train(3, [(in_turn.made.get("none", to_train=True), 8)])


# Exact sums in float32


def test_float32_sums_are_rounded_once(in_turn):
    """Terms that are rounded before they are added are off in places, a sum in float32 nowhere but at ties."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import PartitionSpec as P

    from taco_jax.models import blocks, overlap
    from taco_jax.models.run_config import Parallel

    mesh, par = in_turn.made.mesh, Parallel(plan={}, dtype=jnp.bfloat16)
    rng = np.random.default_rng(0)
    bf16 = lambda *shape: np.asarray(jnp.asarray(rng.normal(size=shape), jnp.bfloat16), np.float32)
    x_BLD, w_DF, y_BLF, v_FD = bf16(2, 64, 32), bf16(32, 128), bf16(2, 64, 128), bf16(128, 32)

    def both(x_BLD, w_DF, y_BLF, v_FD):
        """(the gradient of x of sum(y * (x @ w)), y @ v)"""
        entered = lambda x: blocks.column_parallel(overlap.column_input(x, par, {}, "in"), [{"kernel": w_DF}], par)[0]
        product, back = jax.vjp(entered, x_BLD.astype(par.dtype))
        return back(y_BLF.astype(product.dtype))[0], overlap.row_parallel(y_BLF, v_FD, None, par, {}, "out")[0]

    specs = P(), P(None, "tp"), P(None, None, "tp"), P("tp")
    run = lambda: jax.jit(jax.shard_map(both, mesh=mesh, in_specs=specs, out_specs=P()))(x_BLD, w_DF, y_BLF, v_FD)
    narrow = run()
    with in_turn.float32_sums.sums_in_float32():
        wide = run()
    for found, before, exact in zip(wide, narrow, (y_BLF @ w_DF.T, y_BLF @ v_FD), strict=True):
        right = np.asarray(jnp.asarray(exact, jnp.bfloat16))
        assert found.dtype == before.dtype == jnp.bfloat16
        assert np.mean(np.asarray(found) == right) > 0.999 and np.mean(np.asarray(before) == right) < 0.9


@pytest.mark.slow
def test_every_message_but_the_embedding_is_in_float32(in_turn):
    import jax.numpy as jnp
    import model_helpers
    from hlo import collectives

    size = 4 * 16 * 32
    run = lambda: model_helpers.Run(model_helpers.GPT2, tp=2, batch=4, dtype=jnp.bfloat16)

    def sent():
        return sorted(dtype for opcode, dtype, n in collectives(run().compiled()[0]) if n == size)

    before = sent()
    with in_turn.float32_sums.sums_in_float32():
        program = run()
        inside, (loss, gradients, _) = sent(), program.gradients()
    # A layer's two messages forward and two backward are in loops; the embedding's and the head's are not. XLA on CPU
    # may send bfloat16 as float32, so the embedding's message counts as either.
    assert len(inside) == len(before) == 6 and inside.count("float32") >= 5
    want, expected, _ = run().gradients()
    assert loss == pytest.approx(want, rel=1e-4) and sent() == before
    norm = sum((g**2).sum() for g in expected.values()) ** 0.5
    assert sum(((gradients[k] - g) ** 2).sum() for k, g in expected.items()) ** 0.5 < 0.02 * norm
