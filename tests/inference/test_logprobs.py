"""Log-probabilities of prompts and answers, over the API: each beside transformers' and beside `evaluate perplexity`'s;
the forms of OpenAI's objects, whole and streamed."""

import json
import threading

import jax
import numpy as np
import pytest
from checkpoints import reference_logits
from served import BATCH, LIMIT, LONGEST, in_thread

import taco_jax

pytest.importorskip("torch", reason="the reference: pip install 'taco-jax[test]'")
pytest.importorskip("transformers", reason="the reference: pip install 'taco-jax[test]'")
pytest.importorskip("httpx", reason="the client: pip install 'taco-jax[test]'")
pytest.importorskip("starlette", reason="the extra serve: pip install 'taco-jax[serve]'")

import httpx
import transformers

from taco_jax.inference.perplexity import Evaluation
from taco_jax.inference.serving import service as services
from taco_jax.inference.serving.batch_programs import RowPrograms
from taco_jax.inference.serving.engine import Engine
from taco_jax.inference.serving.service import Service
from taco_jax.inference.serving.spelling import Spelling

QUEUE = 8
RANDOM = np.random.default_rng(8)
IDS = [RANDOM.integers(0, 300, length).tolist() for length in (1, 2, 31, 33, 64)]
TEXT = "Once upon a time, in a café"
KEYS = ["tokens", "token_logprobs", "top_logprobs", "text_offset"]


class Server:
    """One model behind the API. reference(ids): log-probabilities float64[len(ids), vocabulary] of transformers."""

    def __init__(self, generator, programs, url: str):
        self.generator, self.programs = generator, programs
        self.http = httpx.Client(base_url=url, timeout=LIMIT)
        self._model = transformers.LlamaForCausalLM.from_pretrained(generator.checkpoint.path)
        self.name = Spelling(generator.checkpoint.tokenizer).name

    def ask(self, path="completions", **body) -> dict:
        response = self.http.post(f"/v1/{path}", json={"temperature": 0} | body)
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, path="completions", **body) -> list[dict]:
        response = self.http.post(f"/v1/{path}", json={"temperature": 0, "stream": True} | body)
        lines = [line for line in response.text.splitlines() if line]
        assert lines.pop() == "data: [DONE]"
        return [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]

    def reference(self, ids: list[int]) -> np.ndarray:
        logits = reference_logits(self._model, np.array([ids]))[0].astype(np.float64)
        return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def _serve(generator, programs):
    """(the engine, its server); compiled: the threads that have compiled a program since."""
    engine, program = Engine(programs, QUEUE), programs._program
    engine.compiled = []

    def noted(key, *rest, **options):
        if key not in programs._compiled:
            engine.compiled.append(threading.current_thread().name)
        return program(key, *rest, **options)

    programs._program = noted
    engine.start()
    return engine, in_thread(Service(generator, engine, "tiny", LONGEST, BATCH + QUEUE))


@pytest.fixture(scope="module")
def two(generator, programs):
    """On two devices."""
    engine, running = _serve(generator, programs)
    with running as url:
        server = Server(generator, programs, url)
        server.compiled = engine.compiled
        yield server
    engine.stop()
    del programs._program


@pytest.fixture(scope="module")
def one(generator):
    """On one."""
    alone = taco_jax.Generator(generator.checkpoint, tp=1, dtype="float32")
    programs = RowPrograms(alone.config, alone.settings, alone.mesh, alone.programs.params, BATCH, LONGEST)
    engine, running = _serve(alone, programs)
    with running as url:
        yield Server(alone, programs, url)
    engine.stop()


@pytest.fixture
def server(request):
    return request.getfixturevalue(request.param)


def _check(said: dict, ids: list[int], want: np.ndarray, server: Server, asked: int, first: int = 1) -> None:
    """All values of the tokens ids[first:], which are in `said` from its place `first` on (1: of an echo)."""
    assert list(said) == KEYS and {len(values) for values in said.values()} == {len(ids)}
    assert said["tokens"] == [server.name(i).text for i in ids]
    for at in range(first, len(ids)):
        row, top = want[at - 1], said["top_logprobs"][at]
        assert abs(said["token_logprobs"][at] - row[ids[at]]) < 1e-4
        likeliest = np.argsort(-row)[:asked]
        assert list(top)[:asked] == [server.name(i).text for i in likeliest]
        np.testing.assert_allclose(list(top.values())[:asked], row[likeliest], rtol=0, atol=1e-4)
        assert set(top) == {server.name(i).text for i in [*likeliest, ids[at]]}
        assert top[server.name(ids[at]).text] == said["token_logprobs"][at]


