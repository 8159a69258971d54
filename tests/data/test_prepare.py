"""`python -m taco_jax.prepare`: which tokens it writes, what it refuses, and that a killed run leaves nothing half."""

import dataclasses
import errno
import gzip
import hashlib
import json
import lzma
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import text_corpus
from helpers import REPOSITORY
from text_corpus import END, expected, sentences, stored, tokenizer_folder, tree

from taco_jax.config import ConfigError, DataConfig, cli
from taco_jax.data import open_data, open_prepared
from taco_jax.data.prepare import command, encoding, output, text_files
from taco_jax.data.prepare.command import PrepareConfig, main, prepare
from taco_jax.data.prepare.encoding import Encoder, Task
from taco_jax.data.prepare.long_texts import Joiner, windows
from taco_jax.inference.loading import open_checkpoint

pytest.importorskip("tokenizers")
DOCUMENTS = [sentences(1 + i % 7, seed=i) for i in range(60)]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return tokenizer_folder(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def config(tmp_path, tokenizer):
    """One .jsonl, workers in this process."""
    write_lines(tmp_path / "a.jsonl", DOCUMENTS)
    out, source = str(tmp_path / "out"), str(tmp_path / "a.jsonl")
    return PrepareConfig((source,), out, str(tokenizer), validation=0.1, workers=1)


def write_lines(path, documents, field="text"):
    lines = "".join(
        json.dumps({"id": i, field: text}, ensure_ascii=i % 2 == 0) + "\n" for i, text in enumerate(documents)
    )
    data = lines.encode()
    packed = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstd}
    path.write_bytes(packed.get(path.suffix, bytes)(data))


def zstd(data):
    zstandard = pytest.importorskip("zstandard")
    half = len(data) // 2  # two frames
    return zstandard.compress(data[:half]) + zstandard.compress(data[half:])


def write_parquet(path, documents, field="text", group=7, kind="string"):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    column = pyarrow.array(documents, pyarrow.string())
    column = column.dictionary_encode() if kind == "dictionary" else column.cast(kind)
    table = pyarrow.table({"id": list(range(len(documents))), field: column})
    parquet.write_table(table, path, row_group_size=group)


def command_line(config, **flags):
    """Runs the command in this process. Returns its exit code."""
    flags = {"out": config.out, "tokenizer": config.tokenizer, "workers": 1} | flags
    return cli.run(
        main, [*config.sources, *(part for key, value in flags.items() for part in (f"--{key}", str(value)))]
    )


# Tokens


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".jsonl.xz", ".parquet"])
def test_each_record_is_a_document(suffix, config, tmp_path, tokenizer):
    path = tmp_path / f"b{suffix}"
    (write_parquet if suffix == ".parquet" else write_lines)(path, DOCUMENTS, "body")
    meta = prepare(dataclasses.replace(config, sources=(str(path),), text_field="body"))
    found = expected(tokenizer, DOCUMENTS, 0.1)
    assert found["train"] and found["validation"] and stored(tmp_path / "out") == found
    assert meta == json.loads((tmp_path / "out/meta.json").read_text())
    assert meta["sources"] == [{"name": str(path), "files": 1, "bytes": path.stat().st_size, "documents": 60}]
    assert meta["text_bytes"] == sum(len(text.encode()) for text in DOCUMENTS)
    assert meta["end_token"] == {"text": END, "id": 0} and meta["dtype"] == "uint16"


@pytest.mark.parametrize("kind", ["large_string", "binary", "dictionary"])
def test_parquet_columns(kind, config, tmp_path, tokenizer):
    write_parquet(tmp_path / "b.parquet", DOCUMENTS, kind=kind)
    prepare(dataclasses.replace(config, sources=(str(tmp_path / "b.parquet"),)))
    assert stored(tmp_path / "out") == expected(tokenizer, DOCUMENTS, 0.1)


