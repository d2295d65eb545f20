"""Capacity and latency of links: measured, else declared by the topology, else a default; tables of links.

TCP cost model: a link carries what its throughput, loss and RTT allow (`usable_throughput`), and each message waits
for the one-way latency plus the expected retransmission stall (`expected_rto_stall`). Weighted cost model (Lee et
al., Electronics 2023, 12(14):3021): a link carries its default times its `weighted_score`. Scores decay towards the
defaults by half after each half-life. Differences below the tolerance are noise and rounded away (`quantize`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl import units
from slurmdl.links.link_scores import FloatArray, LinkScore, LinkScores, MetricWeights
from slurmdl.topology.topology import Topology

BoolArray = npt.NDArray[np.bool_]

#: default ratio of the node links below a zone to its uplink; the uplink is never below one node link
OVERSUBSCRIPTION = 2.0
#: fraction of its link's bandwidth that a node must lose on an inter-leaf path before the path counts as slow
SLOW_PATH_FRACTION = 0.25
#: one-way seconds below which latency differences are measurement error, through the kernel and with RDMA
TCP_LATENCY_RESOLUTION_S, RDMA_LATENCY_RESOLUTION_S = 25e-6, 1e-6
_MIN_TIME_S = 1e-6  # of RTTs and latencies, shorter than any message takes
_MIN_TOLERANCE = 1e-9  # steps of a smaller tolerance would be lost in rounding

MSS_BYTES = 1448.0  # payload bytes of a segment on Ethernet with an MTU of 1500
SEGMENTS_PER_ACK = 2.0  # of delayed acknowledgements
#: minimum retransmission timeout in s, Linux's TCP_RTO_MIN (RFC 6298 recommends 1 s)
MIN_RTO_S = 0.2
#: seconds after two RTTs at which a tail loss probe is sent, two ticks of Linux's timer
TLP_SLACK_S = 4e-3
MESSAGE_BYTES = 1e6  # size of the message whose transfer time compares links
MAX_LOSS = 0.9  # loss above which the formulas do not hold


def node_links(nodes: Sequence[str], scores: LinkScores) -> tuple[FloatArray, FloatArray]:
    """Capacity (bytes/s) and one-way latency (s) of each node's link to its leaf zone, both of shape (nodes,)."""
    return _apply_scores("node", nodes, np.full(len(nodes), float(scores.default_node_bandwidth)), scores)


def zone_uplinks(zones: Sequence[str], level: npt.NDArray[np.integer[Any]], node_count: npt.NDArray[np.integer[Any]],
                 declared_bandwidth: FloatArray, scores: LinkScores) -> tuple[FloatArray, FloatArray]:
    """Capacity (bytes/s) and one-way latency (s) of the uplink of each zone, both of shape (zones,).

    Args:
        level: shape (zones,), height of each zone, 0 = leaf.
        node_count: shape (zones,), nodes of the topology below each zone.
        declared_bandwidth: shape (zones,), bytes/s in the topology, NaN if not declared.
    """
    if scores.default_zone_bandwidth:
        by_level = np.array(scores.default_zone_bandwidth, float)
        defaults = by_level[np.minimum(level, len(by_level) - 1)]
    else:
        defaults = scores.default_node_bandwidth * np.maximum(node_count / OVERSUBSCRIPTION, 1.0)
    prior = np.where(np.isnan(declared_bandwidth), defaults, declared_bandwidth)
    return _apply_scores("zone", zones, prior, scores)


def inter_leaf_paths(names: Sequence[str], default_capacity: FloatArray,
                     scores: LinkScores) -> tuple[FloatArray, FloatArray]:
    """Capacity (bytes/s) and one-way latency (s) of inter-leaf paths, both of shape (names,).

    Names are from link_scores.inter_leaf_name; `default_capacity` (bytes/s) holds for paths that were not measured.
    """
    return _apply_scores("inter_leaf", names, default_capacity.copy(), scores)