@pytest.mark.parametrize("server, asked", [("one", 5), ("two", 1)], indirect=["server"])
def test_prompts_of_ids_equal_transformers(server, asked):
    prompts = IDS[:3]
    answer = server.ask(prompt=prompts, max_tokens=1, logprobs=asked, echo=True)
    new = len(prompts)
    assert answer["usage"] == {
        "prompt_tokens": sum(map(len, prompts)), "completion_tokens": new, "total_tokens": sum(map(len, prompts)) + new,
    }  # fmt: skip
    for ids, choice in zip(prompts, answer["choices"], strict=True):
        want, said = server.reference(ids), choice["logprobs"]
        whole = [*ids, int(np.argmax(want[-1]))]
        _check(said, whole, want, server, asked)
        assert said["token_logprobs"][0] is None and said["top_logprobs"][0] is None
        assert choice["finish_reason"] == "length"
        # Equal bit for bit where the token is the likeliest, as lm-eval asks.
        assert said["token_logprobs"][-1] == max(said["top_logprobs"][-1].values())


def test_a_prompt_alone_as_long_as_the_longest_sequence(two):
    (choice,) = two.ask(prompt=IDS[4], max_tokens=0, logprobs=20, echo=True)["choices"]
    _check(choice["logprobs"], IDS[4], two.reference(IDS[4]), two, asked=20)
    assert choice["finish_reason"] == "length"
    answer = two.ask(prompt=TEXT, max_tokens=0, logprobs=0, echo=True)
    ids = two.generator.encode(TEXT)
    _check(answer["choices"][0]["logprobs"], ids, two.reference(ids), two, asked=0)
    assert answer["choices"][0]["text"] == TEXT and answer["usage"]["completion_tokens"] == 0
    assert two.ask(prompt=TEXT, max_tokens=0, echo=True)["choices"][0] == {
        "index": 0, "text": TEXT, "logprobs": None, "finish_reason": "length",
    }  # fmt: skip


def test_answers_equal_transformers(two):
    (choice,) = two.ask(prompt=IDS[2], max_tokens=9, logprobs=3, temperature=1, seed=4)["choices"]
    (whole,) = two.ask(prompt=IDS[2], max_tokens=9, logprobs=3, temperature=1, seed=4, echo=True)["choices"]
    said = whole["logprobs"]
    names = {two.name(i).text: i for i in range(300)}
    ids = [*IDS[2], *(names[name] for name in said["tokens"][len(IDS[2]) :])]
    assert len(ids) == len(IDS[2]) + 9
    _check(said, ids, two.reference(ids), two, asked=3)
    assert whole["text"].endswith(choice["text"])
    tail = {key: values[len(IDS[2]) :] for key, values in said.items()}
    np.testing.assert_allclose(tail.pop("token_logprobs"), choice["logprobs"]["token_logprobs"], atol=1e-5)
    assert {key: tail[key] for key in ("tokens", "text_offset")} == {
        key: choice["logprobs"][key] for key in ("tokens", "text_offset")
    }


@pytest.mark.parametrize("compression", [None, pytest.param("int8h", marks=pytest.mark.slow), "int4h"])
def test_a_prompt_equals_what_evaluate_says(two, compression):
    """Compressed too, with what the sums lost fed back (int4h): at every position, as there."""
    ids = RANDOM.integers(0, 300, 33).tolist()
    if compression is None:
        generator, programs = two.generator, two.programs
    else:
        generator = taco_jax.Generator(two.generator.checkpoint, tp=2, dtype="float32", compression=compression)
        programs = RowPrograms(
            generator.config, generator.settings, generator.mesh, generator.programs.params, 1, LONGEST
        )
    want = Evaluation(generator.config, generator.mesh, generator.programs.params, ids, 32).score(generator.settings)
    insert = programs.insert(32, top=1, whole=True)
    state, cache = programs.empty()
    tokens = np.array([ids[:32]], np.int32), np.array([32, 0], np.int32), jax.tree.map(lambda a: a[:1], state.rows)
    *_, scores = insert(programs.params, state, cache, *programs.put(tokens))
    np.testing.assert_allclose(scores.prompt.chosen[:31], -want.nll[:31], atol=1e-5)
    assert np.asarray(scores.prompt.ids)[:31, 0].tolist() == want.best[:31].tolist()
    reference = two.reference(ids[:32])
    exact = np.abs(-want.nll[:31] - reference[np.arange(31), ids[1:32]]).max() < 1e-4
    assert exact == (compression is None)


