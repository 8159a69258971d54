"""The text of an answer, whole and as it comes: what decode(prompt + answer) has from the prompt's last whole character
on, with an `add` for each token and a `flush` at the end."""

import itertools
import random
import time

import pytest

pytest.importorskip("tokenizers", reason="the extra inference: pip install 'taco-jax[inference]'")
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from taco_jax.inference.serving.spelling import Spelling
from taco_jax.inference.text import Tokenizer, begun, read_tokenizer

UNKNOWN = "\N{REPLACEMENT CHARACTER}"


def byte_level() -> Library:
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {s: i for i, s in enumerate(symbols)} | {"Ġâ": 256}
    library = Library(models.BPE(vocab=vocabulary, merges=[("Ġ", "â")]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    return library


def byte_fallback() -> Library:
    """As Llama 2's: what is in no word is bytes, and the space before the first word is dropped."""
    words = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyz!"]
    library = Library(models.BPE({w: i for i, w in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence(steps)
    library.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    return library


LIBRARIES = {"byte level": byte_level(), "byte fallback": byte_fallback()}


@pytest.fixture(params=LIBRARIES)
def tokenizer(request) -> Tokenizer:
    return Tokenizer(LIBRARIES[request.param])


def ids_of(tokenizer: Tokenizer, raw: bytes) -> list[int]:
    """One token a byte."""
    one = {tokenizer.bytes_of(i): i for i in range(259)}
    return [one[bytes([byte])] for byte in raw]


def streamed(tokenizer: Tokenizer, prompt: list[int], answer: list[int]) -> str:
    stream = tokenizer.stream(prompt)
    return "".join([*map(stream.add, answer), stream.flush()])


@pytest.mark.parametrize(
    "prompt, answer, expected",
    [
        (b"hi ", "a🌶b".encode(), "a🌶b"),
        (b"hi ", b"ok\xf0\x9f", "ok" + UNKNOWN),
        (b"hi ", f"ok {UNKNOWN}".encode(), "ok " + UNKNOWN),
        (b"hi ", b"ok \xff", "ok " + UNKNOWN),
        (b"hi ", b"\xff" * 10 + b"ok", UNKNOWN * 10 + "ok"),
        (b"hi ", b"ok" + b"\xff" * 10, "ok" + UNKNOWN * 10),
        (b"hi ", "é".encode() + b"\xff" + "é".encode(), f"é{UNKNOWN}é"),
        (b"hi \xf0\x9f\x8c", b"\xb6!", "🌶!"),
        ("hi 🌶".encode() + b"\xf0", b"\x9f\x8c\xb6!", "🌶!"),
        ("ไท".encode(), b"ab", "ab"),
        ("안녕".encode(), "녕".encode(), "녕"),
        (f"price: {UNKNOWN}".encode(), b" x", " x"),
        (b"hi \xff", b"a", "a"),
        (b"", "🌶".encode(), "🌶"),
    ],
)
def test_text_of_an_answer(tokenizer, prompt, answer, expected):
    assert streamed(tokenizer, ids_of(tokenizer, prompt), ids_of(tokenizer, answer)) == expected


def test_a_token_of_a_space_and_half_a_character():
    tokenizer = Tokenizer(LIBRARIES["byte level"])
    assert streamed(tokenizer, ids_of(tokenizer, b"hi"), [*ids_of(tokenizer, b"ok"), 256]) == "ok " + UNKNOWN


def test_special_tokens_after_the_prompt_s_last_character(tokenizer):
    prompt = [*ids_of(tokenizer, "I like 🌶".encode()), *[tokenizer.id_of("<s>")] * 20]
    assert streamed(tokenizer, prompt, ids_of(tokenizer, b"abc")) == "abc"


def test_any_tokens_cut_anywhere(tokenizer):
    """Of what a prompt ends with, only what begins a character is the answer's."""
    numbers, size = random.Random(0), tokenizer._tokenizer.get_vocab_size()
    raw = [i for i in range(size) if tokenizer.bytes_of(i)]
    for n in range(150):
        ids = [numbers.choice(raw) if n % 2 else numbers.randrange(size) for _ in range(numbers.randrange(1, 14))]
        whole = tokenizer.decode(ids)
        for cut in range(len(ids)):
            held = begun(b"".join(b"~" if (piece := tokenizer.bytes_of(i)) is None else piece for i in ids[:cut]))
            before = tokenizer.decode(ids[:cut])
            assert (before[:-1] if held else before) + streamed(tokenizer, ids[:cut], ids[cut:]) == whole, (ids, cut)


def test_bytes_that_are_no_characters_are_shown_as_the_library_shows_them():
    """All pairs and triples of the bytes at which the rules of UTF-8 change."""
    tokenizer = Tokenizer(LIBRARIES["byte level"])
    edges = bytes.fromhex("41 80 8f 90 9f a0 bf c1 c2 e0 e1 ed ef f0 f4 f5")
    id_of = dict(zip(edges, ids_of(tokenizer, edges)))
    for raw in itertools.chain(itertools.product(edges, repeat=2), itertools.product(edges, repeat=3)):
        ids = [id_of[byte] for byte in raw]
        assert streamed(tokenizer, [], ids) == LIBRARIES["byte level"].decode(ids)


@pytest.mark.parametrize("raw", [b"\x80", b"\xf0", b"\xff"])
def test_tokens_that_never_make_a_character(tokenizer, raw):
    """4,000 tokens give 4,000 characters in time that grows as their number does: far below the old 30 s."""
    (token,) = ids_of(tokenizer, raw)
    begin = time.process_time()
    stream = tokenizer.stream([token])
    text = "".join(stream.add(token) for _ in range(4000))
    assert time.process_time() - begin < 3
    assert text == UNKNOWN * 4000  # of a byte that begins a character the first is the prompt's, the last is held
    assert stream.flush() == (UNKNOWN if raw == b"\xf0" else "")


@pytest.mark.parametrize("setting", ["truncation", "padding"])
def test_a_tokenizer_of_a_training_run_neither_cuts_nor_fills_up(tmp_path, setting):
    library = byte_level()
    if setting == "truncation":
        library.enable_truncation(16)
    else:
        library.enable_padding(length=128, pad_id=0, pad_token="!")
    library.save(str(tmp_path / "tokenizer.json"))
    text = "The quick brown fox jumps over the lazy dog; the answer is"
    ids = read_tokenizer(tmp_path / "tokenizer.json").encode(text)
    assert ids == byte_level().encode(text).ids and len(ids) == len(text)


@pytest.mark.parametrize("text", ["a b", "ab cé!", "é", "a<s>b", "\N{SNOWMAN} x\N{SNOWMAN}", "<s>a"])
def test_tokens_of_a_prompt_stand_where_their_texts_do(tokenizer, text):
    """As `logprobs` and `echo` say: whole tokens at their texts, parts of a character at its begin."""
    spelling, ids = Spelling(tokenizer), tokenizer.encode(text)
    of_text, of_ids = (spelling.prompt(ids, given, ends=True) for given in (text, None))
    assert of_text.text == of_ids.text == text and of_text.offsets == of_ids.offsets
    begin = 0
    for token, at in zip(ids, of_ids.offsets, strict=True):
        name = spelling.name(token).text
        if name.startswith("bytes:\\x"):
            assert text[at] in "é\N{SNOWMAN} ", (name, at)
        else:
            # The space before the first word is none of the text.
            name = name if at else name.removeprefix("" if text.startswith(name) else " ")
            assert text.startswith(name, at) and at >= begin, (name, at)
        begin = at
    half = tokenizer.encode("aé")[:-1]
    assert spelling.prompt(half, None, ends=False).text == "a"
    assert spelling.prompt(half, None, ends=True).text == "a" + UNKNOWN
