"""Sources of link scores: the collector's file, the user's own probes and a Prometheus server, or one given source.

Link scores are optional: a source that is missing, stale, malformed, untrusted or slow gives a warning, and all
sources together take at most a second.
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

#: for all sources together
SOURCES_TIMEOUT_S = 0.9
#: values of --dl-link-scores that are neither a file nor a URL
KEYWORDS = ("auto", "off")


@dataclass(frozen=True)
class LoadedScores:
    """Link scores, and warnings about sources that are missing in them."""

    scores: LinkScores
    warnings: tuple[str, ...] = ()


#: reads one source; the argument is called with the reason for each rejected score
ScoreReader = Callable[[Callable[[str], None]], LinkScores]


@dataclass
class _SourceReader:
    """One source, read in a daemon thread, so that a hung file system cannot block the process."""

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
    """File of the user's own probe samples, JSON lines (XDG Base Directory Specification)."""
    base = environ.get("XDG_STATE_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"),
                                                         ".local", "state")
    return os.path.join(base, "slurmdl", "probe.jsonl")


def load_from_sources(config: Config, source: str, environ: Mapping[str, str]) -> LoadedScores:
    """Read the link scores that --dl-link-scores names, in at most a second.

    Parameters
    ----------
    source : "off", "auto", a file (JSON, CSV, or JSON lines of samples) or the URL of a Prometheus server.
    """
    defaults = _defaults(config)
    if source == "off":
        return LoadedScores(defaults)
    deadline, max_age = monotonic() + SOURCES_TIMEOUT_S, config.link_scores.max_age
    readers = [_SourceReader(name, read_scores)
               for name, read_scores in _list_sources(config, source, environ, time(), deadline)]
    loaded, warnings = [], []
    for reader in readers:
        reader.thread.join(max(0.0, deadline - monotonic()))
        if reader.error is not None:
            warnings.append(str(reader.error))
        elif reader.scores is None:
            warnings.append(f"{reader.name}: no answer within {SOURCES_TIMEOUT_S:g} s")
        else:
            if reader.rejected:
                warnings.append(f"{reader.name}: {len(reader.rejected)} rejected, the first: {reader.rejected[0]}")
            fresh = _drop_expired(reader.scores, max_age)
            if reader.scores.link_count and not fresh.link_count:
                warnings.append(f"{reader.name}: stale, the newest score is {newest_age(reader.scores):.0f} s old "
                                f"(link_scores.max_age: {max_age:g})")
            elif not (fresh.link_count or reader.rejected or _declared_defaults(fresh)) and source not in KEYWORDS:
                warnings.append(f"{reader.name}: no score of the last {max_age:g} s")
            loaded.append(fresh)
    return LoadedScores(_merge_sources(defaults, loaded), tuple(warnings))


def _defaults(config: Config) -> LinkScores:
    """Configured defaults of links without a score, and the cost model."""
    default, settings = LinkScores(), config.link_scores
    return LinkScores(default_node_bandwidth=config.node_bandwidth or default.default_node_bandwidth,
                      default_zone_bandwidth=config.zone_bandwidth or default.default_zone_bandwidth,
                      default_latency=config.latency or default.default_latency,
                      half_life=settings.half_life or None,
                      weights=MetricWeights(**settings.weights) if settings.cost_model == "weighted" else None)


def _list_sources(config: Config, source: str, environ: Mapping[str, str], now: float,
                  deadline: float) -> list[tuple[str, ScoreReader]]:
    settings = config.link_scores
    rules = aggregate.AggregationRules(settings.max_age, settings.half_life, settings.tolerance)

    def query_prometheus(url: str, _: Callable[[str], None]) -> LinkScores:
        from slurmdl.links import prometheus_query  # its imports take longer than reading files

        label = settings.prometheus_node_label
        samples = prometheus_query.query_samples(url, settings.prometheus_queries, label, deadline)
        if not samples:
            raise UnavailableError(f"prometheus: no result has a node name in the label {label!r}")
        return aggregate.aggregate_scores(samples, now, rules=rules).scores

    def load_file(path: str, on_reject: Callable[[str], None]) -> LinkScores:
        return score_files.load_scores(path, now, settings.trusted_owner, rules, on_reject)

    def load_if_exists(path: str, on_reject: Callable[[str], None]) -> LinkScores:
        return load_file(path, on_reject) if os.path.exists(path) else LinkScores()

    if source not in KEYWORDS:
        is_url = source.startswith(("http://", "https://"))
        return [(source, partial(query_prometheus if is_url else load_file, source))]
    is_configured = settings.file != type(settings).file
    sources: list[tuple[str, ScoreReader]] = [
        (settings.file, partial(load_file if is_configured else load_if_exists, settings.file)),
        (user_probe_file(environ), partial(load_if_exists, user_probe_file(environ)))]
    if settings.prometheus_url:
        sources.append((settings.prometheus_url, partial(query_prometheus, settings.prometheus_url)))
    return sources


def _drop_expired(scores: LinkScores, max_age: float) -> LinkScores:
    def recent(links: Mapping[str, LinkScore]) -> dict[str, LinkScore]:
        return {name: score for name, score in links.items() if score.age <= max_age}

    return replace(scores, nodes=recent(scores.nodes), zones=recent(scores.zones),
                   inter_leaf=recent(scores.inter_leaf))


def newest_age(scores: LinkScores) -> float:
    return min(score.age for links in (scores.nodes, scores.zones, scores.inter_leaf) for score in links.values())


def _merge_sources(defaults: LinkScores, loaded: Sequence[LinkScores]) -> LinkScores:
    """Merge the scores of all sources; per link the youngest wins and missing metrics come from the others.

    Scores of counters alone come last. Defaults come from the first source that declares them, else from the
    configuration. The tolerance comes from sources that were aggregated from samples.
    """
    declared = {name: value for each in reversed(loaded) for name, value in _declared_defaults(each).items()}
    tolerance = max((each.tolerance for each in loaded if each.link_count), default=0.0)
    return replace(defaults, **declared, tolerance=tolerance, nodes=_merge_links([each.nodes for each in loaded]),
                   zones=_merge_links([each.zones for each in loaded]),
                   inter_leaf=_merge_links([each.inter_leaf for each in loaded]))


def _declared_defaults(scores: LinkScores) -> dict[str, Any]:
    """Defaults that a source declares itself."""
    default = LinkScores()
    return {name: getattr(scores, name)
            for name in ("default_node_bandwidth", "default_zone_bandwidth", "default_latency")
            if getattr(scores, name) != getattr(default, name)}


def _merge_links(links: Sequence[Mapping[str, LinkScore]]) -> dict[str, LinkScore]:
    merged: dict[str, LinkScore] = {}
    for name in dict.fromkeys(name for each in links for name in each):
        score, *others = sorted((each[name] for each in links if name in each),
                                key=lambda score: (score.source == "counters", score.age))
        for other in others:
            score = replace(score, throughput=score.throughput or other.throughput, rtt=score.rtt or other.rtt,
                            rtt_p99=score.rtt_p99 or other.rtt_p99, loss=score.loss or other.loss)
        merged[name] = score
    return merged
