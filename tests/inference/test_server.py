"""The API over real sockets: answers, streams, refusals that never reach the model, clients that go away."""

import json
import socket
import threading

import numpy as np
import pytest
from helpers import until
from served import BATCH, LIMIT, LONGEST, in_thread

pytest.importorskip("httpx", reason="the client: pip install 'taco-jax[test]'")
pytest.importorskip("starlette", reason="the extra serve: pip install 'taco-jax[serve]'")
pytest.importorskip("torch", reason="writes the checkpoint: pip install 'taco-jax[test]'")
pytest.importorskip("transformers", reason="writes the checkpoint: pip install 'taco-jax[test]'")

import httpx

from taco_jax.inference.serving import app
from taco_jax.inference.serving.engine import Engine
from taco_jax.inference.serving.service import Service

QUEUE = 6
TEXTS = ["Once upon a time", "the quick brown", "é", "1 2 3 4 5 6 7 8 9"]
MESSAGES = [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": "Hi!"}]


@pytest.fixture(scope="module")
def service(generator, programs):
    engine = Engine(programs, QUEUE)
    engine.start()
    yield Service(generator, engine, "tiny", LONGEST, BATCH + QUEUE)
    engine.stop()


@pytest.fixture(scope="module")
def client(service):
    with in_thread(service) as url, httpx.Client(base_url=url, timeout=LIMIT) as client:
        yield client


@pytest.fixture(scope="module")
def expected(generator):
    """What Generator makes of TEXTS: 12 tokens each."""
    return generator.complete(TEXTS, max_tokens=12)


def _complete(client, path="completions", **body):
    return client.post(f"/v1/{path}", json=body)


def _events(client, path="completions", **body) -> list[dict]:
    """The objects of a stream, which must end with [DONE]."""
    with client.stream("POST", f"/v1/{path}", json=body | {"stream": True}) as response:
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines) and lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def _is_free(service) -> bool:
    return service.engine.counts()[1:3] == (0, 0) and service.answers == 0


def _until_free(service) -> None:
    until(lambda: _is_free(service), "the engine to be free of all jobs")


def test_prompts_of_every_kind(client, generator, expected):
    ids = [generator.encode(text) for text in TEXTS]
    options = {"model": "tiny", "max_tokens": 12, "temperature": 0}
    one = expected[:1], ids[:1]
    for prompt, texts, tokens in (
        (TEXTS[0], *one), (ids[0], *one), (TEXTS, expected, ids), (ids, expected, ids), (ids[:1], *one),
    ):  # fmt: skip
        answer = _complete(client, prompt=prompt, **options).json()
        assert [choice["text"] for choice in answer["choices"]] == texts
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
        sent = sum(map(len, tokens))
        new = 12 * len(texts)
        assert answer["usage"] == {"prompt_tokens": sent, "completion_tokens": new, "total_tokens": sent + new}
        assert (answer["object"], answer["model"], answer["id"][:5]) == ("text_completion", "tiny", "cmpl-")


