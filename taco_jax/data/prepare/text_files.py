"""Documents of files, one after the other, from any place on.

A .txt is one document, a .jsonl one a line, a .parquet one a row; .txt and .jsonl may be compressed (.gz, .zst, .xz).
Of a file only a part is in memory: a line, some rows, the first megabytes of a text. A longer text is read twice, once
for its hash and once for its tokens.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import hashlib
import io
import json
import lzma
import os
import stat
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, BinaryIO, NamedTuple

from taco_jax.config import ConfigError
from taco_jax.data.tokens import DataError
from taco_jax.errors import did_you_mean

COMPRESSIONS = ("", ".gz", ".zst", ".xz")
SUFFIXES = (*(kind + packed for kind in (".txt", ".jsonl") for packed in COMPRESSIONS), ".parquet")
JSONL = tuple(f".jsonl{packed}" for packed in COMPRESSIONS)
KINDS = ".txt or .jsonl (also with .gz, .zst or .xz behind) or .parquet"
# A .txt up to so many bytes is read at once.
WHOLE_TEXT_BYTES = 1 << 23
# A longer line is no record of text: a file of one line that holds everything, perhaps.
LONGEST_LINE_BYTES = 1 << 28
CHUNK_BYTES = 1 << 20
PARQUET_ROWS = 256
DIGEST_BYTES = 16
NO_WINDOW = -1
BOM = codecs.BOM_UTF8


class TextFile(NamedTuple):
    """A file to read. argument: the number of the command's argument that led to it."""

    path: str
    argument: int
    bytes: int
    modified_ns: int


class Position(NamedTuple):
    """A place between two documents, or within the one that follows.

    record: lines or rows of the file `file` that were read; offset: of lines, their bytes after decompression. window:
    of a long document, the last window whose ids are written up to where it joins the next one; joined: the place in
    it from which its own ids count (`long_texts.Joiner.joined`).
    """

    file: int = 0
    record: int = 0
    offset: int = 0
    window: int = NO_WINDOW
    joined: int = 0


class LongText(NamedTuple):
    """A text that is not in memory. `chunks` reads it once more."""

    path: str

    def chunks(self) -> Iterator[str]:
        return _decoded(self.path)


class Document(NamedTuple):
    """The file that a text is from, the place behind it, the text, and the hash of its UTF-8 bytes.

    file_bytes: what was read of the file so far, as it is on the disk. text: None for a record without text. bytes: of
    the text, in UTF-8. bad: a record that is broken and was left out.
    """

    file: int
    position: Position
    file_bytes: int
    text: str | LongText | None = None
    digest: bytes = b""
    bytes: int = 0
    bad: bool = False


class BadRecordError(DataError):
    """One record that is no document. The message names the file and the line."""


# The files


def find_files(arguments: Sequence[str]) -> tuple[list[TextFile], Counter[str]]:
    """Returns the files that arguments name, and how many files of other kinds the folders hold, by suffix.

    An argument is a file, a folder or a pattern. A folder's files come in the order of their names, with those of its
    folders at any depth; hidden ones and other kinds are passed over. A file that several arguments name is read once.

    Raises:
      DataError: nothing has the name, a file is of another kind or cannot be read, or there is no file at all.
    """
    found: dict[str, TextFile] = {}
    others: Counter[str] = Counter()

    def add(path: str, number: int) -> None:
        try:
            if not os.access(path, os.R_OK):
                open(path, "rb").close()  # raises the reason
            status = os.stat(path)
            if not stat.S_ISREG(status.st_mode):
                raise DataError(f"{path}: must be a file, since it is read from any place on")
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from None
        found.setdefault(os.path.realpath(path), TextFile(path, number, status.st_size, status.st_mtime_ns))

    for number, argument in enumerate(arguments):
        for path in [argument] if os.path.lexists(argument) else sorted(glob.glob(argument, recursive=True)):
            if os.path.isdir(path):
                for inside in _walk(path):
                    if inside.lower().endswith(SUFFIXES):
                        add(inside, number)
                    else:
                        others[os.path.splitext(inside)[1]] += 1
            elif path.lower().endswith(SUFFIXES) or not os.path.exists(path):
                add(path, number)
            else:
                raise DataError(f"{path}: unknown kind of text file; must be {KINDS}")
        if not os.path.lexists(argument) and not glob.glob(argument, recursive=True):
            raise DataError(f"{argument}: {_nothing_there(argument)}")
    if not found:
        raise no_text(arguments, f"there are {sum(others.values())} files of other kinds" if others else "no files")
    return list(found.values()), others


