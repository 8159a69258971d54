"""What the programs in experiments/ refuse: one line and exit code 2, before anything is measured or written."""

import importlib

import pytest

from taco_jax import cli

LINKS = ["--config", "experiments/quickstart.py"]
BAD = [
    ("bench_codec", ["--codecs", "taco,tacoo"], "--codecs='tacoo': did you mean 'taco'?"),
    ("bench_codec", ["--codecs", "none"], "--codecs='none': "),
    ("bench_codec", ["--codecs", ""], "--codecs='': name at least one"),
    ("bench_codec", ["--implementations", "cuda"], "--implementations='cuda': known: auto, jnp, mosaic, triton"),
    ("bench_codec", ["--elements", "0"], "--elements=0: must be a positive multiple of 32768"),
    ("bench_codec", ["--elements", "-32768"], "--elements=-32768: must be a positive multiple"),
    ("bench_psum", ["--codecs", "foo"], "--codecs='foo': known: "),
    ("bench_psum", ["--codecs", "taco:x"], "--codecs='taco:x': must be name:chunks:exchange with 1 to 1024 chunks"),
    ("bench_psum", ["--codecs", "taco:0"], "--codecs='taco:0': must be name:chunks:exchange"),
    ("bench_psum", ["--codecs", "taco:2:rings"], "--codecs (exchange)='rings': did you mean 'ring'?"),
    ("bench_psum", ["--codecs", "taco:2:ring:1"], "--codecs='taco:2:ring:1': must be name:chunks:exchange"),
    ("bench_psum", ["--repeats", "0"], "--repeats=0: must be at least 1"),
    ("bench_psum", ["--megaelements", "0"], "--megaelements=0: must be integers of at least 1"),
    ("bench_psum", ["--megaelements", "1,x"], "--megaelements=1,x: must be integers of at least 1"),
    ("tokenize_corpus", ["--corpus", ".", "--merges", "nowhere"], "--merges=nowhere: no such file; name GPT-2's"),
    ("tokenize_corpus", ["--corpus", "nowhere", "--merges", "README.md"], "--corpus=nowhere: must be a folder with"),
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


def test_a_folder_that_cannot_be_made(program, tmp_path, capsys):
    (tmp_path / "file").write_text("kept")
    assert cli.run(program("bench_psum").main, ["--out", str(tmp_path / "file")]) == 2
    assert "cannot be made (File exists); name a folder that can" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "kept"


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