def test_a_stream_is_the_answer_in_pieces(client, expected):
    body = {"prompt": TEXTS, "max_tokens": 12, "temperature": 0, "stream_options": {"include_usage": True}}
    *chunks, last = _events(client, **body)
    texts, reasons = [""] * len(TEXTS), {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert chunk["usage"] is None and choice["index"] not in reasons
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            reasons[choice["index"]] = choice["finish_reason"]
    assert texts == expected and reasons == dict.fromkeys(range(len(TEXTS)), "length")
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 12 * len(TEXTS)
    assert len(chunks) > 2 * len(TEXTS) and len({chunk["id"] for chunk in [*chunks, last]}) == 1
    assert "usage" not in _events(client, prompt="a", max_tokens=2)[0]


def test_a_chat_is_the_completion_of_its_template(client, generator):
    prompt = "<s><system>\nBe brief.\n<user>\nHi!\n<assistant>\n"
    room = LONGEST - len(generator.encode(prompt))
    want = _complete(client, prompt=prompt, max_tokens=room, temperature=0).json()["choices"][0]["text"]
    body = {"messages": MESSAGES, "temperature": 0}
    answer = _complete(client, "chat/completions", **body).json()
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": want, "refusal": None}
    assert (choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", room)
    assert answer["object"] == "chat.completion"

    chunks = _events(client, "chat/completions", **body)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(choice["delta"].get("content", "") for choice in choices) == want
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    short = _complete(client, "chat/completions", max_completion_tokens=3, **body).json()
    assert short["usage"]["completion_tokens"] == 3 and want.startswith(short["choices"][0]["message"]["content"])


def test_a_chats_template_puts_its_special_tokens_itself(client, generator, monkeypatch):
    from tokenizers.processors import TemplateProcessing

    library = generator.checkpoint.tokenizer._tokenizer
    begin = TemplateProcessing("<256> $A", special_tokens=[("<256>", 256)])
    monkeypatch.setattr(library, "post_processor", begin)
    completion = _complete(client, prompt="Hi!", max_tokens=1).json()
    assert completion["usage"]["prompt_tokens"] == len("Hi!") + 1
    chat = _complete(client, "chat/completions", messages=MESSAGES, max_completion_tokens=1).json()
    assert chat["usage"]["prompt_tokens"] == len("<s><system>\nBe brief.\n<user>\nHi!\n<assistant>\n")


def test_a_stop_string_over_several_tokens(client, service, expected):
    text = max(expected, key=len)
    at = len(text) // 2
    stop = text[at : at + 2]
    body = {"prompt": TEXTS[expected.index(text)], "max_tokens": 12, "temperature": 0, "stop": ["zzz", stop]}
    (choice,) = _complete(client, **body).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text[: text.index(stop)], "stop")
    chunks = [chunk["choices"][0] for chunk in _events(client, **body)]
    assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
    assert chunks[-1]["finish_reason"] == "stop"
    _until_free(service)


def test_a_seed_repeats_its_answer_whoever_else_asks(client):
    texts = {}

    def ask(i: int) -> None:
        seed = 11 if i % 2 else None
        body = {"prompt": TEXTS[0], "max_tokens": 12, "top_p": 0.9, "seed": seed}  # the temperature is 1
        texts[i] = httpx.post(f"{client.base_url}/v1/completions", json=body).json()["choices"][0]["text"]

    ask(-1)
    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [texts[i] for i in range(1, 8, 2)] == [texts[-1]] * 4
    assert len({texts[i] for i in range(0, 8, 2)}) > 1


def test_models_and_health(client):
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"]) == ("tiny", "model") and client.get("/v1/models/tiny").json() == model
    health = client.get("/health")
    assert health.status_code == 200 and health.json()["status"] == "ok" and health.json()["rows"] == BATCH


P = {"prompt": "a"}
M = {"messages": [{"role": "user", "content": "a"}]}
BAD = [
    ({}, "prompt", "prompt: is needed"),
    ({"prompt": ""}, "prompt", "none of them empty"),
    ({"prompt": []}, "prompt", "prompt=[]: must be a text"),
    ({"prompt": ["a", 3]}, "prompt", 'prompt=["a", 3]'),
    ({"prompt": [[1], []]}, "prompt", "none of them empty"),
    ({"prompt": [1, True]}, "prompt", "must be a text"),
    ({"prompt": {"text": "a"}}, "prompt", "must be a text"),
    ({"prompt": [1, 300]}, "prompt", "token id 300 is not in the vocabulary of 300"),
    ({"prompt": [-1]}, "prompt", "token id -1"),
    ({"prompt": [1] * LONGEST}, "prompt", "64 tokens; at most 64 fit together"),
    ({"prompt": [1] * 60, "max_tokens": 5}, "prompt", "60 tokens and 5 to answer; at most 64 fit together"),
    ({"prompt": ["a"] * 11}, "prompt", "11 prompts; at most 10 fit in the queue"),
    (P | {"max_tokens": 0}, "max_tokens", "max_tokens=0: must be an integer from 1 to 2147483647; 0 is for echo"),
    (P | {"max_tokens": 2.0}, "max_tokens", "must be an integer"),
    (P | {"max_tokens": True}, "max_tokens", "must be an integer"),
    (P | {"temperature": 2.1}, "temperature", "temperature=2.1: must be a number from 0 to 2"),
    (P | {"temperature": "hot"}, "temperature", "must be a number"),
    (P | {"temperature": 10**400}, "temperature", "must be a number"),
    (P | {"top_p": 0}, "top_p", "must be above 0"),
    (P | {"top_k": -2}, "top_k", "must be an integer from -1"),
    (P | {"seed": 2**63}, "seed", "must be an integer"),
    (P | {"stop": ["a", ""]}, "stop", "none empty"),
    (P | {"stop": ["a"] * 5}, "stop", "at most 4"),
    (P | {"stream": "yes"}, "stream", "must be true or false, not a string"),
    (P | {"stream_options": {"include_usage": True}}, "stream_options", "for stream=true only"),
    (P | {"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options", "must be"),
    (P | {"n": 2}, "n", "n=2: is not supported here"),
    (P | {"n": True}, "n", "is not supported"),
    (P | {"best_of": 2}, "best_of", "is not supported"),
    (P | {"logprobs": 21}, "logprobs", "logprobs=21: must be an integer from 0 to 20"),
    (P | {"logprobs": True}, "logprobs", "must be an integer"),
    (P | {"logprobs": 20, "max_tokens": 2**31 - 1, "echo": True}, "prompt", "1 tokens and 2147483647 to answer"),
    (P | {"echo": 1}, "echo", "must be true or false, not a number"),
    ({"prompt": [1] * 65, "max_tokens": 0, "echo": True}, "prompt", "65 tokens; at most 64 fit together"),
    (P | {"presence_penalty": 0.5}, "presence_penalty", "is not supported"),
    (P | {"logit_bias": {"3": 1}}, "logit_bias", "is not supported"),
    (P | {"max_token": 3}, "max_token", "no such field; did you mean 'max_tokens'?"),
    (P | {"x" * 1000: 3}, "x" * 60, f"{'x' * 60}: no such field"),
    ({"messages": [{"role": "user", "content": "a", "x" * 1000: 3}]}, f"messages[0].{'x' * 60}", "is not supported"),
    (P | {"model": 3}, "model", "must be a string, not a number"),
    ({"messages": []}, "messages", "at least one message"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "content=null: must be a text"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role", 'role="tool": must be one of system'),
    ({"messages": ["a"]}, "messages[0]", "must be an object"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "only parts of type"),
    ({"messages": [{"role": "developer", "content": "a"}]}, "messages", "template refuses them: no developer here"),
    (M | {"tools": [{}]}, "tools", "is not supported"),
    (M | {"logprobs": 1}, "logprobs", "must be true or false, not a number"),
    (M | {"top_logprobs": 2}, "top_logprobs", "top_logprobs=2: is for logprobs=true only"),
    (M | {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "must be an integer from 0 to 20"),
    (M | {"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens=0: must be an integer from 1"),
    (M | {"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens", "is the old name of max_completion_tokens"),
    (M | {"response_format": {"type": "json_object"}}, "response_format", "is not supported"),
]


def test_malformed_requests_never_reach_the_model(client, service):
    taken = service.engine.counts().taken
    for body, param, message in BAD:
        response = _complete(client, "chat/completions" if "messages" in body else "completions", **body)
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error"), body
        assert message in error["message"] and set(error) == {"message", "type", "param", "code"}, error
    assert service.engine.counts().taken == taken and _is_free(service)


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    "path, content, headers, status, message",
    [
        ("completions", b"{", JSON, 400, "the body is no JSON"),
        ("completions", b"", JSON, 400, "the body is no JSON"),
        ("completions", b"[1]", JSON, 400, "must be a JSON object, not an array"),
        ("completions", b'{"prompt": "\xff"}', JSON, 400, "the body is no JSON"),
        ("completions", b'{"prompt": "\\ud800"}', JSON, 400, "the body is no JSON"),
        ("completions", b'{"prompt": "a", "temperature": NaN}', JSON, 400, "NaN is no JSON"),
        ("completions", b"[" * 100_000, JSON, 400, "the body is no JSON"),
        ("completions", b'{"prompt": "a"}', {"content-type": "text/plain"}, 415, "must be application/json"),
        ("completions", b'{"prompt": "a"}', {}, 415, "must be application/json"),
        (
            "completions",
            b'{"prompt": "a", "model": "other"}',
            JSON,
            404,
            "model='other': is not served here; 'tiny' is",
        ),
        ("models/other", None, {}, 404, "model='other': is not served here; 'tiny' is"),
        ("completions", b'{"prompt": "a", "model": "%s"}' % (b"x" * 9999), JSON, 404, f"'{'x' * 100}': is not served"),
        (f"models/{'x' * 9999}", None, {}, 404, f"'{'x' * 100}': is not served"),
        ("x" * 9999, None, {}, 404, f"GET /v1/{'x' * 96}: Not Found"),
        ("completion", None, {}, 404, "GET /v1/completion: Not Found"),
        ("completions", None, {}, 405, "GET /v1/completions: Method Not Allowed"),
    ],
)
def test_what_is_no_request(client, service, path, content, headers, status, message):
    taken = service.engine.counts().taken
    response = client.request("GET" if content is None else "POST", f"/v1/{path}", content=content, headers=headers)
    assert response.status_code == status and message in response.json()["error"]["message"]
    assert service.engine.counts().taken == taken


def test_a_body_that_is_too_large(client, service, monkeypatch):
    monkeypatch.setattr(app, "MAX_BODY", 1000)
    parts = lambda: iter([b'{"prompt": "', b"a" * 2000, b'"}'])
    for content in (b"".join(parts()), parts()):  # with a length, and in chunks
        response = client.post("/v1/completions", content=content, headers=JSON)
        assert response.status_code == 413 and "more than 1000 bytes" in response.json()["error"]["message"]


def test_null_and_what_clients_send_along_is_taken(client):
    nothing = dict.fromkeys(["n", "echo", "logprobs", "suffix", "best_of", "stop", "seed", "top_p", "stream"])
    body = {"prompt": "a", "max_tokens": 2, "user": "me", "presence_penalty": 0, "n": 1, **nothing}
    assert _complete(client, **body).status_code == 200
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": "me"}]
    body = {"messages": parts, "max_tokens": 2, "tools": [], "response_format": {"type": "text"}, "store": False}
    assert _complete(client, "chat/completions", **body).status_code == 200


def _send(client, **body) -> socket.socket:
    """A request on a socket of its own."""
    raw = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n"
    )
    connection = socket.create_connection((client.base_url.host, client.base_url.port))
    connection.sendall(head.encode() + b"\r\n" + raw)
    return connection


def test_a_full_queue_is_429_and_a_client_that_goes_away_frees_its_place(client, service, gate, expected):
    in_engine = lambda: sum(service.engine.counts()[1:3])
    connections = [_send(client, prompt="a", max_tokens=60, stream=i % 2 == 0) for i in range(BATCH + QUEUE)]
    until(lambda: in_engine() == BATCH + QUEUE, "all requests to be in the engine")
    assert service.engine.counts().busy > 0
    response = _complete(client, prompt="a")
    assert response.status_code == 429 and response.headers["retry-after"] == "1"
    assert response.json()["error"]["code"] == "queue_full"

    for connection in connections[:3]:  # streams and whole answers
        connection.close()
    until(lambda: in_engine() == service.answers == BATCH + QUEUE - 3, "three clients' places to be free")
    for connection in connections:
        connection.close()
    _until_free(service)
    gate.set()
    (choice,) = _complete(client, prompt=TEXTS[0], max_tokens=12, temperature=0).json()["choices"]
    assert choice["text"] == expected[0]


def test_a_client_that_goes_away_in_the_middle_of_a_stream(client, service, programs, monkeypatch):
    step, steps, gone = programs.step, [], threading.Event()

    def held(**kind):
        """The engine goes no further than this before the client has gone."""
        steps.append(kind)
        assert len(steps) < 20 or gone.wait(LIMIT), f"limit of {LIMIT} s: waited for the client to go away"
        return step(**kind)

    monkeypatch.setattr(programs, "step", held)
    connection = _send(client, prompt="a", max_tokens=60, stream=True)
    received = b""
    while received.count(b"data: ") < 2:
        received += connection.recv(4096)
    connection.close()
    _until_free(service)
    gone.set()
    assert 2 <= len(steps) < 50  # of 59


def test_an_engine_that_fails(generator, programs, monkeypatch, capsys):
    def broken(**kind):
        raise RuntimeError("INTERNAL: a device is lost")

    monkeypatch.setattr(programs, "step", broken)
    engine = Engine(programs, QUEUE)
    service = Service(generator, engine, "tiny", LONGEST, BATCH + QUEUE)
    with in_thread(service) as url, httpx.Client(base_url=url, timeout=LIMIT) as client:
        threading.Timer(0.2, engine.start).start()
        *_, error = _events(client, prompt="a", max_tokens=9)
        assert "a device is lost" in error["error"]["message"]
        response = _complete(client, prompt="a")
        assert response.status_code == 503 and response.json()["error"]["code"] == "engine_stopped"
        health = client.get("/health")
        assert health.status_code == 503 and "a device is lost" in health.json()["status"]


def test_the_engine_is_as_it_was(client, service, expected):
    """After all of the above."""
    assert _is_free(service)
    answer = _complete(client, prompt=TEXTS, max_tokens=12, temperature=0).json()
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert np.asarray(service.engine._state.tokens).shape == (BATCH,)
