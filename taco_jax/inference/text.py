"""Text <-> token ids: a thin layer over the `tokenizers` library, which an extra brings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from taco_jax.config import ConfigError

IN_MEMORY = Path("parameters in memory")  # in the place of a model's path
CONTEXT = 4  # tokens of the prompt: as long as a character can be


def missing_tokenizer(model: Path) -> str:
    """Why there is no tokenizer for a model, and what would help."""
    if model == IN_MEMORY:
        return "prompt: the model came without a tokenizer, so it must be token ids; tokenizer= names a tokenizer.json"
    if model.is_dir() and not (model / "tokenizer.json").is_file():
        return f"{model}: has no tokenizer.json, so a prompt must be token ids"
    return f"{model}: text needs the package tokenizers: pip install 'taco-jax[inference]'; token ids work without it"


class Tokenizer:
    """Encodes and decodes with a `tokenizers.Tokenizer`."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

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
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def stream(self, prompt: Sequence[int]) -> Stream:
        """The text of what follows a prompt."""
        return Stream(self, prompt)


class Stream:
    """The text of tokens as they come: each part is held back until its characters are whole.

    A part is what its tokens add to the text of the part before them. (The library's own DecodeStream gives up where
    bytes that are no character follow a byte that is one, which any model may write.)
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self._decode, self._before, self._held = tokenizer.decode, [], []
        # Some tokenizers drop the space before a text's first word: let that be the prompt's.
        for token in prompt[-CONTEXT:]:
            self.add(token)

    def add(self, token: int) -> str:
        self._held.append(token)
        text = self._decode([*self._before, *self._held])
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        new = text[len(self._decode(self._before)) :]
        if new:  # else they are special tokens, beside which the next word would be a text's first
            self._before = self._held
        self._held = []
        return new


def read_tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer.json of a model; None where there is none.

    Raises:
      ConfigError: the library is missing, or cannot read the file.
    """
    if not path.is_file():
        return None
    try:
        import tokenizers
    except ImportError:
        return None
    try:
        return Tokenizer(tokenizers.Tokenizer.from_file(str(path)))
    except Exception as error:  # the library raises Exception itself
        raise ConfigError(f"{path}: tokenizers cannot read it ({' '.join(str(error).split())})") from None


# How a text is split before byte-level BPE, by llama.cpp's names of tokenizers; the patterns are the models' own.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CASELESS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {"gpt-2": _GPT2, "smollm": _GPT2, "qwen2": _CASELESS % "", "llama-bpe": _CASELESS % "{1,3}"}
_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's types of tokens that are matched as they stand


def byte_level_bpe(
    tokens: Sequence[str], merges: Sequence[str], types: Sequence[int], pre: str, bos: int | None
) -> Tokenizer:
    """A tokenizer of the lists that a GGUF file holds; `bos` is put before every text.

    Raises:
      ValueError: `pre` is a way of splitting that is not known here.
    """
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
    from tokenizers import Tokenizer as Library

    if pre not in _SPLITS:
        raise ValueError(f"tokenizer.ggml.pre={pre!r}: must be one of {', '.join(_SPLITS)}")
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    library = Library(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    split = [pre_tokenizers.Split(Regex(_SPLITS[pre]), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    digits = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
    library.pre_tokenizer = pre_tokenizers.Sequence([*digits, *split])
    library.decoder = decoders.ByteLevel()
    of_type = lambda kind: [token for token, t in zip(tokens, types) if t == kind]
    library.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in of_type(_CONTROL)])
    library.add_tokens([AddedToken(token, special=False, normalized=False) for token in of_type(_USER_DEFINED)])
    if bos is not None:
        first = tokens[bos]
        library.post_processor = processors.TemplateProcessing(f"{first} $A", special_tokens=[(first, bos)])
    return Tokenizer(library)
