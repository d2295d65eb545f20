"""The collector: store link samples in a database, and publish the scores aggregated from the recent ones.

The database is SQLite on a local disk. Samples are committed with fsync before their spool files are removed, so they
survive a power failure. On a full disk or a held lock new samples are rejected and stored ones are kept. Age, rows
and bytes are bounded.
"""

from __future__ import annotations

import os
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from time import time

from slurmdl import files
from slurmdl.config import LinkScoresConfig
from slurmdl.errors import InputError, UnavailableError, warn
from slurmdl.links import aggregate, prometheus
from slurmdl.links.link_scores import LinkScores
from slurmdl.links.samples import SPOOL_SUFFIX, LinkSample, parse_sample_lines
from slurmdl.links.score_sources import parse_scores

LOCK_TIMEOUT_S = 5.0  # seconds that a writer waits for the lock of another one
#: retention in seconds and in samples, and the largest size of the file in bytes
RETENTION_S, MAX_ROWS, MAX_BYTES = 7 * 86400.0, 20_000_000, 4 * 2**30
_PAGE_BYTES = 4096
_SCHEMA_VERSION = 2  # version of the schema, in `PRAGMA user_version`

_COLUMNS = LinkSample._fields
_SCHEMA = f"CREATE TABLE samples ({', '.join(_COLUMNS)}, PRIMARY KEY (time, kind, name, source)) WITHOUT ROWID"

#: suffix of spool files that were rejected as a whole or in part, and how many of them are kept
REJECTED_SUFFIX, MAX_REJECTED_FILES = ".rejected", 100
MAX_REJECTION_REASONS = 100  # distinct reasons of rejections that are counted separately


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


@dataclass
class Collector:
    """State of one collector.

    Attributes:
        scores_path: file of scores for readers on a shared file system.
        textfile_path: file of Prometheus text, "" for none.
        trusted_users: whose spool files are accepted (see files.py).
        known_names: names of nodes and zones; samples of other links are rejected. None if the topology is unknown.
        rejected: reason -> number of samples since the last report.
    """

    store: SampleStore
    scores_path: str
    settings: LinkScoresConfig
    textfile_path: str = ""
    trusted_users: str = ""
    known_names: frozenset[str] | None = None
    rejected: Counter[str] = field(default_factory=Counter)
    #: rejected spool files that could not be renamed
    _unmovable_files: set[str] = field(default_factory=set)

    def parse_samples(self, lines: Iterable[str], now: float) -> list[LinkSample]:
        """Return the valid samples and count the others by reason."""
        valid = []
        for sample in parse_sample_lines(lines):
            if isinstance(sample, InputError):
                self._count_rejection(f"line {str(sample).lstrip(':')}")
            elif reason := self._unknown_name_reason(sample):
                self._count_rejection(reason)
            elif sample.time > now + aggregate.MAX_CLOCK_SKEW_S:
                self._count_rejection(f"{sample.name}: {sample.time - now:.0f} s in the future")
            else:
                valid.append(sample)
        return valid

    def _count_rejection(self, reason: str) -> None:
        is_counted = reason in self.rejected or len(self.rejected) < MAX_REJECTION_REASONS
        self.rejected[reason if is_counted else "other reasons"] += 1

    def _unknown_name_reason(self, sample: LinkSample) -> str:
        names = sample.name.split("|") if sample.kind == "inter_leaf" else [sample.name]
        is_known = self.known_names is None or self.known_names.issuperset(names)
        return "" if is_known else f"unknown {sample.kind} {sample.name}"

    def ingest_spool(self, spool_dir: str) -> None:
        """Store the samples in a spool directory, then remove their files.

        An untrusted file, or a file with a rejected line, is renamed with REJECTED_SUFFIX instead: it is reported
        once and kept for inspection. Raises UnavailableError if the directory cannot be read, or samples cannot be
        stored; then all files are kept.
        """
        now, samples = time(), []
        ingested: list[str] = []
        rejected: list[str] = []
        try:
            paths = {name: os.path.join(spool_dir, name) for name in sorted(os.listdir(spool_dir))}
        except OSError as error:
            raise UnavailableError(f"--spool-dir {spool_dir}: cannot be read ({error.strerror})") from error
        self._unmovable_files.intersection_update(paths.values())
        for name, path in paths.items():
            if name.endswith(SPOOL_SUFFIX) and not name.startswith(".") and path not in self._unmovable_files:
                rejections = self.rejected.total()
                try:
                    lines = files.read_trusted_lines(path, self.trusted_users, follow_links=False)
                    samples += self.parse_samples(lines, now)
                except InputError as error:
                    self._count_rejection(str(error))
                (ingested if self.rejected.total() == rejections else rejected).append(path)
        self.store.add(samples)
        for path in ingested:
            with suppress(OSError):
                os.unlink(path)
        for path in rejected:
            try:
                os.rename(path, path + REJECTED_SUFFIX)
            except OSError:
                self._unmovable_files.add(path)  # a directory that this user may only read
        old = [path for name, path in reversed(paths.items()) if name.endswith(SPOOL_SUFFIX + REJECTED_SUFFIX)]
        for path in old[max(0, MAX_REJECTED_FILES - len(rejected)):]:
            with suppress(OSError):
                os.unlink(path)

    def publish_scores(self) -> None:
        """Aggregate the recent samples, publish the scores and prune the database."""
        now = time()
        samples = self.store.samples_since(now - self.settings.max_age)
        scores = aggregate.aggregate_scores(samples, now, self._load_previous_scores(now), self.settings)
        publish_file(self.scores_path, scores.to_text())
        if self.textfile_path:
            publish_file(self.textfile_path, prometheus.exposition_text(scores))
        self.store.prune(now)

    def _load_previous_scores(self, now: float) -> LinkScores | None:
        """Scores of the last score file; None if it is missing or not valid."""
        try:
            return parse_scores(files.read_trusted_text(self.scores_path, self.trusted_users), now)
        except InputError:
            return None

    def report_rejections(self) -> None:
        """Warn about the rejections since the last call, if there are any."""
        rejected, self.rejected = self.rejected, Counter()
        reasons = "; ".join(f"{reason} ({count})" if count > 1 else reason
                            for reason, count in rejected.most_common(2))
        more = f"; and {len(rejected) - 2} other reasons" if len(rejected) > 2 else ""
        if rejected:
            warn(f"{rejected.total()} rejected: {reasons}{more}")
