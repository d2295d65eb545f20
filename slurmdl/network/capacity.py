"""Capacity and delay of links: what was measured, else what the topology declares, else a default."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from slurmdl.network.model import LinkScore, LinkScores

FloatArray = npt.NDArray[np.float64]


def node_links(nodes: Sequence[str], scores: LinkScores) -> tuple[FloatArray, FloatArray]:
    """Capacity (bytes/s) and one-way delay (s) of the link of each node to its leaf, each of shape (nodes,)."""
    measured = [scores.nodes.get(node) for node in nodes]
    return (np.array([score.throughput if score else scores.node_default for score in measured], float),
            _delays(measured, scores))


def zone_uplinks(zones: Sequence[str], level: npt.NDArray[np.int32], speed: FloatArray,
                 scores: LinkScores) -> tuple[FloatArray, FloatArray]:
    """Capacity (bytes/s) and one-way delay (s) of the uplink of each zone, each of shape (zones,).

    Parameters
    ----------
    level : shape (zones,), height of each zone, 0 = leaf.
    speed : shape (zones,), bytes/s that the topology declares, NaN where it declares none.
    """
    measured = [scores.zones.get(zone) for zone in zones]
    defaults = np.array(scores.zone_default, float)[np.minimum(level, len(scores.zone_default) - 1)]
    assumed = np.where(np.isnan(speed), defaults, speed)
    return (np.array([score.throughput if score else speed for score, speed in zip(measured, assumed, strict=True)],
                     float),
            _delays(measured, scores))


def _delays(measured: Sequence[LinkScore | None], scores: LinkScores) -> FloatArray:
    return np.array([score.delay / 2 if score and score.delay else scores.delay_default for score in measured], float)
