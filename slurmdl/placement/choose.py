"""Which nodes: the smallest zone that fits, and inside it the fewest or most balanced zones below."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slurmdl.errors import PlacementError, UsageError
from slurmdl.topology.model import Topology

IntArray = npt.NDArray[np.int64]

#: most zones of one level that are scored by the cost model: those that fit tightest
MAX_ZONES = 8


@dataclass(frozen=True, eq=False)
class Choice:
    """One way to choose the nodes.

    Attributes
    ----------
    zone : index of the smallest zone that holds them all.
    nodes : indices in the topology.
    left : nodes of the pool below `zone` that are left over.
    """

    zone: int
    nodes: IntArray
    left: int


def allowed(topology: Topology, zones: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Which nodes lie below one of the named zones, of any level; shape (nodes,).

    Raises
    ------
    UsageError : a zone that the topology does not have.
    """
    for zone in zones:
        if zone not in topology.zone_index:
            shown = ", ".join(topology.zones[:16]) + (", ..." if len(topology.zones) > 16 else "")
            raise UsageError(f"--dl-zone={zone}: no such zone; valid: {shown}")
    has_zone = topology.leaf >= 0
    if not zones:
        return has_zone
    inside = np.zeros(len(topology.nodes), bool)
    for zone in zones:
        inside |= topology.below(topology.zone_index[zone])
    return inside


def count_below(topology: Topology, nodes: IntArray) -> IntArray:
    """How many of the nodes lie below each zone; shape (zones,)."""
    return topology.sums(np.bincount(nodes, minlength=len(topology.nodes)))


def choices(topology: Topology, pool: IntArray, wanted: int, place: str) -> Iterator[Choice]:
    """Ways to choose `wanted` nodes, the tightest zone first.

    Considered are the zones that hold enough nodes while none of the zones below them does; in each, where it
    has zones below: `pack` tries the fewest leaves filled one after the other, the same leaves evenly, and all
    leaves evenly; `balance` the fewest leaves evenly; `spread` all leaves of the highest zone evenly.

    Parameters
    ----------
    pool : indices in the topology of the nodes to choose from, best first; all have a zone.

    Raises
    ------
    PlacementError : no zone holds enough nodes.
    """
    free = count_below(topology, pool)
    enough = free >= wanted
    if not enough.any():
        most = int(free.argmax()) if len(free) else -1
        largest = f" (the most: {free[most]} in {topology.zones[most]})" if most >= 0 else ""
        raise PlacementError(f"no zone has {wanted} fitting nodes{largest}")
    has_parent = enough & (topology.parent >= 0)
    if place == "spread":
        # the highest: those with no fitting zone above, which is every fitting root
        fitting = np.flatnonzero(enough & (topology.parent < 0))
    else:
        fitting = np.setdiff1d(np.flatnonzero(enough), topology.parent[has_parent])
    tightest = fitting[np.lexsort((free[fitting], topology.level[fitting]))]
    for zone in tightest[:MAX_ZONES]:
        inside = pool[topology.below(int(zone))[pool]]
        for nodes in _inside(topology, inside, wanted, place):
            yield Choice(int(zone), nodes, len(inside) - wanted)


def _inside(topology: Topology, pool: IntArray, wanted: int, place: str) -> Iterator[IntArray]:
    """Ways to choose among the leaves of one zone."""
    leaves, room = np.unique(topology.leaf[pool], return_counts=True)
    fullest = np.argsort(-room, kind="stable")
    fewest = int(np.searchsorted(np.cumsum(room[fullest]), wanted) + 1)
    quotas: list[IntArray] = []
    if place == "spread" or len(leaves) == 1:
        quotas.append(even(room, wanted))
    else:
        chosen = np.zeros_like(room)
        chosen[fullest[:fewest]] = room[fullest[:fewest]]
        quotas.append(even(chosen, wanted))
        if place == "pack":
            quotas += [filled(room, wanted), even(room, wanted)]
    # the nodes leaf by leaf, and the rank of each, best first, in its leaf
    by_leaf = pool[np.argsort(topology.leaf[pool], kind="stable")]
    rank = np.arange(len(pool)) - np.repeat(np.cumsum(room) - room, room)
    seen = set()
    for quota in quotas:
        if tuple(quota) not in seen:
            seen.add(tuple(quota))
            yield by_leaf[rank < np.repeat(quota, room)]


def filled(room: IntArray, wanted: int) -> IntArray:
    """Full zones in descending order, and for the rest the zone that it fits best."""
    quota, left = np.zeros_like(room), wanted
    for zone in np.argsort(-room, kind="stable"):
        if left <= room[zone]:
            open_zones = np.flatnonzero((quota == 0) & (room >= left))
            quota[open_zones[room[open_zones].argmin()]] = left
            break
        quota[zone] = room[zone]
        left -= int(room[zone])
    return quota


def even(room: IntArray, wanted: int) -> IntArray:
    """As even as the room allows: the level of water that `wanted` units reach."""
    quota, left = np.zeros_like(room), wanted
    while left > 0:
        open_zones = np.flatnonzero(quota < room)
        step = left // len(open_zones)
        if step == 0:
            # the last units go to the roomiest zones
            last = open_zones[np.argsort(quota[open_zones] - room[open_zones], kind="stable")[:left]]
            quota[last] += 1
            break
        taken = np.minimum(step, room[open_zones] - quota[open_zones])
        quota[open_zones] += taken
        left -= int(taken.sum())
    return quota
