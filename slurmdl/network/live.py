"""The scores that a choice is made from: the site's, the user's own and a Prometheus server's, or those of one file.

Scores are a help and never a need: whatever is missing, stale, malformed, not to be trusted or slow leaves a remark
and costs at most a second.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic, time
from typing import Any

from slurmdl.config import Config
from slurmdl.errors import InputError, SlurmdlError, UnavailableError
from slurmdl.network import hygiene, read
from slurmdl.network.model import LinkScore, LinkScores, Weights

#: seconds for all sources together
LIMIT = 0.9
#: values of --dl-scores that are neither a file nor a URL
WORDS = ("auto", "off")


@dataclass(frozen=True)
class Live:
    """Scores, and why some that were asked for are not among them."""

    scores: LinkScores
    remarks: tuple[str, ...] = ()


#: reads one source; what is wrong with the score of a single link is told to the function that it is given
Reader = Callable[[Callable[[str], None]], LinkScores]


@dataclass
class _Reading:
    """One source that is read beside the others; it is daemonic, so that a hung file system holds nobody."""

    name: str
    read: Reader
    scores: LinkScores | None = None
    error: SlurmdlError | None = None
    refused: list[str] = field(default_factory=list)
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.scores = self.read(self.refused.append)
        except SlurmdlError as error:
            self.error = error
        except Exception as error:
            self.error = InputError(f"{self.name}: {type(error).__name__}: {error}")


def own_file(environ: Mapping[str, str]) -> str:
    """Where a user's own probes are kept, as JSON lines of samples (XDG Base Directory Specification)."""
    base = environ.get("XDG_STATE_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"),
                                                         ".local", "state")
    return os.path.join(base, "slurmdl", "probe.jsonl")


def live(config: Config, wanted: str, environ: Mapping[str, str]) -> Live:
    """Read what --dl-scores names, in at most a second.

    Parameters
    ----------
    wanted : "off", "auto", a file (JSON, CSV, or JSON lines of samples) or the URL of a Prometheus server.
    """
    usual = _usual(config)
    if wanted == "off":
        return Live(usual)
    deadline = monotonic() + LIMIT
    readings = [_Reading(name, reader) for name, reader in _sources(config, wanted, environ, time(), deadline)]
    found, remarks = [], []
    for reading in readings:
        reading.thread.join(max(0.0, deadline - monotonic()))
        if reading.error is not None:
            remarks.append(str(reading.error))
        elif reading.scores is None:
            remarks.append(f"{reading.name}: no answer within {LIMIT:g} s")
        else:
            if reading.refused:
                remarks.append(f"{reading.name}: {len(reading.refused)} refused, the first: {reading.refused[0]}")
            fresh = _fresh(reading.scores, config.scores.max_age)
            if reading.scores.measured and not fresh.measured:
                remarks.append(f"{reading.name}: stale, the newest score is {newest(reading.scores):.0f} s old "
                               f"(scores.max_age: {config.scores.max_age:g})")
            elif not (fresh.measured or reading.refused or _assumed(fresh)) and wanted not in WORDS:
                remarks.append(f"{reading.name}: holds no score of the last {config.scores.max_age:g} s")
            found.append(fresh)
    return Live(_joined(usual, found), tuple(remarks))


def _usual(config: Config) -> LinkScores:
    """No scores; what the configuration assumes of all links, and how scores count."""
    default, given = LinkScores(), config.scores
    return LinkScores(node_default=config.node_speed or default.node_default,
                      zone_default=config.zone_speed or default.zone_default,
                      delay_default=config.delay or default.delay_default,
                      half_life=given.half_life or None,
                      weights=Weights(**given.weights) if given.scoring == "weighted" else None)


def _sources(config: Config, wanted: str, environ: Mapping[str, str], now: float,
             deadline: float) -> list[tuple[str, Reader]]:
    given = config.scores
    rules = hygiene.Rules(given.max_age, given.half_life, given.margin)

    def asked(url: str, _: Callable[[str], None]) -> LinkScores:
        from slurmdl.network import prometheus  # what it stands on takes longer to import than files to read

        found = prometheus.samples(url, given.queries, given.label, deadline)
        if not found:
            raise UnavailableError(f"prometheus: no answer names a node by its label {given.label!r}")
        return hygiene.scores(found, now, rules=rules).scores

    def file(path: str, refuse: Callable[[str], None]) -> LinkScores:
        return read.from_file(path, now, given.owner, rules, refuse)

    def perhaps(path: str, refuse: Callable[[str], None]) -> LinkScores:
        return file(path, refuse) if os.path.exists(path) else LinkScores()

    if wanted not in WORDS:
        return [(wanted, partial(asked if wanted.startswith(("http://", "https://")) else file, wanted))]
    found: list[tuple[str, Reader]] = [
        (given.file, partial(file if given.file != type(given).file else perhaps, given.file)),
        (own_file(environ), partial(perhaps, own_file(environ)))]
    return [*found, (given.url, partial(asked, given.url))] if given.url else found


def _fresh(scores: LinkScores, max_age: float) -> LinkScores:
    def young(links: Mapping[str, LinkScore]) -> dict[str, LinkScore]:
        return {name: score for name, score in links.items() if score.age <= max_age}

    return replace(scores, nodes=young(scores.nodes), zones=young(scores.zones), trunks=young(scores.trunks))


def newest(scores: LinkScores) -> float:
    return min(score.age for links in (scores.nodes, scores.zones, scores.trunks) for score in links.values())


def _joined(usual: LinkScores, found: Sequence[LinkScores]) -> LinkScores:
    """All scores together: of two of one link the younger one counts, and the other fills in what it lacks; one of
    mere counters comes last.

    What is assumed of links that were not measured is what the first source says of it, else the configuration.
    Scores that were made of samples say how noisy they are; what is written by hand counts as it stands.
    """
    assumed = {name: value for each in reversed(found) for name, value in _assumed(each).items()}
    margin = max((each.margin for each in found if each.measured), default=0.0)
    return replace(usual, **assumed, margin=margin, nodes=_united([each.nodes for each in found]),
                   zones=_united([each.zones for each in found]), trunks=_united([each.trunks for each in found]))


def _assumed(scores: LinkScores) -> dict[str, Any]:
    """What a source itself says of links that were not measured."""
    default = LinkScores()
    return {name: getattr(scores, name) for name in ("node_default", "zone_default", "delay_default")
            if getattr(scores, name) != getattr(default, name)}


def _united(links: Sequence[Mapping[str, LinkScore]]) -> dict[str, LinkScore]:
    if len(links) < 2:
        return dict(links[0]) if links else {}
    found: dict[str, LinkScore] = {}
    for name in dict.fromkeys(name for each in links for name in each):
        young, *others = sorted((each[name] for each in links if name in each),
                                key=lambda score: (score.source == "counters", score.age))
        for other in others:
            young = replace(young, throughput=young.throughput or other.throughput, delay=young.delay or other.delay,
                            delay_tail=young.delay_tail or other.delay_tail, loss=young.loss or other.loss)
        found[name] = young
    return found