def no_text(arguments: Sequence[str], why: str) -> DataError:
    return DataError(f"{', '.join(arguments)}: no text found ({why}); text files are {KINDS}")


def _walk(folder: str) -> Iterator[str]:
    """The files of a folder and of the folders in it, in the order of their names. Each folder once, by any link."""
    seen: set[str] = set()
    for path, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(path)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and real not in seen)
        if real not in seen:
            yield from (os.path.join(path, name) for name in sorted(files) if not name.startswith("."))
        seen.add(real)


def _nothing_there(argument: str) -> str:
    if glob.has_magic(argument):
        return "no file has such a name"
    folder = os.path.dirname(argument) or "."
    if not os.path.isdir(folder):
        return f"no such file; the folder {folder} does not exist"
    near = [os.path.join(os.path.dirname(argument), name) for name in sorted(os.listdir(folder))[:1000]]
    return f"no such file or folder; {did_you_mean(argument, near, otherwise='nothing there has a name like it')}"


# Bytes


class _ZstdReader(io.RawIOBase):
    """Decompresses zstd frames. An EOFError says what is wrong: an end within a frame too, of which the library's own
    reader says nothing."""

    def __init__(self, file: BinaryIO):
        import zstandard

        self._error = zstandard.ZstdError
        self._file, self._new = file, zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj
        self._frame, self._rest, self._out = self._new(), b"", memoryview(b"")
        self._within = False

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while not self._out:
            data = self._rest or self._file.read(CHUNK_BYTES >> 4)
            self._rest = b""
            if not data:
                if self._within:
                    raise EOFError("ends within a frame")
                return 0
            if self._frame.eof:
                self._frame = self._new()
            try:
                self._out, self._within = memoryview(self._frame.decompress(data)), True
            except self._error as error:
                raise EOFError(str(error)) from None
            if self._frame.eof:
                self._rest, self._within = self._frame.unused_data, False
        count = min(len(buffer), len(self._out))
        buffer[:count] = self._out[:count]
        self._out = self._out[count:]
        return count


def open_bytes(path: str) -> tuple[io.BufferedIOBase, BinaryIO]:
    """Returns a file's bytes after decompression, and the file itself, whose place says how much of it was read."""
    file = open(path, "rb")
    if path.lower().endswith(".gz"):
        return io.BufferedReader(gzip.GzipFile(fileobj=file), CHUNK_BYTES), file
    if path.lower().endswith(".xz"):
        return io.BufferedReader(lzma.LZMAFile(file), CHUNK_BYTES), file
    if path.lower().endswith(".zst"):
        return io.BufferedReader(_ZstdReader(file), CHUNK_BYTES), file
    return file, file


def _no_utf8(where: str, error: UnicodeDecodeError, offset: int = 0, start: bytes = b"") -> BadRecordError:
    hint = "; it looks like UTF-16" if start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else ""
    wrong = error.object[error.start]
    return BadRecordError(f"{where}: byte {offset + error.start} is no UTF-8 (0x{wrong:02x}){hint}; text must be UTF-8")


def _decoded(path: str) -> Iterator[str]:
    """The text of a file in chunks, without the mark that some programs put before it."""
    stream, file = open_bytes(path)
    with file, stream:
        decoder, offset = codecs.getincrementaldecoder("utf-8")(), 0
        data = start = stream.read(CHUNK_BYTES)
        skipped = len(BOM) if data.startswith(BOM) else 0
        data = data[skipped:]
        while data:
            pending = len(decoder.getstate()[0])
            try:
                yield decoder.decode(data)
            except UnicodeDecodeError as error:
                raise _no_utf8(path, error, offset + skipped - pending, start) from None
            offset += len(data)
            data = stream.read(CHUNK_BYTES)
        pending = len(decoder.getstate()[0])
        try:
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            raise _no_utf8(path, error, offset + skipped - pending, start) from None


