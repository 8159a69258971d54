"""The command as a process: what it prints, signals, refusals; as a slow test, 64 clients for two minutes."""

import asyncio
import builtins
import json
import random
import re
import signal
import socket
import sys
import threading
import time

import pytest
from helpers import make_mesh, until
from served import BATCH, LIMIT, Process, save_chat_model

pytest.importorskip("httpx", reason="the client: pip install 'taco-jax[test]'")
pytest.importorskip("starlette", reason="the extra serve: pip install 'taco-jax[serve]'")
pytest.importorskip("torch", reason="writes the checkpoint: pip install 'taco-jax[test]'")
pytest.importorskip("transformers", reason="writes the checkpoint: pip install 'taco-jax[test]'")

import httpx

import taco_jax
from taco_jax.config import ConfigError
from taco_jax.inference import serve
from taco_jax.inference.serving import process

OPTIONS = ("--tp", "2", "--dtype", "float32", "--batch", str(BATCH))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    save_chat_model(folder)
    return folder


@pytest.fixture
def start(folder):
    started = []

    def start(*options):
        started.append(Process(folder, *OPTIONS, *options))
        return started[-1]

    yield start
    for server in started:
        server.kill()


class Stream:
    """Long answers for many prompts, read by a thread. text: what has come."""

    def __init__(self, url: str, prompts: int):
        self.text, self.begun = "", threading.Event()
        self.body = {"prompt": ["a"] * prompts, "max_tokens": 60, "stream": True, "ignore_eos": True}
        self.thread = threading.Thread(target=self._read, args=(url,), daemon=True)
        self.thread.start()
        assert self.begun.wait(LIMIT), f"limit of {LIMIT} s: waited for the first piece of a stream"

    def _read(self, url: str) -> None:
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=self.body, timeout=LIMIT) as response:
                for text in response.iter_text():
                    self.text += text
                    self.begun.set()
        except httpx.HTTPError as error:
            self.text += f" {type(error).__name__}"

    def whole(self) -> str:
        self.thread.join(LIMIT)
        assert not self.thread.is_alive(), f"limit of {LIMIT} s: waited for the end of a stream"
        return self.text


def _until_draining(url: str) -> None:
    until(lambda: httpx.get(f"{url}/health", timeout=LIMIT).status_code == 503, "the server to refuse what is new")


