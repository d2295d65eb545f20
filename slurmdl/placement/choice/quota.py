"""How many nodes of each zone, from the room that each has."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from slurmdl.placement.arrays import begins
from slurmdl.placement.nodes.pool import IntArray, Pool


def quotas(room: IntArray, turn: IntArray, wanted: int, place: str) -> Iterator[IntArray]:
    """Nodes per zone, from the room of each: shape (zones,) as `room`; `turn` is the order of equal zones."""
    leaves = np.flatnonzero(room)
    leaves = leaves[np.argsort(turn[leaves], kind="stable")]
    sizes = room[leaves]
    found: list[IntArray] = []
    if place == "spread" or len(leaves) == 1:
        found.append(even(sizes, wanted))
    else:
        fullest = np.argsort(-sizes, kind="stable")
        fewest = int(np.searchsorted(np.cumsum(sizes[fullest]), wanted) + 1)
        chosen = np.zeros_like(sizes)
        chosen[fullest[:fewest]] = sizes[fullest[:fewest]]
        found.append(even(chosen, wanted))
        if place == "pack":
            found += [filled(sizes, wanted), even(sizes, wanted)]
    seen = set()
    for quota in found:
        if quota.tobytes() not in seen:
            seen.add(quota.tobytes())
            total = np.zeros_like(room)
            total[leaves] = quota
            yield total


def take(pool: Pool, nodes: IntArray, quota: IntArray) -> IntArray:
    """Of the given nodes the first ones in each leaf.

    Parameters
    ----------
    nodes : indices in the pool, ascending.
    quota : shape (zones,), how many of each leaf.
    """
    leaf = pool.leaf[nodes]
    begin = begins(leaf)
    turn = np.arange(len(nodes)) - np.repeat(begin, np.diff(np.append(begin, len(nodes))))
    return nodes[turn < quota[leaf]]


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