def test_others_go_on_beside_prompts_that_are_scored(two):
    from concurrent.futures import ThreadPoolExecutor

    plain = {"prompt": IDS[1], "max_tokens": 40}
    scored = {"prompt": IDS[3], "max_tokens": 3, "logprobs": 2, "echo": True}
    alone = two.ask(**plain)["choices"], two.ask(**scored)["choices"]
    # The engine's thread compiles nothing: nobody waits for a program but who asks for it.
    assert two.compiled and "engine" not in two.compiled
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda i: two.ask(**(scored if i % 2 else plain))["choices"], range(12)))
    assert answers[::2] == [alone[0]] * 6
    for (answer,) in answers[1::2]:
        assert answer["text"] == alone[1][0]["text"]
        got, want = (each["logprobs"]["token_logprobs"][1:] for each in (answer, alone[1][0]))
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_a_stream_has_the_same_in_pieces(two):
    for body in (
        {"prompt": [TEXT, "é"], "max_tokens": 6, "logprobs": 2, "echo": True},
        {"prompt": IDS[1:3], "max_tokens": 6, "logprobs": 2},
        {"prompt": IDS[1:3], "max_tokens": 6, "echo": True},
        {"prompt": IDS[1:3], "max_tokens": 0, "logprobs": 2, "echo": True},
    ):
        whole = two.ask(**body)["choices"]
        pieces = two.stream(**body)
        for i, choice in enumerate(whole):
            own = [piece for piece in pieces if piece["index"] == i]
            assert "".join(piece["text"] for piece in own) == choice["text"]
            assert own[-1]["finish_reason"] == choice["finish_reason"]
            if "logprobs" not in body:
                assert choice["logprobs"] is None and all(piece["logprobs"] is None for piece in own)
                continue
            for key in KEYS:
                assert [value for piece in own for value in piece["logprobs"][key]] == choice["logprobs"][key]


def test_offsets_are_where_tokens_begin_in_the_text(two):
    """Whole characters: the parts of one stand at its begin; special ids have their names."""
    for prompt in (TEXT, [*two.generator.encode(TEXT), 299, 65]):
        (choice,) = two.ask(prompt=prompt, max_tokens=4, logprobs=2, echo=True)["choices"]
        said, text = choice["logprobs"], choice["text"]
        assert text.startswith(TEXT)
        for name, at in zip(said["tokens"], said["text_offset"], strict=True):
            assert name.startswith("bytes:\\x") or text.startswith(name, at), (name, at)
        assert said["text_offset"] == sorted(said["text_offset"])
        parts = [i for i, name in enumerate(said["tokens"]) if name in ("bytes:\\xc3", "bytes:\\xa9")][:2]
        assert [text[said["text_offset"][i]] for i in parts] == ["é", "é"]
        (alone,) = two.ask(prompt=prompt, max_tokens=4, logprobs=2)["choices"]
        assert alone["logprobs"]["text_offset"] == said["text_offset"][-4:]


def test_texts_of_special_tokens_and_of_what_a_tokenizer_puts_around(two, monkeypatch):
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.processors import TemplateProcessing

    from taco_jax.inference.text import Tokenizer as Wrapped

    library = Tokenizer.from_str(two.generator.checkpoint.tokenizer.library.to_str())
    library.add_special_tokens([AddedToken("<256>", special=True)])
    library.post_processor = TemplateProcessing("<256> $A", special_tokens=[("<256>", 256)])
    tokenizer = Wrapped(library)
    spelling = Spelling(tokenizer)
    assert (spelling.name(256).text, spelling.name(999).text) == ("<256>", "token_id:999")
    for text in ("Hi", "a<256>b"):
        prompt = spelling.prompt(tokenizer.encode(text), text, ends=True)
        assert prompt.text == text
        assert prompt.offsets == ([0, 0, 1] if text == "Hi" else [0, 0, 1, 6])
    ids = spelling.prompt(tokenizer.encode("Hi"), None, ends=True)
    assert (ids.text, ids.offsets) == ("<256>Hi", [0, 5, 6])
    half = tokenizer.encode("é")[1:2]
    assert [spelling.prompt(half, None, ends=ends).text for ends in (True, False)] == ["\ufffd", ""]


