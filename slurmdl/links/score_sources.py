"""Sources of link scores: the collector's file, the user's own probes and a Prometheus server, or one given source.

Files hold JSON, CSV, or JSON lines of samples. Link scores are optional: a source that is missing, stale, malformed,
untrusted or slow gives a warning, and all sources together take at most a second.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic, time
from typing import Any

from slurmdl import files, records
from slurmdl.config import Config, LinkScoresConfig, user_dir
from slurmdl.errors import InputError, SlurmdlError, UnavailableError
from slurmdl.links.aggregate import DEFAULT_SETTINGS, MAX_CLOCK_SKEW_S, aggregate_scores
from slurmdl.links.link_scores import LinkScore, LinkScores, MetricWeights, raise_rejection
from slurmdl.links.samples import KIND_OF_KEY, LINK_KINDS, check_link_name, parse_sample_lines, reject_duplicate_keys
from slurmdl.slurm.process import start_thread

SOURCES_TIMEOUT_S = 0.9  # for all sources together
KEYWORDS = ("auto", "off")  # values of --dl-link-scores that are neither a file nor a URL
#: metric column of a CSV file -> type of its values
_CSV_COLUMNS = {"throughput": float, "rtt": float, "rtt_p99": float, "loss": float, "age": float, "samples": int}


@dataclass(frozen=True)
class LoadedScores:
    """Link scores, and warnings about sources that are missing in them."""

    scores: LinkScores
    warnings: tuple[str, ...] = ()


#: reads one source; the argument is called with the reason for each rejected score
ScoreReader = Callable[[Callable[[str], None]], LinkScores]


def user_probe_file(environ: Mapping[str, str], cluster: str) -> str:
    """File of the user's own probe samples of a cluster, JSON lines: clusters may share home directories."""
    return os.path.join(user_dir(environ, "state"), f"probe-{cluster.replace('/', '_')}.jsonl")


def load_from_sources(config: Config, source: str, environ: Mapping[str, str],
                      get_cluster: Callable[[], str] = str) -> LoadedScores:
    """Read the link scores of the value of --dl-link-scores, in at most a second.

    Args:
        source: "off", "auto", a file (JSON, CSV, or JSON lines of samples) or the URL of a Prometheus server.
        get_cluster: returns the cluster's name, and may wait for it; "auto" reads the user's own probes of this
            cluster, none if the name is "" or Slurm does not answer.
    """
    defaults = _defaults(config)
    if source == "off":
        return LoadedScores(defaults)
    deadline, max_age = monotonic() + SOURCES_TIMEOUT_S, config.link_scores.max_age
    readers = [_start_reading(name, read_scores)
               for name, read_scores in _list_sources(config, source, time(), deadline)]
    if source == "auto" and (cluster := _name_or_empty(get_cluster)):
        own_file, deadline = user_probe_file(environ, cluster), monotonic() + SOURCES_TIMEOUT_S
        readers.append(_start_reading(own_file, partial(_load_file, config, time(), own_file, required=False)))
    loaded, warnings = [], []
    for name, rejected, result in readers:
        try:
            scores = result(max(0.0, deadline - monotonic()))
        except Exception as error:
            reason = (f"no answer within {SOURCES_TIMEOUT_S:g} s" if isinstance(error, TimeoutError)
                      else f"{type(error).__name__}: {error}")
            warnings.append(str(error) if isinstance(error, SlurmdlError) else f"{name}: {reason}")
            continue
        if rejected:
            warnings.append(f"{name}: {len(rejected)} rejected, the first: {rejected[0]}")
        fresh = scores.map_links(lambda links: {name: score for name, score in links.items() if score.age <= max_age})
        if scores.link_count and not fresh.link_count:
            warnings.append(f"{name}: stale, the newest score is {newest_age(scores):.0f} s old "
                            f"(link_scores.max_age: {max_age:g})")
        elif not (fresh.link_count or rejected or _declared_defaults(fresh)) and source not in KEYWORDS:
            warnings.append(f"{name}: no score of the last {max_age:g} s")
        loaded.append(fresh)
    return LoadedScores(_merge_sources(defaults, loaded), tuple(warnings))


