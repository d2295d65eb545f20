"""Leaf zones of a cluster as the simulation counts them, and free nodes per leaf."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from slurmdl.errors import InputError
from slurmdl.history.trace import IntArray
from slurmdl.text import pluralize
from slurmdl.topology.topology import Topology


@dataclass(frozen=True, eq=False)
class Leaves:
    """Leaf zones with nodes, in the order of the topology. The nodes of a leaf are contiguous and interchangeable.

    Attributes:
        topology: of kind tree, block or flat; of a flat one all nodes are one leaf.
        zone: shape (leaves,), index of the zone in the topology, -1 in a flat one.
        begin: shape (leaves + 1,), offset of each leaf's nodes.
        names: node names in this order.
    """

    topology: Topology
    zone: IntArray
    begin: IntArray
    names: tuple[str, ...]

    @classmethod
    def from_topology(cls, topology: Topology) -> Leaves:
        """InputError for other kinds, or if no node is in a zone. Nodes without a zone are left out, as by Slurm."""
        if topology.kind not in ("tree", "block", "flat"):
            raise InputError(f"topology/{topology.kind}: its node selection is not simulated; expected tree, block "
                             "or flat", topology.source)
        leaf = np.zeros(len(topology.nodes), np.int64) if topology.kind == "flat" else topology.leaf.astype(np.int64)
        order = np.argsort(leaf, kind="stable")
        order = order[leaf[order] >= 0]
        if not len(order):
            raise InputError("no node is in a zone", topology.source)
        zones, counts = np.unique(leaf[order], return_counts=True)
        if topology.kind == "flat":
            zones = np.array([-1])
        if topology.kind == "block":
            # empty blocks count when Slurm aligns aggregates
            zones = np.flatnonzero(topology.level == 0)
            counts = np.bincount(leaf[order], minlength=len(topology.zones))[zones]
        return cls(topology, zones.astype(np.int64), np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
                   tuple(topology.nodes[i] for i in order.tolist()))

    @property
    def nodes(self) -> int:
        return len(self.names)

    @cached_property
    def size(self) -> IntArray:
        """Nodes of each leaf, shape (leaves,)."""
        return np.diff(self.begin)

    @cached_property
    def leaf_of_node(self) -> IntArray:
        return np.repeat(np.arange(len(self.size)), self.size)

    @cached_property
    def ancestors(self) -> IntArray:
        """Zones above each leaf, itself first, padded with -1; shape (leaves, depth)."""
        parent, current, columns = np.append(self.topology.parent, -1), self.zone, []
        while (current >= 0).any():
            columns.append(current)
            current = parent[current].astype(np.int64)
        return np.stack(columns, axis=1) if columns else np.full((len(self.zone), 1), -1)

    @cached_property
    def root(self) -> IntArray:
        """Root zone above each leaf, shape (leaves,); 0 in a flat topology and in one of blocks."""
        if self.topology.kind != "tree":
            return np.zeros(len(self.zone), np.int64)
        return np.asarray(self.ancestors[np.arange(len(self.zone)), (self.ancestors >= 0).sum(axis=1) - 1])

    @cached_property
    def fewest(self) -> IntArray:
        """Fewest leaves that hold n nodes of an empty cluster, shape (nodes + 1,), by n."""
        held = np.cumsum(np.sort(self.size)[::-1])
        return np.asarray(np.searchsorted(held, np.arange(self.nodes + 1)) + 1)

    def note(self) -> str:
        """What the topology leaves out; "" if nothing."""
        missing = len(self.topology.nodes) - self.nodes
        return f"{pluralize(missing, 'node')} in no zone not used, as by Slurm" if missing else ""
