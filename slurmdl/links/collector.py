"""The collector: store link samples and publish the scores aggregated from the recent ones."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from time import time

from slurmdl import file_trust
from slurmdl.errors import InputError, UnavailableError, warn
from slurmdl.links import aggregate, prometheus
from slurmdl.links.link_scores import LinkScores
from slurmdl.links.sample_store import SampleStore, publish_file
from slurmdl.links.samples import SPOOL_SUFFIX, LinkSample, parse_sample_lines
from slurmdl.links.score_sources import parse_scores

#: suffix of spool files that were rejected as a whole or in part, and how many of them are kept
REJECTED_SUFFIX, MAX_REJECTED_FILES = ".rejected", 100
MAX_REJECTION_REASONS = 100  # distinct reasons of rejections that are counted separately


@dataclass
class Collector:
    """State of one collector.

    Attributes:
        snapshot_path: file of scores for readers on a shared file system.
        textfile_path: file of Prometheus text, "" for none.
        trusted_users: whose spool files are accepted (see file_trust).
        known_names: names of nodes and zones; samples of other links are rejected. None if the topology is unknown.
        rejected: reason -> number of samples since the last report.
    """

    store: SampleStore
    snapshot_path: str
    rules: aggregate.AggregationRules
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
                    lines = file_trust.read_trusted_lines(path, self.trusted_users, follow_links=False)
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
        samples = self.store.samples_since(now - self.rules.window)
        scores = aggregate.aggregate_scores(samples, now, self._load_previous_scores(now), self.rules)
        publish_file(self.snapshot_path, scores.to_text())
        if self.textfile_path:
            publish_file(self.textfile_path, prometheus.exposition_text(scores))
        self.store.prune(now)

    def _load_previous_scores(self, now: float) -> LinkScores | None:
        """Scores of the last snapshot; None if it is missing or not valid."""
        try:
            return parse_scores(file_trust.read_trusted_text(self.snapshot_path, self.trusted_users), now)
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
