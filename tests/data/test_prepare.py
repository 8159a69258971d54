"""`python -m taco_jax.prepare`: which tokens it writes."""

import dataclasses
import gzip
import hashlib
import json
import lzma
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import text_corpus
from preparation import DOCUMENTS, write_lines, write_parquet
from text_corpus import END, expected, sentences, stored, tokenizer_folder, tree

from taco_jax.config import ConfigError, DataConfig
from taco_jax.data import open_data, open_prepared
from taco_jax.data.prepare import command, text_files
from taco_jax.data.prepare.command import prepare
from taco_jax.data.prepare.encoding import Encoder, Task
from taco_jax.data.prepare.long_texts import Joiner, windows
from taco_jax.inference.loading import open_checkpoint

pytest.importorskip("tokenizers")


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


def test_the_command(config, tmp_path, tokenizer, run_python):
    arguments = [tmp_path / "a.jsonl", "--out", "o", "--tokenizer", tokenizer, "--validation", "0.1", "--workers", "2"]
    result = run_python(["-m", "taco_jax.prepare", *arguments], devices=None)
    assert not result.stderr and "train: " in result.stdout and len(result.stdout.splitlines()) == 3
    assert stored(tmp_path / "o") == expected(tokenizer, DOCUMENTS, 0.1)
