"""Probe links by a Slurm step on the nodes of this job, or by a job of its own.

The step measures rounds of disjoint pairs of nodes; the links are estimated from these measurements.

Each node is paired with a few others of its zone, and a few pairs of nodes measure the path between two zones:
O(nodes + zones^2) probes. Both are round-robin tournaments by the circle method: with n players (n even), round r
pairs i with r - i modulo n - 1; the player paired with itself gets the last player.

Estimated are each node's own link, each path between two zones, and each zone's uplink. The throughput of a path is
the minimum over its links; RTT and the logarithm of the delivered fraction are sums. As one bad link spoils all paths
over it, a link is estimated from its paths over other good links: for throughput, from peers that carry at least as
much; for sums, by the median over the peers (the lower of two values, as one bad peer must not spoil a good node).
"""

from __future__ import annotations

import json
import math
import random
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_low

from slurmdl import records
from slurmdl.errors import InputError, UnavailableError
from slurmdl.links.probe import tcp_task
from slurmdl.links.probe.pair_probe import PairMeasurement, ProbeConfig
from slurmdl.links.samples import LinkSample
from slurmdl.slurm import jobs, process
from slurmdl.topology.topology import Topology

#: default number of rounds inside zones, and of node pairs per pair of zones
ROUNDS_IN_ZONE, PAIRS_PER_ZONE_PAIR = 4, 2
#: fraction of an end's throughput that a peer must carry to count in its estimate; allows for noise
_MIN_PEER_FRACTION = 0.75
_ITERATIONS = 4  # passes over all ends; each corrects the estimates by those of the peers
_LOG_ALL_LOST = 20.0  # -log(1 - loss) of a path that loses everything
#: standard error of a median relative to that of a mean, for normal noise
MEDIAN_SE_FACTOR = math.sqrt(math.pi / 2)
#: measured paths: one end, the other end, value
PathValues = Sequence[tuple[str, str, float]]


@dataclass(frozen=True)
class ProbeStep:
    """The settings of a probe.

    Attributes:
        nodes, topology: at least two nodes, and their zones.
        config: of one pair; scaled so that all rounds fit in the budget.
        budget_s: time for all rounds.
        start_timeout_s: time for the step to start, in addition to the budget.
        interface: to probe over; "" for the interface by which the nodes reach each other's names.
        rounds_in_zone, pairs_per_zone_pair: see `round_robin_schedule`.
        checks_all_pairs: also check that every pair of nodes can exchange data.
    """

    nodes: tuple[str, ...]
    topology: Topology
    config: ProbeConfig = field(default_factory=ProbeConfig)
    budget_s: float = 30.0
    start_timeout_s: float = 30.0
    interface: str = ""
    srun_args: tuple[str, ...] = ()
    source: str = "probe"
    rounds_in_zone: int = ROUNDS_IN_ZONE
    pairs_per_zone_pair: int = PAIRS_PER_ZONE_PAIR
    checks_all_pairs: bool = False

    def leaf_by_node(self) -> dict[str, str]:
        """Leaf zone of each node that has one."""
        return {node: leaf for node in self.nodes if (leaf := self.topology.leaf_of(node))}

    def schedule(self) -> tcp_task.ProbeSchedule:
        """The schedule for the tasks of the step."""
        leaf = self.leaf_by_node()
        leaf_index = {name: i for i, name in enumerate(dict.fromkeys(leaf.values()))}
        rounds = list(round_robin_schedule([leaf_index.get(leaf.get(node, ""), -1) for node in self.nodes],
                                           rounds_in_zone=self.rounds_in_zone,
                                           pairs_per_zone_pair=self.pairs_per_zone_pair))
        # the tasks need time to start, and a pair time for its replies
        config = self.config.scaled_to(max(0.1, 0.6 * self.budget_s / max(1, len(rounds))))
        return tcp_task.ProbeSchedule(self.nodes, rounds, config, self.budget_s, self.interface,
                                      self.checks_all_pairs)

    def srun_argv(self, environ: Mapping[str, str]) -> list[str]:
        """srun's command line."""
        return [*jobs.node_step_argv(self.nodes, environ, "slurmdl-probe", ("--mpi=none", *self.srun_args)),
                *process.module_argv("slurmdl.links.probe.tcp_task")]


