"""The collector: samples go into the store, and the scores made of the recent ones are published."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import time

from slurmdl.errors import InputError
from slurmdl.network import exposition, hygiene, trust
from slurmdl.network.model import LinkScores
from slurmdl.network.read import from_text
from slurmdl.network.samples import LinkSample, from_lines
from slurmdl.network.store import Store, publish

#: what a file in the spool must end in to be taken; it is put there by renaming
SPOOLED = ".jsonl"
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
    owner : user whose files in the spool are trusted, see trust.
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
        """Store what lies in a directory, and then remove it there. What cannot be trusted or read is left there."""
        now, taken, samples = time(), [], []
        for name in sorted(os.listdir(folder)):
            path = os.path.join(folder, name)
            if name.endswith(SPOOLED) and not name.startswith("."):
                try:
                    samples += self.lines(trust.trusted_text(path, self.owner).splitlines(), now)
                    taken.append(path)
                except InputError as error:
                    self._refuse(str(error))
        self.keep(samples)
        for path in taken:
            with suppress(FileNotFoundError):
                os.unlink(path)

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