def test_folders_patterns_and_texts_in_the_order_of_the_command(config, tmp_path, tokenizer, capsys):
    notes = tmp_path / "notes"
    (notes / "deep").mkdir(parents=True)
    (notes / ".hidden").mkdir()
    (notes / "b.txt").write_bytes(b"one\r\ntwo")
    (notes / "deep/a.TXT").write_bytes(b"\xef\xbb\xbfwith a mark")
    (notes / "deep/z.txt.gz").write_bytes(gzip.compress(b"gzip"))
    (notes / "a.txt.xz").write_bytes(lzma.compress("Zürich".encode()))
    (notes / "empty.txt").touch()
    (notes / ".hidden/c.txt").write_text("hidden")
    (notes / "picture.png").write_text("no text")
    os.symlink(notes, notes / "deep/loop")
    sources = (str(tmp_path / "*.jsonl"), str(notes), str(notes / "b.txt"))
    meta = prepare(dataclasses.replace(config, sources=sources, validation=0.0))
    texts = [*DOCUMENTS, "Zürich", "one\r\ntwo", "with a mark", "gzip"]
    assert stored(tmp_path / "out") == expected(tokenizer, texts, 0.0)
    assert [(row["files"], row["documents"]) for row in meta["sources"]] == [(1, 60), (5, 4), (0, 0)]
    assert meta["left_out"] == {"duplicates": 0, "empty": 1, "bad": 0}
    assert "passed over in folders: 1 files of other kinds (1 .png)" in capsys.readouterr().out


def test_shards_end_with_documents(config, tmp_path, tokenizer):
    meta = prepare(dataclasses.replace(config, shard_tokens=1000))
    files = meta["splits"]["train"]["files"]
    assert [file["name"] for file in files] == [f"train-{i:05}.bin" for i in range(len(files))] and len(files) > 3
    assert all(file["tokens"] >= 1000 for file in files[:-1])
    assert stored(tmp_path / "out") == expected(tokenizer, DOCUMENTS, 0.1)


def test_the_tokenizer_stands_beside_the_tokens(config, tmp_path, tokenizer):
    folder = shutil.copytree(tokenizer, tmp_path / "tokenizer")
    for name in ("special_tokens_map.json", "generation_config.json", "chat_template.jinja", "config.json"):
        (folder / name).write_text("{}")
    meta = prepare(dataclasses.replace(config, tokenizer=str(folder / "tokenizer.json")))
    out = tree(tmp_path / "out")
    bins = {file["name"] for split in meta["splits"].values() for file in split["files"]}
    assert {*out} - bins - {"meta.json"} == {*tree(folder)} - {"config.json"}
    assert all(out[name] == data for name, data in tree(folder).items() if name != "config.json")
    assert meta["tokenizer"] == {"file": "tokenizer.json", "sha256": hashlib.sha256(out["tokenizer.json"]).hexdigest()}