@dataclass(frozen=True)
class ProbeResult:
    """The samples of the measured links, and the pairs of nodes that cannot exchange data, if all were checked."""

    samples: Sequence[LinkSample]
    unreachable: Sequence[tuple[str, str]] = ()


def run_probe_step(probe: ProbeStep, environ: Mapping[str, str], on_warning: Callable[[str], None]) -> ProbeResult:
    """Run the step and return what was measured.

    If the step fails early, the pairs measured so far count; the error and the step's notes are warnings. Raises
    UnavailableError if srun is missing, or no pair was measured.
    """
    env = jobs.node_step_environ(environ)
    env[tcp_task.SECRET_VARIABLE] = secrets.token_hex()
    measurements: list[PairMeasurement] = []
    unreachable: list[tuple[str, str]] = []
    warnings = []
    schedule = probe.schedule()
    lines = process.stream_lines(probe.srun_argv(environ), env=env, stdin=json.dumps(records.to_json(schedule)),
                                 timeout=probe.start_timeout_s + schedule.check_limit_s + probe.budget_s)
    try:
        for line in lines:
            message = _read_message(line)
            if message.is_last:
                break
            if message.note:
                warnings.append(message.note)
            if message.unreachable:
                unreachable.append(message.unreachable)
            if message.pair:
                measurements.append(message.pair)
    except (UnavailableError, InputError) as error:
        warnings.append(str(error))
    finally:
        lines.close()
    if not measurements and not unreachable:
        raise UnavailableError(f"probe: no pair of nodes was measured ({warnings[0] if warnings else 'no answer'})")
    for warning in dict.fromkeys(warnings):
        on_warning(f"probe: {warning}")
    return ProbeResult(estimate_links(measurements, probe.leaf_by_node(), time.time(), probe.source), unreachable)


def _read_message(line: str) -> tcp_task.LeaderMessage:
    try:
        return records.from_json(tcp_task.LeaderMessage, json.loads(line), "the step's output")
    except ValueError as error:
        raise InputError(f"the step wrote {line.strip()[:80]!r}") from error