def test_offsets_where_a_tokenizer_writes_a_text_in_another_way():
    """Composed characters, and spaces behind special tokens: those of the text are counted."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    from taco_jax.inference.text import Tokenizer as Wrapped

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {name: i for i, name in enumerate([*alphabet, "Ġt", "<s>"])}
    library = Tokenizer(models.BPE(vocab=vocab, merges=[("Ġ", "t")]))
    library.normalizer = normalizers.NFC()
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder, library.post_processor = decoders.ByteLevel(), processors.ByteLevel(trim_offsets=True)
    tokenizer = Wrapped(library)
    text = "e\u0301 to"  # two characters that are one to the model, of two bytes
    prompt = Spelling(tokenizer).prompt(tokenizer.encode(text), text, ends=True)
    assert (prompt.text, prompt.offsets) == (text, [0, 0, 2, 4])

    vocab = {name: i for i, name in enumerate(["<unk>", "<s>", "▁", "a", "b", "▁b"])}
    library = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "b")], unk_token="<unk>"))
    library.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    library.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = Wrapped(library)
    text = "a<s>b<s>ab b"
    ids = tokenizer.encode(text)
    prompt = Spelling(tokenizer).prompt(ids, text, ends=True)
    names = [library.id_to_token(i) for i in ids]
    assert names == ["<s>", "▁", "a", "<s>", "▁b", "<s>", "▁", "a", "b", "▁b"]
    assert (prompt.text, prompt.offsets) == (text, [0, 0, 0, 1, 4, 5, 8, 8, 9, 10])


@pytest.mark.slow
def test_chats(two):
    body = {"messages": [{"role": "user", "content": "Hi!"}], "max_completion_tokens": 7}
    ask = lambda **more: two.ask("chat/completions", **body, **more)["choices"][0]
    choice = ask(logprobs=True, top_logprobs=3)
    ids = two.generator.encode("<s><user>\nHi!\n<assistant>\n")
    entries = choice["logprobs"]["content"]
    assert choice["logprobs"]["refusal"] is None and len(entries) == 7
    raw = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert raw.decode("utf-8", "replace") == choice["message"]["content"]
    for entry in entries:
        row = two.reference(ids)[-1]
        best = np.argsort(-row)[:3]
        assert [each["token"] for each in entry["top_logprobs"]] == [two.name(i).text for i in best]
        np.testing.assert_allclose([each["logprob"] for each in entry["top_logprobs"]], row[best], atol=1e-4)
        assert (entry["token"], entry["logprob"]) == tuple(entry["top_logprobs"][0][k] for k in ("token", "logprob"))
        ids.append(int(best[0]))
    assert ask(logprobs=False)["logprobs"] is None
    assert {tuple(entry["top_logprobs"]) for entry in ask(logprobs=True)["logprobs"]["content"]} == {()}
    pieces = two.stream("chat/completions", **body, logprobs=True, top_logprobs=3)
    streamed = [entry for piece in pieces if piece["logprobs"] for entry in piece["logprobs"]["content"]]
    assert streamed == entries


def test_tokens_of_an_answer_that_ends_early(two, monkeypatch):
    (free,) = two.ask(prompt=TEXT, max_tokens=8, logprobs=2)["choices"]
    names = free["logprobs"]["tokens"]
    ids = {two.name(i).text: i for i in range(300)}
    place = next(i for i in range(2, 8) if names[i] not in names[:i])
    monkeypatch.setitem(vars(two.generator.checkpoint), "eos", frozenset([ids[names[place]]]))
    answer = two.ask(prompt=TEXT, max_tokens=8, logprobs=2)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop" and choice["logprobs"]["tokens"] == names[: place + 1]
    assert answer["usage"]["completion_tokens"] == place + 1


def test_more_values_than_an_answer_holds(two, monkeypatch):
    monkeypatch.setattr(services, "MOST_VALUES", 400)
    ask = lambda **more: two.http.post("/v1/completions", json={"prompt": [IDS[2]] * 4, "logprobs": 2} | more)
    assert ask(max_tokens=2).status_code == 200
    error = ask(max_tokens=8, echo=True).json()["error"]
    assert error["param"] == "logprobs"
    assert "156 tokens would have 3 values each; an answer has at most 400" in error["message"]
