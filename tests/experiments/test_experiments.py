"""What the programs in experiments/ refuse: one line and exit code 2, before anything is measured or written; and how
they go on after a run that fails."""

import dataclasses
import importlib
import json
import subprocess
from types import SimpleNamespace

import pytest
from model_helpers import QWEN2

from pallas_kernels.nvlink import hardware
from taco_jax.config import ConfigError, TrainConfig, cli, to_dict

LINKS = ["--config", "experiments/quickstart.py"]
BAD = [
    ("bench_codec", ["--codecs", "taco,tacoo"], "--codecs='tacoo': did you mean 'taco'?"),
    ("bench_codec", ["--codecs", "none"], "--codecs='none': "),
    ("bench_codec", ["--codecs", ""], "--codecs='': name at least one"),
    ("bench_codec", ["--implementations", "cuda"], "--implementations='cuda': known: auto, jnp, mosaic, triton"),
    ("bench_codec", ["--elements", "0"], "--elements=0: must be a positive multiple of 32768"),
    ("bench_codec", ["--elements", "-32768"], "--elements=-32768: must be a positive multiple"),
    ("kernel_targets", ["--targets", "90,75"], "--targets='75': "),
    ("kernel_targets", ["--codecs", "tah4"], "--codecs=tah4: element int3_4"),
    ("kernel_targets", ["--operations", "encod"], "--operations='encod': did you mean 'encode'?"),
    ("bench_psum", ["--codecs", "foo"], "--codecs='foo': known: "),
    ("bench_psum", ["--codecs", "taco:x"], "--codecs='taco:x': must be name:chunks:exchange with 1 to 1024 chunks"),
    ("bench_psum", ["--codecs", "taco:0"], "--codecs='taco:0': must be name:chunks:exchange"),
    ("bench_psum", ["--codecs", "taco:2:rings"], "--codecs (exchange)='rings': did you mean 'ring'?"),
    ("bench_psum", ["--codecs", "taco:2:ring:1"], "--codecs='taco:2:ring:1': must be name:chunks:exchange"),
    ("bench_psum", ["--repeats", "0"], "--repeats=0: must be at least 1"),
    ("bench_psum", ["--megaelements", "0"], "--megaelements=0: must be integers of at least 1"),
    ("bench_psum", ["--megaelements", "1,x"], "--megaelements=1,x: must be integers of at least 1"),
    ("bench_allreduce", ["--operation", "psums"], "--operation='psums': did you mean 'psum'?"),
    ("bench_allreduce", ["--exact", "xla,nccll"], "--exact='nccll': did you mean 'nccl'?"),
    ("bench_small_sums", ["--codecs", "int8h:al"], "--codecs='int8h:al': must be name or name:all"),
    ("bench_small_sums", ["--codecs", "int8"], "--codecs='int8': did you mean"),
    ("bench_small_sums", ["--width", "100"], "--width=100: must be a multiple of 512"),
    ("bench_small_sums", ["--kibibytes", "256,100"], "--kibibytes=256,100: must be multiples of "),
    ("bench_small_sums", ["--rounds", "0"], "--rounds=0: must be at least 1"),
    ("bench_step", [*LINKS, "--variants", "none,free,tacoo"], "--codecs='tacoo': did you mean 'taco'?"),
    ("bench_step", [*LINKS, "--variants", "none,taco"], "--variants=none,taco: must have none and free to compare"),
    ("bench_step", [*LINKS, "--variants", "none,free,taco:0"], "--variants (chains)=0: must be integers of at least 1"),
    ("bench_step", [*LINKS, "--variants", "none,free,taco:2:x"], "--variants (link)='x': "),
    ("bench_step", [*LINKS, "--variants", "none,free,taco,taco"], "must name each variant once"),
    ("bench_step", [*LINKS, "--rounds", "0"], "--rounds=0: must be at least 1"),
    ("bench_step", [*LINKS, "--chains", "2"], "--chains 2: no flag for a study's runs: a variant has its own"),
    ("bench_step", [*LINKS, "--mesh.tp", "3"], "3"),
    ("bench_dropin", ["--programs", "stak"], "--programs='stak': did you mean 'stack'?"),
    ("bench_dropin", ["--variants", "none,int8"], "--codecs='int8': did you mean"),
    ("bench_dropin", ["--variants", "int8h"], "--variants=int8h: must have none to compare with"),
    ("bench_dropin", ["--variants", "none,none"], "must name each variant once"),
    ("bench_dropin", ["--variants", "none,int8h:nccll"], "--variants (link)='nccll': did you mean 'nccl'?"),
    ("bench_dropin", ["--variants", "none,int8h:nccl:-1"], "--variants (chunks)=-1: must be integers of at least 0"),
    ("bench_dropin", ["--variants", "none,int8h:nccl:2:1"], "must be codec:link:chunks, up to 1024 chunks, or none"),
    ("bench_dropin", ["--variants", "none:nccl"], "must be codec:link:chunks"),
    ("bench_dropin", ["--tokens", "100", "--sequence", "64"], "--tokens=100: must be a multiple of --sequence 64"),
    ("bench_dropin", ["--layers", "0"], "--layers=0: must be at least 1"),
    ("bench_dropin", ["--loss-steps", "0"], "--loss-steps=0: must be at least 1"),
    ("bench_dropin", ["--heads", "12"], "--heads=12: must be a multiple of the 8 devices"),
    ("bench_feedback", ["--codecs", "int4h:int8h"], "--codecs"),
    ("bench_feedback", ["--rows", "0"], "--rows"),
    ("bench_ttft", ["--variants", "none", "free", "tacoo"], "--variants='tacoo' is unknown: did you mean 'taco'"),
    ("bench_ttft", ["--variants", "none", "free", "int4h,blok=32"], "'blok=32' must be FIELD=VALUE; did you mean"),
    ("bench_ttft", ["--variants", "none", "free", "taco:nvlinkk"], "--variants (link)='nvlinkk': did you mean"),
    ("bench_ttft", ["--variants", "none", "taco"], "--variants=none taco: must have none and free to compare"),
    ("bench_ttft", ["--memory-gb", "-1"], "--memory-gb=-1.0: must be above 0"),
    ("bench_ttft", ["--min-bytes", "-1"], "--min-bytes=-1: must be at least 0"),
    ("bench_ttft", ["--tp", "0"], "--tp=0: must be at least 1"),
    ("bench_ttft", ["--variants", "none", "free", "int4h:nvlink:fed"], "NVLink kernels keep no errors; use nccl"),
    ("bench_ttft", ["--variants", "none", "free", "int4h:auto:fedd"], "must have fed or plain"),
    ("bench_ttft", ["--rounds", "4"], "--rounds=4: must be at least 5"),
    ("bench_ttft", ["--lengths", "0"], "--lengths=0: must be integers of at least 1"),
    ("bench_ttft", ["--model", "qwen7b"], "--model='qwen7b': "),
    ("bench_ttft", ["--layers", "29"], "--layers=29: must be from 1 to the preset's 28"),
    ("bench_ttft", ["--tp", "3"], "tp 3 does not divide 28"),
    ("tokenize_corpus", ["--corpus", ".", "--merges", "nowhere"], "--merges=nowhere: no such file; name GPT-2's"),
    ("tokenize_corpus", ["--corpus", "nowhere", "--merges", "README.md"], "--corpus=nowhere: must be a folder with"),
    ("bench_prepare", ["--corpus", "docs", "--tokenizer", "x", "--workers", "0"], "--workers=0: must be from 1 to"),
    ("bench_prepare", ["--corpus", "docs", "--tokenizer", "x", "--rounds", "0"], "--rounds=0: must be above 0"),
    ("bench_prepare", ["--corpus", "docs", "--tokenizer", "x"], "--corpus=docs: must hold *.train.txt.xz files"),
    ("link_study", [*LINKS, "--links", "nvlinkk"], "--links='nvlinkk': did you mean 'nvlink'?"),
    ("link_study", [*LINKS, "--codecs", "none,fre"], "--codecs='fre': did you mean 'free'?"),
    ("link_study", [*LINKS, "--codecs", "free:none"], "--codecs='free': "),
    ("link_study", ["--config", "nowhere.py"], "--config=nowhere.py: no such file; name an experiment"),
    ("seed_study", ["--config", "nowhere.py"], "--config=nowhere.py: no such file"),
    ("seed_study", [*LINKS, "--codecs", "tacoo"], "--codecs='tacoo': did you mean 'taco'?"),
    ("seed_study", [*LINKS, "--seed", "7"], "--seed 7: no flag for a study's runs: the seeds are those of --seeds"),
    ("seed_study", [*LINKS, "--compression.forward=int4h"], "--compression.forward=int4h: no flag for a study's runs"),
    ("seed_study", [*LINKS, "--workdir", "runs/a"], "--workdir runs/a: no flag for a study's runs: each run has"),
    ("seed_study", [*LINKS, "--checkpoint.resume_step", "5"], "--checkpoint.resume_step 5: no flag for a study's"),
    ("seed_study", [*LINKS, "--compression.plan", "*", "taco:taco"], "--compression.plan *: no flag for a study's"),
    ("seed_study", [*LINKS, "--mesh.tpp", "4"], "unknown option --mesh.tpp; did you mean --mesh.tp?"),
    ("seed_study", [*LINKS, "--mesh.tp", "3"], "3"),
    ("seed_study", [*LINKS, "--evaluation.batches", "0"], "evaluation.batches=0: the study compares validation losses"),
    ("seed_study", [*LINKS, "--timeout", "-1"], "--timeout=-1.0: must be above 0; leave it out for no limit"),
    ("seed_study", [*LINKS, "--timeout", "nan"], "--timeout=nan: must be above 0"),
    ("three_axes_study", ["--variants", "exactt"], "--variants='exactt': did you mean 'exact'?"),
    ("three_axes_study", ["--pipeline.forward", "tah4"], "--pipeline.forward tah4: no flag for a study's runs: it is"),
    ("three_axes_study", ["--data_parallel.gradients=int4h"], "=int4h: no flag for a study's runs: it is the"),
    ("three_axes_study", ["--evaluation.batches", "0"], "evaluation.batches=0: the study compares validation losses"),
    ("sequence_parallel", [*LINKS, "--lengths", "130"], "--lengths=130: must be a multiple of mesh.tp=4"),
    ("sequence_parallel", [*LINKS, "--remats", "ful"], "--remats='ful': did you mean 'full'?"),
    ("sequence_parallel", [*LINKS, "--mesh.tp", "1"], "mesh=pp 1, tp 1: needs pp 1 and tp 2 or more"),
    ("sequence_parallel", [*LINKS, "--sequence-parallel", "True"], "--sequence-parallel True: no flag for a study's"),
    ("guard_cost", [*LINKS, "--codecs", "int4hh"], "--codecs='int4hh': did you mean 'int4h'?"),
    ("guard_cost", [*LINKS, "--compression.guard", "warn"], "--compression.guard warn: no flag for a study's runs: "),
    ("guard_cost", [*LINKS, "--rounds", "1"], "--rounds=1: must be at least 2, to say a standard error"),
    ("link_study", [*LINKS, "--timeout", "nan"], "--timeout=nan: must be above 0"),
    ("link_study", [*LINKS, "--timeout", "0"], "--timeout=0.0: must be above 0"),
    ("link_study", [*LINKS, "--dry-run"], "--dry-run: no flag for a study's runs: trains nothing"),
    ("link_study", [*LINKS, "--no_dry_run", "--steps", "5"], "--no_dry_run: no flag for a study's runs"),
    ("link_study", [*LINKS, "--compression.backward", "none"], "--compression.backward none: no flag for"),
    ("link_study", [*LINKS, "--metrics.every=10"], "--metrics.every=10: no flag for a study's runs: the medians"),
]  # fmt: skip


