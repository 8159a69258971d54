"""Folders, inputs, tokenizers and flags that a preparation refuses, each in one line."""

import dataclasses
import gzip
import json
import lzma
import os
import shutil
import sys

import numpy as np
import pytest
from preparation import DOCUMENTS, command_line, write_lines, write_parquet, zstd
from text_corpus import END, expected, stored, tree

from taco_jax.config import ConfigError
from taco_jax.data.prepare import command, text_files
from taco_jax.data.prepare.command import prepare

pytest.importorskip("tokenizers")


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