def _start_reading(name: str, read_scores: ScoreReader) -> tuple[str, list[str], Callable[..., LinkScores]]:
    """Start to read a source in a thread, so that a hung file system cannot block the process.

    Returns its name, the list of rejected scores, and a function that waits for the scores (see start_thread).
    """
    rejected: list[str] = []
    return name, rejected, start_thread(lambda: read_scores(rejected.append))


def _name_or_empty(get_cluster: Callable[[], str]) -> str:
    try:
        return get_cluster()
    except SlurmdlError:
        return ""


def _defaults(config: Config) -> LinkScores:
    """Configured defaults of links without a score, and the cost model."""
    assumed, settings = config.link_defaults, config.link_scores
    return LinkScores(default_node_bandwidth=assumed.node_bandwidth or LinkScores.default_node_bandwidth,
                      default_leaf_bandwidth=assumed.leaf_bandwidth or 0.0, default_rails=assumed.rails or 1,
                      default_zone_bandwidth=assumed.zone_bandwidth,
                      default_latency=assumed.latency or LinkScores.default_latency,
                      half_life=settings.half_life or None,
                      weights=MetricWeights(**vars(settings.weights)) if settings.cost_model == "weighted" else None)


def _load_file(config: Config, now: float, path: str, on_reject: Callable[[str], None], *,
               required: bool = True) -> LinkScores:
    if not required and not os.path.exists(path):
        return LinkScores()
    return load_scores(path, now, config.link_scores, on_reject)


def _list_sources(config: Config, source: str, now: float, deadline: float) -> list[tuple[str, ScoreReader]]:
    """The sources except for the user's own probes."""
    settings, load_file = config.link_scores, partial(_load_file, config, now)

    def query_prometheus(url: str, _: Callable[[str], None]) -> LinkScores:
        from slurmdl.links import prometheus  # its imports take longer than reading files

        server = replace(settings.prometheus, url=url)
        samples = prometheus.query_samples(server, deadline)
        if not samples:
            raise UnavailableError(f"prometheus: no result has a node name in the label {server.node_label!r}")
        return aggregate_scores(samples, now, settings=settings)

    if source not in KEYWORDS:
        is_url = source.startswith(("http://", "https://"))
        return [(source, partial(query_prometheus if is_url else load_file, source))]
    is_configured = settings.file != type(settings).file
    sources: list[tuple[str, ScoreReader]] = [
        (settings.file, partial(load_file, settings.file, required=is_configured))]
    if url := settings.prometheus.url:
        sources.append((url, partial(query_prometheus, url)))
    return sources


def newest_age(scores: LinkScores) -> float:
    return min(score.age for links in scores.by_kind.values() for score in links.values())


def _merge_sources(defaults: LinkScores, loaded: Sequence[LinkScores]) -> LinkScores:
    """Merge the scores of all sources; per link the youngest wins and missing metrics come from the others.

    Scores of counters alone come last. Defaults come from the first source that declares them, else from the
    configuration. The tolerance comes from sources that were aggregated from samples.
    """
    declared = {name: value for each in reversed(loaded) for name, value in _declared_defaults(each).items()}
    tolerance = max((each.tolerance for each in loaded if each.link_count), default=0.0)
    links: dict[str, Any] = {key: _merge_links([getattr(each, key) for each in loaded]) for key in KIND_OF_KEY}
    return replace(defaults, **declared, **links, tolerance=tolerance)


def _declared_defaults(scores: LinkScores) -> dict[str, Any]:
    """Defaults that a source declares itself."""
    return {name: value for name in ("default_node_bandwidth", "default_leaf_bandwidth", "default_rails",
                                     "default_zone_bandwidth", "default_latency")
            if (value := getattr(scores, name)) != getattr(LinkScores, name)}


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


