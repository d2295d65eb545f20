"""From pairs to links: what each node's own link, each way between two zones and each zone's uplink can do.

The throughput of a way is the least of its links', its delay the sum, and so is the logarithm of the share that is
not lost. One bad link spoils every way over it, so a good link's figure comes from its ways over other good links: of
throughputs the ways count whose other end carries at least as much, of sums the median over the other ends (of two
others the lower, so that one bad peer does not blacken a good node).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median, median_low

from slurmdl.links.probe.measurement import PairMeasurement
from slurmdl.links.samples import LinkSample

#: an end counts as good enough for another one where it carries this share of what that one does: noise of probes
_MIN_PEER_FRACTION = 0.75
#: passes over the ends; each corrects the figures by those of the other ends
_ITERATIONS = 4
#: -log(1 - loss) of a way that lets nothing through
_LOG_ALL_LOST = 20.0

#: standard error of a median, times that of a mean, of normal noise
MEDIAN_SE_FACTOR = math.sqrt(math.pi / 2)
#: the ways that were measured: one end, the other end, the figure
PathValues = Sequence[tuple[str, str, float]]


def estimate_links(pairs: Iterable[PairMeasurement], leaf: Mapping[str, str],
                   time: float, source: str = "probe") -> list[LinkSample]:
    """Samples of the links.

    A node that has no peer in its zone is told apart from its zone's uplink by nothing: the figures of its way are
    the node's, and the uplink is taken to add nothing. Of two zones alone, half of what the way between them adds
    is each one's, and both have its throughput. A figure of an uplink is a lower bound where the nodes' own links
    carry less.

    Parameters
    ----------
    leaf : leaf zone of each node; a node that is missing is in none, and all these are taken to be beside each other.
    time : seconds since the epoch, of all samples.
    """
    known = list(pairs)
    inside = [pair for pair in known if leaf.get(pair.first, "") == leaf.get(pair.second, "")]
    between = [pair for pair in known if leaf.get(pair.first, "") != leaf.get(pair.second, "")]
    met = {node for pair in inside for node in (pair.first, pair.second)}
    lonely = [pair for pair in between if not {pair.first, pair.second} <= met]
    nodes = _EndpointEstimates(inside + lonely)
    found = nodes.samples("node", time, source)
    trunks: list[PairMeasurement] = []
    grouped: dict[tuple[str, str], list[PairMeasurement]] = {}
    for pair in between:
        one, other = sorted((leaf.get(pair.first, ""), leaf.get(pair.second, "")))
        if one:
            grouped.setdefault((one, other), []).append(pair)
    for (one, other), group in grouped.items():
        trunks.append(_inter_leaf_path(one, other, [nodes.subtract_endpoints(pair) for pair in group], group))
    found += [_make_sample("trunk", f"{trunk.first}|{trunk.second}", trunk, time, source) for trunk in trunks]
    # an uplink adds to a round trip what the way between two zones adds to that of the nodes' own links
    return found + _EndpointEstimates(trunks).samples("zone", time, source)


def robust_spread(paths: PathValues, estimates: Mapping[str, float]) -> float | None:
    """How far the ways are off what their ends carry, as a fraction; None where no more ways than ends were measured.

    It is 1.4826 times the median absolute deviation of the logarithms: of normal noise the standard deviation, and
    blind to the few ways that were disturbed. The ends were fitted to the same ways, which takes away as many degrees
    of freedom.
    """
    off = [
    math.log(
        value / most) for one,
        other,
        value in paths if (
            most := min(
                estimates[one],
                 estimates[other])) and value]
    if len(off) <= len(estimates):
        return None
    middle = median(off)
    return 1.4826 * median(abs(value - middle) for value in off) * math.sqrt(len(off) / (len(off) - len(estimates)))


def estimate_own_link(pairs: Sequence[PairMeasurement], node: str, time: float,
                      source: str = "serve") -> LinkSample | None:
    """What one node can say of its own link, from its ways to a few others; None where it reached nobody.

    The best of its ways tells most of it: its throughput, its loss, and the half of its round trips.
    """
    def best(values: Iterable[float | None], choose: Callable[[list[float]], float]) -> float | None:
        known = [value for value in values if value is not None]
        return choose(known) if known else None

    def half(values: list[float]) -> float:
        return min(values) / 2

    link = PairMeasurement(node, "", best((p.throughput for p in pairs), max), None, best((p.rtt for p in pairs), half),
                best((p.rtt_p99 for p in pairs), half), best((p.loss for p in pairs), min))
    return _make_sample("node", node, link, time, source) if pairs else None


class _EndpointEstimates:
    """The ends of ways between pairs, with each end's share in the figures."""

    def __init__(self, pairs: Sequence[PairMeasurement]) -> None:
        speeds = _known_values(pairs, lambda pair: pair.throughput)
        self.throughput, met = _min_rule_estimates(speeds), _group_by_endpoint(speeds)
        # a median of n figures is off by so much where these are off by the spread
        off = robust_spread(speeds, self.throughput)
        self.throughput_rse = {end: MEDIAN_SE_FACTOR * off / math.sqrt(len(others)) for end, others in met.items()} \
            if off is not None else {}
        self.rtt = _sum_rule_estimates(_known_values(pairs, lambda pair: pair.rtt))
        self.rtt_p99 = _sum_rule_estimates(_known_values(pairs, lambda pair: pair.rtt_p99))
        self.log_loss = _sum_rule_estimates(
    _known_values(
        pairs,
        lambda pair: None if pair.loss is None else _loss_to_log(
            pair.loss)))
        self.names = list(dict.fromkeys(end for pair in pairs for end in (pair.first, pair.second)))

    def samples(self, kind: str, time: float, source: str) -> list[LinkSample]:
        return [_make_sample(kind, name, PairMeasurement(name, "", self.throughput.get(name), None, self.rtt.get(name),
                                         self.rtt_p99.get(name), _log_to_loss(self.log_loss.get(name))), time, source,
                        self.throughput_rse.get(name))
                for name in self.names]

    def subtract_endpoints(self, pair: PairMeasurement) -> PairMeasurement:
        """What a way adds to the links of its ends."""
        def rest(value: float | None, shares: Mapping[str, float]) -> float | None:
            known = [shares.get(end, 0.0) for end in (pair.first, pair.second)]
            return None if value is None else max(0.0, value - sum(known))

        lost = rest(None if pair.loss is None else _loss_to_log(pair.loss), self.log_loss)
        return PairMeasurement(pair.first, pair.second, pair.throughput, None, rest(pair.rtt, self.rtt),
                    rest(pair.rtt_p99, self.rtt_p99), _log_to_loss(lost))


