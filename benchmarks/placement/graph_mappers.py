"""Rank maps by general graph mappers: Scotch's gmap, and KaHIP's kaffpa applied zone by zone.

Both get the same input as slurmdl's rank map: traffic between ranks, slots, and distances between slots.

Pellegrini and Roman, SCOTCH: a software package for static mapping by dual recursive bipartitioning of process and
architecture graphs, HPCN 1996. Sanders and Schulz, Think locally, act globally: highly balanced graph
partitioning, SEA 2013.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from slurmdl.placement.iteration_cost import NetworkLinks
from slurmdl.traffic import Phase

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

#: Debian's name of gmap
GMAP = "scotch_gmap"
#: time limit of gmap in seconds
TIMEOUT_S = 120
#: maximum weight of an edge or distance; the mappers require integers
MAX_WEIGHT = 1000


def missing() -> dict[str, str]:
    """Return mapper -> message with its package, for the mappers that are not installed."""
    reasons = {}
    if not shutil.which(GMAP):
        reasons["gmap"] = f"{GMAP} is not installed (Debian package scotch)"
    if importlib.util.find_spec("kahip") is None:
        reasons["KaHIP"] = "kahip is not installed (pip install slurmdl[bench])"
    return reasons


def volumes(phases: Sequence[Phase], ranks: int) -> FloatArray:
    """Return bytes between each pair of ranks, over both directions and all phases; (ranks, ranks), symmetric."""
    total = np.zeros((ranks, ranks))
    for phase in phases:
        if phase.all_pairs:
            total[np.ix_(phase.source, phase.target)] += phase.bytes_per_pair
        else:
            np.add.at(total, (phase.source, phase.target), phase.bytes_per_pair)
    np.fill_diagonal(total, 0.0)
    return total + total.T


def distances(network: NetworkLinks, slots: IntArray) -> FloatArray:
    """Return the sum of seconds per byte over the links between each pair of slots; shape (slots, slots).

    Args:
        slots: shape (slots,), node of each slot.
    """
    node_seconds = 1 / network.node_capacity
    zone = np.append(1 / network.zone_capacity, 0.0)
    # both paths to the root, minus twice their common part
    to_root = node_seconds + zone[network.ancestors].sum(axis=1)
    shared = np.zeros((len(node_seconds), len(node_seconds)))
    for column in network.ancestors.T:
        both = (column[:, None, None] == network.ancestors[None]).any(axis=2) & (column >= 0)[:, None]
        shared += both * zone[column][:, None]
    between = to_root[:, None] + to_root[None] - 2 * shared
    np.fill_diagonal(between, 0.0)
    return np.asarray(between[np.ix_(slots, slots)])


def paths(network: NetworkLinks) -> IntArray:
    """Return the zones above each node from the root, -1 below its leaf, and the node last; (nodes, levels)."""
    depth = (network.ancestors >= 0).sum(axis=1)
    position = depth[:, None] - 1 - np.arange(network.ancestors.shape[1])
    zones = np.where(position >= 0, np.take_along_axis(network.ancestors, np.maximum(position, 0), axis=1), -1)
    return np.column_stack([zones, np.arange(len(depth))])


def gmap(traffic: FloatArray, distance: FloatArray) -> tuple[IntArray, float]:
    """Map ranks to slots with Scotch; return the slot of each rank, and the seconds.

    Args:
        traffic, far: results of `volumes` and `distances`; neighboring slots in the network are adjacent.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, target, out = (Path(folder) / name for name in ("source.grf", "target.tgt", "out.map"))
        source.write_text(_graph(traffic))
        target.write_text(_architecture(distance))
        start = time.perf_counter()
        subprocess.run([GMAP, str(source), str(target), str(out)], check=True, timeout=TIMEOUT_S, capture_output=True)
        seconds = time.perf_counter() - start
        _, *lines = out.read_text().splitlines()
    slot = np.zeros(len(traffic), np.int64)
    for line in lines:
        rank, assigned = map(int, line.split())
        slot[rank] = assigned
    return _make_one_to_one(slot), seconds


def _graph(traffic: FloatArray) -> str:
    """Format a graph for Scotch: edge weights, no labels, no vertex weights."""
    weight = _to_integers(traffic)
    rows = []
    for row in weight:
        neighbors = np.flatnonzero(row)
        pairs = " ".join(f"{w} {v}" for v, w in zip(neighbors.tolist(), row[neighbors].tolist(), strict=True))
        rows.append(f"{len(neighbors)} {pairs}")
    return f"0\n{len(weight)} {np.count_nonzero(weight)}\n0 010\n" + "\n".join(rows) + "\n"


