"""Tokens as texts, where they stand in a prompt, and their log-probabilities in OpenAI's forms.

    completions: {"tokens": [...], "token_logprobs": [...], "top_logprobs": [{text: value}, ...], "text_offset": [...]}
    chats:       [{"token": ..., "logprob": ..., "bytes": [...], "top_logprobs": [{"token", "logprob", "bytes"}]}, ...]

A token that is a part of a character is "bytes:\\xe2\\x80", as OpenAI writes it; an id without a text is "token_id:5".
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from taco_jax.inference.logprobs import Scores
from taco_jax.inference.text import Tokenizer

LEAST = -9999.0
"""Stands for all values below it: JSON has no -inf. OpenAI's value for "very unlikely"."""
NAMES = 1 << 17  # tokens whose texts are kept


class Name(NamedTuple):
    """A token's text, and its bytes."""

    text: str
    bytes: bytes


class Prompt(NamedTuple):
    """The ids of a prompt. text, offsets: of a request that asks for echo or logprobs, else empty. offsets: characters
    of the text before each token."""

    ids: list[int]
    text: str = ""
    offsets: Sequence[int] = ()


class Spelling:
    """Texts of a tokenizer's tokens. All methods may be called from any thread."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.name = functools.lru_cache(NAMES)(self._name)

    def _name(self, token: int) -> Name:
        raw = self._tokenizer.bytes_of(token)
        if raw is None:  # a vocabulary of texts, which drops the space before a first word: so not the first
            decode = self._tokenizer.decode
            text = decode([token, token])[len(decode([token])) :]
            return Name(text, text.encode())
        if not raw:
            text = self._tokenizer.library.id_to_token(token)
            return Name(f"token_id:{token}", b"") if text is None else Name(text, text.encode())
        try:
            return Name(raw.decode(), raw)
        except UnicodeDecodeError:
            return Name("bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw)

    def prompt(self, ids: list[int], text: str | None, *, ends: bool) -> Prompt:
        """A prompt with its text: the one that it was made of; of ids (None) their own, special tokens by name.

        ends: nothing follows. Else a character that the prompt begins is what follows' own.
        """
        stream, parts, offsets, at = self._tokenizer.stream([]), [], [], 0
        for token in ids:
            offsets.append(at)
            if self._tokenizer.bytes_of(token) == b"":
                name = self.name(token).text
                # What a tokenizer puts around every text has no place in it.
                part = stream.flush() + (name if text is None or text.startswith(name, at) else "")
            else:
                part = stream.add(token)
            parts.append(part)
            at += len(part)
        rest = stream.flush()
        if text is None:
            return Prompt(ids, "".join(parts) + (rest if ends else ""), offsets)
        if "".join(parts) + rest != text and (found := self._offsets(ids, text)):
            offsets = found
        return Prompt(ids, text, [min(offset, len(text)) for offset in offsets])

    def _offsets(self, ids: list[int], text: str) -> list[int] | None:
        """Returns where tokens begin in a text that is not what they spell: its tokenizer writes characters in another
        way, or puts a space behind a special token. None where the ids are not the library's own of this text."""
        encoding = self._tokenizer.library.encode_batch([text])[0]
        if encoding.ids != ids:
            return None
        offsets, at = [], 0
        for token, (start, _) in zip(ids, encoding.offsets):
            # A byte-level one may count no space before a word.
            start -= text[at:start].endswith(" ") and self.name(token).text.startswith(" ")
            at = max(at, start)  # what a tokenizer puts around a text is at 0
            offsets.append(at)
        return offsets

    def completion(self, tokens: Sequence[int], offsets: Sequence[int], scores: Scores, asked: int) -> dict[str, list]:
        """The object of a completion's tokens; `asked` alternatives each, and the token itself where it is no such."""
        chosen = [_value(value) for value in scores.chosen.tolist()]
        tops = []
        for token, value, best, ids in zip(tokens, chosen, scores.best.tolist(), scores.ids.tolist()):
            top: dict[str, float] = {}
            for i, other in zip(ids[:asked], best):
                top.setdefault(self.name(i).text, _value(other))
            top.setdefault(self.name(token).text, value)
            tops.append(top)
        names = [self.name(token).text for token in tokens]
        return {"tokens": names, "token_logprobs": chosen, "top_logprobs": tops, "text_offset": list(offsets)}

    def prompt_completion(self, prompt: Prompt, scores: Scores, asked: int) -> dict[str, list]:
        """The object of an echoed prompt, of whose first token nothing is known."""
        said = self.completion(prompt.ids[1:], prompt.offsets[1:], scores, asked)
        firsts = (self.name(prompt.ids[0]).text, None, None, prompt.offsets[0])
        return {key: [first, *said[key]] for key, first in zip(said, firsts, strict=True)}

    def chat(self, tokens: Sequence[int], scores: Scores, asked: int) -> list[dict[str, Any]]:
        """The entries of a chat's tokens, with exactly `asked` alternatives."""
        entry = lambda token, value: {
            "token": self.name(token).text, "logprob": _value(value), "bytes": list(self.name(token).bytes),
        }  # fmt: skip
        rows = zip(tokens, scores.chosen.tolist(), scores.best.tolist(), scores.ids.tolist())
        return [
            entry(token, value) | {"top_logprobs": [entry(*each) for each in zip(ids[:asked], best)]}
            for token, value, best, ids in rows
        ]


def joined(parts: Iterable[dict[str, list] | list | None]) -> dict[str, list] | list | None:
    """Several of the above, one behind the other; None of none."""
    parts = [part for part in parts if part is not None]
    if not parts:
        return None
    if isinstance(parts[0], list):
        return [entry for part in parts for entry in part]
    return {key: [value for part in parts for value in part[key]] for key in parts[0]}


def _value(value: float) -> float:
    return max(value, LEAST)