def round_robin_schedule(leaf: Sequence[int], seed: int = 0, *, rounds_in_zone: int = ROUNDS_IN_ZONE,
                         pairs_per_zone_pair: int = PAIRS_PER_ZONE_PAIR) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of node index pairs, those inside zones first. A round has at most one pair per node, and at most
    one inter-zone pair per zone.

    Args:
        leaf: leaf zone of each node as a number; nodes without a zone share one.
        rounds_in_zone: rounds inside zones; small zones need fewer.
        pairs_per_zone_pair: node pairs that measure the path between two zones.
    """
    rng = random.Random(seed)
    zones: dict[int, list[int]] = {}
    for node, zone in enumerate(leaf):
        zones.setdefault(zone, []).append(node)
    members = list(zones.values())
    for nodes in members:
        rng.shuffle(nodes)
    rounds = [_sample_rounds(len(nodes), rounds_in_zone, rng) for nodes in members]
    for i in range(max(map(len, rounds), default=0)):
        yield [(nodes[a], nodes[b]) for nodes, numbers in zip(members, rounds, strict=True) if i < len(numbers)
               for a, b in _round_pairs(len(nodes), numbers[i])]
    used = [0] * len(members)  # pairs so far, per zone
    for _ in range(pairs_per_zone_pair):
        for number in _sample_rounds(len(members), len(members), rng):
            pairs = []
            for a, b in _round_pairs(len(members), number):
                pairs.append((members[a][used[a] % len(members[a])], members[b][used[b] % len(members[b])]))
                used[a] += 1
                used[b] += 1
            yield pairs


def _sample_rounds(players: int, max_rounds: int, rng: random.Random) -> list[int]:
    """Numbers of at most `max_rounds` rounds of a tournament in random order; none for less than two players."""
    total = players - 1 + players % 2 if players > 1 else 0
    return rng.sample(range(total), min(max_rounds, total))


def _round_pairs(players: int, round_number: int) -> Iterator[tuple[int, int]]:
    """Pairs of one round; with an odd number of players one of them is idle."""
    circle = players - 1 + players % 2
    for i in range(circle):
        j = (round_number - i) % circle
        if i < j:
            yield i, j
        elif i == j and players % 2 == 0:
            yield i, players - 1


def estimate_links(pairs: Sequence[PairMeasurement], leaf: Mapping[str, str],
                   time: float, source: str = "probe") -> list[LinkSample]:
    """Estimate samples of all links.

    A node without a measured peer in its zone cannot be distinguished from the zone's uplink: its path counts as its
    own link. With two zones, half of what the path adds belongs to each uplink, and both get its throughput. The
    throughput of an uplink is a lower bound if the links of the nodes carry less. Nodes that are missing in
    `leaf` (node -> leaf zone) count as one zone. `time` of the samples is in seconds since the epoch.
    """
    inside = [pair for pair in pairs if leaf.get(pair.first, "") == leaf.get(pair.second, "")]
    between = [pair for pair in pairs if leaf.get(pair.first, "") != leaf.get(pair.second, "")]
    measured_inside = {node for pair in inside for node in (pair.first, pair.second)}
    lone_pairs = [pair for pair in between if not {pair.first, pair.second} <= measured_inside]
    nodes = _EndpointEstimates(inside + lone_pairs)
    residuals: dict[tuple[str, str], list[PairMeasurement]] = {}
    for pair in between:
        left, right = sorted((leaf.get(pair.first, ""), leaf.get(pair.second, "")))
        if left:
            residuals.setdefault((left, right), []).append(nodes.subtract_endpoints(pair))
    paths = [_inter_leaf_path(left, right, pairs_between) for (left, right), pairs_between in residuals.items()]
    # the RTT of an inter-leaf path without the nodes' own links is the sum over its two uplinks
    return [*nodes.samples("node", time, source),
            *(_make_sample("inter_leaf", f"{path.first}|{path.second}", path, time, source) for path in paths),
            *_EndpointEstimates(paths).samples("zone", time, source)]


def robust_spread(paths: PathValues, estimates: Mapping[str, float]) -> float | None:
    """Relative deviation of the paths from the minimum of their ends; None without degrees of freedom.

    1.4826 times the median absolute deviation of the logarithms: the standard deviation of normal noise, insensitive
    to a few disturbed paths, corrected for the degrees of freedom that the estimates of the ends used.
    """
    deviations = [math.log(value / expected) for left, right, value in paths
                  if (expected := min(estimates[left], estimates[right])) and value]
    count, freedom = len(deviations), len(deviations) - len(estimates)
    if freedom <= 0:
        return None
    center = median(deviations)
    return 1.4826 * median(abs(value - center) for value in deviations) * math.sqrt(count / freedom)


class _EndpointEstimates:
    def __init__(self, pairs: Sequence[PairMeasurement]) -> None:
        throughputs = _known_values(pairs, lambda pair: pair.throughput)
        self.throughput = _min_rule_estimates(throughputs)
        spread = robust_spread(throughputs, self.throughput)
        self.throughput_rse = {} if spread is None else {
            end: MEDIAN_SE_FACTOR * spread / math.sqrt(len(peers))
            for end, peers in _group_by_endpoint(throughputs).items()}
        self.rtt = _sum_rule_estimates(_known_values(pairs, lambda pair: pair.rtt))
        self.rtt_p99 = _sum_rule_estimates(_known_values(pairs, lambda pair: pair.rtt_p99))
        self.log_loss = _sum_rule_estimates(_known_values(pairs, lambda pair: _loss_to_log(pair.loss)))
        self.names = list(dict.fromkeys(end for pair in pairs for end in (pair.first, pair.second)))

    def samples(self, kind: str, time: float, source: str) -> list[LinkSample]:
        return [_make_sample(kind, name, PairMeasurement(
                    name, "", self.throughput.get(name), None, self.rtt.get(name), self.rtt_p99.get(name),
                    _log_to_loss(self.log_loss.get(name))), time, source, self.throughput_rse.get(name))
                for name in self.names]

    def subtract_endpoints(self, pair: PairMeasurement) -> PairMeasurement:
        """The path without the links of its ends."""
        def subtract(value: float | None, estimates: Mapping[str, float]) -> float | None:
            ends = estimates.get(pair.first, 0.0) + estimates.get(pair.second, 0.0)
            return None if value is None else max(0.0, value - ends)

        return PairMeasurement(pair.first, pair.second, pair.throughput, None, subtract(pair.rtt, self.rtt),
                               subtract(pair.rtt_p99, self.rtt_p99),
                               _log_to_loss(subtract(_loss_to_log(pair.loss), self.log_loss)))


def _inter_leaf_path(left: str, right: str, residuals: Sequence[PairMeasurement]) -> PairMeasurement:
    """Path between two zones from the pairs that measured it: maximum throughput, medians of the residuals."""
    def known_median(metric: Callable[[PairMeasurement], float | None]) -> float | None:
        values = [value for pair in residuals if (value := metric(pair)) is not None]
        return median(values) if values else None

    throughput = max((pair.throughput for pair in residuals if pair.throughput is not None), default=None)
    return PairMeasurement(left, right, throughput, None, known_median(lambda pair: pair.rtt),
                           known_median(lambda pair: pair.rtt_p99), known_median(lambda pair: pair.loss))


def _known_values(pairs: Sequence[PairMeasurement], metric: Callable[[PairMeasurement], float | None]) -> PathValues:
    return [(pair.first, pair.second, value) for pair in pairs if (value := metric(pair)) is not None]


def _group_by_endpoint(paths: PathValues) -> dict[str, list[tuple[str, float]]]:
    """End -> (peer, value) of each of its paths."""
    groups: dict[str, list[tuple[str, float]]] = {}
    for left, right, value in paths:
        groups.setdefault(left, []).append((right, value))
        groups.setdefault(right, []).append((left, value))
    return groups


def _min_rule_estimates(paths: PathValues) -> dict[str, float]:
    """Value of each end, if the value of a path is the minimum of its ends."""
    groups = _group_by_endpoint(paths)
    best = {end: max(value for _, value in peers) for end, peers in groups.items()}
    return {end: median([value for peer, value in peers if best[peer] >= _MIN_PEER_FRACTION * best[end]])
            for end, peers in groups.items()}


def _sum_rule_estimates(paths: PathValues) -> dict[str, float]:
    """Value of each end, if the value of a path is the sum of its ends."""
    groups = _group_by_endpoint(paths)
    estimates = {end: min(value for _, value in peers) / 2 for end, peers in groups.items()}  # start: equal halves
    for _ in range(_ITERATIONS):
        for end, peers in groups.items():
            estimates[end] = max(0.0, median_low([value - estimates[peer] for peer, value in peers]))
    return estimates


def _loss_to_log(loss: float | None) -> float | None:
    if loss is None:
        return None
    return -math.log1p(-loss) if loss < 1 else _LOG_ALL_LOST


def _log_to_loss(log_loss: float | None) -> float | None:
    return None if log_loss is None else -math.expm1(-log_loss)


def _make_sample(kind: str, name: str, link: PairMeasurement, time: float,
                 source: str, throughput_rse: float | None = None) -> LinkSample:
    # the two RTT estimates come from independent sums: noise may put the tail below the median
    rtt_p99 = None if link.rtt_p99 is None else max(link.rtt_p99, link.rtt or 0.0)
    return LinkSample(kind, name, time, source, link.throughput, link.rtt, rtt_p99, link.loss,
                      throughput_rse=throughput_rse)
