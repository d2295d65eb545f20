"""Nodes of the jobs, as indices in the order of the topology's leaf zones."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from slurmdl.errors import InputError
from slurmdl.history.accounting import Int32Array, IntArray
from slurmdl.slurm.hostlist import expand_hostlist
from slurmdl.topology.topology import Topology

#: nodes of the records that are in no zone, which are kept for a message
MAX_UNKNOWN = 100_000


@dataclass(frozen=True, eq=False)
class LeafZones:
    """Leaf zones that contain nodes, depth first, so that the leaf zones below any zone are a range.

    Attributes:
        zones: shape (leaves,), index of each in `topology.zones`.
        begin: shape (leaves + 1,), offset of each leaf zone's nodes in `order`.
        order: shape (nodes in a zone,), indices in `topology.nodes`; positions in it are the node numbers used here.
        ranges: (first leaf, last leaf + 1) of each zone above leaf zones, the lowest zones first.
        group: shape (leaves,), number of the root above each leaf zone; 0 for blocks, whose jobs are not limited to
            one root.
    """

    topology: Topology
    zones: IntArray
    begin: IntArray
    order: IntArray
    ranges: tuple[tuple[int, int], ...]
    range_level: tuple[int, ...]
    group: IntArray

    @classmethod
    def from_topology(cls, topology: Topology) -> LeafZones:
        """InputError if no node is in a zone."""
        order = topology.node_order[:int((topology.leaf >= 0).sum())]
        if not len(order):
            raise InputError("has no zones with nodes: there is nothing to audit", topology.source or "the topology")
        leaf = topology.leaf[order].astype(np.int64)
        first = np.flatnonzero(np.append(True, leaf[1:] != leaf[:-1]))
        zones = leaf[first]
        begin = np.append(first, len(order))
        upper = [zone for zone in np.argsort(topology.level, kind="stable").tolist()
                 if topology.node_count[zone] and topology.level[zone] > 0]
        bounds = [np.searchsorted(first, (topology.node_begin[zone], topology.node_begin[zone]
                                          + topology.node_count[zone])).tolist() for zone in upper]
        group = np.zeros(len(zones), np.int64)
        if topology.kind != "block":
            roots = [topology.zone_index[topology.zone_path(zone)[0]] for zone in zones.tolist()]
            group = np.unique(roots, return_inverse=True)[1].astype(np.int64)
        return cls(topology, zones, begin, order, tuple((low, high) for low, high in bounds),
                   tuple(int(topology.level[zone]) for zone in upper), group)

    @cached_property
    def leaf_of_node(self) -> IntArray:
        """Leaf zone of each node number."""
        return np.repeat(np.arange(len(self.zones)), np.diff(self.begin))

    @cached_property
    def node_numbers(self) -> dict[str, int]:
        names = self.topology.nodes
        return {names[index]: number for number, index in enumerate(self.order.tolist())}

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(self.topology.zones[zone] for zone in self.zones.tolist())


@dataclass(frozen=True, eq=False)
class NodeLists:
    """Distinct node lists as node numbers; a name with a domain is also the node without it, and vice versa.

    Attributes:
        numbers: node numbers of all lists, one list after the other, without repeats.
        begin: shape (lists + 1,), offset of each list in `numbers`.
        is_complete: shape (lists,), whether the list could be read, and the topology has all its nodes.
        unreadable: lists that are no hostlists.
        unknown: nodes that the topology has in no zone, in order of appearance; at most MAX_UNKNOWN.
        same_host: name in the lists -> name in the topology, where only one of the two has a domain.
    """

    numbers: Int32Array
    begin: IntArray
    is_complete: np.typing.NDArray[np.bool_]
    unreadable: tuple[str, ...]
    unknown: tuple[str, ...]
    same_host: dict[str, str]

    @classmethod
    def expand(cls, hostlists: Sequence[str], leaves: LeafZones) -> NodeLists:
        numbers, begin, is_complete = array("i"), array("q", [0]), np.ones(len(hostlists), bool)
        known, unreadable, unknown = dict(leaves.node_numbers), list[str](), dict[str, None]()
        other_names = _OtherNames(leaves)
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
        return cls(np.frombuffer(numbers, np.int32) if numbers else np.zeros(0, np.int32), np.array(begin, np.int64),
                   is_complete, tuple(unreadable), tuple(unknown), other_names.found)

    @cached_property
    def counts(self) -> IntArray:
        """Number of known nodes of each list."""
        return np.diff(self.begin)

    def of(self, index: int) -> Int32Array:
        return self.numbers[self.begin[index]:self.begin[index + 1]]


class _OtherNames:
    """Nodes by their names with or without domain. Two hosts of the same short name are two hosts: neither is taken.

    Attributes:
        found: name -> name in the topology, of the nodes that were found.
    """

    def __init__(self, leaves: LeafZones) -> None:
        self.found: dict[str, str] = {}
        self._leaves = leaves
        self._full_name: dict[int, str] = {}

    @cached_property
    def _by_short_name(self) -> dict[str, int | None]:
        """Number of the only node with this name and any domain; None if there are several."""
        numbers: dict[str, int | None] = {}
        for name, number in self._leaves.node_numbers.items():
            short, _, domain = name.partition(".")
            if domain:
                numbers[short] = None if short in numbers else number
        return numbers

    def find(self, name: str) -> int | None:
        """Number of the node; None if there is none, or if it was found by another domain."""
        short, _, domain = name.partition(".")
        number = self._leaves.node_numbers.get(short) if domain else self._by_short_name.get(short)
        if number is None or self._full_name.setdefault(number, name) != name:
            return None
        self.found[name] = self._leaves.topology.nodes[self._leaves.order[number]]
        return number
