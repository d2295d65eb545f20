"""The collector's history of samples, in SQLite on a local disk, and the files that it publishes.

What is stored was committed with fsync before it is said to be stored: a power failure loses nothing of it, and a
full disk or a lock refuses new samples and leaves the old ones. The history is bounded in age, rows and bytes.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress

from slurmdl import files
from slurmdl.errors import InputError, UnavailableError
from slurmdl.links.samples import LinkSample

#: seconds that a writer waits for another one
LOCK_TIMEOUT_S = 5.0
#: seconds and samples that are kept, and bytes that the file may have
RETENTION_S, MAX_ROWS, MAX_BYTES = 7 * 86400.0, 20_000_000, 4 * 2**30
_PAGE_BYTES = 4096

_COLUMNS = LinkSample._fields
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS samples (
    {', '.join(_COLUMNS)}, PRIMARY KEY (time, kind, name, source)) WITHOUT ROWID
"""


class SampleStore:
    """An open history. One process writes; a second one waits, then is refused."""

    def __init__(self, connection: sqlite3.Connection, path: str) -> None:
        self._connection, self._path = connection, path

    @classmethod
    @contextmanager
    def open(cls, path: str) -> Iterator[SampleStore]:
        """The history in a file, which is made where there is none.

        Raises
        ------
        UnavailableError : the file cannot be opened or is locked.
        InputError : it is no history.
        """
        with _translate_sqlite_errors(path), closing(sqlite3.connect(path, timeout=LOCK_TIMEOUT_S, isolation_level=None)) as connection:
            # a write-ahead log that is synced at every commit: readers do not wait, nothing that was committed goes
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute(f"PRAGMA journal_size_limit = {64 * 2**20}")
            connection.execute(f"PRAGMA max_page_count = {MAX_BYTES // _PAGE_BYTES}")
            connection.execute(_SCHEMA)
            there = {row[1] for row in connection.execute("PRAGMA table_info(samples)")}
            for column in _COLUMNS:
                if column not in there:  # a history of an earlier version
                    connection.execute(f"ALTER TABLE samples ADD COLUMN {column}")
            yield cls(connection, path)

    def add(self, samples: Iterable[LinkSample]) -> int:
        """Store samples, all or none of them; those that are there already are passed over.

        Returns
        -------
        how many were new.

        Raises
        ------
        UnavailableError : the disk is full, or another process holds the lock.
        """
        names, marks = ", ".join(_COLUMNS), ", ".join("?" * len(_COLUMNS))
        with _translate_sqlite_errors(self._path), self._transaction():
            before = self._connection.total_changes
            self._connection.executemany(f"INSERT OR IGNORE INTO samples ({names}) VALUES ({marks})",
                                         samples)
            return self._connection.total_changes - before

    def samples_since(self, time: float) -> list[LinkSample]:
        """The samples of that time (seconds since the epoch) and later.

        A row that is not a valid sample (an earlier version checked less) is left out; it goes with its age.
        """
        with _translate_sqlite_errors(self._path):
            rows = self._connection.execute(f"SELECT {', '.join(_COLUMNS)} FROM samples WHERE time >= ?", (time,))
            found = []
            for row in rows:
                sample = dict(zip(_COLUMNS, row, strict=True))
                with suppress(InputError):
                    found.append(LinkSample(**{**sample, "rdma": bool(sample["rdma"])}))
            return found

    def prune(self, now: float, retention_s: float = RETENTION_S, max_rows: int = MAX_ROWS) -> int:
        """Forget what is older than `keep` seconds, and the oldest of more samples than `rows`; returns how many.

        A clock that jumps ahead makes nothing old: the newest sample tells the time, too.
        """
        with _translate_sqlite_errors(self._path), self._transaction():
            gone = self._connection.execute(
                "DELETE FROM samples WHERE time < min(?, (SELECT max(time) FROM samples)) - ?", (now, retention_s)).rowcount
            gone += self._connection.execute(
                "DELETE FROM samples WHERE time <= (SELECT time FROM samples ORDER BY time DESC LIMIT 1 OFFSET ?)",
                (max_rows,)).rowcount
        if gone:
            with _translate_sqlite_errors(self._path):
                # execute would free one page: the pragma gives no rows, and is to be stepped to its end
                self._connection.executescript("PRAGMA incremental_vacuum")
        return gone

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            raise


@contextmanager
def _translate_sqlite_errors(path: str) -> Iterator[None]:
    """SQLite's errors in our words."""
    try:
        yield
    except sqlite3.OperationalError as error:
        raise UnavailableError(f"{path}: {error}; what was stored before is kept") from error
    except sqlite3.DatabaseError as error:
        raise InputError(f"{error}; valid: a history that `slurmdl score ingest` made", file=path) from error


def publish_file(path: str, text: str) -> None:
    """Put a file in its place at once: readers see the old or the new text, also after a power failure.

    Raises
    ------
    UnavailableError : it cannot be written; the old one stays.
    """
    try:
        files.write_atomic(path, text, durable=True)
    except OSError as error:
        raise UnavailableError(f"{path}: cannot be written ({error.strerror}); the old one stays") from error
