"""docs/own-text.md, as it stands: its commands from a folder of jsonl to answers, and what transformers makes of them.

The commands run in this process, on four of its emulated devices: their main functions get the words of the page.
"""

import importlib
import io
import json
import re
import shlex
import subprocess
import types
import urllib.error

import httpx
import numpy as np
import pytest
from checkpoints import MODELS, edit_json, reference_logits, save
from documents import blocks
from helpers import REPOSITORY, run_python
from served import in_thread
from text_corpus import END, byte_level, sentences

from taco_jax.config import ConfigError, cli
from taco_jax.inference import serve

torch = pytest.importorskip("torch", reason="the reference: pip install 'taco-jax[test]'")
transformers = pytest.importorskip("transformers", reason="the reference: pip install 'taco-jax[test]'")

PAGE = REPOSITORY / "docs" / "own-text.md"
LENGTH = 64  # of the page
COMMANDS = [
    shlex.split(line)
    for block in blocks(PAGE, "bash")
    for line in block.replace("\\\n", " ").splitlines()
    if line.startswith(("python -m", "curl"))
]


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    """The folder in which the commands run: a model and texts, in the page's names."""
    folder = tmp_path_factory.mktemp("user")
    model = folder / "path/to/model"
    model.mkdir(parents=True)
    tokenizer = byte_level()
    arguments = MODELS["qwen3"][1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "own", ("Qwen3", arguments | {"vocab_size": 600, "max_position_embeddings": 128}))
        save("own", model)
    tokenizer.save(str(model / "tokenizer.json"))
    edit_json(model / "config.json", eos_token_id=tokenizer.token_to_id(END))
    (model / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END})
    )
    texts = folder / "texts"
    texts.mkdir()
    documents = [sentences(12, seed) for seed in range(120)]
    for name, part in (("a.jsonl", documents[:70]), ("b.jsonl", documents[70:])):
        (texts / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    return folder


def validation_windows(folder):
    meta = json.loads((folder / "meta.json").read_text())
    (file,) = meta["splits"]["validation"]["files"]
    ids = np.fromfile(folder / file["name"], "<u2").astype(np.int64)
    return np.stack([ids[i : i + LENGTH + 1] for i in range(0, len(ids) - LENGTH, LENGTH)])


def loss_of(model, windows):
    logits = torch.as_tensor(reference_logits(model, windows[:, :-1])).double()
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.as_tensor(windows[:, 1:]).flatten()))


def call(command):
    """Runs `python -m MODULE ...` in this process."""
    assert command[:2] == ["python", "-m"]
    module = "taco_jax.train.loop" if command[2] == "taco_jax.train" else command[2]
    assert cli.run(importlib.import_module(module).main, command[3:]) == 0


