"""Capacity and delay of links: what was measured, else what the topology declares, else a default.

A link that was measured carries what its loss, delay and throughput allow (figure.carried), and each message over it
waits half its round trip and what its lost tails cost (figure.stall). With weights (Lee et al., Electronics 2023,
12(14):3021) it carries the share of its default that its weighted score says. What is older counts less beside the
default: half after each half-life. Differences below the margin are no differences: noise must not scatter a job.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.links.link_scores import LinkScores, MetricWeights, ScoreArrays

FloatArray = npt.NDArray[np.float64]

#: how many times the links of its nodes a zone's uplink is taken to fall short, where nothing is known of it; but
#: it is never taken for slower than one of them
OVERSUBSCRIPTION = 2.0
#: share of its link that a node must miss on a way between zones before the way is called slow: the nodes that
#: measure a way bound what they can show of it
SLOW_PATH_FRACTION = 0.25
#: seconds one way by which probes through the kernel, and those past it, may be off whatever the margin
TCP_LATENCY_RESOLUTION_S, RDMA_LATENCY_RESOLUTION_S = 25e-6, 1e-6
#: seconds, shorter than any message: where neither a measurement nor a default says anything
_MIN_TIME_S = 1e-6


def node_links(nodes: Sequence[str], scores: LinkScores) -> tuple[FloatArray, FloatArray]:
    """Capacity (bytes/s) and one-way delay (s) of the link of each node to its leaf, each of shape (nodes,)."""
    return _apply_scores(nodes, np.full(len(nodes), float(scores.default_node_bandwidth)), scores.node_table, scores)


def zone_uplinks(zones: Sequence[str], level: npt.NDArray[np.integer[Any]], node_count: npt.NDArray[np.integer[Any]],
                 declared_bandwidth: FloatArray, scores: LinkScores) -> tuple[FloatArray, FloatArray]:
    """Capacity (bytes/s) and one-way delay (s) of the uplink of each zone, each of shape (zones,).

    Parameters
    ----------
    level : shape (zones,), height of each zone, 0 = leaf.
    size : shape (zones,), nodes of the topology below each zone.
    speed : shape (zones,), bytes/s that the topology declares, NaN where it declares none.
    """
    if scores.default_zone_bandwidth:
        defaults = np.array(scores.default_zone_bandwidth, float)[
                            np.minimum(level, len(scores.default_zone_bandwidth) - 1)]
    else:
        defaults = scores.default_node_bandwidth * np.maximum(node_count / OVERSUBSCRIPTION, 1.0)
    return _apply_scores(zones, np.where(np.isnan(declared_bandwidth), defaults,
                         declared_bandwidth), scores.zone_table, scores)


def inter_leaf_paths(names: Sequence[str], default_capacity: FloatArray,
                     scores: LinkScores) -> tuple[FloatArray, FloatArray]:
    """Capacity (bytes/s) and one-way delay (s) of the ways between leaf zones, each of shape (names,).

    Parameters
    ----------
    names : as model.trunk makes them.
    assumed : bytes/s of those that were not measured.
    """
    return _apply_scores(names, default_capacity.copy(), scores.inter_leaf_table, scores)


def _apply_scores(names: Sequence[str], capacity: FloatArray, table: ScoreArrays,
              scores: LinkScores) -> tuple[FloatArray, FloatArray]:
    """Capacity and delay: what is measured of these links, for all others what is assumed (and given here)."""
    delay = np.full(len(names), float(scores.default_latency))
    known, row = _find_measured(names, table)
    if not len(known):
        return capacity, delay
    prior, loss, rdma = capacity[known], table.loss[row], table.rdma[row]
    round_trip = np.where(np.isnan(table.rtt[row]), 2 * scores.default_latency, table.rtt[row])
    throughput = np.where(np.isnan(table.throughput[row]), prior, table.throughput[row])
    # the other end has a link, too
    whole = np.maximum(round_trip + 2 * scores.default_latency, _MIN_TIME_S)
    if scores.weights is None:
        carried = usable_throughput(throughput, loss, whole, rdma)
        waits = round_trip / 2 + expected_rto_stall(loss, whole, rdma)
    else:
        good = np.full(len(known), max(4 * scores.default_latency, _MIN_TIME_S))
        carried = prior * weighted_score(throughput, loss, whole, prior, good, scores.weights)
        waits = delay[known]
    if scores.half_life is not None:
        trust = 0.5 ** (table.age[row] / scores.half_life)
        # figures of links span orders of magnitude: the mean of their logarithms
        carried = prior * (carried / prior) ** trust
        waits = delay[known] + trust * (waits - delay[known])
    capacity[known] = quantize(carried, prior, scores.tolerance)
    if scores.tolerance:
        usual = np.maximum(delay[known], _MIN_TIME_S)
        unclear = np.abs(waits - usual) <= np.where(rdma, RDMA_LATENCY_RESOLUTION_S, TCP_LATENCY_RESOLUTION_S)
        waits = np.where(unclear, usual, quantize(np.maximum(waits, _MIN_TIME_S), usual, scores.tolerance))
    delay[known] = waits
    return capacity, delay


def _find_measured(names: Sequence[str], table: ScoreArrays) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Which of the names are measured, and their rows in the table."""
    if not table.index:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    row = np.fromiter(map(table.index.get, names, repeat(-1)), np.int64, len(names))
    known = np.flatnonzero(row >= 0)
    return known, row[known]


