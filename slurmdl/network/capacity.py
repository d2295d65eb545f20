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

from slurmdl.network import figure
from slurmdl.network.model import LinkScores, ScoreArrays

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
        carried = figure.usable_throughput(throughput, loss, whole, rdma)
        waits = round_trip / 2 + figure.expected_rto_stall(loss, whole, rdma)
    else:
        good = np.full(len(known), max(4 * scores.default_latency, _MIN_TIME_S))
        carried = prior * figure.weighted_score(throughput, loss, whole, prior, good, scores.weights)
        waits = delay[known]
    if scores.half_life is not None:
        trust = 0.5 ** (table.age[row] / scores.half_life)
        # figures of links span orders of magnitude: the mean of their logarithms
        carried = prior * (carried / prior) ** trust
        waits = delay[known] + trust * (waits - delay[known])
    capacity[known] = figure.quantize(carried, prior, scores.tolerance)
    if scores.tolerance:
        usual = np.maximum(delay[known], _MIN_TIME_S)
        unclear = np.abs(waits - usual) <= np.where(rdma, RDMA_LATENCY_RESOLUTION_S, TCP_LATENCY_RESOLUTION_S)
        waits = np.where(unclear, usual, figure.quantize(np.maximum(waits, _MIN_TIME_S), usual, scores.tolerance))
    delay[known] = waits
    return capacity, delay


def _find_measured(names: Sequence[str], table: ScoreArrays) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Which of the names are measured, and their rows in the table."""
    if not table.index:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    row = np.fromiter(map(table.index.get, names, repeat(-1)), np.int64, len(names))
    known = np.flatnonzero(row >= 0)
    return known, row[known]
