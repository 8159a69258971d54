"""EleutherAI's harness against the server: experiments/lm_eval_server.py on a tiny model, with the package lm-eval."""

import json
import os
import subprocess
import sys

import pytest
from helpers import REPOSITORY

pytest.importorskip("lm_eval", reason="the harness: pip install 'taco-jax[lm-eval]'")
pytest.importorskip("aiohttp", reason="the harness's client: pip install 'taco-jax[lm-eval]'")
pytest.importorskip("starlette", reason="the extra serve: pip install 'taco-jax[serve]'")

from served import save_chat_model

QUESTIONS, PASSAGES = 3, 2


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_harness_says_the_same_of_the_server_and_of_its_own_model(tmp_path):
    """Of token ids on one device and two, of texts, and nearly of compressed sums."""
    save_chat_model(tmp_path / "model", longest=256)
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<256>", "eos_token": "<257>"}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(described))
    command = [sys.executable, str(REPOSITORY / "experiments/lm_eval_server.py"), "--model", str(tmp_path / "model")]
    command += ["--out", str(tmp_path / "out"), "--runs", "1,2,1:none:text,2:int8h", "--words", "60"]
    command += ["--questions", str(QUESTIONS), "--passages", str(PASSAGES), "--window", "256", "--commit", "x"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads((tmp_path / "out" / "summary.json").read_text())
    hf = results["hf"]
    assert {task: len(values) for task, values in hf["log_likelihoods"].items()} == {
        "next_words": 4 * QUESTIONS, "passages": PASSAGES,
    }  # fmt: skip
    assert len({round(value, 3) for value in hf["log_likelihoods"]["next_words"]}) == 4 * QUESTIONS
    for run in ("1", "2", "1:none:text"):
        apart = results[run]["apart"]
        assert set(apart) == ({"next_words"} if "text" in run else {"next_words", "passages"})
        for of_task in apart.values():
            assert of_task["largest"] < 1e-3 and of_task["greedy_differs"] == 0, (run, apart)
        assert results[run]["metrics"]["next_words"]["acc"] == hf["metrics"]["next_words"]["acc"]
    assert 1e-3 < results["2:int8h"]["apart"]["passages"]["largest"] < 1
    assert "| `2:int8h` | " in (tmp_path / "out" / "README.md").read_text()
