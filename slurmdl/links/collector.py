"""The collector: samples go into the store, and the scores made of the recent ones are published."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import time

from slurmdl import file_trust
from slurmdl.errors import InputError, UnavailableError
from slurmdl.links import aggregate, prometheus_exporter
from slurmdl.links.link_scores import LinkScores
from slurmdl.links.sample_store import SampleStore, publish_file
from slurmdl.links.samples import LinkSample, parse_sample_lines
from slurmdl.links.score_files import parse_scores

#: what a file in the spool must end in to be taken; it is put there by renaming
SPOOL_SUFFIX = ".jsonl"
#: what is added to the name of a file that was refused as a whole or in part, and how many of these are kept
REJECTED_SUFFIX, MAX_REJECTED_FILES = ".refused", 100
#: reasons for which samples are refused that are told apart
MAX_REJECTION_REASONS = 100


@dataclass
class Collector:
    """What takes samples, and tells what it made of them.

    Attributes
    ----------
    store : open history.
    snapshot : file for readers on a shared file system.
    textfile : Prometheus text beside it, "" for none.
    owner : users whose files in the spool are trusted, see trust.
    known : names of nodes and zones; samples of others are refused. None where the topology is not known.
    refused : reason -> number of samples since the last report.
    """

    store: SampleStore
    snapshot_path: str
    rules: aggregate.AggregationRules
    textfile_path: str = ""
    trusted_users: str = ""
    known_names: frozenset[str] | None = None
    rejected: Counter[str] = field(default_factory=Counter)
    #: files of the spool that were refused and could not be renamed
    _unmovable_files: set[str] = field(default_factory=set)

    def parse_samples(self, lines: Iterable[str], now: float) -> list[LinkSample]:
        """The samples that can be stored; the others are counted by why they cannot."""
        good = []
        for found in parse_sample_lines(lines):
            why = f"line {str(found).lstrip(':')}" if isinstance(found, InputError) else self._unknown_name_reason(found) or (
                f"{found.name}: {found.time - now:.0f} s in the future" if found.time > now + aggregate.MAX_CLOCK_SKEW_S else "")
            if isinstance(found, InputError) or why:
                self._count_rejection(why)
            else:
                good.append(found)
        return good

    def _count_rejection(self, reason: str) -> None:
        """Count it; of very many reasons only the number."""
        self.rejected[reason if reason in self.rejected or len(
            self.rejected) < MAX_REJECTION_REASONS else "other reasons"] += 1

    def _unknown_name_reason(self, sample: LinkSample) -> str:
        names = sample.name.split("|") if sample.kind == "trunk" else [sample.name]
        lost = [name for name in names if self.known_names is not None and name not in self.known_names]
        return f"unknown {sample.kind} {sample.name}" if lost else ""

    def store_samples(self, samples: Iterable[LinkSample]) -> None:
        """Store samples. UnavailableError where that is not possible: then none of them is stored."""
        self.store.add(samples)

    def store_batches(self, batches: Sequence[Sequence[str]]) -> list[int]:
        """Store what is good in the lines of several senders; returns for each how many samples that were."""
        good = [self.parse_samples(lines, time()) for lines in batches]
        self.store_samples(sample for samples in good for sample in samples)
        return [len(samples) for samples in good]

    def ingest_spool(self, spool_dir: str) -> None:
        """Store the samples in a directory, and then remove their files.

        A file that is not to be trusted, or of which a line was refused, is renamed instead: its name ends in ASIDE,
        so that it is read and reported once and an admin can look at it.

        Raises
        ------
        UnavailableError : the directory cannot be read, or nothing can be stored; then all files stay.
        """
        now, samples = time(), []
        taken: list[str] = []
        aside: list[str] = []
        try:
            names = sorted(os.listdir(spool_dir))
        except OSError as error:
            raise UnavailableError(f"--spool {spool_dir}: cannot be read ({error.strerror})") from error
        there = {name: os.path.join(spool_dir, name) for name in names}
        self._unmovable_files.intersection_update(there.values())
        for name, path in there.items():
            if name.endswith(SPOOL_SUFFIX) and not name.startswith(".") and path not in self._unmovable_files:
                refused = sum(self.rejected.values())
                try:
                    samples += self.parse_samples(file_trust.read_trusted_lines(path, self.trusted_users), now)
                except InputError as error:
                    self._count_rejection(str(error))
                (taken if sum(self.rejected.values()) == refused else aside).append(path)
        self.store_samples(samples)
        for path in taken:
            with suppress(OSError):
                os.unlink(path)
        for path in aside:
            try:
                os.rename(path, path + REJECTED_SUFFIX)
            except OSError:
                self._unmovable_files.add(path)  # a directory in which this user may only read
        old = sorted((name for name in names if name.endswith(SPOOL_SUFFIX + REJECTED_SUFFIX)), reverse=True)
        for name in old[max(0, MAX_REJECTED_FILES - len(aside)):]:
            with suppress(OSError):
                os.unlink(there[name])

    def publish_scores(self) -> LinkScores:
        """Make scores of the recent samples and put them in their places; forget the oldest samples."""
        now = time()
        made = aggregate.aggregate_scores(
    self.store.samples_since(
        now - self.rules.window),
        now,
        self._load_previous_scores(now),
         self.rules)
        publish_file(self.snapshot_path, made.scores.to_text())
        if self.textfile_path:
            publish_file(self.textfile_path, prometheus_exporter.exposition_text(made.scores))
        self.store.prune(now)
        return made.scores

    def _load_previous_scores(self, now: float) -> LinkScores | None:
        """What was published before; a file that is not there or is broken is none."""
        try:
            return parse_scores(file_trust.read_trusted_text(self.snapshot_path, self.trusted_users), now)
        except InputError:
            return None

    def rejection_summary(self) -> str:
        """What happened since the last report, "" for nothing refused."""
        refused, self.rejected = self.rejected, Counter()
        first = "; ".join(f"{why} ({count})" if count > 1 else why for why, count in refused.most_common(2))
        more = f"; and {len(refused) - 2} other reasons" if len(refused) > 2 else ""
        return f"{sum(refused.values())} refused: {first}{more}" if refused else ""
