"""The collector's database of samples, in SQLite on a local disk, and the files that it publishes.

Samples are committed with fsync before their spool files are removed, so they survive a power failure. On a full disk
or a held lock new samples are rejected and stored ones are kept. Age, rows and bytes are bounded.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress

from slurmdl import files
from slurmdl.errors import InputError, UnavailableError
from slurmdl.links.samples import LinkSample

LOCK_TIMEOUT_S = 5.0  # seconds that a writer waits for the lock of another one
#: retention in seconds and in samples, and the largest size of the file in bytes
RETENTION_S, MAX_ROWS, MAX_BYTES = 7 * 86400.0, 20_000_000, 4 * 2**30
_PAGE_BYTES = 4096
_SCHEMA_VERSION = 2  # version of the schema, in `PRAGMA user_version`

_COLUMNS = LinkSample._fields
_SCHEMA = f"CREATE TABLE samples ({', '.join(_COLUMNS)}, PRIMARY KEY (time, kind, name, source)) WITHOUT ROWID"


class SampleStore:
    """An open database. Only one process writes at a time; a second writer waits for LOCK_TIMEOUT_S, then fails."""

    def __init__(self, connection: sqlite3.Connection, path: str) -> None:
        self._connection, self._path = connection, path

    @classmethod
    @contextmanager
    def open(cls, path: str) -> Iterator[SampleStore]:
        """Open the database in a file, and create it if it does not exist.

        Raises UnavailableError if the file cannot be opened or is locked, InputError if it is of another kind.
        """
        with _translate_sqlite_errors(path), \
                closing(sqlite3.connect(path, timeout=LOCK_TIMEOUT_S, isolation_level=None)) as connection:
            # a write-ahead log that is synced at every commit: readers do not wait, commits are durable
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute(f"PRAGMA journal_size_limit = {64 * 2**20}")
            connection.execute(f"PRAGMA max_page_count = {MAX_BYTES // _PAGE_BYTES}")
            store = cls(connection, path)
            if store._schema_version() == 0:
                with store._transaction():
                    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
                    if not tables:
                        connection.execute(_SCHEMA)
                        connection.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
            if (version := store._schema_version()) != _SCHEMA_VERSION:
                raise InputError(f"has schema version {version}; expected {_SCHEMA_VERSION} (remove the file to "
                                 "start a new one)", file=path)
            yield store

    def add(self, samples: Iterable[LinkSample]) -> int:
        """Store all samples or none, skip those that are already stored, and return the number of new ones.

        Raises UnavailableError if the disk is full, or another process holds the lock.
        """
        names, marks = ", ".join(_COLUMNS), ", ".join("?" * len(_COLUMNS))
        with _translate_sqlite_errors(self._path), self._transaction():
            before = self._connection.total_changes
            self._connection.executemany(f"INSERT OR IGNORE INTO samples ({names}) VALUES ({marks})", samples)
            return self._connection.total_changes - before

    def samples_since(self, time: float) -> list[LinkSample]:
        """Valid samples with at least this time (seconds since the epoch)."""
        with _translate_sqlite_errors(self._path):
            rows = self._connection.execute(f"SELECT {', '.join(_COLUMNS)} FROM samples WHERE time >= ?", (time,))
            samples = []
            for row in rows:
                values = dict(zip(_COLUMNS, row, strict=True))
                with suppress(InputError):
                    samples.append(LinkSample(**{**values, "rdma": bool(values["rdma"])}))
            return samples

    def prune(self, now: float, retention_s: float = RETENTION_S, max_rows: int = MAX_ROWS) -> int:
        """Delete samples older than `retention_s`, and the oldest in excess of `max_rows`; return their number.

        Ages count from the newest sample if that is before `now`, so a clock that jumps ahead deletes nothing.
        """
        with _translate_sqlite_errors(self._path):
            with self._transaction():
                deleted = self._connection.execute(
                    "DELETE FROM samples WHERE time < min(?, (SELECT max(time) FROM samples)) - ?",
                    (now, retention_s)).rowcount
                deleted += self._connection.execute(
                    "DELETE FROM samples WHERE time <= "
                    "(SELECT time FROM samples ORDER BY time DESC LIMIT 1 OFFSET ?)", (max_rows,)).rowcount
            if deleted:
                # executescript steps the pragma to its end; execute would free a single page
                self._connection.executescript("PRAGMA incremental_vacuum")
        return deleted

    def _schema_version(self) -> int:
        version: int = self._connection.execute("PRAGMA user_version").fetchone()[0]
        return version

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
    try:
        yield
    except sqlite3.OperationalError as error:
        raise UnavailableError(f"{path}: {error}; stored samples are kept") from error
    except sqlite3.DatabaseError as error:
        raise InputError(f"{error}; expected a database of `slurmdl links ingest`", file=path) from error


def publish_file(path: str, text: str) -> None:
    """Write a file atomically and durably; UnavailableError if that fails, and the old file is kept."""
    try:
        files.write_atomic(path, text, durable=True)
    except OSError as error:
        raise UnavailableError(f"{path}: cannot be written ({error.strerror}); the old file is kept") from error
