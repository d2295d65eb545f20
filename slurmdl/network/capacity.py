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
from slurmdl.network.model import LinkScores, Table

FloatArray = npt.NDArray[np.float64]

#: how many times the links of its nodes a zone's uplink is taken to fall short, where nothing is known of it; but
#: it is never taken for slower than one of them
OVERSUBSCRIPTION = 2.0
#: share of its link that a node must miss on a way between zones before the way is called slow: the nodes that
#: measure a way bound what they can show of it
SLOWER = 0.25
#: seconds one way by which probes through the kernel, and those past it, may be off whatever the margin
TCP_GRAIN, RDMA_GRAIN = 25e-6, 1e-6
#: seconds, shorter than any message: where neither a measurement nor a default says anything
_SHORTEST = 1e-6


def node_links(nodes: Sequence[str], scores: LinkScores) -> tuple[FloatArray, FloatArray]:
    """Capacity (bytes/s) and one-way delay (s) of the link of each node to its leaf, each of shape (nodes,)."""
    return _measured(nodes, np.full(len(nodes), float(scores.node_default)), scores.node_table, scores)


def zone_uplinks(zones: Sequence[str], level: npt.NDArray[np.integer[Any]], size: npt.NDArray[np.integer[Any]],
                 speed: FloatArray, scores: LinkScores) -> tuple[FloatArray, FloatArray]:
    """Capacity (bytes/s) and one-way delay (s) of the uplink of each zone, each of shape (zones,).

    Parameters
    ----------
    level : shape (zones,), height of each zone, 0 = leaf.
    size : shape (zones,), nodes of the topology below each zone.
    speed : shape (zones,), bytes/s that the topology declares, NaN where it declares none.
    """
    if scores.zone_default:
        defaults = np.array(scores.zone_default, float)[np.minimum(level, len(scores.zone_default) - 1)]
    else:
        defaults = scores.node_default * np.maximum(size / OVERSUBSCRIPTION, 1.0)
    return _measured(zones, np.where(np.isnan(speed), defaults, speed), scores.zone_table, scores)


def trunks(names: Sequence[str], assumed: FloatArray, scores: LinkScores) -> tuple[FloatArray, FloatArray]:
    """Capacity (bytes/s) and one-way delay (s) of the ways between leaf zones, each of shape (names,).

    Parameters
    ----------
    names : as model.trunk makes them.
    assumed : bytes/s of those that were not measured.
    """
    return _measured(names, assumed.copy(), scores.trunk_table, scores)


def _measured(names: Sequence[str], capacity: FloatArray, table: Table,
              scores: LinkScores) -> tuple[FloatArray, FloatArray]:
    """Capacity and delay: what is measured of these links, for all others what is assumed (and given here)."""
    delay = np.full(len(names), float(scores.delay_default))
    known, row = _known(names, table)
    if not len(known):
        return capacity, delay
    prior, loss, rdma = capacity[known], table.loss[row], table.rdma[row]
    round_trip = np.where(np.isnan(table.delay[row]), 2 * scores.delay_default, table.delay[row])
    throughput = np.where(np.isnan(table.throughput[row]), prior, table.throughput[row])
    # the other end has a link, too
    whole = np.maximum(round_trip + 2 * scores.delay_default, _SHORTEST)
    if scores.weights is None:
        carried = figure.carried(throughput, loss, whole, rdma)
        waits = round_trip / 2 + figure.stall(loss, whole, rdma)
    else:
        good = np.full(len(known), max(4 * scores.delay_default, _SHORTEST))
        carried = prior * figure.weighted(throughput, loss, whole, prior, good, scores.weights)
        waits = delay[known]
    if scores.half_life is not None:
        trust = 0.5 ** (table.age[row] / scores.half_life)
        # figures of links span orders of magnitude: the mean of their logarithms
        carried = prior * (carried / prior) ** trust
        waits = delay[known] + trust * (waits - delay[known])
    capacity[known] = figure.stepped(carried, prior, scores.margin)
    if scores.margin:
        usual = np.maximum(delay[known], _SHORTEST)
        unclear = np.abs(waits - usual) <= np.where(rdma, RDMA_GRAIN, TCP_GRAIN)
        waits = np.where(unclear, usual, figure.stepped(np.maximum(waits, _SHORTEST), usual, scores.margin))
    delay[known] = waits
    return capacity, delay


def _known(names: Sequence[str], table: Table) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Which of the names are measured, and their rows in the table."""
    if not table.index:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    row = np.fromiter(map(table.index.get, names, repeat(-1)), np.int64, len(names))
    known = np.flatnonzero(row >= 0)
    return known, row[known]
