"""Text <-> token ids: a thin layer over the `tokenizers` library, which an extra brings."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from taco_jax.config import ConfigError
from taco_jax.inference.model_folder import check_size

IN_MEMORY = Path("parameters in memory")  # in the place of a model's path
CONTEXT = 8  # tokens of the prompt that a stream keeps, more where these have no text
LONGEST_CHARACTER = 4  # bytes, in UTF-8
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


def _byte_symbols() -> dict[str, int]:
    """The characters that stand for bytes in byte-level vocabularies, GPT-2's table: {"Ġ": 32, ...}."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTES = _byte_symbols()


def begun(text: bytes) -> int:
    """Returns how many bytes at the end of a text in UTF-8 begin a character that more bytes could make whole."""
    for count in range(1, min(LONGEST_CHARACTER, len(text) + 1)):
        lead = text[-count]
        if not 0x80 <= lead < 0xC0:
            length = 1 + (lead >= 0xC2) + (lead >= 0xE0) + (lead >= 0xF0) if lead <= 0xF4 else 1
            # After these a second byte has less than 0x80 to 0xBF to itself.
            least, most = {0xE0: (0xA0, 0xBF), 0xED: (0x80, 0x9F), 0xF0: (0x90, 0xBF), 0xF4: (0x80, 0x8F)}.get(
                lead, (0x80, 0xBF)
            )
            return count if count < length and (count == 1 or least <= text[1 - count] <= most) else 0
    return 0


def missing_tokenizer(model: Path) -> str:
    """Why there is no tokenizer for a model, and what would help."""
    if model == IN_MEMORY:
        return "prompt: the model came without a tokenizer, so it must be token ids; tokenizer= names a tokenizer.json"
    if not model.is_file() and not (model / "tokenizer.json").is_file():  # the folder may be one that a run has not
        return f"{model}: has no tokenizer.json, so a prompt must be token ids (generate --prompt-ids)"
    return f"{model}: text needs the package tokenizers: pip install 'taco-jax[inference]'; token ids work without it"


class Tokenizer:
    """Encodes and decodes with a `tokenizers.Tokenizer`, which is set to neither cut nor fill up what it encodes.

    Bytes that are no character are U+FFFD in text: one for each longest beginning of a character, as in Unicode's
    recommendation. (The library itself does so for byte-level vocabularies. Where tokens of single bytes stand in for
    what the vocabulary lacks, one stray byte would cost it the whole characters beside it.)
    """

    def __init__(self, tokenizer: Any):
        # A tokenizer.json may hold the settings of somebody's training run.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        kinds = _decoders(tokenizer)
        self.byte_level = kinds == ["ByteLevel"]
        names = [f"<0x{byte:02X}>" for byte in range(256)] if "ByteFallback" in kinds else []
        self._of_byte = [tokenizer.token_to_id(name) for name in names]

    @property
    def library(self) -> Any:
        """The `tokenizers.Tokenizer`."""
        return self._tokenizer

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of a text, with the special tokens that the model's own post-processor adds (a BOS, where it has one).

        special=False adds none: a chat template has put them there itself.
        """
        # As a batch: `encode` holds the interpreter's lock for all of a text: of megabytes seconds, for a whole server.
        return self._tokenizer.encode_batch([text], add_special_tokens=special)[0].ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(self._whole_characters(ids), skip_special_tokens=True)

    def id_of(self, token: str) -> int | None:
        """The id of a token by its name, such as "</s>"; None where the vocabulary lacks it."""
        return self._tokenizer.token_to_id(token)

    def bytes_of(self, token: int) -> bytes | None:
        """The bytes that a token adds to a text, none for a special one; None for text that is whole characters."""
        name = None if token in self._special else self._tokenizer.id_to_token(token)
        if name is None:
            return b""
        if self.byte_level:
            return bytes(_BYTES[c] for c in name) if all(c in _BYTES for c in name) else name.encode()
        found = _BYTE_TOKEN.fullmatch(name) if self._of_byte else None
        return bytes.fromhex(found[1]) if found else None

    def stream(self, prompt: Sequence[int]) -> ByteStream | TextStream:
        """The text of what follows a prompt."""
        return ByteStream(self, prompt) if self.byte_level else TextStream(self, prompt)

    def _whole_characters(self, ids: Sequence[int]) -> list[int]:
        """The ids, in whose runs of single bytes those that are no character are replaced by the bytes of U+FFFD."""
        if not self._of_byte or None in self._of_byte:
            return list(ids)
        out: list[int] = []
        run = bytearray()

        def close() -> None:
            out.extend(self._of_byte[byte] for byte in run.decode("utf-8", "replace").encode())
            run.clear()

        for token in ids:
            piece = self.bytes_of(token)
            if piece is None:
                close()
                out.append(token)
            else:
                run += piece
        close()
        return out


class ByteTokenizer:
    """A `Tokenizer` whose ids are bytes of UTF-8: of models that were trained on the bytes of texts. Needs no library
    but for `library`."""

    byte_level = True

    @functools.cached_property
    def library(self) -> Any:
        """The `tokenizers.Tokenizer` that does the same."""
        from tokenizers import Tokenizer as Library
        from tokenizers import decoders, models, pre_tokenizers

        library = Library(models.BPE(vocab=_BYTES, merges=[]))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        library.decoder = decoders.ByteLevel()
        return library

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")

    def id_of(self, token: str) -> int | None:
        return _BYTES.get(token)

    def bytes_of(self, token: int) -> bytes:
        return bytes([token])

    def stream(self, prompt: Sequence[int]) -> ByteStream:
        return ByteStream(self, prompt)


class ByteStream:
    """The text of tokens as they come, for byte-level vocabularies: whole characters, at the token that ends them.

    A character that the prompt begins and the answer ends is the answer's. `flush` at the end of an answer: a character
    that is not whole comes as one U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer | ByteTokenizer, prompt: Sequence[int]):
        self._bytes_of, end = tokenizer.bytes_of, b""
        for token in reversed(prompt):
            if len(end) >= LONGEST_CHARACTER:
                break
            end = tokenizer.bytes_of(token) + end
        self._held = end[len(end) - begun(end) :]

    def add(self, token: int) -> str:
        text = self._held + self._bytes_of(token)
        whole = len(text) - begun(text)
        self._held = text[whole:]
        return text[:whole].decode("utf-8", "replace")

    def flush(self) -> str:
        held, self._held = self._held, b""
        return held.decode("utf-8", "replace")


