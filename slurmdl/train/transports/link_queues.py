"""Links between virtual ranks, on which messages queue."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """A rate in bytes/s, and a delay in s."""

    bandwidth: float
    latency: float = 0.0


class QueueingNetwork:
    """The network of a simulated run; see virtual.Network.

    A message to another zone passes the uplink of its zone and that of the other one, a message to another node of
    the zone the links of both nodes; each direction of a link carries one message after the other, in the order in
    which they are sent. Within a node messages pass side by side.

    Parameters
    ----------
    nodes, zones : entry i is that of rank i.
    links : level, one of messages.LEVELS -> its link; messages of a level that is missing take no time.
    """

    def __init__(self, nodes: Sequence[str], zones: Sequence[str], links: Mapping[str, Link]) -> None:
        self._location_by_level = {"across": tuple(zones), "zone": tuple(nodes)}
        self._links = links
        self._free_at: defaultdict[tuple[str, str, str], float] = defaultdict(float)

    def arrival(self, source: int, target: int, size: int, clock: float) -> tuple[float, float]:
        level = next((level for level, its in self._location_by_level.items() if its[source] != its[target]), "node")
        link = self._links.get(level)
        if link is None:
            return clock, clock
        takes = size / link.bandwidth
        if level == "node":
            return clock + takes, clock + takes + link.latency
        left = self._earliest_start(level, self._location_by_level[level][source], "out", clock) + takes
        self._free_at[level, self._location_by_level[level][source], "out"] = left
        # what begins to arrive while another message still comes in waits for it
        there = self._earliest_start(
    level,
    self._location_by_level[level][target],
    "in",
     left - takes + link.latency) + takes
        self._free_at[level, self._location_by_level[level][target], "in"] = there
        return left, there

    def _earliest_start(self, level: str, location: str, direction: str, clock: float) -> float:
        return max(clock, self._free_at[level, location, direction])