def _apply_scores(kind: str, names: Sequence[str], capacity: FloatArray,
                  scores: LinkScores) -> tuple[FloatArray, FloatArray]:
    """Replace the default capacities (in place) and latencies of the measured links."""
    table, latency = scores.arrays_by_kind[kind], np.full(len(names), float(scores.default_latency))
    if not table.index:
        return capacity, latency
    row = np.fromiter(map(table.index.get, names, repeat(-1)), np.int64, len(names))
    known = np.flatnonzero(row >= 0)
    row = row[known]
    prior, default, loss, rdma = capacity[known], latency[known], table.loss[row], table.rdma[row]
    link_rtt = np.where(np.isnan(table.rtt[row]), 2 * scores.default_latency, table.rtt[row])
    throughput = np.where(np.isnan(table.throughput[row]), prior, table.throughput[row])
    # the RTT of a path includes the link of the other end
    path_rtt = np.maximum(link_rtt + 2 * scores.default_latency, _MIN_TIME_S)
    if scores.weights is None:
        measured = usable_throughput(throughput, loss, path_rtt, rdma)
        wait = link_rtt / 2 + expected_rto_stall(loss, path_rtt, rdma)  # one way, and the whole stall
    else:
        good_rtt = max(4 * scores.default_latency, _MIN_TIME_S)  # over two default links
        measured = prior * weighted_score(throughput, loss, path_rtt, prior, good_rtt, scores.weights)
        wait = default
    if scores.half_life is not None:
        trust = 0.5 ** (table.age[row] / scores.half_life)
        # bandwidths span orders of magnitude: average the logarithms
        measured = prior * (measured / prior) ** trust
        wait = default + trust * (wait - default)
    capacity[known] = quantize(measured, prior, scores.tolerance)
    if scores.tolerance:
        baseline = np.maximum(default, _MIN_TIME_S)
        is_equal = np.abs(wait - baseline) <= np.where(rdma, RDMA_LATENCY_RESOLUTION_S, TCP_LATENCY_RESOLUTION_S)
        wait = np.where(is_equal, baseline, quantize(np.maximum(wait, _MIN_TIME_S), baseline, scores.tolerance))
    latency[known] = wait
    return capacity, latency


def usable_throughput(throughput: FloatArray, loss: FloatArray, rtt: FloatArray, rdma: BoolArray) -> FloatArray:
    """Bytes/s that a link carries: the measured throughput, or less if TCP cannot reach it at this loss and RTT.

    The adapters of RDMA links repair losses, which are part of the measured throughput then.
    """
    return np.asarray(np.where(rdma, throughput, np.minimum(throughput, padhye_throughput(loss, rtt))))


def padhye_throughput(loss: FloatArray, rtt: FloatArray) -> FloatArray:
    """Bytes/s of a TCP connection that only loss limits; infinity without loss. Padhye et al., equation 32.

    T0 is the time until a loss is detected without duplicate acknowledgements. Inside a bulk transfer this is the
    tail loss probe's (RFC 8985), not the retransmission timeout, which `expected_rto_stall` covers.
    """
    p = np.minimum(loss, MAX_LOSS)
    timeout = 2 * rtt + TLP_SLACK_S
    by_acks = rtt * np.sqrt(2 * SEGMENTS_PER_ACK * p / 3)
    by_timeouts = timeout * np.minimum(1.0, 3 * np.sqrt(3 * SEGMENTS_PER_ACK * p / 8)) * p * (1 + 32 * p**2)
    with np.errstate(divide="ignore"):
        return np.asarray(MSS_BYTES / (by_acks + by_timeouts))


def expected_rto_stall(loss: FloatArray, rtt: FloatArray, rdma: BoolArray) -> FloatArray:
    """Expected seconds that a message waits for retransmission timeouts because its last packet was lost.

    Each lost retransmission doubles the timeout (RFC 6298), which sums to p / (1 - 2p); p is bounded.
    """
    p = np.minimum(loss, MAX_LOSS / 2)
    return np.asarray(np.where(rdma, 0.0, p / (1 - 2 * p) * np.maximum(MIN_RTO_S, 2 * rtt)))


def weighted_score(throughput: FloatArray, loss: FloatArray, rtt: FloatArray, good_throughput: FloatArray,
                   good_rtt: FloatArray | float, weights: MetricWeights) -> FloatArray:
    """Score of a link in (0, 1]: weighted mean of metrics relative to `good_throughput` (bytes/s), `good_rtt` (s)."""
    total = weights.throughput + weights.rtt + weights.loss
    score = (weights.throughput * np.minimum(throughput / good_throughput, 1.0)
             + weights.rtt * np.minimum(good_rtt / rtt, 1.0) + weights.loss * (1 - loss))
    return np.asarray(np.maximum(score / total if total else np.ones_like(score), 1e-6))