class TextStream:
    """A `ByteStream` for vocabularies whose text depends on the tokens beside it, such as SentencePiece's.

    A part is what its tokens add to the text of the part before them: the space before a text's first word, which many
    of these drop, is then the prompt's. Bytes that begin a character are held until it ends. (The library's own
    DecodeStream gives up where bytes that are no character follow a byte that is one, which any model may write.)
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self._tokenizer, self._before, self._held = tokenizer, [], _Held()
        count = CONTEXT
        while True:
            start, self._held = max(0, len(prompt) - count), _Held()
            self._before = []
            for token in prompt[start:]:
                piece = tokenizer.bytes_of(token)
                inside = start and not self._before and not self._held.tokens and piece and 0x80 <= piece[0] < 0xC0
                if piece != b"" and not inside:  # else of a character that begins before the window
                    self._before += self._held.add(token, piece)
            if start == 0 or tokenizer.decode(self._before):
                break
            count *= 2

    def add(self, token: int) -> str:
        piece = self._tokenizer.bytes_of(token)
        return "" if piece == b"" else self._text(self._held.add(token, piece))

    def flush(self) -> str:
        return self._text(self._held.rest())

    def _text(self, ready: list[int]) -> str:
        decode = self._tokenizer.decode
        new = decode([*self._before, *ready])[len(decode(self._before)) :]
        self._before = ready if new else [*self._before, *ready]
        return new


class _Held:
    """Tokens of single bytes that begin a character."""

    def __init__(self):
        self.tokens: list[int] = []
        self._bytes = b""

    def add(self, token: int, piece: bytes | None) -> list[int]:
        """The tokens whose characters are whole now, or never will be."""
        self.tokens.append(token)
        if piece is None:
            return self.rest()
        text = self._bytes + piece
        self._bytes = text[len(text) - begun(text) :]
        ready = self.tokens[: len(self.tokens) - len(self._bytes)]
        self.tokens = self.tokens[len(ready) :]
        return ready

    def rest(self) -> list[int]:
        tokens, self.tokens, self._bytes = self.tokens, [], b""
        return tokens


def _decoders(tokenizer: Any) -> list[str]:
    """The kinds of the steps by which a library's tokenizer decodes."""

    def kinds(step: dict[str, Any]) -> list[str]:
        parts = step.get("decoders") if step.get("type") == "Sequence" else None
        return [step.get("type")] if parts is None else [kind for part in parts for kind in kinds(part)]

    decoder = tokenizer.decoder
    return [] if decoder is None else kinds(json.loads(decoder.__getstate__()))


