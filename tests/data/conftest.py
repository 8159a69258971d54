"""What the tests of preparation share. The tokenizer comes with the extra `test`, so late."""

import pytest


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    from text_corpus import tokenizer_folder

    return tokenizer_folder(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def config(tmp_path, tokenizer):
    """One .jsonl, workers in this process."""
    from preparation import DOCUMENTS, write_lines

    from taco_jax.data.prepare.command import PrepareConfig

    write_lines(tmp_path / "a.jsonl", DOCUMENTS)
    out, source = str(tmp_path / "out"), str(tmp_path / "a.jsonl")
    return PrepareConfig((source,), out, str(tokenizer), validation=0.1, workers=1)
