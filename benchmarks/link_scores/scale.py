"""Detection of bad links among 10,000 nodes, with the production code on synthetic links.

Schedule of pairs, estimate of links, aggregation of samples and capacities for placement are production code. A pair
measures the slower of two links, the sum of two delays and the combined loss, each with noise. In one pair of a
hundred, other traffic takes two thirds of the throughput.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import numpy.typing as npt

from benchmarks.results import Row, make_row
from slurmdl.links import aggregate, capacity
from slurmdl.links.link_scores import LinkScores
from slurmdl.links.probe.pair_probe import PairMeasurement, ProbeConfig
from slurmdl.links.probe.probe_step import estimate_links, round_robin_schedule
from slurmdl.links.samples import LinkSample

FloatArray = npt.NDArray[np.float64]

NODES, PER_ZONE, DEGRADED, NOISE = 10_000, 20, 0.01, 0.10
#: twice the noise of the target
NOISIER = 0.20
#: maximum time of probing in seconds, and maximum share of the capacity of the nodes' links in that time
SECONDS, SHARE = 180.0, 0.001
RECALL, PRECISION = 0.99, 0.95
#: a good link: bytes/s, and round-trip time in seconds
THROUGHPUT, RTT = 1.25e9, 2e-5
#: share of pairs disturbed by other traffic, and their remaining share of the throughput
BUSY, LEFT = 0.01, 1 / 3
#: defect of a link -> factor of its throughput, seconds added to its round-trip time, loss
KINDS = {"a tenth of the throughput": (0.1, 0.0, 0.0), "2 % loss": (1.0, 0.0, 0.02),
         "10 ms of delay": (1.0, 0.01, 0.0)}
#: peers of each node in its zone and peers of each zone in a sweep, and number of sweeps
INSIDE, BETWEEN, SWEEPS = 4, 8, 3
#: bytes/s of a good and of a bad uplink; the share of bad uplinks is DEGRADED, too
UPLINK, BAD_UPLINK = 1.25e10, 1.25e8
REPEATS = 5
#: bytes of a datagram of the loss probe with all headers
_DATAGRAM = 128


@dataclass(frozen=True, eq=False)
class Fabric:
    """Nodes in zones with their links.

    Attributes:
        names, leaf: names of the nodes, and their zones.
        kind: shape (nodes,), index into KINDS, -1 for a good link.
        speed, trip, loss: shape (nodes,), bytes/s, seconds and fraction of each node's link.
        uplink: shape (zones,), bytes/s.
    """

    names: tuple[str, ...]
    leaf: tuple[int, ...]
    kind: npt.NDArray[np.int64]
    throughput: FloatArray
    rtt: FloatArray
    loss: FloatArray
    uplink: FloatArray

    @classmethod
    def of(cls, nodes: int, draw: np.random.Generator) -> Fabric:
        kind = np.full(nodes, -1)
        bad = draw.choice(nodes, round(nodes * DEGRADED), replace=False)
        kind[bad] = np.arange(len(bad)) % len(KINDS)
        factor, added_rtt, loss = np.array([*KINDS.values(), (1.0, 0.0, 0.0)])[kind].T
        uplink = np.full(-(-nodes // PER_ZONE), UPLINK)
        uplink[draw.choice(len(uplink), max(1, round(len(uplink) * DEGRADED)), replace=False)] = BAD_UPLINK
        return cls(tuple(f"n{i:05d}" for i in range(nodes)), tuple(i // PER_ZONE for i in range(nodes)), kind,
                   THROUGHPUT * factor, RTT + added_rtt, loss, uplink)

    def measured(self, pairs: list[tuple[int, int]], config: ProbeConfig, noise: float,
                 draw: np.random.Generator) -> list[PairMeasurement]:
        """Measure the pairs of one round."""
        a, b = np.array(pairs, np.int64).reshape(-1, 2).T

        def noise_factors() -> FloatArray:
            return np.maximum(0.1, 1 + noise * draw.standard_normal(len(a)))

        busy = np.where(draw.random(len(a)) < BUSY, LEFT, 1.0)
        zone_a, zone_b = (np.array(self.leaf)[i] for i in (a, b))
        uplink = np.where(zone_a == zone_b, np.inf, np.minimum(self.uplink[zone_a], self.uplink[zone_b]))
        throughput = np.minimum(np.minimum(self.throughput[a], self.throughput[b]), uplink) * busy
        rtt = (self.rtt[a] + self.rtt[b]) * noise_factors()
        loss = 1 - (1 - self.loss[a]) * (1 - self.loss[b])
        measured_loss = draw.binomial(config.loss_probes, loss) / config.loss_probes
        columns = (throughput * noise_factors(), throughput * noise_factors(), rtt, rtt * 1.5, measured_loss)
        return [PairMeasurement(self.names[i], self.names[j], *metrics) for (i, j), *metrics in zip(
            pairs, *(column.tolist() for column in columns), strict=True)]


@dataclass(frozen=True)
class ProbeResult:
    """Result of probing one fabric.

    Attributes:
        scores: scores to publish.
        seconds: duration of the rounds.
        share: bytes of all probes over the capacity of all nodes' links in SECONDS.
    """

    scores: LinkScores
    seconds: float
    share: float


def probe(fabric: Fabric, seed: int, noise: float = NOISE, sweeps: int = SWEEPS) -> ProbeResult:
    """Probe inside the zones and between some of them, in `sweeps` sweeps with different pairs."""
    draw, config = np.random.default_rng((seed, 1)), ProbeConfig()
    leaf = {name: f"z{zone}" for name, zone in zip(fabric.names, fabric.leaf, strict=True)}
    samples: list[LinkSample] = []
    num_rounds, count = 0, 0
    for sweep in range(sweeps):
        rounds = [*round_robin_schedule(fabric.leaf, seed + sweep, rounds_in_zone=INSIDE, pairs_per_zone_pair=0),
                  *islice(round_robin_schedule(fabric.leaf, seed + sweep, rounds_in_zone=0, pairs_per_zone_pair=1),
                          BETWEEN)]
        pairs = [pair for round_pairs in rounds for pair in fabric.measured(round_pairs, config, noise, draw)]
        num_rounds, count = num_rounds + len(rounds), count + len(pairs)
        samples += estimate_links(pairs, leaf, 1e9 + num_rounds * config.expected_s)
    scores = aggregate.aggregate_scores(samples, 1e9 + num_rounds * config.expected_s)
    per_pair = 2 * min(config.stream_bytes, THROUGHPUT * config.stream_seconds) + 2 * config.loss_probes * _DATAGRAM
    scores = replace(scores, half_life=aggregate.DEFAULT_SETTINGS.half_life)
    return ProbeResult(scores, num_rounds * config.expected_s,
                       count * per_pair / (len(fabric.names) * THROUGHPUT * SECONDS))


def flagged(names: tuple[str, ...], scores: LinkScores) -> npt.NDArray[np.bool_]:
    """Return the nodes that placement rates lower than unmeasured nodes; shape (nodes,)."""
    unmeasured = replace(scores, nodes={}, zones={}, inter_leaf={})
    (throughput, delay), (best, least) = capacity.node_links(names, scores), capacity.node_links(names, unmeasured)
    return np.asarray((throughput < best * (1 - 1e-9)) | (delay > least * (1 + 1e-9)))


@dataclass(frozen=True)
class Rates:
    """Detection of bad links.

    `recall_by_kind` has an entry for each of KINDS. `uplinks` is the ratio of detected bad uplinks to uplinks
    that are bad or reported as bad.
    """

    recall: float
    precision: float
    recall_by_kind: tuple[float, ...]
    uplinks: float

    @classmethod
    def of(cls, fabric: Fabric, scores: LinkScores) -> Rates:
        is_flagged, bad = flagged(fabric.names, scores), fabric.kind >= 0
        slow = {name for name, score in scores.zones.items() if score.throughput is not None}
        bad_uplinks = {f"z{zone}" for zone in np.flatnonzero(fabric.uplink < UPLINK).tolist()}
        return cls(float(is_flagged[bad].mean()), float(bad[is_flagged].mean()) if is_flagged.any() else 0.0,
                   tuple(float(is_flagged[fabric.kind == kind].mean()) for kind in range(len(KINDS))),
                   len(slow & bad_uplinks) / len(slow | bad_uplinks))


def shuffled(scores: LinkScores, draw: np.random.Generator) -> LinkScores:
    """Permute the scores of the nodes: the negative control."""
    order = draw.permutation(len(scores.nodes))
    values = list(scores.nodes.values())
    return replace(scores, nodes={name: values[i] for name, i in zip(scores.nodes, order.tolist(), strict=True)})


def rows(seed: int = 0, nodes: int = NODES, repeats: int = REPEATS) -> Iterator[Row]:
    """Yield recall and precision at the target noise and above, cost, and negative control."""
    label = f"{nodes} nodes, {DEGRADED:.0%} bad"
    probed = []
    for number in range(repeats):
        fabric = Fabric.of(nodes, np.random.default_rng((seed, number)))
        probed.append((fabric, probe(fabric, seed + 100 * number)))
    measured = [Rates.of(fabric, result.scores) for fabric, result in probed]
    recall = [entry.recall for entry in measured]
    yield _evaluate(f"{label}, noise {NOISE:.0%}: recall", recall, RECALL)
    yield _evaluate(f"{label}, noise {NOISE:.0%}: precision", [entry.precision for entry in measured], PRECISION)
    noisier = [Rates.of(fabric, probe(fabric, seed + 100 * number, NOISIER).scores)
               for number, (fabric, _) in enumerate(probed)]
    yield _evaluate(f"{label}, noise {NOISIER:.0%}: recall", [entry.recall for entry in noisier], RECALL)
    yield _evaluate(f"{label}, noise {NOISIER:.0%}: precision", [entry.precision for entry in noisier], PRECISION)
    for kind, name in enumerate(KINDS):
        yield make_row(f"{label}: recall of links with {name}", [entry.recall_by_kind[kind] for entry in measured],
                       "")
    yield make_row(f"{label}: correctly reported slow uplinks over slow or reported ones",
                   [entry.uplinks for entry in measured], "")
    seconds = [result.seconds for _, result in probed]
    yield make_row("duration of all probe rounds", seconds, "s", target=f"at most {SECONDS:g} s",
                   met=max(seconds) <= SECONDS)
    share = [result.share for _, result in probed]
    yield make_row(f"bytes of all probes over the capacity of the links in {SECONDS:g} s", share, "",
                   target=f"below {SHARE:g}", met=max(share) < SHARE)
    fabric = probed[0][0]
    for variant, noise, sweeps in (("noise 5%", 0.05, SWEEPS), ("noise 30%", 0.3, SWEEPS),
                                   (f"noise {NOISE:.0%}, one sweep only", NOISE, 1)):
        rates = Rates.of(fabric, probe(fabric, seed, noise, sweeps).scores)
        yield make_row(f"{label}, {variant}: recall", [rates.recall], "")
        yield make_row(f"{label}, {variant}: precision", [rates.precision], "")
    control_recalls = [Rates.of(fabric, shuffled(result.scores, np.random.default_rng((seed, 2)))).recall
                       for fabric, result in probed]
    yield make_row("control, shuffled scores: recall", control_recalls, "", baseline=float(np.median(recall)),
                   target="below 0.1", met=max(control_recalls) < 0.1)


def _evaluate(metric: str, samples: list[float], least: float) -> Row:
    return make_row(metric, samples, "", target=f"at least {least:g}", met=min(samples) >= least)
