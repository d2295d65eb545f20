"""Network model of virtual ranks: links with bandwidth, latency, and FIFO queues."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """Bandwidth in bytes/s, and latency in s."""

    bandwidth: float
    latency: float = 0.0


class QueueingNetwork:
    """Network of a virtual run; see virtual.NetworkModel.

    A message to another zone passes the uplinks of both zones; a message to another node of the zone, the links of
    both nodes. Each direction of a link carries messages one at a time, in the order of sending. Messages within a
    node do not queue.

    Args:
        nodes, zones: entry i belongs to rank i.
        links: locality level, one of p2p.LOCALITY_LEVELS -> link; messages of other levels take no time.
    """

    def __init__(self, nodes: Sequence[str], zones: Sequence[str], links: Mapping[str, Link]) -> None:
        self._locations_by_level = {"inter_zone": tuple(zones), "intra_zone": tuple(nodes)}
        self._links = links
        self._free_at: defaultdict[tuple[str, str, str], float] = defaultdict(float)

    def arrival(self, source: int, target: int, size: int, clock: float) -> tuple[float, float]:
        level = next((level for level, locations in self._locations_by_level.items()
                      if locations[source] != locations[target]), "intra_node")
        link = self._links.get(level)
        if link is None:
            return clock, clock
        duration = size / link.bandwidth
        if level == "intra_node":
            return clock + duration, clock + duration + link.latency
        outgoing = level, self._locations_by_level[level][source], "out"
        incoming = level, self._locations_by_level[level][target], "in"
        sent_at = max(clock, self._free_at[outgoing]) + duration
        self._free_at[outgoing] = sent_at
        # queue behind messages that are still arriving at the target
        arrives_at = max(sent_at - duration + link.latency, self._free_at[incoming]) + duration
        self._free_at[incoming] = arrives_at
        return sent_at, arrives_at
