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

from slurmdl.network.capacity import SLOWER
from slurmdl.network.model import LinkScore, LinkScores
from slurmdl.network.samples import LinkSample

#: seconds that the clock of a node may be ahead of the collector's
SKEW = 60.0
#: bytes/s that stand for a link that carries nothing
LEAST = 1.0
#: how much a sample of the source counts; retransmissions tell of all the links that a node's traffic took
TRUST = {"counters": 0.25}
#: least number of measured nodes whose median stands for those that were not measured
ENOUGH = 3
#: fractions of loss that count as equal
LOSS_MARGIN = 2e-3

#: standard errors that a figure of a good link is off by at most, and the margin beyond which noise widens none: what
#: is at less than half of the usual figure is degraded, however noisy the probes
CLEAR, WIDEST = 4.5, 1.0

#: (value, weight) of each sample
Weighted = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Rules:
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
    margin: float = 0.25

    @property
    def deadband(self) -> float:
        return self.margin / 2


#: the usual ones
USUAL = Rules()


@dataclass(frozen=True)
class Made:
    """Scores, and what was left out of them: reason -> number of samples."""

    scores: LinkScores
    refused: Counter[str] = field(default_factory=Counter)


def scores(samples: Iterable[LinkSample], now: float, previous: LinkScores | None = None,
           rules: Rules = USUAL) -> Made:
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
        why = _fault(sample, now, rules)
        if why:
            refused[why] += 1
        else:
            found[sample.kind].setdefault(sample.name, []).append(sample)
    rules = replace(rules, margin=widened(found["node"], rules.margin))
    before = {"node": previous.nodes, "zone": previous.zones, "trunk": previous.trunks}
    nodes, zones, trunks = ({name: _score(found[kind][name], now, before[kind].get(name), rules)
                             for name in sorted(found[kind])} for kind in ("node", "zone", "trunk"))
    made = LinkScores(nodes=nodes, zones=zones, trunks=trunks, time=now, margin=rules.margin)
    speeds = [score.throughput for score in nodes.values() if score.throughput is not None]
    if len(speeds) >= ENOUGH:
        usual = previous.node_default if previous.measured else 0.0
        made = replace(made, node_default=_settled(float(np.median(speeds)), usual, rules.deadband))
    delays = [score.delay / 2 for score in nodes.values() if score.delay]
    if len(delays) >= ENOUGH:
        usual = previous.delay_default if previous.measured else 0.0
        made = replace(made, delay_default=_settled(float(np.median(delays)), usual, rules.deadband))
    measured = {name: _unbound(score, _fast(made)) for name, score in zones.items()}
    return Made(replace(made, zones={**uplinks(made), **measured}), refused)


def widened(nodes: Mapping[str, Sequence[LinkSample]], margin: float) -> float:
    """The margin, or more where the nodes' figures are noisier than that.

    Each sample tells its standard error s, and the median of n of them has s (pi / 2 / n)^(1/2). It is the median of
    the nodes that counts, so a few bad ones change nothing.
    """
    errors = []
    for samples in nodes.values():
        told = [sample.noise for sample in samples if sample.noise is not None]
        if told:
            errors.append(float(np.median(told)) * min(1.0, np.sqrt(np.pi / 2 / len(told))))
    if len(errors) < ENOUGH:
        return margin
    return max(margin, min(WIDEST, float(np.expm1(CLEAR * np.median(errors)))))


def uplinks(scores: LinkScores) -> dict[str, LinkScore]:
    """What the ways between leaf zones say of the uplinks of these zones, for those with a trunk that was measured.

    A way is as fast as the slower of two uplinks, and its delay is that of both; so an uplink is as good as the best
    way over it. The nodes that measured it bound what it can show: one that is no slower than a node's link says
    nothing of the uplink's throughput.
    """
    ways: dict[str, list[LinkScore]] = {}
    for name, score in scores.trunks.items():
        for zone in name.split("|"):
            ways.setdefault(zone, []).append(score)
    return {zone: _uplink(each, _fast(scores)) for zone, each in sorted(ways.items())}


def _fast(scores: LinkScores) -> float:
    """Bytes/s from which a way between zones counts as no slower than the nodes that measured it."""
    return scores.node_default * min(1 - SLOWER, 1 / (1 + scores.margin))


def _uplink(ways: Sequence[LinkScore], fast: float) -> LinkScore:
    best = min(ways, key=lambda way: way.loss)
    speed = max((way.throughput for way in ways if way.throughput is not None), default=None)
    return replace(_unbound(replace(best, throughput=speed), fast),
                   delay=min((way.delay for way in ways if way.delay), default=0.0) / 2,
                   delay_tail=min((way.delay_tail for way in ways if way.delay_tail), default=0.0) / 2,
                   age=min(way.age for way in ways), samples=sum(way.samples for way in ways))


