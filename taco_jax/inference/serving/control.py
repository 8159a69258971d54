"""Control tokens (`<|im_end|>`, `</s>`) come from chat templates, never from what users write.

A tokenizer finds its control tokens wherever their text stands. In a chat that would let a user's text end its turn and
begin one of the system. So what users write is told from what the template writes:

1. `mark`: in the users' texts, before the template sees them, the first character of what is a control token, or could
   become one beside the template's text, is replaced by a private character.
2. `encode`: in the prompt that the template makes of them, the control tokens that are left are the template's. Each is
   replaced by a private token, the marks by what they stand for, and a copy of the tokenizer that takes control tokens
   as text encodes all at once, so that words are split as they are in any prompt.

Prompts without marks, which nearly all are, are encoded as they stand, by the tokenizer itself.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from taco_jax.inference.serving.engine_types import RequestError
from taco_jax.inference.text import Tokenizer

# Characters of private use: the first stand for control tokens, the rest are marks.
TOKENS, MARKS, END = 0x10F000, 0x100000, 0x10EFFF


class Marked(NamedTuple):
    """Messages, and what each mark in them stands for."""

    messages: list[dict[str, Any]]
    marks: dict[str, str]


class ControlTokens:
    """The control tokens of a tokenizer: those that it calls special, and those that end texts (`ends`)."""

    def __init__(self, tokenizer: Tokenizer, ends: Collection[int] = ()):
        self._tokenizer, self._library = tokenizer, tokenizer.library
        added = self._library.get_added_tokens_decoder()
        self._tokens = {i: token for i, token in added.items() if token.special or i in ends}
        self._texts = [token.content for token in self._tokens.values()]
        self._normalizer = self._library.normalizer
        self._unknown = getattr(self._library.model, "unk_token", None)
        self._lock, self._copy = threading.Lock(), None

    def mark(self, messages: Sequence[Mapping[str, Any]], taken: str = "") -> Marked:
        """Copies of messages in which no text of a user can be a part of a control token. taken: the template."""
        places = [(i, key, text) for i, m in enumerate(messages) for key, text in m.items() if key != "role"]
        found = {(i, key): at for i, key, text in places if (at := self._places(text))}
        copies = [dict(message) for message in messages]
        if not found:
            return Marked(copies, {})
        used = set(taken).union(*(text for _, _, text in places))
        free = (c for c in map(chr, range(MARKS, END)) if c not in used)
        marks: dict[str, str] = {}  # character -> mark
        for (i, key), at in found.items():
            characters = list(copies[i][key])
            for place in at:
                character = characters[place]
                if character not in marks:
                    marks[character] = next(free, "")
                    if not marks[character]:
                        raise RequestError("messages: all characters of private use are in them", "messages")
                characters[place] = marks[character]
            copies[i][key] = "".join(characters)
        return Marked(copies, {mark: character for character, mark in marks.items()})

    def encode(self, prompt: str, marks: Mapping[str, str]) -> list[int]:
        """The ids of what a template has made of marked messages."""
        if not marks:
            return self._tokenizer.encode(prompt, special=False)
        parts, private, end = [], [], 0
        for token, span in self._found(prompt):
            place = self._place_of(token, prompt, span, marks)
            if place is not None:
                parts.append(prompt[end : place[0]])
                private.append(self._private(token))
                end = place[1]
        restore = str.maketrans(dict(marks))
        parts = [part.translate(restore) for part in (*parts, prompt[end:])]
        text = parts[0] + "".join(token + part for token, part in zip(private, parts[1:]))
        return self._as_text(text, "".join(parts), "messages", special=False)

    def encode_text(self, text: str) -> list[int]:
        """The ids of a raw prompt as plain text, behind the BOS that the tokenizer's own post-processor may add."""
        return self._as_text(text, text, "prompt", special=True)

    def check_ids(self, ids: Iterable[int]) -> None:
        """Raises RequestError for a control token among the ids of a prompt."""
        for i in ids:
            if i in self._tokens:
                content = self._tokens[i].content
                raise RequestError(f"prompt: token id {i} is the control token {content!r}, refused here", "prompt")

    def _places(self, text: str) -> list[int]:
        """Characters of a user's text without which it has no part in any control token."""
        core = text.strip()
        if not core:
            return []
        first, places = text.index(core[0]), set()
        last = first + len(core) - 1
        normal = text if self._normalizer is None else self._normalizer.normalize_str(text)
        if any(token in text or token in normal for token in self._texts):
            places |= {_first_of_word(text, *span) for _, span in self._found(text)}
        for token in self._texts:
            shortest = min(len(core), len(token))
            if any(core.endswith(token[:n]) for n in range(1, shortest + 1)):
                places.add(last)
            if any(core.startswith(token[-n:]) for n in range(1, shortest + 1)) or core in token:
                places.add(first)
        return sorted(places)

    def _found(self, text: str) -> list[tuple[int, tuple[int, int]]]:
        """(token, its characters) of all control tokens that the tokenizer finds in a text."""
        encoding = self._library.encode_batch([text], add_special_tokens=False)[0]
        return [(i, span) for i, span in zip(encoding.ids, encoding.offsets) if i in self._tokens]

    def _place_of(self, token: int, text: str, span: tuple[int, int], marks: Collection[str]) -> tuple[int, int] | None:
        """Returns where the token's own text stands in what the tokenizer says; None where it is another's, that is
        unknown.

        The white space that a token takes along is not its own: its private token takes the same along.
        """
        content = self._tokens[token].content
        at = text.find(content, *span)
        if at >= 0:
            return at, at + len(content)
        other = not self._tokens[token].normalized or content == self._unknown
        return None if other or any(c in marks for c in text[slice(*span)]) else span

    def _private(self, token: int) -> str:
        return chr(TOKENS + list(self._tokens).index(token))

    def _as_text(self, text: str, written: str, key: str, *, special: bool) -> list[int]:
        """Ids of a text in which private tokens alone are control tokens. written: all of it but these."""
        if any(TOKENS <= ord(c) < TOKENS + len(self._tokens) for c in written if c >= chr(TOKENS)):
            raise RequestError(f"{key}: characters from U+{TOKENS:X} on are of private use, here too", key)
        copy, private = self._as_text_copy()
        encoding = copy.encode_batch([text], add_special_tokens=special)[0]
        for i, added in zip(encoding.ids, encoding.special_tokens_mask):
            if i in self._tokens and not added and self._tokens[i].content != self._unknown:
                # A model of whole words, to which the token is a word.
                raise RequestError(f"{key}: holds the control token {self._tokens[i].content!r}, refused here", key)
        return [private.get(i, i) for i in encoding.ids]

    def _as_text_copy(self) -> tuple[Any, dict[int, int]]:
        """The tokenizer that takes control tokens as text, and its private tokens' ids -> what they stand for."""
        with self._lock:
            if self._copy is None:
                import tokenizers

                copy = tokenizers.Tokenizer.from_str(self._library.to_str())
                copy.add_special_tokens([token for token in self._tokens.values() if not token.special])
                copy.encode_special_tokens = True
                like = lambda token: {k: getattr(token, k) for k in ("lstrip", "rstrip", "single_word", "normalized")}
                for i, token in self._tokens.items():
                    private = tokenizers.AddedToken(self._private(i), special=False, **like(token))
                    copy.add_tokens([private])
                self._copy = copy, {copy.token_to_id(self._private(i)): i for i in self._tokens}
            return self._copy


def _first_of_word(text: str, start: int, stop: int) -> int:
    """The first character of a token's text, without the white space that it takes along."""
    return next((at for at in range(start, stop) if not text[at].isspace()), start)