def _architecture(distance: FloatArray) -> str:
    """Format Scotch's `deco 0`: the slots as leaves of a binary tree, and the distance of each pair."""
    number = np.zeros(len(distance), np.int64)

    def halve(begin: int, end: int, label: int) -> None:
        if end - begin == 1:
            number[begin] = label
        else:
            middle = (begin + end + 1) // 2
            halve(begin, middle, 2 * label)
            halve(middle, end, 2 * label + 1)

    halve(0, len(distance), 1)
    weight = np.maximum(_to_integers(distance), 1)
    lines = [f"{i} 1 {label}" for i, label in enumerate(number.tolist())]
    lines += [" ".join(map(str, weight[i, :i].tolist())) for i in range(1, len(distance))]
    return f"deco 0\n{len(distance)} {number.max()}\n" + "\n".join(lines) + "\n"


def kahip(traffic: FloatArray, zones: IntArray) -> tuple[IntArray, float]:
    """Map ranks to slots with KaHIP; return the slot of each rank, and the seconds.

    The zones of the highest level are split into two halves and the ranks with them, recursively down to the slots
    of a leaf. KaHIP splits evenly: an isolated vertex, the filler, compensates for the difference of the halves.

    Args:
        traffic: result of `volumes`.
        zones: shape (slots, levels), zones of each slot from the root down to its node; slots of a zone are adjacent.
    """
    weight = _to_integers(traffic)
    slot = np.zeros(len(weight), np.int64)
    start = time.perf_counter()
    _split(weight, np.arange(len(weight)), 0, zones, slot)
    return slot, time.perf_counter() - start


def _split(weight: IntArray, ranks: IntArray, first: int, zones: IntArray, slot: IntArray) -> None:
    """Assign the slots starting at `first` to `ranks`."""
    slot_zones = zones[first:first + len(ranks)]
    column = next((level for level in range(zones.shape[1])
                   if (slot_zones[:, level] != slot_zones[0, level]).any()), None)
    if column is None:
        slot[ranks] = np.arange(first, first + len(ranks))
        return
    borders = np.flatnonzero(slot_zones[1:, column] != slot_zones[:-1, column]) + 1
    middle = int(borders[np.abs(borders - len(ranks) / 2).argmin()])
    inside = _half(weight[np.ix_(ranks, ranks)], middle)
    _split(weight, ranks[inside], first, zones, slot)
    _split(weight, ranks[~inside], first + middle, zones, slot)


def _half(weight: IntArray, size: int) -> npt.NDArray[np.bool_]:
    """Return the `size` ranks that kaffpa puts into one block."""
    import kahip as library

    ranks = len(weight)
    source, target = np.nonzero(weight)
    offsets = np.searchsorted(source, np.arange(ranks + 1))
    filler_weight = abs(ranks - 2 * size)
    loads = [1] * ranks + [filler_weight] * (filler_weight > 0)
    starts = offsets.tolist() + [len(target)] * (filler_weight > 0)
    _, blocks = library.kaffpa(loads, starts, weight[source, target].tolist(), target.tolist(), 2, 0.0, True, 1,
                               library.ECO)
    block = np.array(blocks[:ranks], np.int64)
    # the filler is in the block of the smaller half
    inside = block == (block[0] if not filler_weight else blocks[ranks] if 2 * size < ranks else 1 - blocks[ranks])
    # repair an unbalanced split: move ranks with the least traffic out of the half, or with the most into it
    surplus = int(inside.sum()) - size
    if surplus:
        pull = weight @ inside
        candidates = np.flatnonzero(inside if surplus > 0 else ~inside)
        order = np.argsort(pull[candidates] if surplus > 0 else -pull[candidates], kind="stable")
        inside[candidates[order[:abs(surplus)]]] = surplus < 0
    return np.asarray(inside)


def _make_one_to_one(slot: IntArray) -> IntArray:
    """Make the map one-to-one: of ranks in the same slot, all but the first move to free slots."""
    order = np.argsort(slot, kind="stable")
    repeated = order[1:][slot[order[1:]] == slot[order[:-1]]]
    fixed = slot.copy()
    fixed[repeated] = np.setdiff1d(np.arange(len(slot)), slot)[:len(repeated)]
    return fixed


def _to_integers(values: FloatArray) -> IntArray:
    """Scale to integers up to STEPS; positive values stay positive."""
    top = float(values.max(initial=0.0)) or 1.0
    return np.ceil(values / top * MAX_WEIGHT).astype(np.int64)
