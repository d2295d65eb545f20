"""From samples to scores: what is recent counts most, noise changes nothing, and what is absurd is left out.

Each figure of a link is the weighted median of its samples of the last minutes, an older one counting half as much
after each half-life; loss, which is mostly nothing and now and then much, is a mean without the highest tenth. A
figure that was published before stays until the samples leave it by a margin, and one gets better only where most of
them say so: a choice must not turn with the noise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from slurmdl.links.capacity import SLOW_PATH_FRACTION
from slurmdl.links.link_scores import LinkScore, LinkScores
from slurmdl.links.samples import LinkSample

#: seconds that the clock of a node may be ahead of the collector's
MAX_CLOCK_SKEW_S = 60.0
#: bytes/s that stand for a link that carries nothing
MIN_THROUGHPUT = 1.0
#: how much a sample of the source counts; retransmissions tell of all the links that a node's traffic took
SOURCE_WEIGHTS = {"counters": 0.25}
#: least number of measured nodes whose median stands for those that were not measured
MIN_NODES = 3
#: fractions of loss that count as equal
LOSS_TOLERANCE = 2e-3

#: standard errors that a figure of a good link is off by at most, and the margin beyond which noise widens none: what
#: is at less than half of the usual figure is degraded, however noisy the probes
NOISE_SIGMAS, MAX_TOLERANCE = 4.5, 1.0

#: (value, weight) of each sample
WeightedValues = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class AggregationRules:
    """How samples become scores.

    Attributes
    ----------
    window : seconds after which a sample is forgotten.
    half_life : seconds after which a sample counts half as much; 0 for no decay.
    margin : fraction below which figures of two links count as equal, more where the probes say of themselves that
        they are noisier (`widened`); half of it is what a figure must leave the published one by, so that those on
        the edge do not come and go.
    """

    window: float = 900.0
    half_life: float = 300.0
    tolerance: float = 0.25

    @property
    def deadband(self) -> float:
        return self.tolerance / 2


#: the usual ones
DEFAULT_RULES = AggregationRules()


@dataclass(frozen=True)
class AggregatedScores:
    """Scores, and what was left out of them: reason -> number of samples."""

    scores: LinkScores
    rejected: Counter[str] = field(default_factory=Counter)


def aggregate_scores(samples: Iterable[LinkSample], now: float, previous: LinkScores | None = None,
           rules: AggregationRules = DEFAULT_RULES) -> AggregatedScores:
    """The scores that these samples make.

    Parameters
    ----------
    samples : in any order; one that is given twice counts once.
    now : seconds since the epoch.
    previous : what was published before; None for nothing.
    """
    previous = previous or LinkScores()
    refused: Counter[str] = Counter()
    found: dict[str, dict[str, list[LinkSample]]] = {"node": {}, "zone": {}, "trunk": {}}
    for sample in set(samples):
        why = _rejection_reason(sample, now, rules)
        if why:
            refused[why] += 1
        else:
            found[sample.kind].setdefault(sample.name, []).append(sample)
    rules = replace(rules, tolerance=noise_tolerance(found["node"], rules.tolerance))
    before = {"node": previous.nodes, "zone": previous.zones, "trunk": previous.inter_leaf}
    nodes, zones, trunks = ({name: _aggregate_link(found[kind][name], now, before[kind].get(name), rules)
                             for name in sorted(found[kind])} for kind in ("node", "zone", "trunk"))
    made = LinkScores(nodes=nodes, zones=zones, inter_leaf=trunks, time=now, tolerance=rules.tolerance)
    speeds = [score.throughput for score in nodes.values() if score.throughput is not None]
    if len(speeds) >= MIN_NODES:
        usual = previous.default_node_bandwidth if previous.link_count else 0.0
        made = replace(made, default_node_bandwidth=_with_deadband(float(np.median(speeds)), usual, rules.deadband))
    delays = [score.rtt / 2 for score in nodes.values() if score.rtt]
    if len(delays) >= MIN_NODES:
        usual = previous.default_latency if previous.link_count else 0.0
        made = replace(made, default_latency=_with_deadband(float(np.median(delays)), usual, rules.deadband))
    measured = {name: _drop_node_limited(score, _node_limited_threshold(made)) for name, score in zones.items()}
    return AggregatedScores(replace(made, zones={**infer_uplinks(made), **measured}), refused)


def noise_tolerance(samples_by_node: Mapping[str, Sequence[LinkSample]], tolerance: float) -> float:
    """The margin, or more where the nodes' figures are noisier than that.

    Each sample tells its standard error s, and the median of n of them has s (pi / 2 / n)^(1/2). It is the median of
    the nodes that counts, so a few bad ones change nothing.
    """
    errors = []
    for samples in samples_by_node.values():
        told = [sample.throughput_rse for sample in samples if sample.throughput_rse is not None]
        if told:
            errors.append(float(np.median(told)) * min(1.0, np.sqrt(np.pi / 2 / len(told))))
    if len(errors) < MIN_NODES:
        return tolerance
    return max(tolerance, min(MAX_TOLERANCE, float(np.expm1(NOISE_SIGMAS * np.median(errors)))))


def infer_uplinks(scores: LinkScores) -> dict[str, LinkScore]:
    """What the ways between leaf zones say of the uplinks of these zones, for those with a trunk that was measured.

    A way is as fast as the slower of two uplinks, and its delay is that of both; so an uplink is as good as the best
    way over it. The nodes that measured it bound what it can show: one that is no slower than a node's link says
    nothing of the uplink's throughput.
    """
    ways: dict[str, list[LinkScore]] = {}
    for name, score in scores.inter_leaf.items():
        for zone in name.split("|"):
            ways.setdefault(zone, []).append(score)
    return {zone: _infer_uplink(each, _node_limited_threshold(scores)) for zone, each in sorted(ways.items())}


def _node_limited_threshold(scores: LinkScores) -> float:
    """Bytes/s from which a way between zones counts as no slower than the nodes that measured it."""
    return scores.default_node_bandwidth * min(1 - SLOW_PATH_FRACTION, 1 / (1 + scores.tolerance))


def _infer_uplink(paths: Sequence[LinkScore], threshold: float) -> LinkScore:
    best = min(paths, key=lambda way: way.loss)
    speed = max((way.throughput for way in paths if way.throughput is not None), default=None)
    return replace(_drop_node_limited(replace(best, throughput=speed), threshold),
                   rtt=min((way.rtt for way in paths if way.rtt), default=0.0) / 2,
                   rtt_p99=min((way.rtt_p99 for way in paths if way.rtt_p99), default=0.0) / 2,
                   age=min(way.age for way in paths), samples=sum(way.samples for way in paths))


def _drop_node_limited(score: LinkScore, threshold: float) -> LinkScore:
    """The score of an uplink that pairs of nodes measured: one that is no slower than a node's link shows nothing of
    its own throughput."""
    paired = score.source in (
    "probe",
    "serve",
     "job") and score.throughput is not None and score.throughput >= threshold
    return replace(score, throughput=None) if paired else score


def _rejection_reason(sample: LinkSample, now: float, rules: AggregationRules) -> str:
    """Why a sample is left out, "" where it is not."""
    if sample.time > now + MAX_CLOCK_SKEW_S:
        return "in the future"
    if now - sample.time > rules.window:
        return "too old"
    if sample.throughput is None and sample.rtt is None and sample.loss is None:
        return "without a figure"
    if sample.rtt is not None and sample.rtt_p99 is not None and sample.rtt_p99 < sample.rtt:
        return "absurd"
    return ""


def _aggregate_link(samples: Sequence[LinkSample], now: float,
                    previous: LinkScore | None, rules: AggregationRules) -> LinkScore:
    def values(of: Callable[[LinkSample], float | None], counters: bool = True) -> WeightedValues:
        return sorted((value, _sample_weight(sample, now, rules)) for sample in samples
                      if (counters or sample.source != "counters") and (value := of(sample)) is not None)

    active = values(lambda sample: sample.throughput, counters=False)
    # what an interface calls its speed is no measurement: it only bounds
    bound = max((sample.throughput for sample in samples if sample.source == "counters" and sample.throughput),
                default=None)
    speeds = active or ([(bound, 1.0)] if bound else [])
    delays, losses = values(lambda sample: sample.rtt), values(lambda sample: sample.loss)
    tails = values(lambda sample: sample.rtt_p99) or delays
    newest = max(sample.time for sample in samples)
    best = max(samples, key=lambda sample: (sample.source != "counters", sample.time, sample.source))
    old = previous or LinkScore(samples=1)
    throughput = None
    if speeds:
        # the lower quartile must be better, too
        middle, low = _weighted_quantile(speeds, 0.5), _weighted_quantile(speeds, 0.25)
        throughput = max(MIN_THROUGHPUT, -_with_hysteresis(-middle, -low, -(old.throughput or 0.0), rules.deadband))
    delay = _with_hysteresis(
    _weighted_quantile(
        delays, 0.5), _weighted_quantile(
            delays, 0.75), old.rtt, rules.deadband) if delays else 0.0
    loss = _trimmed_mean(losses) if losses else 0.0
    if previous is not None and abs(loss - previous.loss) < max(LOSS_TOLERANCE, rules.deadband * previous.loss):
        loss = previous.loss
    return LinkScore(throughput=throughput, rtt=delay, loss=loss, age=max(0.0, now - newest),
                     samples=len(samples), rtt_p99=max(delay, _weighted_quantile(tails, 0.99)) if tails else 0.0,
                     rdma=best.rdma, source=best.source)


def _sample_weight(sample: LinkSample, now: float, rules: AggregationRules) -> float:
    age = max(0.0, now - sample.time)
    decay = max(0.5 ** (age / rules.half_life), 1e-9) if rules.half_life else 1.0
    return SOURCE_WEIGHTS.get(sample.source, 1.0) * decay


def _with_hysteresis(median: float, worse_quartile: float, previous: float, tolerance: float) -> float:
    """The figure to publish, where less is better: the one before unless the samples leave it by the margin.

    Parameters
    ----------
    now : median of the samples.
    worse_now : what a quarter of them are worse than.
    before : what was published; 0 for nothing.
    """
    if not previous:
        return median
    room = tolerance * abs(previous)
    return median if median > previous + room or worse_quartile < previous - room else previous


def _with_deadband(current: float, previous: float, tolerance: float) -> float:
    return previous if abs(current - previous) <= tolerance * previous else current


def _weighted_quantile(values: WeightedValues, fraction: float) -> float:
    """The least value that so much of the weight does not exceed."""
    wanted, seen = fraction * sum(weight for _, weight in values), 0.0
    for value, weight in values:
        seen += weight
        if seen >= wanted - 1e-12:
            return value
    return values[-1][0]


def _trimmed_mean(values: WeightedValues) -> float:
    """Weighted mean of what does not exceed nine tenths of the weight, of all where they are few."""
    most = _weighted_quantile(values, 0.9) if len(values) >= 5 else values[-1][0]
    kept = [(value, weight) for value, weight in values if value <= most]
    return sum(value * weight for value, weight in kept) / sum(weight for _, weight in kept)


def with_current_ages(scores: LinkScores, now: float) -> LinkScores:
    """The scores with the ages that they have now, where they say when they were made."""
    later = max(0.0, now - scores.time) if scores.time else 0.0
    if not later:
        return scores

    def aged(links: Mapping[str, LinkScore]) -> dict[str, LinkScore]:
        return {name: replace(score, age=score.age + later) for name, score in links.items()}

    return replace(scores, nodes=aged(scores.nodes), zones=aged(
        scores.zones), inter_leaf=aged(scores.inter_leaf), time=now)
