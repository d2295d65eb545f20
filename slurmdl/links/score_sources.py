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
from slurmdl.links import aggregate, score_files
from slurmdl.links.link_scores import LinkScore, LinkScores, MetricWeights

#: seconds for all sources together
SOURCES_TIMEOUT_S = 0.9
#: values of --dl-scores that are neither a file nor a URL
KEYWORDS = ("auto", "off")


@dataclass(frozen=True)
class LoadedScores:
    """Scores, and why some that were asked for are not among them."""

    scores: LinkScores
    warnings: tuple[str, ...] = ()


#: reads one source; what is wrong with the score of a single link is told to the function that it is given
ScoreReader = Callable[[Callable[[str], None]], LinkScores]


@dataclass
class _SourceReader:
    """One source that is read beside the others; it is daemonic, so that a hung file system holds nobody."""

    name: str
    read_scores: ScoreReader
    scores: LinkScores | None = None
    error: SlurmdlError | None = None
    rejected: list[str] = field(default_factory=list)
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.scores = self.read_scores(self.rejected.append)
        except SlurmdlError as error:
            self.error = error
        except Exception as error:
            self.error = InputError(f"{self.name}: {type(error).__name__}: {error}")


def user_probe_file(environ: Mapping[str, str]) -> str:
    """Where a user's own probes are kept, as JSON lines of samples (XDG Base Directory Specification)."""
    base = environ.get("XDG_STATE_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"),
                                                         ".local", "state")
    return os.path.join(base, "slurmdl", "probe.jsonl")


def load_from_sources(config: Config, source: str, environ: Mapping[str, str]) -> LoadedScores:
    """Read what --dl-scores names, in at most a second.

    Parameters
    ----------
    wanted : "off", "auto", a file (JSON, CSV, or JSON lines of samples) or the URL of a Prometheus server.
    """
    usual = _defaults(config)
    if source == "off":
        return LoadedScores(usual)
    deadline = monotonic() + SOURCES_TIMEOUT_S
    readings = [
    _SourceReader(
        name,
        reader) for name,
        reader in _list_sources(
            config,
            source,
            environ,
            time(),
             deadline)]
    found, remarks = [], []
    for reading in readings:
        reading.thread.join(max(0.0, deadline - monotonic()))
        if reading.error is not None:
            remarks.append(str(reading.error))
        elif reading.scores is None:
            remarks.append(f"{reading.name}: no answer within {SOURCES_TIMEOUT_S:g} s")
        else:
            if reading.rejected:
                remarks.append(f"{reading.name}: {len(reading.rejected)} refused, the first: {reading.rejected[0]}")
            fresh = _drop_expired(reading.scores, config.link_scores.max_age)
            if reading.scores.link_count and not fresh.link_count:
                remarks.append(f"{reading.name}: stale, the newest score is {newest_age(reading.scores):.0f} s old "
                               f"(scores.max_age: {config.link_scores.max_age:g})")
            elif not (fresh.link_count or reading.rejected or _declared_defaults(fresh)) and source not in KEYWORDS:
                remarks.append(f"{reading.name}: holds no score of the last {config.link_scores.max_age:g} s")
            found.append(fresh)
    return LoadedScores(_merge_sources(usual, found), tuple(remarks))


def _defaults(config: Config) -> LinkScores:
    """No scores; what the configuration assumes of all links, and how scores count."""
    default, given = LinkScores(), config.link_scores
    return LinkScores(default_node_bandwidth=config.node_bandwidth or default.default_node_bandwidth,
                      default_zone_bandwidth=config.zone_bandwidth or default.default_zone_bandwidth,
                      default_latency=config.latency or default.default_latency,
                      half_life=given.half_life or None,
                      weights=MetricWeights(**given.weights) if given.cost_model == "weighted" else None)


def _list_sources(config: Config, source: str, environ: Mapping[str, str], now: float,
             deadline: float) -> list[tuple[str, ScoreReader]]:
    given = config.link_scores
    rules = aggregate.AggregationRules(given.max_age, given.half_life, given.tolerance)

    def asked(url: str, _: Callable[[str], None]) -> LinkScores:
        from slurmdl.links import prometheus_query  # what it stands on takes longer to import than files to read

        found = prometheus_query.query_samples(url, given.prometheus_queries, given.prometheus_node_label, deadline)
        if not found:
            raise UnavailableError(f"prometheus: no answer names a node by its label {given.prometheus_node_label!r}")
        return aggregate.aggregate_scores(found, now, rules=rules).scores

    def file(path: str, refuse: Callable[[str], None]) -> LinkScores:
        return score_files.load_scores(path, now, given.trusted_owner, rules, refuse)

    def perhaps(path: str, refuse: Callable[[str], None]) -> LinkScores:
        return file(path, refuse) if os.path.exists(path) else LinkScores()

    if source not in KEYWORDS:
        return [(source, partial(asked if source.startswith(("http://", "https://")) else file, source))]
    found: list[tuple[str, ScoreReader]] = [
        (given.file, partial(file if given.file != type(given).file else perhaps, given.file)),
        (user_probe_file(environ), partial(perhaps, user_probe_file(environ)))]
    return [*found, (given.prometheus_url, partial(asked, given.prometheus_url))] if given.prometheus_url else found


def _drop_expired(scores: LinkScores, max_age: float) -> LinkScores:
    def young(links: Mapping[str, LinkScore]) -> dict[str, LinkScore]:
        return {name: score for name, score in links.items() if score.age <= max_age}

    return replace(scores, nodes=young(scores.nodes), zones=young(scores.zones), inter_leaf=young(scores.inter_leaf))


def newest_age(scores: LinkScores) -> float:
    return min(score.age for links in (scores.nodes, scores.zones, scores.inter_leaf) for score in links.values())


def _merge_sources(defaults: LinkScores, loaded: Sequence[LinkScores]) -> LinkScores:
    """All scores together: of two of one link the younger one counts, and the other fills in what it lacks; one of
    mere counters comes last.

    What is assumed of links that were not measured is what the first source says of it, else the configuration.
    Scores that were made of samples say how noisy they are; what is written by hand counts as it stands.
    """
    assumed = {name: value for each in reversed(loaded) for name, value in _declared_defaults(each).items()}
    margin = max((each.tolerance for each in loaded if each.link_count), default=0.0)
    return replace(defaults, **assumed, tolerance=margin, nodes=_merge_links([each.nodes for each in loaded]),
                   zones=_merge_links([each.zones for each in loaded]), inter_leaf=_merge_links([each.inter_leaf for each in loaded]))


def _declared_defaults(scores: LinkScores) -> dict[str, Any]:
    """What a source itself says of links that were not measured."""
    default = LinkScores()
    return {name: getattr(scores, name) for name in ("node_default", "zone_default", "delay_default")
            if getattr(scores, name) != getattr(default, name)}


def _merge_links(links: Sequence[Mapping[str, LinkScore]]) -> dict[str, LinkScore]:
    if len(links) < 2:
        return dict(links[0]) if links else {}
    found: dict[str, LinkScore] = {}
    for name in dict.fromkeys(name for each in links for name in each):
        young, *others = sorted((each[name] for each in links if name in each),
                                key=lambda score: (score.source == "counters", score.age))
        for other in others:
            young = replace(young, throughput=young.throughput or other.throughput, rtt=young.rtt or other.rtt,
                            rtt_p99=young.rtt_p99 or other.rtt_p99, loss=young.loss or other.loss)
        found[name] = young
    return found
