"""Capacity and delay of links: what was measured, else what the topology declares, else a default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.network.model import LinkScore, LinkScores

FloatArray = npt.NDArray[np.float64]

#: how many times the links of its nodes a zone's uplink is taken to fall short, where nothing is known of it; but
#: it is never taken for slower than one of them
OVERSUBSCRIPTION = 2.0


def node_links(nodes: Sequence[str], scores: LinkScores) -> tuple[FloatArray, FloatArray]:
    """Capacity (bytes/s) and one-way delay (s) of the link of each node to its leaf, each of shape (nodes,)."""
    return _measured(nodes, np.full(len(nodes), float(scores.node_default)), scores.nodes, scores)


def node_losses(nodes: Sequence[str], scores: LinkScores) -> FloatArray:
    """Fraction of packets lost on the link of each node, 0 where nothing was measured; shape (nodes,)."""
    loss = np.zeros(len(nodes))
    for i in _known(nodes, scores.nodes):
        loss[i] = scores.nodes[nodes[i]].loss
    return loss


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
    return _measured(zones, np.where(np.isnan(speed), defaults, speed), scores.zones, scores)


def _measured(names: Sequence[str], assumed: FloatArray, measured: Mapping[str, LinkScore],
              scores: LinkScores) -> tuple[FloatArray, FloatArray]:
    """Capacity and delay: what is measured of these links, for all others what is assumed."""
    delay = np.full(len(names), float(scores.delay_default))
    for i in _known(names, measured):
        score = measured[names[i]]
        assumed[i] = score.throughput
        if score.delay:
            delay[i] = score.delay / 2
    return assumed, delay


def _known(names: Sequence[str], measured: Mapping[str, LinkScore]) -> list[int]:
    """Which of the names are measured; there may be very many, and few of them measured."""
    if not measured:
        return []
    return np.flatnonzero(np.fromiter(map(measured.__contains__, names), bool, len(names))).tolist()