def _unbound(score: LinkScore, fast: float) -> LinkScore:
    """The score of an uplink that pairs of nodes measured: one that is no slower than a node's link shows nothing of
    its own throughput."""
    paired = score.source in ("probe", "serve", "job") and score.throughput is not None and score.throughput >= fast
    return replace(score, throughput=None) if paired else score


def _fault(sample: LinkSample, now: float, rules: Rules) -> str:
    """Why a sample is left out, "" where it is not."""
    if sample.time > now + SKEW:
        return "in the future"
    if now - sample.time > rules.window:
        return "too old"
    if sample.throughput is None and sample.delay is None and sample.loss is None:
        return "without a figure"
    if sample.delay is not None and sample.delay_tail is not None and sample.delay_tail < sample.delay:
        return "absurd"
    return ""


def _score(samples: Sequence[LinkSample], now: float, before: LinkScore | None, rules: Rules) -> LinkScore:
    def values(of: Callable[[LinkSample], float | None], counters: bool = True) -> Weighted:
        return sorted((value, _weight(sample, now, rules)) for sample in samples
                      if (counters or sample.source != "counters") and (value := of(sample)) is not None)

    active = values(lambda sample: sample.throughput, counters=False)
    # what an interface calls its speed is no measurement: it only bounds
    bound = max((sample.throughput for sample in samples if sample.source == "counters" and sample.throughput),
                default=None)
    speeds = active or ([(bound, 1.0)] if bound else [])
    delays, losses = values(lambda sample: sample.delay), values(lambda sample: sample.loss)
    tails = values(lambda sample: sample.delay_tail) or delays
    newest = max(sample.time for sample in samples)
    best = max(samples, key=lambda sample: (sample.source != "counters", sample.time, sample.source))
    old = before or LinkScore(samples=1)
    throughput = None
    if speeds:
        # the lower quartile must be better, too
        middle, low = _quantile(speeds, 0.5), _quantile(speeds, 0.25)
        throughput = max(LEAST, -_kept(-middle, -low, -(old.throughput or 0.0), rules.deadband))
    delay = _kept(_quantile(delays, 0.5), _quantile(delays, 0.75), old.delay, rules.deadband) if delays else 0.0
    loss = _mean(losses) if losses else 0.0
    if before is not None and abs(loss - before.loss) < max(LOSS_MARGIN, rules.deadband * before.loss):
        loss = before.loss
    return LinkScore(throughput=throughput, delay=delay, loss=loss, age=max(0.0, now - newest),
                     samples=len(samples), delay_tail=max(delay, _quantile(tails, 0.99)) if tails else 0.0,
                     rdma=best.rdma, source=best.source)


def _weight(sample: LinkSample, now: float, rules: Rules) -> float:
    age = max(0.0, now - sample.time)
    decay = max(0.5 ** (age / rules.half_life), 1e-9) if rules.half_life else 1.0
    return TRUST.get(sample.source, 1.0) * decay


def _kept(now: float, worse_now: float, before: float, margin: float) -> float:
    """The figure to publish, where less is better: the one before unless the samples leave it by the margin.

    Parameters
    ----------
    now : median of the samples.
    worse_now : what a quarter of them are worse than.
    before : what was published; 0 for nothing.
    """
    if not before:
        return now
    room = margin * abs(before)
    return now if now > before + room or worse_now < before - room else before


def _settled(now: float, before: float, margin: float) -> float:
    return before if abs(now - before) <= margin * before else now


def _quantile(values: Weighted, share: float) -> float:
    """The least value that so much of the weight does not exceed."""
    wanted, seen = share * sum(weight for _, weight in values), 0.0
    for value, weight in values:
        seen += weight
        if seen >= wanted - 1e-12:
            return value
    return values[-1][0]


def _mean(values: Weighted) -> float:
    """Weighted mean of what does not exceed nine tenths of the weight, of all where they are few."""
    most = _quantile(values, 0.9) if len(values) >= 5 else values[-1][0]
    kept = [(value, weight) for value, weight in values if value <= most]
    return sum(value * weight for value, weight in kept) / sum(weight for _, weight in kept)


def decayed(scores: LinkScores, now: float) -> LinkScores:
    """The scores with the ages that they have now, where they say when they were made."""
    later = max(0.0, now - scores.time) if scores.time else 0.0
    if not later:
        return scores

    def aged(links: Mapping[str, LinkScore]) -> dict[str, LinkScore]:
        return {name: replace(score, age=score.age + later) for name, score in links.items()}

    return replace(scores, nodes=aged(scores.nodes), zones=aged(scores.zones), trunks=aged(scores.trunks), time=now)
