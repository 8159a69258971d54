"""Make token files of text, once, for training.

    python -m taco_jax.prepare --out data/mine --tokenizer tokenizer.json book.txt notes/ 'shards/*.jsonl' more.parquet

A .txt is one document, a .jsonl one a line, a .parquet one a row. Each document ends with the tokenizer's end token. A
run that was stopped goes on when the same command is given again, and leaves the same bytes, with any --workers.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import math
import os
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from taco_jax.config import ConfigError, cli
from taco_jax.data.prepare import text_files, tokenizer
from taco_jax.data.prepare.duplicates import Seen
from taco_jax.data.prepare.encoding import Encoded, Encoder, Pool, Task, WorkerError
from taco_jax.data.prepare.long_texts import OVERLAP_CHARS, WINDOW_CHARS, Joiner, windows
from taco_jax.data.prepare.output import SPLITS, Output
from taco_jax.data.prepare.text_files import (
    NO_WINDOW,
    BadRecordError,
    Document,
    LongText,
    Position,
    Reader,
    TextFile,
)

BATCH_CHARS, BATCH_DOCUMENTS = 1 << 18, 1024
# What a killed run has to do again, at most.
CHECKPOINT_SECONDS = 10.0
# Messages about single records; the rest are counted.
MOST_MESSAGES = 20


@dataclasses.dataclass(frozen=True)
class PrepareConfig:
    """Text, the tokenizer, and the folder to write."""

    sources: tuple[str, ...]
    """Files, folders (with those in them) and patterns in quotes: .txt and .jsonl, also with .gz, .zst or .xz behind,
    and .parquet."""
    out: str
    """The folder to write. An unfinished one goes on."""
    tokenizer: str
    """A tokenizer.json, the folder of a model or of a run that has one, or a .gguf file with its vocabulary."""
    text_field: str = "text"
    """The field of .jsonl lines and .parquet rows that holds the text."""
    end_token: str | None = None
    """The token after each document; None takes the end-of-sequence token that tokenizer_config.json,
    generation_config.json or config.json beside the tokenizer names."""
    control_tokens: bool = True
    """Special tokens that a text spells out, such as <|im_start|>, become these tokens; False makes them plain text."""
    validation: float = 0.01
    """Share of the documents that is held out. A document's hash decides, so it stays where it is when others come."""
    drop_duplicates: bool = False
    """Leaves out documents with the same text as an earlier one."""
    skip_bad: int = 0
    """Leave out so many lines, rows or texts that are broken; one more is an error."""
    workers: int = dataclasses.field(default_factory=lambda: len(os.sched_getaffinity(0)))
    """Processes that encode."""
    shard_tokens: int = 1 << 28
    """A token file ends with the document that brings it to so many tokens."""

    def __post_init__(self):
        def require(holds: bool, key: str, rule: str) -> None:
            if not holds:
                raise ConfigError(f"--{key.replace('_', '-')} {getattr(self, key)}: {rule}")

        require(0 <= self.validation < 1, "validation", "must be a share from 0 to below 1, such as 0.01")
        require(self.workers >= 1, "workers", "must be at least 1")
        require(self.skip_bad >= 0, "skip_bad", "must be at least 0")
        require(self.shard_tokens >= 1, "shard_tokens", "must be at least 1")


def main(args: Sequence[str]) -> int:
    head, *more = __doc__.split("\n\n", 1)
    parser = cli.Parser(prog="python -m taco_jax.prepare", description=head, epilog=more[0])
    parser.add_argument("sources", nargs="+", metavar="TEXT", help="file, folder or pattern in quotes")
    parser.add_argument("--out", required=True, help="the folder to write; an unfinished one goes on")
    parser.add_argument("--tokenizer", required=True, help="a tokenizer.json, a model's or run's folder, or a .gguf")
    parser.add_argument("--text-field", help="field of .jsonl and .parquet with the text (default: text)")
    parser.add_argument("--end-token", help="token after each document (default: what stands beside the tokenizer)")
    plain = "special tokens that a text spells out stay text"
    parser.add_argument("--no-control-tokens", dest="control_tokens", action="store_false", help=plain)
    parser.add_argument("--validation", type=float, help="share of documents that is held out (default: 0.01)")
    parser.add_argument("--drop-duplicates", action="store_true", help="leave out documents that came before")
    parser.add_argument("--skip-bad", type=int, metavar="N", help="leave out up to N broken records (default: 0)")
    parser.add_argument("--workers", type=int, metavar="N", help="processes that encode (default: one a core)")
    parser.add_argument("--shard-tokens", type=int, metavar="N", help="tokens of a file (default: 268435456)")
    given = {key: value for key, value in vars(parser.parse_args(args)).items() if value is not None}
    prepare(PrepareConfig(**given | {"sources": tuple(given["sources"])}))
    return 0