@pytest.fixture
def program(monkeypatch, repository):
    monkeypatch.syspath_prepend(repository / "experiments")
    monkeypatch.chdir(repository)
    return importlib.import_module


@pytest.mark.parametrize("name,arguments,message", BAD)
def test_bad_input_is_one_line_and_exit_code_2(name, arguments, message, program, tmp_path, capsys):
    assert cli.run(program(name).main, ["--out", str(tmp_path / "out"), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["bench_psum", "own_text"])
def test_a_folder_that_cannot_be_made(name, program, tmp_path, capsys):
    (tmp_path / "file").write_text("kept")
    assert cli.run(program(name).main, ["--out", str(tmp_path / "file")]) == 2
    assert "cannot be made (File exists); name a folder that can" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "kept"


def test_the_harness_has_no_model_of_a_run(program, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps(to_dict(TrainConfig())))
    (tmp_path / "empty").mkdir()
    for name in ("run", "empty"):
        with pytest.raises(ConfigError, match=f"^--model={tmp_path / name}: must be a transformers folder or a .gguf"):
            program("lm_eval_server").transformers_folder(tmp_path / name, tmp_path / "made")


def test_merges_that_are_not_gpt2s(program, tmp_path, capsys):
    pytest.importorskip("tokenizers")
    for name in ("a.train.txt.xz", "val.jsonl.xz"):
        (tmp_path / name).write_text("")
    (tmp_path / "merges").write_text("#version\na b\n")
    arguments = ["--corpus", str(tmp_path), "--merges", str(tmp_path / "merges"), "--out", str(tmp_path / "out")]
    assert cli.run(program("tokenize_corpus").main, arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "/merges: are not GPT-2's" in line and not (tmp_path / "out").exists()


def test_the_ways_of_a_sum(program):
    assert program("bench_psum").parse("taco,int6h:2,int4h:4:ring") == {
        "taco": ("taco", 1, "auto"), "int6h:2": ("int6h", 2, "auto"), "int4h:4:ring": ("int4h", 4, "ring"),
    }  # fmt: skip


def test_small_messages_as_tuned_beside_exact_ones(program, tmp_path, monkeypatch):
    """What goes exactly is the exact program, timed once; what is compressed is another one."""
    from taco_jax.compression import tuned
    from taco_jax.compression.timings import Row, Time, Way

    small = program("bench_small_sums")
    monkeypatch.setattr(small, "LAYERS", 2)
    file = tmp_path / "tuned.json"
    monkeypatch.setenv("TACO_JAX_TUNED", str(file))
    row = lambda nbytes, us: Row(nbytes, Time(1.0), Time(50.0), {Way("nccl", "one_shot"): Time(us)})
    times = {"psum": (row(16 << 10, 60.0), row(32 << 10, 20.0))}
    tuned.write(file, tuned.entry_name("cpu", 8), {"int8h": tuned.Tuned(0, ((1, 1, "ring"),), (), times)})
    arguments = ["--codecs", "int8h", "--kibibytes", "16,32", "--width", "512", "--rounds", "1", "--calls", "1"]
    assert cli.run(small.main, ["--out", str(tmp_path / "out"), *arguments]) == 0
    found = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert found["16"]["int8h"]["exact_program"] and found["16"]["int8h"]["us"] == found["16"]["none"]["us"]
    assert not found["32"]["int8h"]["exact_program"]
    assert found["32"]["int8h"]["messages"] == dict.fromkeys(("psum forward", "psum backward"), "int8h one_shot")
    assert found["32"]["none"]["messages"] == dict.fromkeys(("psum forward", "psum backward"), "none")
    text = (tmp_path / "out" / "README.md").read_text()
    assert "tuned values: tuned.json for cpu" in text and "1.000x (e)" in text


def test_what_a_variant_saves_of_the_time_of_messages(program):
    study = program("bench_step")
    assert study.parse("none,free,taco:2:nccl")[2] == study.Variant("taco:2:nccl", "taco", 2, "nccl")
    found = study.summarise({"none": [0.2, 0.21, 0.19], "free": [0.1] * 3, "taco": [0.13, 0.12, 0.14]})
    assert found["taco"]["saved"] == pytest.approx(0.7) and found["taco"]["speedup"] == pytest.approx(0.2 / 0.13)
    assert found["none"]["saved"] == 0 and found["free"]["saved"] == 1
    assert found["none"]["fastest_ms"] == pytest.approx(190) and found["none"]["slowest_ms"] == pytest.approx(210)
    assert study.summarise({"none": [0.1], "free": [0.1]})["none"]["saved"] is None


@pytest.mark.slow
def test_time_to_first_token_in_several_goes(program, tmp_path, monkeypatch, capsys):
    """On emulated devices: what is measured, what does not fit, what a later go adds, under which link."""
    study, out = program("bench_ttft"), tmp_path / "out"
    monkeypatch.setattr(study, "preset", lambda name: dataclasses.replace(QWEN2, d_model=512))
    variants = ["none", "free", "mxfp4,block=16"]
    arguments = ["--out", str(out), "--tp", "2", "--rounds", "5", "--variants", *variants]
    assert cli.run(study.main, [*arguments, "--lengths", "32,128", "--batches", "1", "--seconds", "inf"]) == 0
    printed = capsys.readouterr().out
    assert "1x128: skipped, the model's longest sequence has 64 tokens" in printed and " ms, none " in printed
    # Too little memory for any: the larger one is not even compiled.
    one = ["--variants", "none", "free", "--link-name", "another", "--memory-gb", "1e-6", "--lengths", "32"]
    assert cli.run(study.main, [*arguments[:-4], *one, "--batches", "2,4"]) == 0
    assert cli.run(study.main, [*arguments, "--lengths", "32", "--batches", "1,2"]) == 0
    assert "1x32: measured before" in capsys.readouterr().out
    summary = json.loads((out / "summary.json").read_text())
    assert list(summary["results"]) == ["cpu", "another"] and len(summary["goes"]) == 2
    measured, skipped = summary["results"].values()
    assert list(measured) == ["1x32", "1x128", "2x32"] and "needs 0.0 GB, of 0.0 GB" in skipped["2x32"]["skipped"]
    assert skipped["4x32"]["skipped"] == "larger than 2x32, which does not fit"
    for shape in ("1x32", "2x32"):
        found = measured[shape]
        assert list(found) == variants
        for row in found.values():
            assert 0 < row["fastest_ms"] <= row["ms"] <= row["slowest_ms"] and row["rounds"] == 5
            assert row["speedup"] == pytest.approx(found["none"]["ms"] / row["ms"])
        assert found["free"]["mb_sent"] == 0 < found["mxfp4,block=16"]["mb_sent"] < found["none"]["mb_sent"]
    text = (out / "README.md").read_text()
    assert "## Emulated on a CPU" in text and all(f"* {f}: " in text for f in ("date", "hardware", "commit", "command"))
    assert "| 2x32 | " in text and "* 1x128: skipped, the model's" in text
    assert (out / "ttft.png").exists()
    assert cli.run(study.main, [*arguments, "--lengths", "32", "--layers", "1"]) == 2
    assert "summary.json: layers=2: this run has 1; name another --out" in capsys.readouterr().err


def test_the_name_of_the_link(program, monkeypatch):
    seen, gpu = program("bench_ttft").link_seen, SimpleNamespace(platform="gpu", device_kind="a kind")
    monkeypatch.setattr(hardware, "missing", lambda kind: None if kind == "a kind" else "no NVLink")
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    assert seen(gpu, 4) == "nvlink" and seen(gpu, 1) == "one device"
    assert seen(SimpleNamespace(platform="gpu", device_kind="another"), 4) == "nvlink or pcie p2p"
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert seen(gpu, 4) == "host"


def record(step=1, **more):
    numbers = {"tokens_per_second": 1.0, "comm_bytes": 1, "comm_bytes_bf16": 2, "step_seconds": 1.0, "loss": 3.0}
    return json.dumps({"step": step} | numbers | more) + "\n"


@pytest.fixture
def seed_study(program, tmp_path, monkeypatch):
    """seed_study(train, [argument, ...]) -> (exit code, OUT): the study with another trainer."""
    study = program("seed_study")
    monkeypatch.setattr(study.runs, "hardware", lambda: "a test")

    def run(train, arguments=()):
        monkeypatch.setattr(study.runs, "train", train)
        out = tmp_path / "out"
        return cli.run(study.main, [*LINKS, "--out", str(out), "--codecs", "none,taco", *arguments]), out

    return run


def test_seeds_go_on_after_a_run_that_fails(seed_study, capsys):
    asked, limits = [], []

    def train(config, workdir, flags, timeout):
        run = flags[1], flags[flags.index("--seed") + 1]
        asked.append(run)
        limits.append(timeout)
        if run == ("none", "0"):
            raise RuntimeError("exit code 1: a test")
        if run == ("taco", "1"):
            raise subprocess.TimeoutExpired("train", timeout)
        loss = {} if run == ("none", "1") else {"validation_loss": None if run == ("taco", "2") else 3.0}
        return [json.loads(record(**loss))]

    code, out = seed_study(train, ["--seeds", "0,1,2,3", "--timeout", "7"])
    assert code == 1 and asked == [(codec, seed) for seed in "0123" for codec in ("none", "taco")]
    failed = [line for line in capsys.readouterr().err.splitlines() if line.startswith("FAILED")]
    assert failed == [
        "FAILED none, seed 0: exit code 1: a test",
        "FAILED none, seed 1: no validation loss at its last step, 1: not kept",
        "FAILED taco, seed 1: Command 'train' timed out after 7.0 seconds",
        "FAILED taco, seed 2: no validation loss at its last step, 1: not kept",
    ]
    assert sorted(p.name for p in out.glob("*.jsonl")) == [
        "none-2.jsonl", "none-3.jsonl", "taco-0.jsonl", "taco-3.jsonl",
    ]  # fmt: skip
    summary = json.loads((out / "summary.json").read_text())
    assert summary["taco"]["seeds"] == {"3": 3.0} and (out / "loss.png").exists()
    asked.clear()
    limits.clear()
    assert seed_study(train, ["--seeds", "2", "--timeout", "inf"])[0] == 1
    assert asked == [("taco", "2")] and limits == [None]  # the other is kept


@pytest.mark.parametrize(
    "content,message",
    [
        (b"", "is empty"),
        (b"{}\nnot json\n", " line 1: not a record of a step"),
        (record(validation_loss=3.0).encode()[:-1], "is cut off"),
        (record(validation_loss=3.0).encode() + record(2).encode()[:9], "is cut off"),
        (b"\xff\xfe\n", "no run's metrics (byte 0 is no UTF-8)"),
        (record().encode(), ", step 1: validation_loss=None: no number"),
        (b'{"step": 1, "validation_loss": 3.0}\n', ", step 1=tokens_per_second, step_seconds, comm_bytes, comm_bytes"),
        (None, "cannot be read as a run's metrics (Is a directory)"),
    ],
)
@pytest.mark.parametrize("name", ["seed_study", "accuracy"])
def test_a_kept_run_that_is_none(name, content, message, program, seed_study, tmp_path, capsys):
    out = tmp_path / "out"
    kept = out / ("none-0.jsonl" if name == "seed_study" else "gpt2_124m-none-0.jsonl")
    out.mkdir()
    kept.mkdir() if content is None else kept.write_bytes(content)
    if name == "seed_study":
        assert seed_study(lambda *_, **__: pytest.fail("it trained"))[0] == 2
    else:
        assert cli.run(program(name).main, ["--out", str(out), "--report"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {kept}") and message in line and line.endswith("the study makes its run again")
    assert list(out.iterdir()) == [kept] and (content is None or kept.read_bytes() == content)


def test_three_axes_keep_their_runs_and_go_on_after_one_that_fails(program, tmp_path, monkeypatch, capsys):
    study, asked = program("three_axes_study"), []
    monkeypatch.setattr(study.runs, "hardware", lambda: "a test")

    def train(config, workdir, flags, timeout):
        value = lambda flag: flags[flags.index(flag) + 1]
        run = value("--seed"), value("--pipeline.forward"), value("--data-parallel.gradients")
        asked.append(run)
        assert "--data-parallel.zero1" in flags and config.endswith("three_axes.py")
        if run == ("1", "tah4", "int8h"):
            raise RuntimeError("a test")
        loss = 2.0 + int(run[0]) / 10 + {"none": 0, "int8_token": 0.004, "tah4": 0.3}[run[1]]
        return [json.loads(record(step, validation_loss=loss)) for step in (9, 10)]

    monkeypatch.setattr(study.runs, "train", train)
    out = tmp_path / "out"
    arguments = ["--out", str(out), "--seeds", "0,1"]
    assert cli.run(study.main, arguments) == 0
    pairs = [("none", "none"), ("int8_token", "int8h")]
    assert asked == [(seed, *pair) for seed in "01" for pair in pairs]
    asked.clear()
    assert cli.run(study.main, [*arguments, "--variants", "exact,compressed,tah4"]) == 1
    assert (
        asked == [("0", "tah4", "int8h"), ("1", "tah4", "int8h")]
        and "FAILED tah4, seed 1: a test" in capsys.readouterr().err
    )
    summary = json.loads((out / "summary.json").read_text())
    assert summary["runs"]["exact"]["1"]["curve"] == [[10, 3.0]] and list(summary["runs"]["tah4"]) == ["0"]
    compared = {variant: (round(row["difference"], 4), row["equal"]) for variant, row in summary["comparison"].items()}
    assert compared == {"exact": (0.0, True), "compressed": (0.002, True), "tah4": (0.15, False)}
    assert "| tah4 | int8h | tah4, e4m3h | int8h |" in (out / "README.md").read_text() and (out / "loss.png").exists()
    (out / "summary.json").write_text("{}")
    assert cli.run(study.main, arguments) == 2
    assert "summary.json: is no summary of this study (KeyError('runs'))" in capsys.readouterr().err


def test_a_run_without_metrics_failed(program, tmp_path, monkeypatch, capsys):
    study = program("link_study")
    monkeypatch.setattr(study.runs, "hardware", lambda: "a test")
    (tmp_path / "fake.py").write_text(
        "import pathlib, sys\n"
        "if 'taco' in sys.argv:\n"
        "    folder = pathlib.Path(sys.argv[sys.argv.index('--workdir') + 1])\n"
        "    folder.mkdir()\n"
        f"    (folder / 'metrics.jsonl').write_text({record(loss=None)!r})\n"
    )
    monkeypatch.setattr(study.runs, "TRAINER", [str(tmp_path / "fake.py")])
    out = tmp_path / "out"
    arguments = [*LINKS, "--out", str(out), "--links", "host", "--evaluation.batches", "0"]
    assert cli.run(study.main, arguments) == 1
    assert "FAILED host/none: left no metrics\n" in capsys.readouterr().out
    assert "| host | taco | 1000.0 | 0.0 | n/a | n/a | n/a |" in (out / "README.md").read_text()


def test_the_free_run_starts_from_any_folder(program, tmp_path, monkeypatch, repository):
    study, asked = program("link_study"), []

    def train(config, workdir, flags, *, env, timeout, program):
        asked.append(program)
        raise RuntimeError("a test")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(study.runs, "train", train)
    arguments = ["--config", str(repository / "experiments/quickstart.py"), "--codecs", "none,free", "--out", "out"]
    assert cli.run(study.main, [*arguments, "--links", "host"]) == 1
    assert asked == [study.runs.TRAINER, [str(repository / "experiments/free_communication.py")]]
