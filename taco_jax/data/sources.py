"""Sources of tokens by their names: packaged corpora, text, token files, folders. `open_data` opens those of a run.

A source's tokens are one stream: documents, and files of a folder in the order of their names, lie one behind the
other.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from taco_jax.config import DataConfig, TrainConfig
from taco_jax.config.data_sources import DataSource, proportions
from taco_jax.data import tokens as raw
from taco_jax.data.prepared import FILE_NAME, META, Prepared, is_prepared, open_prepared
from taco_jax.data.stream import TokenStream
from taco_jax.data.token_files import TOKEN_SUFFIXES, check_stream, megatron_prefix, open_token_file
from taco_jax.data.tokens import CORPORA, DataError, check_ids, read_text
from taco_jax.errors import ConfigError, did_you_mean

# Words in the names of files that say what their tokens are for.
VALIDATION_WORDS, TEST_WORDS = {"val", "valid", "validation"}, {"test"}


@dataclasses.dataclass(frozen=True)
class Source:
    """The tokens of one source. validation: its own part for validation; None where it has none."""

    name: str
    tokens: TokenStream
    validation: TokenStream | None = None
    prepared: Prepared | None = None


@dataclasses.dataclass(frozen=True)
class Mixture:
    """The training tokens of a run: sources, and how many windows of each follow another (None: by size)."""

    sources: tuple[Source, ...]
    proportions: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return sum(len(source.tokens) for source in self.sources)


def open_data(config: DataConfig, vocab_size: int) -> tuple[Mixture, TokenStream]:
    """Returns (training tokens, validation tokens).

    Without `data.validation`, those are the sources' own validation parts, one behind the other; of a source that has
    none, its end is held out. Raises DataError.
    """
    named = config.sources
    checked = raw.CHECKED_ON_OPEN // len(named)
    opened = [open_source(source.name, vocab_size, config.token_dtype, checked) for source in named]
    chosen = None
    if config.validation is not None:
        chosen = open_source(config.validation, vocab_size, config.token_dtype)
    read = [*opened, chosen] if chosen else opened
    _check_tokenizers([source.prepared for source in read if source.prepared is not None])
    _check_different(opened)
    if chosen:
        validation = [chosen.tokens if chosen.validation is None else chosen.validation]
    else:
        opened = [_held_out(source, config.validation_fraction) for source in opened]
        validation = [source.validation for source in opened]
    return Mixture(tuple(opened), proportions(named)), TokenStream(validation)


def open_source(name: str, vocab_size: int, dtype: str = "auto", checked: int | None = None) -> Source:
    """Returns the tokens that a name stands for. Raises DataError.

    dtype, checked: as `token_files.open_token_file` has them.
    """
    path = Path(name)
    checked = raw.CHECKED_ON_OPEN if checked is None else checked
    if name in CORPORA or name.endswith((".txt", ".txt.xz")):
        text = read_text(name)
        check_ids(text, vocab_size, name)
        return Source(name, TokenStream([text]))
    if path.is_dir():
        if is_prepared(path):
            return _open_prepared(name, vocab_size, checked)
        return _open_folder(name, vocab_size, dtype, checked)
    if path.suffix in TOKEN_SUFFIXES or megatron_prefix(path) is not None:
        return Source(name, open_token_file(path, vocab_size, dtype, checked))
    if not path.exists():
        raise DataError(_no_such_source(path))
    raise DataError(
        f"{name}: unknown kind of data file; use .txt, .txt.xz (read as bytes), .bin, .npy, .idx (token ids), or a "
        f"folder of token files"
    )


def _no_such_source(path: Path) -> str:
    """Returns the error's line, with the nearest name of the path's folder, and of the corpora for a name alone."""
    folder = path.parent
    if not folder.is_dir():
        return f"{path}: no such data file or folder; the folder {folder} does not exist"
    present = [str(folder / p.name) for p in folder.iterdir() if not p.name.startswith(".")]
    if path.suffix or len(path.parts) > 1:
        nearest = did_you_mean(path, present, otherwise=f"the folder {folder} holds nothing of that name")
        return f"{path}: no such data file or folder; {nearest}"
    nearest = did_you_mean(path, [*CORPORA, *present], otherwise=f"known: {', '.join(CORPORA)}")
    return f"data {str(path)!r}: no such corpus; {nearest} (or the path of a file or folder)"


def prepared_folders(sources: tuple[DataSource, ...]) -> list[Prepared]:
    """Returns the prepared folders among `DataConfig.sources`, in their order. Raises DataError.

    They have one tokenizer and one end token: the first one's are those of all.
    """
    found = [open_prepared(source.name) for source in sources if is_prepared(source.name)]
    _check_tokenizers(found)
    return found


def end_token(config: TrainConfig) -> int | None:
    """The id at which attention stops looking back; None without data.document_mask.

    Raises:
      ConfigError: no folder of data.train says which it is, or two of them differ, or the model has no such token.
    """
    data, vocabulary = config.data, config.model.vocab_size
    if not data.document_mask:
        return None
    if data.end_token_id is not None:
        return data.end_token_id
    for source in data.sources:
        if not is_prepared(source.name):
            raise ConfigError(
                f"data.end_token_id=None: data.document_mask needs it, and data.train={source.name!r} is no prepared "
                f"folder with a {META} that says it; set data.end_token_id"
            )
    folder = prepared_folders(data.sources)[0]
    if folder.end_id >= vocabulary:
        raise ConfigError(
            f"data.train={str(folder.folder)!r}: its documents end with token {folder.end_id}, which must be below "
            f"model.vocab_size={vocabulary}"
        )
    return folder.end_id


def _check_tokenizers(folders: list[Prepared]) -> None:
    for other in folders[1:]:
        first = folders[0]
        if other.tokenizer_sha256 != first.tokenizer_sha256:
            raise DataError(
                f"{other.folder}: was prepared with another tokenizer than {first.folder}; prepare both with the same"
            )
        if other.end_id != first.end_id:
            raise DataError(
                f"{other.folder}: its documents end with {other.end_text!r} (id {other.end_id}), those of "
                f"{first.folder} with {first.end_text!r} (id {first.end_id}); prepare both with the same --end-token"
            )


def _check_different(sources: list[Source]) -> None:
    """Raises DataError for two names of the same tokens: the text of the names does not show it."""
    seen: dict[str, str] = {}
    for source in sources if len(sources) > 1 else ():
        first = seen.setdefault(source.tokens.digest(), source.name)
        if first != source.name:
            raise DataError(
                f"data.train={source.name!r}: holds the same tokens as {first}; name a source once, with a weight"
            )


def _held_out(source: Source, fraction: float) -> Source:
    if source.validation is not None:
        return source
    cut = round(len(source.tokens) * (1 - fraction))
    training, end = source.tokens.part(0, cut), source.tokens.part(cut, len(source.tokens))
    return dataclasses.replace(source, tokens=training, validation=end)


def _open_prepared(name: str, vocab_size: int, checked: int) -> Source:
    prepared = open_prepared(name)
    if prepared.needed_vocabulary > vocab_size:
        raise DataError(
            f"{name}: its tokenizer has {prepared.vocab_size:,} ids ({META}), and model.vocab_size={vocab_size}; use "
            f"--model.vocab-size {prepared.vocab_size}, or data of the model's tokenizer"
        )
    train, validation = prepared.stream("train"), prepared.stream("validation")
    for split, tokens in (("train", train), ("validation", validation)):
        check_stream(tokens, vocab_size, f"{name} ({split})", checked)
    if not len(train):
        raise DataError(f"{name}: has no tokens to train on ({META})")
    return Source(name, train, validation if len(validation) else None, prepared)


def _open_folder(name: str, vocab_size: int, dtype: str, checked: int) -> Source:
    """Opens a folder of token files. Those named val are its validation part, those named test are left out."""
    folder = Path(name)
    files = sorted(p for p in folder.iterdir() if p.is_file() and not p.name.startswith("."))
    lone = [p for p in files if p.suffix == ".idx" and not p.with_suffix(".bin").is_file()]
    if lone:
        raise DataError(f"{lone[0]}: the {lone[0].stem}.bin that it belongs to is missing beside it")
    unfinished = [p.name for p in files if FILE_NAME.match(p.name)]
    if unfinished:
        raise DataError(
            f"{name}: holds {unfinished[0]} and no {META}, so it was not prepared to its end; run its python -m "
            f"taco_jax.prepare again, which goes on"
        )
    tokens = [p for p in files if p.suffix in TOKEN_SUFFIXES]
    if not tokens:
        raise DataError(
            f"{name}: holds neither {META} nor token files (.bin, .npy); python -m taco_jax.prepare makes such a "
            f"folder of text"
        )
    words = {p: set(re.findall("[a-z]+", p.name.lower())) for p in tokens}
    train = [p for p in tokens if not words[p] & (VALIDATION_WORDS | TEST_WORDS)]
    each = checked // len(tokens)
    join = lambda paths: TokenStream([open_token_file(path, vocab_size, dtype, each) for path in paths])
    if not train:
        return Source(name, join(tokens))
    validation = [p for p in tokens if words[p] & VALIDATION_WORDS]
    return Source(name, join(train), join(validation) if validation else None)