def prepare(config: PrepareConfig) -> dict[str, Any]:
    """Writes the folder, or goes on with it. Returns the content of its `meta.json`.

    Raises:
      ConfigError: the output folder, the tokenizer or a setting cannot be used. DataError: a text file cannot.
    """
    out = Path(config.out)
    found = tokenizer.load(Path(config.tokenizer), config.end_token)
    files, others = text_files.find_files(config.sources)
    if others:
        kinds = ", ".join(f"{count} {suffix or 'without a suffix'}" for suffix, count in others.most_common(5))
        cli.say(f"passed over in folders: {sum(others.values())} files of other kinds ({kinds})")
    settings = _settings(config, found, files)
    output = Output(out, settings, files, dtype=found.dtype, shard=config.shard_tokens)
    try:
        with output.opened():
            if output.remark:
                cli.say(output.remark, sys.stderr)
            if output.meta is not None:
                cli.say(f"{out}: is whole already")
            else:
                _Run(config, found, files, output).run()
    except WorkerError as error:
        raise ConfigError(f"{error}; the same command goes on") from None
    except cli.OutputError:
        raise
    except (OSError, sqlite3.OperationalError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--out {out}: cannot be written ({reason}); the same command goes on") from None
    for line in summary(out, output.meta):
        cli.say(line)
    return output.meta


def _settings(config: PrepareConfig, found: tokenizer.Tokenizer, files: Sequence[TextFile]) -> dict[str, Any]:
    """Returns what the bytes of the folder depend on, as JSON has it."""
    listing = hashlib.sha256()
    for file in files:
        listing.update(os.fsencode(f"{file.path}\0{file.bytes}\n"))
    size = sum(file.bytes for file in files)
    return {
        "sources": f"{len(files)} files, {size} bytes, {listing.hexdigest()[:32]}",
        "tokenizer": found.hashes,
        "end_token": found.end,
        "text_field": config.text_field,
        "control_tokens": config.control_tokens,
        "validation": config.validation,
        "drop_duplicates": config.drop_duplicates,
        "shard_tokens": config.shard_tokens,
    }


def summary(out: Path, meta: dict[str, Any]) -> Iterator[str]:
    """The lines that end a run."""
    for split in SPLITS:
        part = meta["splits"][split]
        files = len(part["files"])
        yield (
            f"{out}: {split}: {part['documents']:,} documents, {part['tokens']:,} tokens of {meta['dtype']} in {files} "
            f"file{'s' * (files != 1)}"
        )
    yield f"each document ends with {meta['end_token']['text']} (id {meta['end_token']['id']})"
    left_out = {key: count for key, count in meta["left_out"].items() if count}
    if left_out:
        yield "left out: " + ", ".join(f"{count:,} {key}" for key, count in left_out.items())
    share, held = meta["settings"]["validation"], meta["splits"]["validation"]["tokens"]
    if share:
        part = held / (held + meta["splits"]["train"]["tokens"])
        if not held:
            yield "no document is held out: there are few of them, and their hashes decide; other text can validate"
        elif not share / 3 < part < 3 * share:
            yield f"{part:.1%} of the tokens are held out: documents are few and of different lengths"


def held_out(digest: bytes, share: float) -> bool:
    """Returns whether a document with this hash belongs to the validation part."""
    return int.from_bytes(digest[:8], "little") < math.floor(share * 2**64)


@dataclasses.dataclass
class _Work:
    """A task on its way, and what to do with its result.

    splits: of each document of the task; of a window, of its document. position: behind the task. window: its text,
    None for a batch; number: among those of its document. last: it ends the document. held: it is on its way since an
    earlier run.
    """

    task: Task
    splits: list[str]
    position: Position
    counts: Counter[str]
    window: str | None = None
    number: int = 0
    last: bool = False
    held: bool = False
    read_bytes: int = 0
    future: Future[Encoded] | None = None


class _Run:
    """Reads, encodes and writes."""

    def __init__(self, config: PrepareConfig, found: tokenizer.Tokenizer, files: list[TextFile], output: Output):
        self._config, self._tokenizer, self._files, self._output = config, found, files, output
        self._bad = output.counts["bad"]
        self._options = {
            "tokenizer": found.files[tokenizer.TOKENIZER], "end": found.end_id, "dtype": found.dtype,
            "control_tokens": config.control_tokens,
        }  # fmt: skip
        self._joiner: Joiner | None = None
        self._encoder: Encoder | None = None
        self._started = [0]
        for file in files:
            self._started.append(self._started[-1] + file.bytes)

    def run(self) -> None:
        output = self._output
        if not output.complete:
            reader = Reader(self._files, self._config.text_field, self._skip)
            reader.check()
            if output.resumed:
                cli.say(f"{output.folder}: goes on behind {output.counts['documents']:,} documents")
            self._encode(reader)
        counts = output.counts
        if not sum(output.tokens(split) for split in SPLITS):
            output.discard()
            why = f"{len(self._files)} files, {counts['empty']} empty and {counts['bad']} broken documents"
            raise text_files.no_text(self._config.sources, why)
        if not output.tokens("train"):
            raise ConfigError(
                f"--validation {self._config.validation}: holds all {counts['documents']} documents out; use a smaller "
                f"share, or 0"
            )
        output.finish(output.position, self._about(), self._tokenizer.files)

    def _about(self) -> dict[str, Any]:
        """Returns what meta.json says besides the token files."""
        counts, found = self._output.counts, self._tokenizer
        rows = [
            {
                "name": name,
                "files": sum(file.argument == i for file in self._files),
                "bytes": sum(file.bytes for file in self._files if file.argument == i),
                "documents": counts[f"documents of {i}"],
            }
            for i, name in enumerate(self._config.sources)
        ]
        return {
            "dtype": found.dtype,
            "vocab_size": found.vocab_size,
            "largest_id": counts["largest_id"],
            "end_token": {"text": found.end, "id": found.end_id},
            "tokenizer": {"file": tokenizer.TOKENIZER, "sha256": found.hashes[tokenizer.TOKENIZER]},
            "text_bytes": counts["text_bytes"],
            "left_out": {key: counts[key] for key in ("duplicates", "empty", "bad")},
            "sources": rows,
        }

    def _skip(self, error: BadRecordError) -> None:
        """Counts a record that is left out; raises the error where there were enough."""
        self._bad += 1
        if self._bad > self._config.skip_bad:
            more = f"more than --skip-bad {self._config.skip_bad}; " if self._config.skip_bad else ""
            raise BadRecordError(f"{error}; {more}--skip-bad {max(self._bad, 1)} or more leaves it out")
        if self._bad <= MOST_MESSAGES:
            rest = "; more are left out without a line" if self._bad == MOST_MESSAGES else ""
            cli.say(f"left out: {error}{rest}", sys.stderr)

    # Documents to work

    def _works(self, reader: Reader, seen: Seen | None) -> Iterator[_Work]:
        """Batches of documents, and windows of long ones, in the order of the documents."""
        number = self._output.counts["documents"] + self._output.counts["duplicates"]
        texts: list[str] = []
        splits: list[str] = []
        counts: Counter[str] = Counter()
        size = records = 0
        start = self._output.position
        before = start._replace(window=NO_WINDOW, joined=0)
        for document in reader.documents(before):
            records += 1
            read = self._started[document.file] + document.file_bytes
            own: Counter[str] = Counter()
            text = self._kept(document, number, seen, own)
            number += document.text is not None
            split = "validation" if held_out(document.digest, self._config.validation) else "train"
            if isinstance(text, LongText) or (text is not None and len(text) > WINDOW_CHARS):
                if counts:
                    yield _Work(Task(texts), splits, before, counts, read_bytes=read)
                    texts, splits, counts, size, records = [], [], Counter(), 0, 0
                yield from self._windows(text, split, document, (before, own), start.window)
            else:
                counts.update(own)
                if text is not None:
                    counts["text_bytes"] += document.bytes
                    texts.append(text)
                    splits.append(split)
                    size += len(text)
                if size >= BATCH_CHARS or records >= BATCH_DOCUMENTS:
                    yield _Work(Task(texts), splits, document.position, counts, read_bytes=read)
                    texts, splits, counts, size, records = [], [], Counter(), 0, 0
            before, start = document.position, before
        yield _Work(Task(texts), splits, Position(len(self._files)), counts, read_bytes=self._started[-1])

    def _kept(self, document: Document, number: int, seen: Seen | None, counts: Counter[str]) -> str | LongText | None:
        """The text of a document unless it is left out; counts it."""
        if document.text is None:
            counts["bad" if document.bad else "empty"] += 1
            return None
        if seen is not None and seen.before(document.digest, number):
            counts["duplicates"] += 1
            return None
        counts["documents"] += 1
        counts[f"documents of {self._files[document.file].argument}"] += 1
        return document.text

    def _windows(
        self, text: str | LongText, split: str, document: Document, begin: tuple[Position, Counter[str]], held: int
    ) -> Iterator[_Work]:
        """The windows of a document. begin: the place before it, and what its last window counts. held: the window that
        an earlier run has joined to those before it."""
        before, counts = begin
        chunks = text.chunks() if isinstance(text, LongText) else [text]
        # One window behind, to know the last one.
        pairs = itertools.pairwise(itertools.chain(windows(chunks, WINDOW_CHARS, OVERLAP_CHARS), [None]))
        done = 0
        for number, (window, following) in enumerate(pairs):
            new = len(window[OVERLAP_CHARS if number else 0 :].encode())
            done += new
            if number < held:
                continue
            behind, now = before._replace(window=number), Counter()
            if following is None:
                behind, now = document.position, counts
            if number > held:
                now["text_bytes"] += new
            task = Task([window], min(OVERLAP_CHARS, len(window)))
            read = self._started[document.file] + document.file_bytes * done // document.bytes
            more = {"last": following is None, "held": number == held, "read_bytes": read}
            yield _Work(task, [split], behind, now, window=window, number=number, **more)

    # Work to token files

    def _encode(self, reader: Reader) -> None:
        output, config = self._output, self._config
        seen = Seen(output.progress / "seen.sqlite") if config.drop_duplicates else None
        pool = Pool(config.workers, self._options)
        under_way: collections.deque[_Work] = collections.deque()
        saved = time.monotonic()
        try:
            with Display(self._started[-1]) as display:
                works = self._works(reader, seen)
                while True:
                    while len(under_way) < 2 * config.workers + 1 and (work := next(works, None)) is not None:
                        work.future = pool.submit(work.task)
                        under_way.append(work)
                    if not under_way:
                        break
                    work = under_way.popleft()
                    self._write(work, work.future.result())
                    display.update(work.read_bytes, output.counts)
                    if time.monotonic() - saved >= CHECKPOINT_SECONDS:
                        if seen is not None:
                            seen.save()
                        inside = work.position.window != NO_WINDOW
                        output.checkpoint(work.position._replace(joined=self._joiner.joined if inside else 0))
                        saved = time.monotonic()
            output.position = Position(len(self._files))
        finally:
            pool.close()
            if seen is not None:
                seen.close()

    def _write(self, work: _Work, encoded: Encoded) -> None:
        output = self._output
        output.counts.update(work.counts)
        if work.window is None:
            self._note_largest(encoded.ids)
            data, start = memoryview(encoded.ids.tobytes()), 0
            ends = (encoded.lengths.cumsum() * encoded.ids.itemsize).tolist()
            for split, end in zip(work.splits, ends):
                output.write(split, data[start:end], ends=True)
                start = end
            return
        (split,) = work.splits
        if work.held or not work.number:
            self._joiner = Joiner(self._encode_here, OVERLAP_CHARS)
        if work.held:
            self._joiner.go_on(work.window, encoded, output.position.joined)
            return
        ids = self._joiner.add(work.window, encoded)
        self._note_largest(ids)
        output.write(split, memoryview(ids.tobytes()), ends=False)
        if work.last:
            ids = self._joiner.finish(self._tokenizer.end_id)
            self._note_largest(ids)
            output.write(split, memoryview(ids.tobytes()), ends=True)

    def _note_largest(self, ids: np.ndarray) -> None:
        counts = self._output.counts
        counts["largest_id"] = max(counts["largest_id"], int(ids.max(initial=0)))

    def _encode_here(self, task: Task) -> Encoded:
        self._encoder = self._encoder or Encoder(**self._options)
        return self._encoder(task)


class Display:
    """The progress on standard error: a bar on a terminal, else a line every minute."""

    LINE_SECONDS = 60.0

    def __init__(self, total: int):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        self._console = Console(stderr=True)
        columns = (TaskProgressColumn(), BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        self._bar = Progress(*columns, console=self._console, disable=not self._console.is_terminal, transient=True)
        self._total = total
        self._task = self._bar.add_task("", total=total)
        self._start = self._said = time.monotonic()
        self._before: Counter[str] | None = None

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.stop()

    def update(self, read_bytes: int, counts: Counter[str]) -> None:
        now = time.monotonic()
        if self._before is None:
            self._before = counts.copy()
        new = lambda key: (counts[key] - self._before[key]) / max(now - self._start, 1e-9)
        line = f"{counts['documents']:,} documents, {counts['text_bytes'] / 1e6:,.0f} MB of text"
        line += f", {new('documents'):,.0f} documents/s, {new('text_bytes') / 1e6:.2f} MB/s"
        self._bar.update(self._task, description=line, **({"completed": read_bytes} if read_bytes else {}))
        if not self._console.is_terminal and now - self._said >= self.LINE_SECONDS:
            self._said = now
            share = f"{read_bytes / max(self._total, 1):.0%}, " if read_bytes else ""
            cli.say(share + line, sys.stderr)
