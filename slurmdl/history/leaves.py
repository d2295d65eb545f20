"""Leaf zones of a cluster, and the nodes of past jobs as numbers in their order."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from slurmdl.errors import InputError
from slurmdl.history.accounting import Int32Array
from slurmdl.placement.arrays import BoolArray, IntArray, run_starts
from slurmdl.slurm.hostlist import expand_hostlist
from slurmdl.topology.topology import Topology

#: nodes of the records that are in no zone, which are kept for a message
MAX_UNKNOWN = 100_000


@dataclass(frozen=True, eq=False)
class Leaves:
    """Leaf zones, depth first, so that those below any zone are a range; blocks in the order of the topology.

    Attributes:
        topology: a flat one counts as a single leaf zone.
        zone: shape (leaves,), index of each in `topology.zones`, -1 in a flat one. Only blocks may have no nodes:
            they count when Slurm aligns aggregates.
        begin: shape (leaves + 1,), offset of each leaf zone's nodes in `order`.
        order: shape (nodes,), indices in `topology.nodes`; positions in it are the node numbers used here. Nodes in
            no zone are left out, as by Slurm.
    """

    topology: Topology
    zone: IntArray
    begin: IntArray
    order: IntArray

    @classmethod
    def from_topology(cls, topology: Topology) -> Leaves:
        """InputError if no node is in a zone."""
        if topology.kind == "flat":
            count = len(topology.nodes)
            return cls(topology, np.array([-1]), np.array([0, count]), np.arange(count))
        is_block, leaf = topology.kind == "block", topology.leaf.astype(np.int64)
        order = np.argsort(leaf, kind="stable") if is_block else topology.node_order.astype(np.int64)
        order = order[leaf[order] >= 0]
        if not len(order):
            raise InputError("has no zones with nodes", topology.source or "the topology")
        leaf = leaf[order]
        zone = np.flatnonzero(topology.level == 0) if is_block else leaf[run_starts(leaf)]
        size = np.bincount(leaf, minlength=len(topology.zones))[zone]
        return cls(topology, zone, np.append(0, np.cumsum(size)), order)

    @property
    def nodes(self) -> int:
        return len(self.order)

    @cached_property
    def size(self) -> IntArray:
        """Nodes of each leaf zone, shape (leaves,)."""
        return np.diff(self.begin)

    @cached_property
    def leaf_of_node(self) -> IntArray:
        """Leaf zone of each node number."""
        return np.repeat(np.arange(len(self.size)), self.size)

    @cached_property
    def node_names(self) -> tuple[str, ...]:
        return tuple(self.topology.nodes[index] for index in self.order.tolist())

    @cached_property
    def zone_names(self) -> tuple[str, ...]:
        return tuple(self.topology.zones[zone] for zone in self.zone.tolist())

    @cached_property
    def ancestors(self) -> IntArray:
        """Zones above each leaf zone, itself first, padded with -1; shape (leaves, depth)."""
        parent, current, columns = np.append(self.topology.parent, -1), self.zone, []
        while (current >= 0).any():
            columns.append(current)
            current = parent[current].astype(np.int64)
        return np.stack(columns, axis=1) if columns else np.full((len(self.zone), 1), -1)

    @cached_property
    def upper_zones(self) -> tuple[tuple[int, int, int], ...]:
        """(level, first leaf, last leaf + 1) of each zone above leaf zones, the lowest zones first."""
        zones = [zone for zone in np.unique(self.ancestors[:, 1:]).tolist() if zone >= 0]
        below = {zone: np.flatnonzero((self.ancestors == zone).any(axis=1)) for zone in zones}
        return tuple((int(self.topology.level[zone]), int(below[zone][0]), int(below[zone][-1]) + 1)
                     for zone in sorted(zones, key=lambda zone: self.topology.level[zone]))

    @cached_property
    def root(self) -> IntArray:
        """Root zone above each leaf zone, which limits jobs; 0 if nothing does: flat, or blocks. Shape (leaves,)."""
        if self.topology.kind in ("flat", "block"):
            return np.zeros(len(self.zone), np.int64)
        return np.asarray(self.ancestors[np.arange(len(self.zone)), (self.ancestors >= 0).sum(axis=1) - 1])

    @cached_property
    def fewest(self) -> IntArray:
        """Fewest leaf zones that hold n nodes of an empty cluster, shape (nodes + 1,), by n."""
        held = np.cumsum(np.sort(self.size)[::-1])
        return np.asarray(np.searchsorted(held, np.arange(self.nodes + 1)) + 1)

    @property
    def block_size(self) -> int:
        """Nodes of a base block."""
        sizes = self.topology.block_sizes
        return sizes[0] if sizes else int(self.size[self.size > 0][0])


@dataclass(frozen=True, eq=False)
class NodeLists:
    """Distinct node lists as node numbers; a name with a domain is also the node without it, and vice versa.

    Attributes:
        leaves: in whose order nodes are numbered.
        numbers: node numbers of all lists, one list after the other, without repeats.
        begin: shape (lists + 1,), offset of each list in `numbers`.
        is_complete: shape (lists,), whether the list could be read, and the topology has all its nodes.
        unreadable: lists that are not hostlists.
        unknown: nodes that the topology has in no zone, in order of appearance; at most MAX_UNKNOWN.
        same_host: name in the lists -> name in the topology, where only one of the two has a domain.
    """

    leaves: Leaves
    numbers: Int32Array
    begin: IntArray
    is_complete: BoolArray
    unreadable: tuple[str, ...]
    unknown: tuple[str, ...]
    same_host: dict[str, str]

    @classmethod
    def expand(cls, hostlists: Sequence[str], leaves: Leaves) -> NodeLists:
        numbers, begin, is_complete = array("i"), array("q", [0]), np.ones(len(hostlists), bool)
        known = {name: number for number, name in enumerate(leaves.node_names)}
        unreadable, unknown = list[str](), dict[str, None]()
        other_names = _OtherNames(dict(known))
        for i, text in enumerate(hostlists):
            try:
                names = expand_hostlist(text)
            except InputError:
                unreadable.append(text)
                names, is_complete[i] = [], False
            found = [number for number in map(known.get, names) if number is not None]
            if len(found) < len(names):
                for name in names:
                    if name not in known and name not in unknown:
                        if (number := other_names.find(name)) is None:
                            if len(unknown) < MAX_UNKNOWN:
                                unknown[name] = None
                        else:
                            known[name] = number
                found = [known[name] for name in names if name in known]
                is_complete[i] &= len(found) == len(names)
            if len(set(found)) < len(found):
                found = list(dict.fromkeys(found))
            numbers.extend(found)
            begin.append(len(numbers))
        return cls(leaves, np.frombuffer(numbers, np.int32) if numbers else np.zeros(0, np.int32),
                   np.array(begin, np.int64), is_complete, tuple(unreadable), tuple(unknown), other_names.found)

    @cached_property
    def counts(self) -> IntArray:
        """Number of known nodes of each list."""
        return np.diff(self.begin)

    def of(self, index: int) -> Int32Array:
        return self.numbers[self.begin[index]:self.begin[index + 1]]

    def leaves_of(self, index: int) -> IntArray:
        """Leaf zone of each node of a list."""
        return np.asarray(self.leaves.leaf_of_node[self.of(index)])


class _OtherNames:
    """Nodes by their names with or without domain. Two hosts of the same short name are two hosts: neither is taken.

    Attributes:
        numbers: number of each name in the topology.
        found: name -> name in the topology, of the nodes that were found.
    """

    def __init__(self, numbers: dict[str, int]) -> None:
        self.found: dict[str, str] = {}
        self.numbers = numbers
        self._full_name: dict[str, str] = {}

    @cached_property
    def _by_short_name(self) -> dict[str, str]:
        """Name of the only node with this short name and any domain; "" if there are several."""
        names: dict[str, str] = {}
        for name in self.numbers:
            short, _, domain = name.partition(".")
            if domain:
                names[short] = "" if short in names else name
        return names

    def find(self, name: str) -> int | None:
        """Number of the node; None if there is none, or if it was found by another domain."""
        short, _, domain = name.partition(".")
        known = short if domain else self._by_short_name.get(short, "")
        if known not in self.numbers or self._full_name.setdefault(known, name) != name:
            return None
        self.found[name] = known
        return self.numbers[known]