def quantize(value: FloatArray, baseline: FloatArray, tolerance: float) -> FloatArray:
    """Round value / baseline (above 0) in log space; values within the relative tolerance become the baseline."""
    if tolerance <= _MIN_TOLERANCE:
        return value
    step = 2 * np.log1p(tolerance)
    return np.asarray(baseline * np.exp(step * np.round(np.log(value / baseline) / step)))


@dataclass(frozen=True)
class LinkRow:
    """One link.

    Attributes:
        kind: one of samples.LINK_KINDS.
        zone: leaf zone of a node, parent of a zone, "" if there is none.
        slowdown: transfer time of MESSAGE_BYTES relative to a link without a score.
    """

    kind: str
    name: str
    zone: str
    slowdown: float
    score: LinkScore


def link_rows(scores: LinkScores, topology: Topology) -> list[LinkRow]:
    """Rows of all links with a score, worst first."""
    parent: Mapping[str, str] = {zone: topology.zones[index] if index >= 0 else ""
                                 for zone, index in zip(topology.zones, topology.parent.tolist(), strict=True)}
    rows = []
    for kind, links in scores.by_kind.items():
        factors = _slowdowns(kind, tuple(links), scores, topology)
        rows += [LinkRow(kind, name, topology.leaf_of(name) if kind == "node" else parent.get(name, ""),
                         float(f"{factor:.4g}"), links[name])
                 for name, factor in zip(links, factors.tolist(), strict=True)]
    return sorted(rows, key=lambda row: (-row.slowdown, row.kind, row.name))


def _slowdowns(kind: str, names: Sequence[str], scores: LinkScores, topology: Topology) -> FloatArray:
    """Transfer times of a message over these links relative to links without a score, shape (names,)."""
    def transfer_seconds(assumed: LinkScores) -> FloatArray:
        if kind == "node":
            bandwidth, latency = node_links(names, assumed)
        elif kind == "zone":
            bandwidth, latency = _uplink_capacity(names, assumed, topology)
        else:
            defaults = np.full(len(names), assumed.default_node_bandwidth)
            bandwidth, latency = inter_leaf_paths(names, defaults, assumed)
        return np.asarray(MESSAGE_BYTES / bandwidth + 2 * latency)  # the links of sender and receiver, one way each

    exact = replace(scores, tolerance=0.0)
    unmeasured = replace(exact, nodes={}, zones={}, inter_leaf={})
    return np.asarray(transfer_seconds(exact) / transfer_seconds(unmeasured))


def _uplink_capacity(names: Sequence[str], scores: LinkScores, topology: Topology) -> tuple[FloatArray, FloatArray]:
    index = np.array([topology.zone_index.get(name, -1) for name in names], np.int64)
    # index -1 selects the appended values, those of a leaf zone with one node
    return zone_uplinks(names, np.append(topology.level, 0)[index], np.append(topology.node_count, 1)[index],
                                 np.append(topology.uplink_bandwidth, np.nan)[index], scores)


def format_link_table(rows: Sequence[LinkRow], max_rows: int) -> str:
    if not rows:
        return "no link has a score"
    header = ("link", "kind", "zone", "slowdown", "throughput", "rtt", "p99", "loss", "age", "samples", "source")
    cells = [header, *(_row_cells(row) for row in rows[:max_rows])]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) if i < 3 else cell.rjust(width)
                       for i, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip() for row in cells]
    if len(rows) > max_rows:
        lines.append(f"and {len(rows) - max_rows} more, none slower (--all shows them)")
    return "\n".join(lines)


def _row_cells(row: LinkRow) -> tuple[str, ...]:
    score = row.score
    return (row.name, row.kind, row.zone, f"x{row.slowdown:.3g}",
            "-" if score.throughput is None else units.format_bit_rate(score.throughput),
            *(units.format_duration(each) if each else "-" for each in (score.rtt, score.rtt_p99)),
            f"{score.loss:.2%}" if score.loss else "0",
            format_age(score.age), str(score.samples), score.source or "-")


def format_age(seconds: float) -> str:
    """Age in its largest unit: "12 s", "3 min", "5 h", "2 d"."""
    for unit, size in (("s", 60), ("min", 60), ("h", 24)):
        if seconds < size:
            return f"{seconds:.0f} {unit}"
        seconds /= size
    return f"{seconds:.0f} d"
