"""Which documents came before: a table on disk, so that their number takes no memory."""

from __future__ import annotations

import sqlite3
from pathlib import Path

CACHE_KIB = 64 << 10


class Seen:
    """The documents' hashes, each with the number of the first document that has it.

    Numbers make a killed run go on: of documents behind the place where it goes on, the table may hold some already.
    """

    def __init__(self, path: Path):
        # One process at a time works in the folder, which holds a lock of its own.
        self._table = sqlite3.connect(path, isolation_level=None)
        for setting in ("locking_mode = EXCLUSIVE", "journal_mode = TRUNCATE", f"cache_size = -{CACHE_KIB}"):
            self._table.execute(f"PRAGMA {setting}")
        self._table.execute("CREATE TABLE IF NOT EXISTS seen (hash BLOB PRIMARY KEY, number INTEGER) WITHOUT ROWID")
        self._table.execute("BEGIN")

    def before(self, digest: bytes, number: int) -> bool:
        """Returns whether a document of a smaller number has this hash; remembers this one otherwise."""
        if self._table.execute("INSERT OR IGNORE INTO seen VALUES (?, ?)", (digest, number)).rowcount:
            return False
        (first,) = self._table.execute("SELECT number FROM seen WHERE hash = ?", (digest,)).fetchone()
        return first < number

    def save(self) -> None:
        """Brings what is remembered to the disk. Must come before the run says that it goes on behind it."""
        self._table.execute("COMMIT")
        self._table.execute("BEGIN")

    def close(self) -> None:
        self._table.close()
