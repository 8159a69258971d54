"""The commands: text on stdout as it comes, times on stderr, refusals in one line with exit code 2."""

import json
import re

import numpy as np
import pytest
from checkpoints import reference_logits, save
from helpers import make_mesh

from taco_jax import evaluate
from taco_jax.config import cli

pytest.importorskip("torch", reason="writes the checkpoint: pip install 'taco-jax[test]'")
pytest.importorskip("transformers", reason="writes the checkpoint: pip install 'taco-jax[test]'")

TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 2


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(the transformers model, its folder)."""
    folder = tmp_path_factory.mktemp("llama")
    return save("llama", folder), folder


def test_generate(model, run_python):
    command = ["-m", "taco_jax.generate", "--model", model[1], "--prompt", "Once", "upon a time", "--max-tokens", "5"]
    result = run_python([*command, "--tp", "2", "--devices", "cpu:2", "--compression", "auto", "--min-bytes", "0"])
    assert "codecs: tp int6h with error feedback\n" in result.stderr
    assert result.stdout.startswith("--- 1 of 2\nOnce") and "--- 2 of 2\nupon a time" in result.stdout
    assert re.search(r"time to first token \d+ ms .*; then [\d.]+ tokens/s, 10 tokens of 2 row", result.stderr)
    assert re.search(r"a device sends [\d.]+ MB of activations .*, [\d.]+ MB in bf16: .*, with error", result.stderr)


def test_perplexity(model, tmp_path, monkeypatch, capsys):
    make_mesh(tp=2)  # skips where there are too few devices
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    command = ["perplexity", "--model", str(model[1]), "--text", "text.txt", "--context", "32", "--tp", "2"]
    assert cli.run(evaluate.main, [*command, "--codec", "int8h", "auto", "--json", "out.json"]) == 0
    printed = capsys.readouterr().out
    measured = json.loads((tmp_path / "out.json").read_text())
    assert {codec: result["error_feedback"] for codec, result in measured.items()} == {
        "none": False, "int8h": False, "int6h": True,
    }  # fmt: skip
    assert re.search(r"int6h: .* bf16 with error feedback;", printed)

    tokens = _ids(model[1], TEXT)
    total = 0.0
    for start in range(0, len(tokens) - 1, 32):
        window = tokens[start : start + 33]
        logits = reference_logits(model[0], np.array([window[:-1]]))[0].astype(np.float64)
        total += sum(np.log(np.exp(row).sum()) - row[target] for row, target in zip(logits, window[1:]))
    assert measured["none"]["tokens"] == len(tokens) - 1 == len(TEXT.encode()) - 1
    assert measured["none"]["loss"] == pytest.approx(total / (len(tokens) - 1), rel=1e-5)
    assert measured["none"]["perplexity"] == pytest.approx(np.exp(measured["none"]["loss"]))

    compressed = measured["int8h"]
    assert 0 < abs(compressed["change"]) < 0.02 and 0.9 < compressed["agreement"] <= 1
    for site in ("layers/attn/out", "layers/mlp/down"):
        assert 38 < compressed["sites"][site]["snr_db"] < 50
        assert len(compressed["sites"][site]["snr_db_by_layer"]) == 2
        assert 8 <= compressed["sites"][site]["bits"]
    assert "int8h: loss" in printed and "same token" in printed


def _ids(folder, text: str) -> list[int]:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids


@pytest.mark.parametrize(
    "command, message",
    [
        (["generate"], "--model: is needed"),
        (["generate", "--model", "x"], "--prompt: is needed"),
        (["generate", "--modle", "x"], "unknown option --modle; did you mean --model?"),
        (["generate", "--model", "x", "--prompt", "a", "--top-p", "2"], "top_p=2.0: must be above 0"),
        (["generate", "--model", "x", "--prompt", "a"], "--model x: must be a Hugging Face folder"),
        (["evaluate"], "perplexity: is needed, for example python -m taco_jax.evaluate perplexity --help"),
        (["evaluate", "perplexty"], "'perplexty': no evaluation of that name; did you mean 'perplexity'"),
        (["evaluate", "perplexity", "--model", "x"], "--text: is needed"),
        (["evaluate", "perplexity", "--model", "x", "--text", "y", "--context", "0"], "context=0: must be at least 1"),
    ],
)
def test_refusals(command, message):
    from taco_jax.config import ConfigError, cli
    from taco_jax.inference import evaluate, generate

    main = {"generate": generate, "evaluate": evaluate}[command[0]].main
    assert callable(cli.run)
    with pytest.raises(ConfigError, match=re.escape(message)):
        main(command[1:])
