"""Texts of the tests of preparation, written in every form, and the command in this process."""

import gzip
import json
import lzma

import pytest
from text_corpus import sentences

from taco_jax.config import cli
from taco_jax.data.prepare.command import main

DOCUMENTS = [sentences(1 + i % 7, seed=i) for i in range(60)]


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
