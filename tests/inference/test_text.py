"""Text that comes token by token, with tokenizers of both families."""

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("tokenizers", reason="the extra inference: pip install 'taco-jax[inference]'")
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from taco_jax.inference.text import Tokenizer

TEXT = " the xy é the\n😀 量 xythe a"


def _byte_level() -> Library:
    library = Library(
        models.BPE(vocab={s: i for i, s in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return library


def _byte_fallback() -> Library:
    """As Llama 2's: what is in no word is bytes, and the space before the first word is dropped."""
    words = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁thexya", "é"]
    library = Library(models.BPE({w: i for i, w in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence(parts)
    library.add_special_tokens(["<s>"])
    return library


@pytest.mark.parametrize("library", [_byte_level(), _byte_fallback()], ids=["byte level", "byte fallback"])
def test_a_stream_is_the_text_in_whole_characters(library):
    tokenizer = Tokenizer(library)
    ids = tokenizer.encode(TEXT)
    assert len(ids) > len(TEXT)  # some characters are several tokens
    for cut in range(len(ids)):
        before, stream = tokenizer.decode(ids[:cut]), tokenizer.stream(ids[:cut])
        parts = [stream.add(i) for i in ids[cut:]]
        assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)
        if before.endswith("\N{REPLACEMENT CHARACTER}"):  # the prompt ends within a character
            assert "".join(parts)[0] in "é😀量" and tokenizer.decode(ids).endswith("".join(parts))
        else:
            assert before + "".join(parts) == tokenizer.decode(ids)


@pytest.mark.parametrize("library", [_byte_level(), _byte_fallback()], ids=["byte level", "byte fallback"])
def test_whatever_a_model_writes(library):
    tokenizer, numbers = Tokenizer(library), random.Random(0)
    for _ in range(300):
        ids = [numbers.randrange(library.get_vocab_size()) for _ in range(30)]
        stream = tokenizer.stream([])
        text = "".join(map(stream.add, ids))
        assert len(text) <= len(tokenizer.decode(ids)) <= len(text) + 30
        if library.get_vocab_size() == 256:
            assert tokenizer.decode(ids).startswith(text)


def test_special_tokens_are_no_text_and_no_beginning():
    tokenizer = Tokenizer(_byte_fallback())
    special, space, a = (tokenizer._tokenizer.token_to_id(token) for token in ("<s>", "▁", "a"))
    stream = tokenizer.stream([special])
    assert [stream.add(i) for i in (space, a, special, space, a)] == ["", "a", "", " ", "a"]


def test_encoding_a_long_text_holds_no_other_thread_up():
    """The steps of a thread that only sleeps, while another encodes."""
    tokenizer, text = Tokenizer(_byte_level()), "x" * 1_000_000
    with ThreadPoolExecutor(1) as pool:
        encoding, steps = pool.submit(tokenizer.encode, text), 0
        while not encoding.done():
            time.sleep(0.001)
            steps += 1
    assert len(encoding.result()) == len(text)
    # One where encoding holds the interpreter from its beginning to its end, hundreds where it does not.
    assert steps >= 5