def test_wide_ids(config, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {f"w{i}": i for i in range(70_000)} | {END: 70_000}
    library = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.save(str(tmp_path / "wide.json"))
    (tmp_path / "w.txt").write_text("w1 w69999 w65536")
    options = dict(sources=(str(tmp_path / "w.txt"),), tokenizer=str(tmp_path / "wide.json"), end_token=END)
    meta = prepare(dataclasses.replace(config, validation=0.0, **options))
    assert stored(tmp_path / "out")["train"] == [1, 69_999, 65_536, 70_000]
    assert (meta["dtype"], meta["vocab_size"]) == ("uint32", 70_001)


def test_the_tokenizer_of_a_run(config, tmp_path, tokenizer, capsys):
    shutil.copytree(tokenizer, tmp_path / "run" / "model")
    prepare(dataclasses.replace(config, tokenizer=str(tmp_path / "run")))
    assert stored(tmp_path / "out") == expected(tokenizer, DOCUMENTS, 0.1)
    assert f"each document ends with {END} (id " in capsys.readouterr().out


def test_the_vocabulary_of_a_gguf_file_is_what_a_run_keeps_of_it(config, tmp_path):
    gguf_files = pytest.importorskip("gguf_files", reason="the extra gguf: pip install 'taco-jax[gguf]'")
    from taco_jax.train import model_files

    _, file = gguf_files.write("qwen3", tmp_path / "source")
    (file.parent / "config.json").write_text('{"eos_token_id": 12}')  # another model's
    meta = prepare(dataclasses.replace(config, tokenizer=str(file)))
    (tmp_path / "kept").mkdir()
    model_files._of_gguf(open_checkpoint(file), tmp_path / "kept")
    kept = {path.name: path.read_bytes() for path in (tmp_path / "kept").iterdir()}
    assert "tokenizer.json" in kept and all((tmp_path / "out" / name).read_bytes() == kept[name] for name in kept)
    eos = open_checkpoint(file).eos
    assert meta["end_token"]["id"] in eos and 12 not in eos


def test_a_model_may_lack_tokens_that_no_text_has(config, tmp_path, monkeypatch):
    """Gemma 3's tokenizer has one token more than its models of text."""
    from tokenizers import Tokenizer

    path = Path(config.tokenizer)
    path = path / "tokenizer.json" if path.is_dir() else path
    library = Tokenizer.from_file(str(path))
    size = library.get_vocab_size()
    library.add_special_tokens(["<|image|>"])
    library.save(str(path))
    monkeypatch.setattr(command, "BATCH_CHARS", 500)  # some batches, the last of which has no such id
    meta = prepare(config)
    folder = open_prepared(tmp_path / "out")
    largest = max(int(folder.stream(split)[:].max()) for split in ("train", "validation"))
    assert (folder.vocab_size, folder.largest_id, meta["largest_id"]) == (size + 1, largest, largest)
    assert len(open_data(DataConfig(train=config.out), largest + 1)[0])
    with pytest.raises(ConfigError, match=f"its tokenizer has {size + 1} ids .*model.vocab_size={largest}; use"):
        open_data(DataConfig(train=config.out), largest)


def test_special_tokens_that_a_text_spells_out(config, tmp_path, tokenizer):
    (tmp_path / "t.txt").write_text(f"before{END}behind")
    config = dataclasses.replace(config, sources=(str(tmp_path / "t.txt"),), validation=0.0)
    ids = {}
    for control in (True, False):
        out = tmp_path / str(control)
        prepare(dataclasses.replace(config, out=str(out), control_tokens=control))
        ids[control] = np.fromfile(out / "train-00000.bin", "<u2").tolist()
    assert ids[True].count(0) == 2 and ids[False].count(0) == 1 and ids[False][-1] == 0
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    assert library.decode(ids[False][:-1], skip_special_tokens=False) == f"before{END}behind"


def test_settings_of_a_training_run_in_the_tokenizer_are_dropped(config, tmp_path, tokenizer):
    folder = shutil.copytree(tokenizer, tmp_path / "tokenizer")
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.enable_truncation(5)
    library.enable_padding(length=100)
    library.save(str(folder / "tokenizer.json"))
    prepare(dataclasses.replace(config, tokenizer=str(folder)))
    assert stored(tmp_path / "out") == expected(tokenizer, DOCUMENTS, 0.1)


def test_the_held_out_part_stays_when_documents_come(config, tmp_path):
    many = [f"document number {i}" for i in range(3000)]
    write_lines(tmp_path / "a.jsonl", many)
    held = {text for text in many if text_corpus.held_out(text, 0.1)}
    assert 240 < len(held) < 360
    meta = prepare(config)
    assert meta["splits"]["validation"]["documents"] == len(held)
    assert {text for text in many if command.held_out(text_files.hash_of(text.encode()), 0.1)} == held
    assert {text for text in many if command.held_out(text_files.hash_of(text.encode()), 0.2)} > held


def test_duplicates(config, tmp_path, tokenizer):
    doubled = [text for i, text in enumerate(DOCUMENTS) for text in (text, DOCUMENTS[i // 2])]
    write_lines(tmp_path / "a.jsonl", doubled)
    meta = prepare(dataclasses.replace(config, drop_duplicates=True))
    assert stored(tmp_path / "out") == expected(tokenizer, [*dict.fromkeys(doubled)], 0.1)
    assert meta["left_out"]["duplicates"] == len(doubled) - len({*doubled})
    prepare(dataclasses.replace(config, out=str(tmp_path / "kept")))
    assert stored(tmp_path / "kept") == expected(tokenizer, doubled, 0.1)


# Long texts


@pytest.mark.parametrize("kind", text_corpus.KINDS)
def test_windows_make_the_tokens_of_the_whole_text(kind, tmp_path):
    tokenizer = (tokenizer_folder(tmp_path, kind) / "tokenizer.json").read_bytes()
    encoder = Encoder(tokenizer, end=1, dtype="uint16", control_tokens=True)
    text = sentences(600, seed=3)
    whole = encoder(Task([text])).ids.tolist()
    for window, overlap in ((4000, 600), (1300, 500)):
        joiner, ids = Joiner(None, overlap), []  # None: no window has to be encoded again
        for part in windows((text[i : i + 777] for i in range(0, len(text), 777)), window, overlap):
            ids += joiner.add(part, encoder(Task([part], overlap))).tolist()
        assert ids + joiner.finish(1).tolist() == whole
    assert len(whole) > 4000


def test_windows_that_do_not_agree_still_spell_the_text(tokenizer):
    encoder = Encoder((tokenizer / "tokenizer.json").read_bytes(), end=0, dtype="uint16", control_tokens=True)
    text = "a" * 5001 + sentences(20) + "é🙂" * 1000
    joiner, ids, redone = Joiner(lambda task: (redone.append(1), encoder(task))[1], 200), [], []
    for part in windows([text], 1000, 200):
        # A head that agrees nowhere, as of a tokenizer that looks far back.
        encoded = encoder(Task([part], 200))._replace(head=[])
        ids += joiner.add(part, encoded).tolist()
        # A run that was stopped here goes on from the window and the number.
        joined, joiner = joiner.joined, Joiner(joiner._encode, 200)
        joiner.go_on(part, encoded, joined)
    assert redone and encoder.library.decode(ids + joiner.finish(0).tolist()) == text


@pytest.mark.parametrize("suffix", [".txt", ".txt.xz"])
def test_texts_that_are_not_held_in_memory(suffix, config, tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(text_files, "WHOLE_TEXT_BYTES", 10_000)
    monkeypatch.setattr(text_files, "CHUNK_BYTES", 1009)  # characters stand across the ends of chunks
    monkeypatch.setattr(command, "WINDOW_CHARS", 3000)
    monkeypatch.setattr(command, "OVERLAP_CHARS", 500)
    text = sentences(800)
    data = ("\ufeff" + text).encode()
    (tmp_path / f"long{suffix}").write_bytes(lzma.compress(data) if suffix.endswith("xz") else data)
    config = dataclasses.replace(config, sources=(*config.sources, str(tmp_path / f"long{suffix}"), *config.sources))
    meta = prepare(config)
    found = expected(tokenizer, [*DOCUMENTS, text], 0.1)
    assert stored(tmp_path / "out") == found and meta["text_bytes"] == sum(len(t.encode()) for t in [*DOCUMENTS, text])
    # The same text as a line, which is held in memory, is the same document.
    write_lines(tmp_path / "long.jsonl", [*DOCUMENTS, text])
    prepare(dataclasses.replace(config, sources=(str(tmp_path / "long.jsonl"),), out=str(tmp_path / "line")))
    assert stored(tmp_path / "line") == found


# Workers and runs that were stopped


def test_any_number_of_workers_leaves_the_same_bytes(config, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "BATCH_CHARS", 500)
    prepare(config)
    prepare(dataclasses.replace(config, out=str(tmp_path / "three"), workers=3))
    assert tree(tmp_path / "three") == tree(tmp_path / "out")


def test_a_worker_that_ends_is_one_line_and_the_same_command_goes_on(config, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "BATCH_CHARS", 500)
    monkeypatch.setattr(command, "CHECKPOINT_SECONDS", 0)
    prepare(dataclasses.replace(config, out=str(tmp_path / "whole")))
    real = encoding.Pool.submit

    def submit(pool, task):
        if real.count == 9:
            pool._processes[0].kill()
        real.count += 1
        return submit.real(pool, task)

    submit.real, real = real, type("Count", (), {"count": 0})
    monkeypatch.setattr(encoding.Pool, "submit", submit)
    with pytest.raises(ConfigError, match="a worker process ended by signal 9; .* the same command goes on"):
        prepare(dataclasses.replace(config, workers=2))
    assert not (tmp_path / "out/meta.json").exists()
    prepare(config)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_a_full_disk_is_one_line_and_the_same_command_goes_on(config, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "BATCH_CHARS", 500)
    monkeypatch.setattr(command, "CHECKPOINT_SECONDS", 0)
    prepare(dataclasses.replace(config, out=str(tmp_path / "whole")))
    with monkeypatch.context() as full:
        real, space = output._Shard.write, iter(range(30))

        def write(shard, ids):
            if next(space, None) is None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(shard, ids)

        full.setattr(output._Shard, "write", write)
        assert command_line(config, validation=0.1) == 2
    said = f"error: --out {config.out}: cannot be written (No space left on device); the same command goes on\n"
    assert capsys.readouterr().err == said
    prepare(config)
    assert "goes on behind" in capsys.readouterr().out and tree(tmp_path / "out") == tree(tmp_path / "whole")


def killed(folder, tokenizer, places):
    source = folder / "in"
    source.mkdir()
    shutil.copytree(tokenizer, folder / "tokenizer")
    write_lines(source / "a.jsonl", [*DOCUMENTS, *DOCUMENTS[:9]])
    (source / "b.txt").write_text(sentences(900, seed=99))
    write_lines(source / "c.jsonl.gz", [sentences(5, seed=i) for i in range(50, 90)])
    with (source / "a.jsonl").open("a") as file:
        file.write('{"text": broken\n')
    command = [sys.executable, REPOSITORY / "tests/support/killed_prepare.py", folder, str(places)]
    paths = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests/support")])
    result = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=540
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


def test_killed_at_ten_places_nothing_half_written_is_taken_for_whole(tmp_path, tokenizer):
    said = killed(tmp_path, tokenizer, 10)
    went_on = [int(part.split()[0]) for part in said.split("; ")[1:]]
    assert "11 places of" in said and len(went_on) == 2 and min(went_on) >= 1, said


@pytest.mark.slow
def test_killed_at_every_place(tmp_path, tokenizer):
    print(killed(tmp_path, tokenizer, 0))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_the_command_killed_ten_times_while_it_works(workers, tmp_path, tokenizer, run_python):
    """With no hook in it: SIGKILL to the program alone, whose workers end by themselves."""
    write_lines(tmp_path / "a.jsonl", [sentences(40, seed=i) for i in range(2000)])
    arguments = ["-m", "taco_jax.prepare", "a.jsonl", "--tokenizer", tokenizer, "--workers", str(workers)]
    run_python([*arguments, "--out", "whole"], devices=None)
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    fast = "import runpy, sys; from taco_jax.data.prepare import command; command.CHECKPOINT_SECONDS = 0.05; " \
        "sys.argv = sys.argv[1:]; runpy.run_module('taco_jax.prepare', run_name='__main__')"  # fmt: skip
    goes_on = 0
    for _ in range(10):
        process = subprocess.Popen(
            [sys.executable, "-c", fast, "prepare", *map(str, arguments[2:]), "--out", "killed"],
            cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        state = tmp_path / "killed/.progress/state.json"
        before = state.read_bytes() if state.exists() else b""
        while process.poll() is None and (not state.exists() or state.read_bytes() == before):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        said = process.communicate(timeout=60)[0]
        goes_on += "goes on behind" in said
        assert (tmp_path / "killed/meta.json").exists() == (process.returncode == 0)
    assert goes_on >= 5
    run_python([*arguments, "--out", "killed"], devices=None)
    assert tree(tmp_path / "killed") == tree(tmp_path / "whole")


@pytest.mark.slow
def test_memory_does_not_grow_with_the_input(tmp_path, tokenizer, run_python):
    program = (
        "import sys; from taco_jax.config import cli; from taco_jax.data.prepare.command import main\n"
        "assert cli.run(main) == 0\n"
        "print([int(line.split()[1]) >> 10 for line in open('/proc/self/status') if line.startswith('VmHWM')])"
    )
    text, peaks = sentences(2000), {}
    for kind in ("txt", "jsonl", "parquet"):
        for times in (30, 300):
            path = tmp_path / f"{times}.{kind}"
            documents = [text[i * 97 % 50_000 :][:2000] for i in range(times * 60)]
            if kind == "txt":
                path.write_text(text * times)
            elif kind == "jsonl":
                write_lines(path, documents)
            else:
                write_parquet(path, documents, group=1 << 30)
            flags = ["--out", f"{kind}{times}", "--tokenizer", tokenizer, "--workers", "1", "--drop-duplicates"]
            said = run_python(["-c", program, path, *flags], devices=None).stdout
            peaks[kind, times] = json.loads(said.splitlines()[-1])[0]
            path.unlink()
    print(peaks, "MiB")
    assert all(peaks[kind, 300] < peaks[kind, 30] + 100 for kind in ("txt", "jsonl", "parquet")), peaks


def test_a_whole_folder_stays_as_it_is(config, tmp_path, capsys):
    prepare(config)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert command_line(config, validation=0.1) == 0
    assert "is whole already" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


# Refusals


def stopped(config):
    """Leaves an unfinished folder, behind the first documents."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "BATCH_CHARS", 500)
        patch.setattr(command, "CHECKPOINT_SECONDS", 0)
        patch.setattr(command.Display, "update", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare(config)


def stop(display, read_bytes, counts):
    if counts["documents"] > 20:
        raise KeyboardInterrupt


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    "changes,said",
    [
        ({"validation": 0.2}, "with other settings (validation 0.1 -> 0.2)"),
        ({"drop_duplicates": True}, "drop_duplicates False -> True"),
        ({"end_token": "a"}, f"end_token {END} -> a"),
        ({"sources": ("b.jsonl",)}, "sources 1 files"),
    ],
)
def test_the_folder_of_another_preparation(whole, changes, said, config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepare(config) if whole else stopped(config)
    write_lines(tmp_path / "b.jsonl", DOCUMENTS)
    before = tree(tmp_path / "out")
    with pytest.raises(ConfigError, match="use the same, or another folder") as error:
        prepare(dataclasses.replace(config, **changes))
    assert said in str(error.value) and ("a whole" if whole else "an unfinished") in str(error.value)
    assert tree(tmp_path / "out") == before


def test_an_input_that_was_changed_meanwhile(config, tmp_path):
    stopped(config)
    os.utime(tmp_path / "a.jsonl", (1, 1))
    with pytest.raises(ConfigError, match="a.jsonl was changed since this preparation began; use another folder"):
        prepare(config)


def test_a_wrong_setting_at_the_first_try_is_no_preparation(config, tmp_path, tokenizer):
    with pytest.raises(ConfigError, match="has no field 'body'"):
        prepare(dataclasses.replace(config, text_field="body"))
    prepare(config)
    assert stored(tmp_path / "out") == expected(tokenizer, DOCUMENTS, 0.1)


def test_one_process_at_a_time(config, tmp_path):
    import fcntl

    (tmp_path / "out").mkdir()
    number = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(number, fcntl.LOCK_EX)
    try:
        with pytest.raises(ConfigError, match="another process works in it"):
            prepare(config)
    finally:
        os.close(number)
    prepare(config)


def test_a_token_file_of_another_length(config, tmp_path):
    prepare(config)
    with (tmp_path / "out/train-00000.bin").open("ab") as file:
        file.write(b"\0\0")
    with pytest.raises(ConfigError, match="its token file train-00000.bin has another length"):
        prepare(config)
    (tmp_path / "out/train-00000.bin").unlink()
    with pytest.raises(ConfigError, match="its token file train-00000.bin is missing"):
        prepare(config)


@pytest.mark.parametrize("key, value", [("splits", None), ("splits", {}), ("left_out", 3), ("vocab_size", "x")])
def test_a_damaged_record_of_a_whole_folder(key, value, config, tmp_path):
    prepare(config)
    path = tmp_path / "out/meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(ConfigError, match="damaged") as error:
        prepare(config)
    assert "\n" not in str(error.value) and str(tmp_path / "out") in str(error.value)


@pytest.mark.parametrize("key, value", [("settings", None), ("position", {"file": 0}), ("closed", 3), ("counts", 3)])
def test_a_damaged_record_of_an_unfinished_folder(key, value, config, tmp_path):
    stopped(config)
    path = tmp_path / "out/.progress/state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    before = tree(tmp_path / "out")
    with pytest.raises(ConfigError, match="remove the folder") as error:
        prepare(config)
    assert "\n" not in str(error.value) and tree(tmp_path / "out") == before


LINE = json.dumps({"text": "fine"}).encode() + b"\n"
BAD_LINES = {
    b'{"text": "cut\n': "a.jsonl line 3: is no JSON (",
    b'["text"]\n': "a.jsonl line 3: must be a JSON object, not a list",
    b'{"txt": "x", "n": 1}\n': "a.jsonl line 3: has no field 'text'; it has 'txt', 'n'; --text-field names another",
    b'{"text": 5}\n': "a.jsonl line 3: its field 'text' must be a text, not int",
    b'{"text": null}\n': "a.jsonl line 3: its field 'text' must be a text, not null",
    b'{"text": "\xff"}\n': "a.jsonl line 3: byte 10 is no UTF-8 (0xff)",
    b'{"text": "\\ud800"}\n': "a.jsonl line 3: holds U+D800, half of a character",
    b"[" * 100_000 + b"\n": "a.jsonl line 3: is nested too deeply",
}  # fmt: skip


@pytest.mark.parametrize("line,said", BAD_LINES.items(), ids=[str(i) for i in range(len(BAD_LINES))])
def test_broken_lines(line, said, config, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(LINE + b"\n" + line + LINE)
    assert command_line(config, validation=0) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and error.count("\n") == 1
    assert "; --skip-bad 1 or more leaves it out" in error
    assert command_line(config, validation=0, **{"skip-bad": 1}) == 0
    error = capsys.readouterr().err
    assert error.startswith("left out: ") and said in error and error.count("\n") == 1
    meta = json.loads((tmp_path / "out/meta.json").read_text())
    assert meta["left_out"] == {"duplicates": 0, "empty": 1, "bad": 1} and meta["splits"]["train"]["documents"] == 2


def test_more_broken_lines_than_may_be_left_out(config, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(LINE + b"{\n" * 3)
    assert command_line(config, **{"skip-bad": 2}) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and "line 4" in error and "more than --skip-bad 2" in error


def test_null_and_broken_rows(config, tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = pyarrow.array(["good", None, "fine"], pyarrow.string())
    no_utf8 = pyarrow.array([b"good", b"\xff", b"fine"])
    for column, said in ((texts, "row 2: its field 'text' must be"), (no_utf8, "row 2: byte 0 is no UTF-8")):
        parquet.write_table(pyarrow.table({"text": column}), tmp_path / "b.parquet")
        one = dataclasses.replace(config, sources=(str(tmp_path / "b.parquet"),), validation=0.0)
        with pytest.raises(ConfigError, match=said):
            prepare(one)
        meta = prepare(dataclasses.replace(one, skip_bad=1))
        assert meta["splits"]["train"]["documents"] == 2 and meta["left_out"]["bad"] == 1
        shutil.rmtree(tmp_path / "out")


def cut(pack):
    return lambda data: pack(data)[:-30]


@pytest.mark.parametrize(
    "name,content,said",
    [
        (
            "b.md",
            b"text",
            "b.md: unknown kind of text file; must be .txt or .jsonl (also with .gz, .zst or .xz behind) or",
        ),
        ("b.json", b"{}", "b.json: unknown kind of text file"),
        ("b.txt", b"", "no text found (1 files, 1 empty and 0 broken documents)"),
        ("b.txt", b"abc\xffd", "b.txt: byte 3 is no UTF-8 (0xff)"),
        ("b.txt", "abc".encode("utf-16"), "b.txt: byte 0 is no UTF-8 (0xff); it looks like UTF-16; text must be UTF-8"),
        ("b.txt", b"abc\xc3", "b.txt: byte 3 is no UTF-8"),
        ("b.jsonl", b"\n \n", "no text found (1 files, 2 empty"),
        ("b.txt.gz", cut(gzip.compress), "b.txt.gz: corrupt, or cut off ("),
        ("b.jsonl.xz", cut(lzma.compress), "b.jsonl.xz: corrupt, or cut off ("),
        ("b.jsonl.zst", cut(zstd), "b.jsonl.zst: corrupt, or cut off (ends within a frame)"),
        ("b.jsonl.zst", b"no zstd", "b.jsonl.zst: corrupt, or cut off ("),
        ("b.jsonl.gz", b"no gzip", "b.jsonl.gz: corrupt, or cut off (Not a gzipped file"),
        ("b.parquet", b"no parquet", "b.parquet: corrupt ("),
        ("b.parquet", "other", "b.parquet: has no field 'text'; it has 'id', 'other'; --text-field names another"),
        ("folder", None, "no text found (there are 1 files of other kinds); text files are .txt"),
        ("empty", None, "no text found (no files)"),
        ("a.jsnl", None, "a.jsnl: no such file or folder; did you mean"),
        ("gone/x.txt", None, "gone does not exist"),
        ("*.txt", None, "*.txt: no file has such a name"),
    ],
)
def test_unusable_text(name, content, said, config, tmp_path, capsys):
    path = tmp_path / name
    if name in ("folder", "empty"):
        path.mkdir()
        (path / "x.png").touch() if name == "folder" else None
    elif content == "other":
        write_parquet(path, DOCUMENTS, "other")
    elif content is not None:
        lines = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in DOCUMENTS)
        path.write_bytes(content(lines) if callable(content) else content)
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    if name.endswith(".zst"):
        pytest.importorskip("zstandard")
    code = command_line(dataclasses.replace(config, sources=(str(path),)))
    error = capsys.readouterr().err
    assert code == 2 and error.startswith("error: ") and said in error and error.count("\n") == 1, error
    assert not (tmp_path / "out/meta.json").exists()


def test_bytes_that_are_no_utf8_in_a_long_text(config, tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "WHOLE_TEXT_BYTES", 100)
    monkeypatch.setattr(text_files, "CHUNK_BYTES", 10)
    for place in (11, 19, 20, 155):
        data = bytearray(b"\xef\xbb\xbf" + "é".encode() * 98)
        data[place] = 0x41
        with pytest.raises(UnicodeDecodeError) as whole:
            bytes(data).decode()
        (tmp_path / "b.txt").write_bytes(data)
        with pytest.raises(ConfigError, match=f"byte {whole.value.start} is no UTF-8"):
            prepare(dataclasses.replace(config, sources=(str(tmp_path / "b.txt"),)))


@pytest.mark.parametrize(
    "files,flags,said",
    [
        ({}, {}, "nothing beside it says which token ends a document"),
        ({"tokenizer_config.json": {"eos_token": "<gone>"}}, {}, "its end token '<gone>' is not in the vocabulary"),
        ({"generation_config.json": {"eos_token_id": 99_999}}, {}, "its end token 99999 is not in the vocabulary"),
        ({"config.json": []}, {}, "nothing beside it says which token ends a document"),
        ({"config.json": "{"}, {}, "config.json: is no JSON file"),
        ({}, {"end-token": "<|end|"}, "--end-token <|end|: the tokenizer has no such token; did you mean '<|end|>'?"),
        ({"tokenizer.json": {}}, {}, "is no tokenizer.json ("),
        ({"tokenizer.json": None}, {}, "tokenizer.json: cannot be read (No such file or directory)"),
    ],
)
def test_unusable_tokenizers(files, flags, said, config, tmp_path, tokenizer, capsys):
    folder = shutil.copytree(tokenizer, tmp_path / "tokenizer")
    (folder / "tokenizer_config.json").unlink()
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
        if content is None:
            (folder / name).unlink()
    assert command_line(dataclasses.replace(config, tokenizer=str(folder)), **flags) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and error.count("\n") == 1, error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "files,flags,found",
    [
        ({"tokenizer_config.json": {"eos_token": "b"}, "generation_config.json": {"eos_token_id": 5}}, {}, "b"),
        ({"tokenizer_config.json": {"eos_token": None}, "generation_config.json": {"eos_token_id": [5, 6]}}, {}, 5),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": 7}}, {}, 7),
        ({"config.json": {"text_config": {"eos_token_id": 8}}}, {}, 8),
        ({"config.json": {"eos_token_id": 8}}, {"end_token": "a"}, "a"),
    ],
)
def test_the_end_token(files, flags, found, config, tmp_path, tokenizer):
    from tokenizers import Tokenizer

    folder = shutil.copytree(tokenizer, tmp_path / "tokenizer")
    (folder / "tokenizer_config.json").unlink()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    meta = prepare(dataclasses.replace(config, tokenizer=str(folder), **flags))
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    number = found if isinstance(found, int) else library.token_to_id(found)
    assert meta["end_token"] == {"text": library.id_to_token(number), "id": number}
    assert np.fromfile(tmp_path / "out/train-00000.bin", "<u2")[-1] == number


@pytest.mark.parametrize(
    "package,name", [("pyarrow", "b.parquet"), ("zstandard", "b.txt.zst"), ("tokenizers", "a.jsonl")]
)
def test_packages_that_are_missing(package, name, config, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=rf"needs? the package {package}: pip install 'taco-jax\[data\]'"):
        prepare(dataclasses.replace(config, sources=(str(tmp_path / name),)))


@pytest.mark.parametrize(
    "flags,said",
    [
        ({"validation": 1}, "error: --validation 1.0: must be a share from 0 to below 1"),
        ({"validation": "some"}, "argument --validation: invalid float value: 'some'"),
        ({"workers": 0}, "error: --workers 0: must be at least 1"),
        ({"skip-bad": -1}, "error: --skip-bad -1: must be at least 0"),
        ({"shard-tokens": 0}, "error: --shard-tokens 0: must be at least 1"),
        ({"validation": 0.9999999}, "error: --validation 0.9999999: holds all 60 documents out"),
        ({"ouf": "x"}, "unrecognized arguments: --ouf x"),
        ({"out": __file__}, "cannot be written (File exists"),
        (
            {"out": os.path.dirname(__file__)},
            "holds other files, and no preparation; use an empty folder or another one",
        ),
    ],
)
def test_unusable_flags(flags, said, config, capsys):
    assert command_line(config, **flags) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and error.count("\n") == 1, error


def test_the_command(config, tmp_path, tokenizer, run_python):
    arguments = [tmp_path / "a.jsonl", "--out", "o", "--tokenizer", tokenizer, "--validation", "0.1", "--workers", "2"]
    result = run_python(["-m", "taco_jax.prepare", *arguments], devices=None)
    assert not result.stderr and "train: " in result.stdout and len(result.stdout.splitlines()) == 3
    assert stored(tmp_path / "o") == expected(tokenizer, DOCUMENTS, 0.1)
