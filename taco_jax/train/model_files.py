"""`WORKDIR/model/`: what a run's model came with, so that a run can be used, exported or trained on without its source.

    tokenizer.json, tokenizer_config.json, ...     the tokenizer's files, generation_config.json and chat_template.jinja
    source_config.json                             config.json of a Hugging Face source, as it was
    meta.json                                      of prepared data whose tokenizer it is: its end token
    source.json                                    where the weights are from: path, step, a digest of every parameter

They are those of `init_from`; where it has no tokenizer, or is None, of the first prepared folder of `data.train`. The
folder appears whole, before the first step, and is never changed: another source's takes its place only while there is
no checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taco_jax.config import ConfigError, TrainConfig
from taco_jax.data import CORPORA, DataError, prepared_folders
from taco_jax.data.prepared import META
from taco_jax.train.workdir import set_aside

if TYPE_CHECKING:
    from taco_jax.inference.loading import Checkpoint
    from taco_jax.train.init_from import Start

MODEL, SOURCE, SOURCE_CONFIG = "model", "source.json", "source_config.json"
TOKENIZER = "tokenizer.json"
FILES = (
    TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "tokenizer.model", "generation_config.json", "chat_template.jinja",
)  # fmt: skip
"""What makes text of ids and ids of text, in the names of Hugging Face."""


def keep(config: TrainConfig, start: Start | None) -> list[str]:
    """Writes the folder, where it is not there yet. Returns remarks.

    Args:
      start: of a run that begins with weights that exist.

    Raises:
      ConfigError: it cannot be read or written.
    """
    try:
        if start is not None:
            return _keep_source(config, start) + _remarks_on_data(config)
        folders = prepared_folders(config.data.sources)
        if folders and not (Path(config.workdir) / MODEL).exists():
            folder = folders[0].folder
            _write(config.workdir, lambda to: _copy(folder, to, META), {"from": str(folder.absolute()), "kind": "data"})
        return []
    except OSError as error:
        raise ConfigError(
            f"workdir={config.workdir}: its folder {MODEL} cannot be made ({error.strerror}: {error.filename})"
        ) from None


def check_vocabulary(config: TrainConfig) -> None:
    """Raises DataError for prepared data with more ids than the model has."""
    for folder in prepared_folders(config.data.sources):
        if folder.needed_vocabulary > config.model.vocab_size:
            raise DataError(
                f"{folder.folder}: its tokenizer has {folder.vocab_size} ids, the model of "
                f"init_from={config.init_from} {config.model.vocab_size}; prepare the data with its own tokenizer"
            )


def _keep_source(config: TrainConfig, start: Start) -> list[str]:
    folder, remarks = Path(config.workdir) / MODEL, []
    try:
        before = dict(json.loads((folder / SOURCE).read_text()))
    except (OSError, ValueError, TypeError):
        before = None
    if before is not None and before.get("digests") == start.origin["digests"]:
        return []
    if folder.exists():
        remarks = [
            f"this workdir was first started from {(before or {}).get('from')}; its weights are not "
            f"those of init_from={config.init_from}; what came with them is kept in {set_aside(folder)}"
        ]
    source = start.source
    if source.checkpoint is None:
        fill = lambda to: _copy(source.path / MODEL, to, SOURCE_CONFIG)
    elif source.path.is_file():
        fill = lambda to: _of_gguf(source.checkpoint, to)
    else:

        def fill(to: Path) -> None:
            _copy(source.path, to)
            shutil.copyfile(source.path / "config.json", to / SOURCE_CONFIG)

    def fill_up(to: Path) -> None:
        fill(to)
        if not (to / TOKENIZER).exists():  # of weights alone: the data's is the only one that there is
            for folder in prepared_folders(config.data.sources)[:1]:
                _copy(folder.folder, to, META)

    _write(config.workdir, fill_up, start.origin)
    return remarks


def _write(workdir: str | Path, fill: Callable[[Path], None], origin: dict[str, Any]) -> None:
    """Makes the folder under another name, fills it, and gives it its name."""
    folder = Path(workdir) / MODEL
    for stale in folder.parent.glob(f".{MODEL}.*"):  # of a process that was killed
        shutil.rmtree(stale)
    temporary = folder.with_name(f".{MODEL}.{os.getpid()}")
    temporary.mkdir()
    fill(temporary)
    (temporary / SOURCE).write_text(json.dumps(origin, indent=1) + "\n")
    temporary.rename(folder)


def _copy(source: Path, to: Path, *more: str) -> None:
    for name in (*FILES, *more):
        if (source / name).is_file():
            shutil.copyfile(source / name, to / name)


def _of_gguf(checkpoint: Checkpoint, to: Path) -> None:
    """The file's vocabulary, chat template and ends of texts as files of a Hugging Face folder."""
    from taco_jax.inference.gguf import tokenizer_files

    for name, content in tokenizer_files(checkpoint).items():
        (to / name).write_bytes(content)


def _remarks_on_data(config: TrainConfig) -> list[str]:
    """Says it where ids of the data may mean other tokens than the model's."""
    path, remarks = Path(config.workdir) / MODEL / TOKENIZER, []
    names = [source.name for source in config.data.sources]
    text = [name for name in names if name in CORPORA or name.endswith((".txt", ".txt.xz"))]
    if text and config.model.vocab_size > 256:
        remarks.append(f"{text[0]} is read as bytes: its ids below 256 may be other tokens of this model")
    digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
    for folder in prepared_folders(config.data.sources):
        if digest not in (None, folder.tokenizer_sha256):
            remarks.append(
                f"{folder.folder} was made with another tokenizer.json than that of init_from={config.init_from}"
            )
    return remarks