# MERGED: What loss, delay and throughput of a link do to a transfer: one figure in bytes/s, one in seconds per message.

BoolArray = npt.NDArray[np.bool_]

#: bytes of payload in a segment, on Ethernet with 1500 bytes
MSS_BYTES = 1448.0
#: segments that one acknowledgement answers
SEGMENTS_PER_ACK = 2.0
#: least retransmission timeout in seconds, Linux's TCP_RTO_MIN; RFC 6298 would have 1 s
MIN_RTO_S = 0.2
#: seconds beyond two round trips after which the loss of a flight's end is probed, two ticks of Linux's timer
TLP_SLACK_S = 4e-3
#: loss above which no formula holds; so much stands for a link that carries hardly anything
MAX_LOSS = 0.9


def usable_throughput(throughput: FloatArray, loss: FloatArray, rtt: FloatArray, rdma: BoolArray) -> FloatArray:
    """Bytes/s that a link carries: what was measured, or less where TCP cannot fill it at that loss.

    Parameters
    ----------
    throughput : bytes/s, measured.
    loss : fraction of packets lost.
    round_trip : seconds, above 0.
    rdma : links without TCP: their losses are repaired by the adapter and show in the throughput alone.
    """
    return np.asarray(np.where(rdma, throughput, np.minimum(throughput, padhye_throughput(loss, rtt))))


def padhye_throughput(loss: FloatArray, rtt: FloatArray) -> FloatArray:
    """Bytes/s of one TCP connection that only losses bound; infinity without loss. Padhye et al., equation 32.

    Their T0 is the time that passes where no duplicate acknowledgements tell of a loss. Inside a bulk transfer
    that is a tail loss probe's (RFC 8985), not the retransmission timeout's; what the latter does to the end of a
    message is in `stall`.
    """
    p = np.minimum(loss, MAX_LOSS)
    timeout = 2 * rtt + TLP_SLACK_S
    by_acks = rtt * np.sqrt(2 * SEGMENTS_PER_ACK * p / 3)
    by_timeouts = timeout * np.minimum(1.0, 3 * np.sqrt(3 * SEGMENTS_PER_ACK * p / 8)) * p * (1 + 32 * p**2)
    with np.errstate(divide="ignore"):
        return np.asarray(MSS_BYTES / (by_acks + by_timeouts))


def expected_rto_stall(loss: FloatArray, rtt: FloatArray, rdma: BoolArray) -> FloatArray:
    """Seconds that a message is expected to wait for a retransmission timeout, since its last packet was lost.

    A lost timeout's retransmission doubles the timeout (RFC 6298), which adds up to p / (1 - 2p), here bounded.
    """
    p = np.minimum(loss, MAX_LOSS / 2)
    return np.asarray(np.where(rdma, 0.0, p / (1 - 2 * p) * np.maximum(MIN_RTO_S, 2 * rtt)))


def weighted_score(throughput: FloatArray, loss: FloatArray, rtt: FloatArray, good_throughput: FloatArray, good_rtt: FloatArray,
             weights: MetricWeights) -> FloatArray:
    """Score of a link from above 0 to 1 by a weighted sum of its figures, each beside that of a good link.

    Parameters
    ----------
    throughput, loss, round_trip : as in `carried`.
    best : bytes/s of a good link.
    least : seconds, round trip of a good link.
    """
    total = weights.throughput + weights.rtt + weights.loss
    score = (weights.throughput * np.minimum(throughput / good_throughput, 1.0)
             + weights.rtt * np.minimum(good_rtt / rtt, 1.0) + weights.loss * (1 - loss))
    return np.asarray(np.maximum(score / total if total else np.ones_like(score), 1e-6))


def quantize(value: FloatArray, baseline: FloatArray, tolerance: float) -> FloatArray:
    """The value, in steps of so many times the usual one that noise below the margin makes no difference.

    What lies within the margin of the usual value is the usual value.

    Parameters
    ----------
    value, usual : above 0.
    margin : a fraction of the value, 0 for none.
    """
    if tolerance <= 0:
        return value
    step = 2 * np.log1p(tolerance)
    return np.asarray(baseline * np.exp(step * np.round(np.log(value / baseline) / step)))