def hash_of(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=DIGEST_BYTES).digest()


# Documents


class Reader:
    """The documents of `files`, from a position on.

    bad: called with each BadRecordError of a record that is left out; raises it where no more may be.
    """

    def __init__(self, files: Sequence[TextFile], text_field: str, bad: Callable[[BadRecordError], None]):
        self._files, self._field, self._bad = files, text_field, bad

    def check(self) -> None:
        """Raises what can be told before anything is read: packages that are missing, parquet files without the
        field."""
        paths = [file.path for file in self._files]
        _need("pyarrow", any(path.lower().endswith(".parquet") for path in paths), "files of .parquet")
        _need("zstandard", any(path.lower().endswith(".zst") for path in paths), "files of .zst")
        for path in paths:
            if path.lower().endswith(".parquet"):
                with _readable(path):
                    self._open_parquet(path).close()

    def documents(self, start: Position) -> Iterator[Document]:
        for number in range(start.file, len(self._files)):
            place = start if number == start.file else Position(number)
            path = self._files[number].path
            with _readable(path):
                if path.lower().endswith(".parquet"):
                    yield from self._rows(path, place)
                elif path.lower().endswith(JSONL):
                    yield from self._lines(path, place)
                else:
                    yield from self._text(path, place)

    def _document(self, make: Callable[[], str | None], place: Position, behind: Position, read: int) -> Document:
        """The document whose text `make` returns; without text where it is bad and may be left out."""
        document = Document(place.file, behind, read)
        try:
            text = make()
            if not text:
                return document
            data = text.encode()
            return document._replace(text=text, digest=hash_of(data), bytes=len(data))
        except BadRecordError as error:
            self._bad(error)
        except UnicodeEncodeError as error:
            half = f"U+{ord(error.object[error.start]):04X}"
            where = _where(self._files[place.file].path, place.record)  # a line: no other file can hold one
            self._bad(BadRecordError(f"{where}: holds {half}, half of a character, which is no text"))
        return document._replace(bad=True)

    def _text(self, path: str, place: Position) -> Iterator[Document]:
        behind = Position(place.file + 1)
        size = self._files[place.file].bytes
        stream, file = open_bytes(path)
        with file, stream:
            data = stream.read(WHOLE_TEXT_BYTES + 1)
        if len(data) > WHOLE_TEXT_BYTES:
            del data
            document = Document(place.file, behind, size)
            digest, length = hashlib.blake2b(digest_size=DIGEST_BYTES), 0
            try:
                for chunk in _decoded(path):
                    data = chunk.encode()
                    digest.update(data)
                    length += len(data)
            except BadRecordError as error:
                self._bad(error)
                yield document._replace(bad=True)
                return
            yield document._replace(text=LongText(path), digest=digest.digest(), bytes=length)
            return

        def text() -> str:
            try:
                return data.decode().removeprefix("\ufeff")
            except UnicodeDecodeError as error:
                raise _no_utf8(path, error, start=data) from None

        yield self._document(text, place, behind, size)

    def _lines(self, path: str, place: Position) -> Iterator[Document]:
        stream, file = open_bytes(path)
        with file, stream:
            _skip(stream, place.offset)
            while line := stream.readline(LONGEST_LINE_BYTES + 1):
                if len(line) > LONGEST_LINE_BYTES:
                    raise DataError(
                        f"{_where(path, place.record)}: is longer than {LONGEST_LINE_BYTES >> 20} MiB; a .jsonl has "
                        f"one document a line"
                    )
                behind = Position(place.file, place.record + 1, place.offset + len(line))
                yield self._document(partial(self._field_of, path, line, place.record), place, behind, file.tell())
                place = behind

    def _field_of(self, path: str, line: bytes, record: int) -> str | None:
        """The text of a line; None for a blank one."""
        where = _where(path, record)
        if not record:
            line = line.removeprefix(BOM)
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise _no_utf8(where, error, start=line if not record else b"") from None
        if not text.strip():
            return None
        try:
            value = json.loads(text)
        except RecursionError:
            raise BadRecordError(f"{where}: is nested too deeply") from None
        except ValueError as error:
            raise BadRecordError(f"{where}: is no JSON ({error})") from None
        if not isinstance(value, dict):
            raise BadRecordError(f"{where}: must be a JSON object, not a {type(value).__name__}")
        if self._field not in value:
            raise BadRecordError(f"{where}: {self._no_field(value)}")
        if not isinstance(value[self._field], str):
            found = "null" if value[self._field] is None else type(value[self._field]).__name__
            raise BadRecordError(f"{where}: its field {self._field!r} must be a text, not {found}")
        return value[self._field]

    def _no_field(self, names: Sequence[str]) -> str:
        names = [str(name)[:100] for name in names][:50]
        known = f"it has {', '.join(map(repr, names))}" if names else "it has none"
        return f"has no field {self._field!r}; {known}; --text-field names another"

    def _open_parquet(self, path: str) -> Any:
        import pyarrow.parquet as parquet

        # Read page by page: a group of rows may be larger than memory.
        file = parquet.ParquetFile(path, pre_buffer=False, buffer_size=CHUNK_BYTES)
        names = file.schema_arrow.names
        if self._field not in names:
            raise DataError(f"{path}: {self._no_field(names)}")
        kind = file.schema_arrow.field(self._field).type
        kind = getattr(kind, "value_type", kind)
        if str(kind) not in ("string", "large_string", "string_view", "binary", "large_binary"):
            raise DataError(f"{path}: its field {self._field!r} must hold text, not {kind}; --text-field names another")
        return file

    def _rows(self, path: str, place: Position) -> Iterator[Document]:
        import pyarrow

        size = self._files[place.file].bytes
        with self._open_parquet(path) as file:
            total, first = max(file.metadata.num_rows, 1), 0
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if first + rows > place.record:
                    done = first
                    for batch in file.iter_batches(PARQUET_ROWS, row_groups=[group], columns=[self._field]):
                        column = batch.column(0)
                        if isinstance(column, pyarrow.DictionaryArray):
                            column = column.dictionary_decode()
                        # Bytes, so that a row that is no UTF-8 is one bad row.
                        column = column.cast(pyarrow.large_binary())
                        for i in range(max(place.record - done, 0), len(column)):
                            behind = Position(place.file, done + i + 1)
                            read = size * behind.record // total
                            cell = partial(self._cell, path, column[i], place.record)
                            yield self._document(cell, place, behind, read)
                            place = behind
                        done += len(column)
                first += rows

    def _cell(self, path: str, scalar: Any, record: int) -> str:
        data, where = scalar.as_py(), _where(path, record, "row")
        if data is None:
            raise BadRecordError(f"{where}: its field {self._field!r} must be a text, not null")
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise _no_utf8(where, error) from None


def _where(path: str, record: int, what: str = "line") -> str:
    return f"{path} {what} {record + 1}"


def _skip(stream: io.BufferedIOBase, count: int) -> None:
    if stream.seekable() and isinstance(stream, io.BufferedReader) and isinstance(stream.raw, io.FileIO):
        stream.seek(count)
        return
    while count and (data := stream.read(min(count, CHUNK_BYTES))):
        count -= len(data)


def _need(package: str, used: bool, what: str) -> None:
    try:
        if used:
            __import__(package)
    except ImportError:
        raise ConfigError(f"{what} need the package {package}: pip install 'taco-jax[data]'") from None


class _readable:
    """Turns the errors of reading a file into one line."""

    def __init__(self, path: str):
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, EOFError | zlib.error | lzma.LZMAError | gzip.BadGzipFile):
            raise DataError(f"{self._path}: corrupt, or cut off ({error})") from None
        if isinstance(error, OSError) and error.filename in (None, self._path) and not isinstance(error, DataError):
            raise DataError(f"{self._path}: cannot be read ({error.strerror or error})") from None
        if error is not None and type(error).__module__.partition(".")[0] == "pyarrow":
            raise DataError(f"{self._path}: corrupt ({' '.join(str(error).split())[:300]})") from None
