"""Aggregate link samples into scores: age-weighted medians with hysteresis; implausible samples are ignored.

A metric of a link is the weighted median of its samples in the window; weights halve after each half-life. Loss,
which is mostly 0 and sometimes high, is the mean without the highest tenth. A published value changes only if the
samples leave it by the deadband, and improves only if most samples agree, so placements do not follow noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from slurmdl.config import LinkScoresConfig
from slurmdl.links.capacity import SLOW_PATH_FRACTION
from slurmdl.links.link_scores import LinkScore, LinkScores
from slurmdl.links.samples import LINK_KINDS, LinkSample

MAX_CLOCK_SKEW_S = 60.0  # seconds by which the clock of a node may be ahead of the collector's
MIN_THROUGHPUT = 1.0  # bytes/s of a link that carries nothing
#: weight of samples of counters relative to others; retransmissions concern all links that a node's traffic crosses
COUNTERS_WEIGHT = 0.25
MIN_NODES = 3  # measured nodes from which on their median replaces the default of unmeasured nodes
LOSS_TOLERANCE = 2e-3  # loss difference below which losses count as equal
#: standard errors that count as noise, and the bound of the resulting tolerance: a link below half of the baseline
#: counts as degraded however noisy the probes are
NOISE_SIGMAS, MAX_TOLERANCE = 4.5, 1.0

#: (value, weight) of each sample
WeightedValues = Sequence[tuple[float, float]]

DEFAULT_SETTINGS = LinkScoresConfig()


def aggregate_scores(samples: Iterable[LinkSample], now: float, previous: LinkScores | None = None,
                     settings: LinkScoresConfig = DEFAULT_SETTINGS) -> LinkScores:
    """Aggregate samples, in any order, into scores at `now` (s since the epoch); duplicates count once.

    Args:
        previous: the last published scores, None if there are none.
        settings: `max_age` and `half_life` of samples in s; `tolerance`, which `noise_tolerance` may raise: half of
            it is the deadband around a published value.
    """
    previous = previous or LinkScores()
    samples_of: dict[str, dict[str, list[LinkSample]]] = {kind: {} for kind in LINK_KINDS}
    for sample in set(samples):
        if _is_plausible(sample, now, settings):
            samples_of[sample.kind].setdefault(sample.name, []).append(sample)
    tolerance = noise_tolerance(samples_of["node"], settings.tolerance)
    settings = replace(settings, tolerance=tolerance)
    nodes, zones, inter_leaf = (
        {name: _aggregate_link(of_link, now, old_scores.get(name), settings)
         for name, of_link in sorted(samples_of[kind].items())} for kind, old_scores in previous.by_kind.items())
    defaults: dict[str, Any] = {}
    for key, values in (
            ("default_node_bandwidth", [score.throughput for score in nodes.values() if score.throughput]),
            ("default_latency", [score.rtt / 2 for score in nodes.values() if score.rtt])):
        if len(values) >= MIN_NODES:
            center, old = float(np.median(values)), getattr(previous, key) if previous.link_count else 0.0
            defaults[key] = old if abs(center - old) <= tolerance / 2 * old else center
    scores = LinkScores(nodes=nodes, inter_leaf=inter_leaf, time=now, tolerance=tolerance, **defaults)
    measured = {name: _drop_node_limited(score, _node_limited_threshold(scores)) for name, score in zones.items()}
    return replace(scores, zones={**infer_uplinks(scores), **measured})


def noise_tolerance(samples_by_node: Mapping[str, Sequence[LinkSample]], tolerance: float) -> float:
    """Raise the tolerance if the throughput samples of the nodes are noisier than that.

    If one sample has the standard error s, the median of n samples has s * (pi / 2 / n)^(1/2). The median over the
    nodes counts, so a few bad nodes have no effect.
    """
    errors = []
    for samples in samples_by_node.values():
        node_errors = [sample.throughput_rse for sample in samples if sample.throughput_rse is not None]
        if node_errors:
            errors.append(float(np.median(node_errors)) * min(1.0, np.sqrt(np.pi / 2 / len(node_errors))))
    if len(errors) < MIN_NODES:
        return tolerance
    return max(tolerance, min(MAX_TOLERANCE, float(np.expm1(NOISE_SIGMAS * np.median(errors)))))


def infer_uplinks(scores: LinkScores) -> dict[str, LinkScore]:
    """Infer uplink scores of leaf zones from the inter-leaf paths that start there.

    The throughput of a path is the minimum, its RTT the sum over both uplinks, so an uplink is as good as its best
    path. A path no slower than the measuring nodes gives only a lower bound of the throughput, which is dropped.
    """
    paths_by_zone: dict[str, list[LinkScore]] = {}
    for name, score in scores.inter_leaf.items():
        for zone in name.split("|"):
            paths_by_zone.setdefault(zone, []).append(score)
    threshold = _node_limited_threshold(scores)
    return {zone: _infer_uplink(paths, threshold) for zone, paths in sorted(paths_by_zone.items())}


def _node_limited_threshold(scores: LinkScores) -> float:
    """Bytes/s from which an inter-leaf path counts as no slower than the nodes that measured it."""
    return scores.default_node_bandwidth * min(1 - SLOW_PATH_FRACTION, 1 / (1 + scores.tolerance))


def _infer_uplink(paths: Sequence[LinkScore], threshold: float) -> LinkScore:
    best = min(paths, key=lambda path: path.loss)
    throughput = max((path.throughput for path in paths if path.throughput is not None), default=None)
    return replace(_drop_node_limited(replace(best, throughput=throughput), threshold),
                   rtt=min((path.rtt for path in paths if path.rtt), default=0.0) / 2,  # split over both uplinks
                   rtt_p99=min((path.rtt_p99 for path in paths if path.rtt_p99), default=0.0) / 2,
                   age=min(path.age for path in paths), samples=sum(path.samples for path in paths))


def _drop_node_limited(score: LinkScore, threshold: float) -> LinkScore:
    """Drop a throughput that pairs of nodes measured over an uplink and that their own links limited."""
    is_limited = score.source in ("probe", "job") and score.throughput is not None and score.throughput >= threshold
    return replace(score, throughput=None) if is_limited else score


def _is_plausible(sample: LinkSample, now: float, settings: LinkScoresConfig) -> bool:
    """Whether a sample is recent, has a metric, and its RTT tail is not below its median."""
    return -MAX_CLOCK_SKEW_S <= now - sample.time <= settings.max_age \
        and (sample.throughput, sample.rtt, sample.loss) != (None, None, None) \
        and (sample.rtt is None or sample.rtt_p99 is None or sample.rtt_p99 >= sample.rtt)


def _aggregate_link(samples: Sequence[LinkSample], now: float,
                    previous: LinkScore | None, settings: LinkScoresConfig) -> LinkScore:
    deadband = settings.tolerance / 2

    def weighted_values(metric: Callable[[LinkSample], float | None], counters: bool = True) -> WeightedValues:
        return sorted((value, _sample_weight(sample, now, settings)) for sample in samples
                      if (counters or sample.source != "counters") and (value := metric(sample)) is not None)

    throughputs = weighted_values(lambda sample: sample.throughput, counters=False)
    # the nominal speed of an interface is an upper bound, not a measurement
    nominal = max((sample.throughput for sample in samples if sample.source == "counters" and sample.throughput),
                  default=None)
    if not throughputs and nominal:
        throughputs = [(nominal, 1.0)]
    rtts, losses = weighted_values(lambda sample: sample.rtt), weighted_values(lambda sample: sample.loss)
    tails = weighted_values(lambda sample: sample.rtt_p99) or rtts
    newest = max(sample.time for sample in samples)
    best = max(samples, key=lambda sample: (sample.source != "counters", sample.time, sample.source))
    old = previous or LinkScore()
    throughput = None
    if throughputs:
        # the lower quartile must improve, too
        middle, low = _weighted_quantile(throughputs, 0.5), _weighted_quantile(throughputs, 0.25)
        throughput = max(MIN_THROUGHPUT, -_with_hysteresis(-middle, -low, -(old.throughput or 0.0), deadband))
    rtt = _with_hysteresis(_weighted_quantile(rtts, 0.5), _weighted_quantile(rtts, 0.75), old.rtt,
                           deadband) if rtts else 0.0
    loss = _trimmed_mean(losses) if losses else 0.0
    if previous is not None and abs(loss - previous.loss) < max(LOSS_TOLERANCE, deadband * previous.loss):
        loss = previous.loss
    return LinkScore(throughput=throughput, rtt=rtt, loss=loss, age=max(0.0, now - newest), samples=len(samples),
                     rtt_p99=max(rtt, _weighted_quantile(tails, 0.99)) if tails else 0.0, rdma=best.rdma,
                     source=best.source)


def _sample_weight(sample: LinkSample, now: float, settings: LinkScoresConfig) -> float:
    age = max(0.0, now - sample.time)
    decay = max(0.5 ** (age / settings.half_life), 1e-9) if settings.half_life else 1.0
    return decay * COUNTERS_WEIGHT if sample.source == "counters" else decay


def _with_hysteresis(median: float, worse_quartile: float, previous: float, deadband: float) -> float:
    """Value to publish, if less is better: the previous one (0 if there is none) unless the samples leave it.

    A quarter of the samples exceed `worse_quartile`.
    """
    if not previous:
        return median
    margin = deadband * abs(previous)
    return median if median > previous + margin or worse_quartile < previous - margin else previous


def _weighted_quantile(values: WeightedValues, fraction: float) -> float:
    """Smallest value whose cumulative weight reaches the fraction of the total weight; values are sorted."""
    target, cumulative = fraction * sum(weight for _, weight in values), 0.0
    for value, weight in values:
        cumulative += weight
        if cumulative >= target - 1e-12:
            return value
    return values[-1][0]


def _trimmed_mean(values: WeightedValues) -> float:
    """Weighted mean up to the 0.9 quantile; of all values if there are fewer than 5."""
    bound = _weighted_quantile(values, 0.9) if len(values) >= 5 else values[-1][0]
    kept = [(value, weight) for value, weight in values if value <= bound]
    return sum(value * weight for value, weight in kept) / sum(weight for _, weight in kept)
