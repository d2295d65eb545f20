"""The collector: samples go into the store, and the scores made of the recent ones are published."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import time

from slurmdl.errors import InputError, UnavailableError
from slurmdl.network import exposition, hygiene, trust
from slurmdl.network.model import LinkScores
from slurmdl.network.read import from_text
from slurmdl.network.samples import LinkSample, from_lines
from slurmdl.network.store import Store, publish

#: what a file in the spool must end in to be taken; it is put there by renaming
SPOOLED = ".jsonl"
#: what is added to the name of a file that was refused as a whole or in part, and how many of these are kept
ASIDE, MOST_ASIDE = ".refused", 100
#: reasons for which samples are refused that are told apart
MOST_REASONS = 100


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

    store: Store
    snapshot: str
    rules: hygiene.Rules
    textfile: str = ""
    owner: str = ""
    known: frozenset[str] | None = None
    refused: Counter[str] = field(default_factory=Counter)
    #: files of the spool that were refused and could not be renamed
    _immovable: set[str] = field(default_factory=set)

    def lines(self, lines: Iterable[str], now: float) -> list[LinkSample]:
        """The samples that can be stored; the others are counted by why they cannot."""
        good = []
        for found in from_lines(lines):
            why = f"line {str(found).lstrip(':')}" if isinstance(found, InputError) else self._stranger(found) or (
                f"{found.name}: {found.time - now:.0f} s in the future" if found.time > now + hygiene.SKEW else "")
            if isinstance(found, InputError) or why:
                self._refuse(why)
            else:
                good.append(found)
        return good

    def _refuse(self, why: str) -> None:
        """Count it; of very many reasons only the number."""
        self.refused[why if why in self.refused or len(self.refused) < MOST_REASONS else "other reasons"] += 1

    def _stranger(self, sample: LinkSample) -> str:
        names = sample.name.split("|") if sample.kind == "trunk" else [sample.name]
        lost = [name for name in names if self.known is not None and name not in self.known]
        return f"unknown {sample.kind} {sample.name}" if lost else ""

    def keep(self, samples: Iterable[LinkSample]) -> None:
        """Store samples. UnavailableError where that is not possible: then none of them is stored."""
        self.store.add(samples)

    def take(self, senders: Sequence[Sequence[str]]) -> list[int]:
        """Store what is good in the lines of several senders; returns for each how many samples that were."""
        good = [self.lines(lines, time()) for lines in senders]
        self.keep(sample for samples in good for sample in samples)
        return [len(samples) for samples in good]

    def spool(self, folder: str) -> None:
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
            names = sorted(os.listdir(folder))
        except OSError as error:
            raise UnavailableError(f"--spool {folder}: cannot be read ({error.strerror})") from error
        there = {name: os.path.join(folder, name) for name in names}
        self._immovable.intersection_update(there.values())
        for name, path in there.items():
            if name.endswith(SPOOLED) and not name.startswith(".") and path not in self._immovable:
                refused = sum(self.refused.values())
                try:
                    samples += self.lines(trust.trusted_lines(path, self.owner), now)
                except InputError as error:
                    self._refuse(str(error))
                (taken if sum(self.refused.values()) == refused else aside).append(path)
        self.keep(samples)
        for path in taken:
            with suppress(OSError):
                os.unlink(path)
        for path in aside:
            try:
                os.rename(path, path + ASIDE)
            except OSError:
                self._immovable.add(path)  # a directory in which this user may only read
        old = sorted((name for name in names if name.endswith(SPOOLED + ASIDE)), reverse=True)
        for name in old[max(0, MOST_ASIDE - len(aside)):]:
            with suppress(OSError):
                os.unlink(there[name])

    def publish(self) -> LinkScores:
        """Make scores of the recent samples and put them in their places; forget the oldest samples."""
        now = time()
        made = hygiene.scores(self.store.since(now - self.rules.window), now, self._previous(now), self.rules)
        publish(self.snapshot, made.scores.to_text())
        if self.textfile:
            publish(self.textfile, exposition.text(made.scores))
        self.store.prune(now)
        return made.scores

    def _previous(self, now: float) -> LinkScores | None:
        """What was published before; a file that is not there or is broken is none."""
        try:
            return from_text(trust.trusted_text(self.snapshot, self.owner), now)
        except InputError:
            return None

    def report(self) -> str:
        """What happened since the last report, "" for nothing refused."""
        refused, self.refused = self.refused, Counter()
        first = "; ".join(f"{why} ({count})" if count > 1 else why for why, count in refused.most_common(2))
        more = f"; and {len(refused) - 2} other reasons" if len(refused) > 2 else ""
        return f"{sum(refused.values())} refused: {first}{more}" if refused else ""