def _inter_leaf_path(left: str, right: str,
                     residuals: Sequence[PairMeasurement], group: Sequence[PairMeasurement]) -> PairMeasurement:
    """The way between two zones, from the pairs that measured it: the best throughput, medians of the rest."""
    def middle(values: list[float]) -> float | None:
        return median(values) if values else None

    return PairMeasurement(left, right, max((p.throughput for p in group if p.throughput is not None), default=None), None,
                middle([p.rtt for p in residuals if p.rtt is not None]),
                middle([p.rtt_p99 for p in residuals if p.rtt_p99 is not None]),
                middle([p.loss for p in residuals if p.loss is not None]))


def _known_values(pairs: Sequence[PairMeasurement], metric: Callable[[PairMeasurement], float | None]) -> PathValues:
    return [(pair.first, pair.second, value) for pair in pairs if (value := metric(pair)) is not None]


def _group_by_endpoint(paths: PathValues) -> dict[str, list[tuple[str, float]]]:
    found: dict[str, list[tuple[str, float]]] = {}
    for one, other, value in paths:
        found.setdefault(one, []).append((other, value))
        found.setdefault(other, []).append((one, value))
    return found


def _min_rule_estimates(paths: PathValues) -> dict[str, float]:
    """What each end carries, where a way carries the less of its two ends."""
    met = _group_by_endpoint(paths)
    best = {end: max(value for _, value in others) for end, others in met.items()}
    return {end: median([value for other, value in others if best[other] >= _MIN_PEER_FRACTION * best[end]])
            for end, others in met.items()}


def _sum_rule_estimates(paths: PathValues) -> dict[str, float]:
    """What each end adds, where a way has the sum of its two ends."""
    met = _group_by_endpoint(paths)
    share = {end: min(value for _, value in others) / 2 for end, others in met.items()}
    for _ in range(_ITERATIONS):
        for end, others in met.items():
            share[end] = max(0.0, median_low([value - share[other] for other, value in others]))
    return share


def _loss_to_log(loss: float) -> float:
    return -math.log1p(-loss) if loss < 1 else _LOG_ALL_LOST


def _log_to_loss(log_loss: float | None) -> float | None:
    return None if log_loss is None else -math.expm1(-log_loss)


def _make_sample(kind: str, name: str, pair: PairMeasurement, time: float,
                 source: str, throughput_rse: float | None = None) -> LinkSample:
    # the shares in tails are another sum, whose noise may put one below the share in medians
    tail = None if pair.rtt_p99 is None else max(pair.rtt_p99, pair.rtt or 0.0)
    return LinkSample(kind, name, time, source, pair.throughput, pair.rtt, tail, pair.loss, throughput_rse=throughput_rse)