def test_the_page_from_text_to_answers(user, monkeypatch, capfd):
    monkeypatch.chdir(user)
    monkeypatch.setattr(cli, "select_devices", lambda *_, **__: None)  # this process has its devices
    prepare, train, exact, export, server, curl = COMMANDS
    call(prepare)
    windows = validation_windows(user / "data/mine")
    assert len(windows) > 4

    call(train)
    said = capfd.readouterr().out
    first, last = (float(x) for x in re.findall(r"validation loss (\d+\.\d+)", said))
    source = transformers.AutoModelForCausalLM.from_pretrained(user / "path/to/model", dtype=torch.float32)
    assert first == pytest.approx(loss_of(source, windows), abs=0.02)  # compressed, in bfloat16
    assert last < first - 0.02 and "codecs: tp int8h forward, int8h backward; dp int8h" in said
    assert exact[: len(train)] == train and "none" in exact
    call(exact)
    (reached,) = (float(x) for x in re.findall(r"^validation loss (\d+\.\d+)", capfd.readouterr().out, flags=re.M))

    call(export)
    model = transformers.AutoModelForCausalLM.from_pretrained(user / "exported", dtype=torch.float32).eval()
    assert loss_of(model, windows) == pytest.approx(reached, abs=1e-3)

    from taco_jax.inference.serving import service

    assert server[:3] == ["python", "-m", "taco_jax.serve"]
    more = ["--batch", "1", "--max-length", "64", "--dtype", "float32"]  # less to compile, and the reference's type
    config = cli.parse_flags(serve.ServeConfig(), [*server[3:], *more], prog="", description="")
    served, engine = serve._start(config, service)
    engine.start()
    try:
        with in_thread(served) as url:
            assert curl[1].startswith("http://127.0.0.1:8000/") and curl[2::2][:2] == ["-H", "-d"]
            path, headers = curl[1].removeprefix("http://127.0.0.1:8000"), dict([curl[3].split(": ")])
            answer = httpx.post(url + path, content=curl[5], headers=headers, timeout=300)
    finally:
        engine.stop()
        served.chat.close()
    assert answer.status_code == 200, answer.text
    asked = json.loads(curl[5])
    tokenizer = transformers.AutoTokenizer.from_pretrained(user / "exported")
    given = tokenizer(asked["prompt"], return_tensors="pt")["input_ids"]
    greedy = model.generate(given, max_new_tokens=asked["max_tokens"], do_sample=False)[0, given.shape[1] :]
    assert answer.json()["choices"][0]["text"] == tokenizer.decode(greedy, skip_special_tokens=True) != ""


def test_the_script_says_first_what_it_needs(tmp_path):
    (tmp_path / "hide.py").write_text(
        "import importlib.util, runpy, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *more: None if name == 'torch' else find(name, *more)\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "sys.argv[1:] = ['--out', 'all']\n"
        "runpy.run_path(sys.path[0] + '/own_text.py', run_name='__main__')\n"
    )
    run = run_python([tmp_path / "hide.py", REPOSITORY / "experiments"], cwd=tmp_path, check=2)
    needs = "not installed, and needed here: pip install '.[data,inference,serve]' torch transformers"
    assert run.stderr == f"error: packages=torch: {needs}\n" and not (tmp_path / "all").exists()


@pytest.mark.slow
def test_the_script(tmp_path):
    """experiments/own_text.py itself, in processes: its table, and every command that it ran."""
    said = run_python(
        [REPOSITORY / "experiments/own_text.py", "--out", "all", "--results", "results", "--steps", "6"], cwd=tmp_path
    ).stdout
    reached = json.loads((tmp_path / "results/summary.json").read_text())
    assert reached["difference"] <= 1e-3 and reached["answer"] == reached["answer_transformers"] != ""
    assert reached["after"] < reached["before"] and reached["tokens"] > 5000
    ran = re.findall(r"^\$ (?:python -m )?(\S+)", said, flags=re.M)
    assert ran == [f"taco_jax.{name}" for name in ("prepare", "train", "train", "export", "serve")] + ["curl"]
    readme = (tmp_path / "results/README.md").read_text()
    assert f"| {reached['exact']:.4f} |" in readme and "* command: " in readme


def test_a_request_that_the_server_refuses_is_one_line(monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "experiments")
    own_text = importlib.import_module("own_text")
    body = io.BytesIO(b'{"error": {"message": "prompt: 300 tokens; at most 256 fit together"}}')

    def refuse(*_, **__):
        raise urllib.error.HTTPError("http://x", 400, "Bad Request", {}, body)

    line = io.StringIO("serving run at http://127.0.0.1:1/v1\n")
    process = types.SimpleNamespace(stdout=line, kill=lambda: None, wait=lambda *_: 0)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: process)
    monkeypatch.setattr(own_text.urllib.request, "urlopen", refuse)
    with pytest.raises(ConfigError, match="^serve: answers 400: prompt: 300 tokens; at most 256 fit together$"):
        own_text.served_answer(["--model", "run"], {"prompt": "x"})