def read_tokenizer(path: Path, special: Iterable[str] = ()) -> Tokenizer | None:
    """The tokenizer.json of a model; None where there is none. special: texts that are special where they are tokens,
    as transformers reads them from the files beside it.

    Raises:
      ConfigError: the library is missing, or cannot read the file.
    """
    if not path.is_file():
        return None
    try:
        import tokenizers
    except ImportError:
        return None
    check_size(path)
    try:
        library = tokenizers.Tokenizer.from_file(str(path))
        _call_special(library, special)
        return Tokenizer(library)
    except Exception as error:  # the library raises Exception itself
        raise ConfigError(f"{path}: tokenizers cannot read it ({' '.join(str(error).split())})") from None


def _call_special(library: Any, texts: Iterable[str]) -> None:
    """Makes special tokens of those texts that are tokens, with the other flags that they have."""
    from tokenizers import AddedToken

    added = {token.content: token for token in library.get_added_tokens_decoder().values()}
    for text in texts:
        token = added.get(text)
        if library.token_to_id(text) is not None and not (token and token.special):
            flags = ("lstrip", "rstrip", "single_word", "normalized")
            kept = {flag: getattr(token, flag) for flag in flags} if token else {"normalized": False}
            library.add_special_tokens([AddedToken(text, special=True, **kept)])


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CASELESS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _Pre(NamedTuple):
    """The steps of llama.cpp for one of its names of tokenizers; the patterns are the models' own.

    ignore_merges: a word that the vocabulary has is one token, whatever the merges make of it. bos: a text gets a BOS
    where the file does not say.
    """

    split: str
    digits: bool = False
    ignore_merges: bool = False
    bos: bool = False


_LLAMA3 = _Pre(_CASELESS % "{1,3}", ignore_merges=True, bos=True)
PRE = {
    "gpt-2": _Pre(_GPT2),
    "smollm": _Pre(_GPT2, digits=True),
    "qwen2": _Pre(_CASELESS % ""),
    "deepseek-r1-qwen": _Pre(_CASELESS % ""),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}
CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's types of tokens that are matched as they stand


def byte_level_bpe(
    tokens: Sequence[str],
    merges: Sequence[str],
    types: Sequence[int],
    pre: str,
    before: Sequence[int] = (),
    after: Sequence[int] = (),
) -> Tokenizer:
    """A tokenizer of the lists that a GGUF file holds; the ids `before` and `after` are put around every text.

    Raises:
      ValueError: `pre` is not in PRE, a merge names what is no token, an id is not in the vocabulary, a list holds
        something else or has another length.
    """
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
    from tokenizers import Tokenizer as Library

    if pre not in PRE:
        raise ValueError(f"tokenizer.ggml.pre={pre!r}: must be one of {', '.join(PRE)}")
    for key, values, kind, name in (
        ("tokens", tokens, str, "texts"), ("merges", merges, str, "texts"), ("token_type", types, int, "whole numbers")
    ):  # fmt: skip
        if wrong := [value for value in values if not isinstance(value, kind)][:1]:
            raise ValueError(f"tokenizer.ggml.{key}: holds {wrong[0]!r}; must be a list of {name}")
    if len(types) != len(tokens):
        raise ValueError(f"tokenizer.ggml.token_type: has {len(types)} entries; must have {len(tokens)}, one a token")
    if wrong := [merge for merge in merges if " " not in merge][:1]:
        raise ValueError(f"tokenizer.ggml.merges: holds {wrong[0]!r}; must be two tokens with a space between")
    how, pairs = PRE[pre], [tuple(merge.split(" ", 1)) for merge in merges]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        library = Library(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=how.ignore_merges))
    except Exception as error:  # the library raises Exception itself
        raise ValueError(f"tokenizer.ggml.merges: {' '.join(str(error).split())}") from None
    split = [pre_tokenizers.Split(Regex(how.split), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    digits = [pre_tokenizers.Digits(individual_digits=True)] if how.digits else []
    library.pre_tokenizer = pre_tokenizers.Sequence([*digits, *split])
    library.decoder = decoders.ByteLevel()
    of_type = lambda kind: [token for token, t in zip(tokens, types) if t == kind]
    library.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in of_type(CONTROL)])
    library.add_tokens([AddedToken(token, special=False, normalized=False) for token in of_type(_USER_DEFINED)])
    if around := [*before, *after]:
        if not all(0 <= i < len(tokens) for i in around):
            raise ValueError(f"tokenizer.ggml: the ids {around} around every text: {len(tokens)} tokens have none such")
        names = {i: f"[{i}]" for i in around}  # names of the template's own: a token's may hold what means something
        library.post_processor = processors.TemplateProcessing(
            single=[*(names[i] for i in before), "$A", *(names[i] for i in after)],
            special_tokens=[{"id": names[i], "ids": [i], "tokens": [tokens[i]]} for i in names],
        )
    return Tokenizer(library)