def test_sigterm_finishes_what_runs_refuses_what_is_new_and_ends_with_0(start):
    server = start("--name", "tiny")
    assert server.name == "tiny" and server.url.startswith("http://127.0.0.1:")
    with httpx.Client(base_url=server.url, timeout=LIMIT) as client:
        assert client.get("/health").status_code == 200
        stream = Stream(server.url, prompts=60)
        server.signal(signal.SIGTERM)
        _until_draining(server.url)
        refused = client.post("/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
        assert not stream.text.endswith("data: [DONE]\n\n")
    text = stream.whole()
    assert text.endswith("data: [DONE]\n\n") and text.count('"finish_reason":"length"') == 60
    status, errors = server.end()
    assert status == 0 and "SIGTERM: finishing 1 request; a second signal ends at once" in errors
    assert re.search(r"compiled in [\d.]+ s: 4 rows of 64 tokens, their cache [\d.]+ MB a device", errors)
    assert "warning" not in errors and "Traceback" not in errors


def test_a_second_signal_ends_at_once(start):
    server = start("--host", "0.0.0.0")
    stream = Stream(server.url, prompts=60)
    server.signal(signal.SIGTERM)
    _until_draining(server.url)
    server.signal(signal.SIGINT)
    status, errors = server.end()
    assert status == 128 + signal.SIGINT
    assert stream.whole().endswith("RemoteProtocolError")
    assert "warning: http://0.0.0.0:" in errors and "there is no authentication" in errors


@pytest.mark.parametrize(
    "options, message",
    [
        ([], "--model: is needed"),
        (["--modle", "x"], "unknown option --modle; did you mean --model?"),
        (["--model", "x", "--port", "70000"], "port=70000: must be at most 65535"),
        (["--model", "x", "--batch", "0"], "batch=0: must be at least 1"),
        (["--model", "x", "--batch", "99999999999"], "batch=99999999999: must be at most 65536"),
        (["--model", "x", "--queue", "-1"], "queue=-1: must be at least 0"),
        (["--model", "x", "--port", "0"], "--model x: must be a Hugging Face folder"),
        (["--model", "x", "--host", "no.such.host.invalid"], "--host no.such.host.invalid --port 8000:"),
        (["--model", "x", "--host", "no..host"], "--host no..host --port 8000:"),
        (["--model", "FOLDER", "--port", "0", "--tp", "0"], "tp=0: must be at least 1"),
        (
            ["--model", "FOLDER", "--port", "0", "--max-length", "65"],
            "max_length=65: the model's longest sequence has 64",
        ),
        (["--model", "FOLDER", "--port", "0", "--compression", "mxpf4"], "did you mean 'mxfp4'"),
    ],
)
def test_refusals(folder, options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        serve.main([str(folder) if option == "FOLDER" else option for option in options])


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port}: Address already in use; --port 0 takes a port"):
            serve.main(["--model", "x", "--port", str(port)])


def test_a_port_that_another_server_takes_while_this_one_starts():
    """Both have bound it; the one that listens first has it."""
    bound = process.bind("127.0.0.1", 0)
    with bound, process.bind("127.0.0.1", bound.getsockname()[1]) as other:
        other.listen()
        with pytest.raises(ConfigError, match=r"^http://127.0.0.1:\d+: Address already in use; --port 0 takes a port"):
            process.serve(None, None, bound, lambda: pytest.fail("it does not listen"))


def test_a_model_without_a_tokenizer(folder, tmp_path):
    for path in folder.iterdir():
        if path.name != "tokenizer.json":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(ConfigError, match="has no tokenizer.json"):
        serve.main(["--model", str(tmp_path), "--port", "0"])


def test_a_cache_that_does_not_fit(folder, monkeypatch):
    import jax

    from taco_jax.inference.serving.batch_programs import RowPrograms

    def full(self):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes.")

    monkeypatch.setattr(RowPrograms, "compile", full)
    with pytest.raises(ConfigError, match=r"batch=16, max_length=64: .* a cache of 0.2 MB .*; make them smaller"):
        serve.main(["--model", str(folder), "--port", "0"])


def test_without_the_extra(monkeypatch):
    real = builtins.__import__

    def without(name, *rest, **options):
        if name == "uvicorn":
            raise ModuleNotFoundError("No module named 'uvicorn'", name="uvicorn")
        return real(name, *rest, **options)

    for name in [name for name in sys.modules if name.startswith("taco_jax.inference.serving")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(taco_jax.inference, "serving", raising=False)  # else the package keeps what is imported anew
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=re.escape("needs the package uvicorn: pip install 'taco-jax[serve]'")):
        serve.main(["--model", "x"])


CLIENTS, SECONDS, NEW = 64, 120, 24


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_64_clients_for_two_minutes(folder, start):
    """Each client has prompts of its own, greedy ones and sampled ones; every tenth request is given up."""
    make_mesh(tp=2)
    generator = taco_jax.Generator(folder, tp=2, dtype="float32")
    numbers = random.Random(0)
    prompts = [[numbers.randrange(300) for _ in range(numbers.randrange(1, 40))] for _ in range(4 * CLIENTS)]
    greedy = generator.complete(prompts, max_tokens=NEW)
    sampled = generator.complete(prompts, max_tokens=NEW, temperature=1.0, top_p=0.9, seed=100)
    assert len({*greedy, *sampled}) > 6 * CLIENTS  # a mixed-up answer would show
    questions = [({"prompt": p, "temperature": 0}, text) for p, text in zip(prompts, greedy)]
    questions += [
        ({"prompt": p, "top_p": 0.9, "seed": 100 + i}, text) for i, (p, text) in enumerate(zip(prompts, sampled))
    ]
    server = start("--batch", "16", "--queue", "128")

    async def ask(client, body: dict, leave: bool) -> str | None:
        """The text; None where the client has left before its end."""
        if not body["stream"]:
            work = client.post("/v1/completions", json=body)
            try:
                response = await asyncio.wait_for(work, numbers.uniform(0, 0.3) if leave else None)
            except TimeoutError:
                return None
            assert response.status_code == 200, response.text
            return response.json()["choices"][0]["text"]
        text, chunks = "", numbers.randrange(5)
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return text
                if line:
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                    chunks -= 1
                if leave and chunks < 0:
                    return None
        raise AssertionError("a stream without an end")

    async def client(number: int, until: float) -> tuple[int, int]:
        """(answers, requests given up)."""
        answered = left = 0
        async with httpx.AsyncClient(base_url=server.url, timeout=LIMIT) as http:
            while time.monotonic() < until:
                question, want = numbers.choice(questions[number::CLIENTS])
                body = question | {"max_tokens": NEW, "stream": numbers.random() < 0.5}
                text = await ask(http, body, leave=numbers.random() < 0.1)
                assert text in (None, want), (body, text, want)
                answered, left = answered + (text is not None), left + (text is None)
        return answered, left

    async def all_clients() -> list[tuple[int, int]]:
        until = time.monotonic() + SECONDS
        return await asyncio.gather(*(client(number, until) for number in range(CLIENTS)))

    counted = asyncio.run(all_clients())
    assert all(answered for answered, _ in counted)
    answered, left = map(sum, zip(*counted))
    print(f"{answered} answers, {left} given up")
    assert left > answered / 30
    busy = lambda health: health["busy"] or health["waiting"]
    ask_health = lambda: httpx.get(f"{server.url}/health", timeout=LIMIT).json()
    until(lambda: not busy(ask_health()), "the rows of all clients to be free")
    health = ask_health()
    assert (health["status"], health["rows"], health["busy"], health["waiting"]) == ("ok", 16, 0, 0)
    assert answered <= health["taken"] <= answered + left
    server.signal(signal.SIGTERM)
    assert server.end()[0] == 0