def load_scores(path: str, now: float, settings: LinkScoresConfig = DEFAULT_SETTINGS,
                on_reject: Callable[[str], None] = raise_rejection) -> LinkScores:
    """Read the scores in a trusted file (see files.read_trusted_text), with their ages at `now`.

    `on_reject` is called with the reason for each invalid score or sample; if it returns, the others are kept. Raises
    InputError if the file cannot be read, is not trusted, or holds no scores.
    """
    text = files.read_trusted_text(path, settings.trusted_owner)
    try:
        return parse_scores(text, now, path.endswith(".csv"), settings, on_reject)
    except InputError as error:
        raise InputError(str(error), file=path) from error


def parse_scores(text: str, now: float, is_csv: bool = False, settings: LinkScoresConfig = DEFAULT_SETTINGS,
                 on_reject: Callable[[str], None] = raise_rejection) -> LinkScores:
    """Parse CSV, one JSON object of `LinkScores.to_json`, or samples as JSON lines."""
    if is_csv:
        return _parse_csv(text, on_reject)
    first_line = text.lstrip().partition("\n")[0]
    if first_line.startswith("{") and '"kind"' in first_line:
        return _aggregate_sample_lines(text, now, settings, on_reject)
    try:
        data = json.loads(text, object_pairs_hook=reject_duplicate_keys)
    except (ValueError, RecursionError) as error:
        raise InputError(f"is not JSON ({error})") from error
    scores = LinkScores.from_json(data, on_reject)
    if scores.time > now + MAX_CLOCK_SKEW_S:
        raise InputError(f"link scores: time is {scores.time - now:.0f} s in the future")
    return scores.with_current_ages(now)


def _aggregate_sample_lines(text: str, now: float, settings: LinkScoresConfig,
                            on_reject: Callable[[str], None]) -> LinkScores:
    """Aggregate the valid lines; InputError if there are only invalid ones."""
    results = list(parse_sample_lines(text.splitlines()))
    errors = [each for each in results if isinstance(each, InputError)]
    samples = [each for each in results if not isinstance(each, InputError)]
    if errors and not samples:
        raise errors[0]
    for error in errors:
        on_reject(f"line {str(error).lstrip(':')}")
    return aggregate_scores(samples, now, settings=settings)


def _parse_csv(text: str, on_reject: Callable[[str], None]) -> LinkScores:
    """Parse a table with the column `name`, and optionally `kind` (default: node) and metrics of LinkScore."""
    scores: dict[str, dict[str, LinkScore]] = {kind: {} for kind in LINK_KINDS}
    try:
        rows = csv.DictReader(io.StringIO(text), strict=True, skipinitialspace=True)
        header, valid = rows.fieldnames or (), ("kind", "name", *_CSV_COLUMNS)
        for column in header:
            if column not in valid:
                raise InputError(f"unknown column {column!r}; expected {', '.join(valid)}")
        if "name" not in header or len(set(header)) < len(header):
            raise InputError(f"first line: expected column names of {', '.join(valid)}, each once, including name")
        for row in rows:
            try:
                kind, name, score = _parse_csv_row(row, len(header))
                if name in scores[kind]:
                    raise InputError(f"{kind} {name!r}: duplicate row")
                scores[kind][name] = score
            except InputError as error:
                on_reject(f"line {rows.line_num}: {error}")
    except csv.Error as error:
        raise InputError(f"is not CSV ({error})") from error
    return LinkScores(nodes=scores["node"], zones=scores["zone"], inter_leaf=scores["inter_leaf"])


def _parse_csv_row(row: Mapping[str | Any, str | Any], columns: int) -> tuple[str, str, LinkScore]:
    """Kind, name and score of one row; InputError if it is not valid."""
    if None in row or None in row.values():
        raise InputError(f"expected {columns} columns")
    kind, name = row.get("kind") or "node", row["name"]
    if kind not in LINK_KINDS:
        raise InputError(f"kind {kind!r}: expected one of {', '.join(LINK_KINDS)}")
    check_link_name(name, kind, "name ")
    return kind, name, records.from_json(LinkScore, {key: _parse_number(value, convert)
                                                     for key, convert in _CSV_COLUMNS.items()
                                                     if (value := row.get(key) or "").strip()}, name)


def _parse_number(text: str, convert: type[int] | type[float]) -> float:
    try:
        return convert(text)
    except ValueError as error:
        raise InputError(f"{text[:40]!r}: expected a number") from error
