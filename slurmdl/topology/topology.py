"""Topology: a forest of zones with nodes at its leaves. TopologySet: the topologies of one cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from slurmdl.errors import InputError, UnavailableError

if TYPE_CHECKING:
    import networkx


IntArray = npt.NDArray[np.int32]
Indices = npt.NDArray[np.int64]

MAX_LEVELS = 64  # real networks have three to five


@dataclass(frozen=True, eq=False)
class Topology:
    """A forest of zones with nodes at its leaves.

    Attributes:
        zones, nodes: names in source order (Slurm's leaf order follows it).
        parent: shape (zones,), index of the parent zone, -1 for a root.
        level: shape (zones,), height: 0 = leaf switch or base block.
        uplink_bandwidth: shape (zones,), bytes/s of the zone's uplink (`LinkSpeed`), NaN if not given.
        leaf: shape (nodes,), index of each node's leaf zone, -1 for none.
        kind: "tree", "block", "ring", "torus3d" or "flat".
        source: file or command that it was read from, for messages.
        name: name that partitions refer to.
        notes: messages of the reader, one sentence each: simplifications and ignored fields.
        block_sizes: nodes of a base block and of each aggregate level; () if not given.
    """

    zones: tuple[str, ...]
    parent: IntArray
    level: IntArray
    uplink_bandwidth: npt.NDArray[np.float64]
    nodes: tuple[str, ...]
    leaf: IntArray
    kind: str = "tree"
    source: str = ""
    name: str = "default"
    notes: tuple[str, ...] = ()
    block_sizes: tuple[int, ...] = ()

    @classmethod
    def flat(cls, nodes: Sequence[str], source: str = "no topology", name: str = "default",
             notes: tuple[str, ...] = ()) -> Topology:
        """Return a topology without zones."""
        none = np.zeros(0, np.int32)
        leaf = np.full(len(nodes), -1, np.int32)
        return cls((), none, none, np.zeros(0), tuple(nodes), leaf, "flat", source, name, notes)

    @cached_property
    def node_index(self) -> dict[str, int]:
        return dict(zip(self.nodes, range(len(self.nodes)), strict=True))

    @cached_property
    def zone_index(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.zones)}

    @cached_property
    def node_count(self) -> Indices:
        """Number of nodes below each zone, at any depth; shape (zones,)."""
        total = np.bincount(self.leaf[self.leaf >= 0], minlength=len(self.zones)).astype(np.int64)
        for level in range(int(self.level.max(initial=0))):
            children = np.flatnonzero((self.level == level) & (self.parent >= 0))
            np.add.at(total, self.parent[children], total[children])
        return total

    @cached_property
    def node_begin(self) -> Indices:
        """Offset of each zone's nodes in `node_order`; shape (zones,). Zones below one zone are contiguous."""
        begin = [0] * len(self.zones)
        # offset of the next child zone in each zone, after its direct nodes; the last entry is for the roots
        next_begin = [0] * (len(self.zones) + 1)
        direct = np.bincount(self.leaf[self.leaf >= 0], minlength=len(self.zones)).tolist()
        parents_first = np.argsort(-np.append(self.level, MAX_LEVELS)[self.parent], kind="stable").tolist()
        for zone in parents_first:
            parent = int(self.parent[zone])
            begin[zone] = next_begin[parent]
            next_begin[parent] += int(self.node_count[zone])
            next_begin[zone] = begin[zone] + direct[zone]
        return np.array(begin, np.int64)

    @cached_property
    def node_order(self) -> Indices:
        """Node indices, shape (nodes,), the nodes of any zone contiguous; nodes without a zone come last."""
        position = np.full(len(self.nodes), len(self.nodes), np.int64)
        has_zone = self.leaf >= 0
        position[has_zone] = self.node_begin[self.leaf[has_zone]]
        return np.argsort(position, kind="stable")

    def indices_below(self, zone: int) -> Indices:
        """Return the indices of the nodes below a zone, at any depth; leaves keep the source order."""
        begin = int(self.node_begin[zone])
        return self.node_order[begin:begin + int(self.node_count[zone])]

    def sum_below(self, values: Indices) -> Indices:
        """Sum a per-node value, shape (nodes,), over the nodes below each zone; return shape (zones,)."""
        total = np.concatenate([[0], np.cumsum(values[self.node_order])])
        return np.asarray(total[self.node_begin + self.node_count] - total[self.node_begin])

    def ancestors(self, nodes: Indices) -> Indices:
        """Return the zones above each node, leaf first, padded with -1; shape (nodes, maximum depth).

        `nodes` are indices, -1 for a node that the topology does not contain.
        """
        parent = np.append(self.parent, -1)
        current = np.append(self.leaf, -1)[nodes].astype(np.int64)
        columns = []
        while (current >= 0).any():
            columns.append(current)
            current = parent[current]
        return np.stack(columns, axis=1) if columns else np.full((len(nodes), 0), -1, np.int64)

    def path_of(self, node: str) -> tuple[str, ...]:
        """Return the zone path of a node, root first; () for a node that is unknown or in no zone."""
        i = self.node_index.get(node)
        return self.zone_path(int(self.leaf[i])) if i is not None else ()

    def zone_path(self, zone: int) -> tuple[str, ...]:
        """Return the zone names from the root down to a zone, inclusive; () for -1."""
        path = self._zone_path_cache.get(zone)
        if path is None:
            path = self._zone_path_cache[zone] = (*self.zone_path(int(self.parent[zone])), self.zones[zone])
        return path

    @cached_property
    def _zone_path_cache(self) -> dict[int, tuple[str, ...]]:
        return {-1: ()}

    def leaf_of(self, node: str) -> str:
        """Return the leaf zone of a node, or "" if it has none."""
        path = self.path_of(node)
        return path[-1] if path else ""

    def to_networkx(self) -> networkx.DiGraph[tuple[str, str]]:
        """Return a networkx view with edges from each zone to its child zones and nodes.

        Its nodes are pairs ("zone", name) and ("node", name), as a zone and a node may share a name. Zones have the
        attributes `level` and, if known, `uplink_bandwidth` (bytes/s). Raises UnavailableError without networkx.
        """
        try:
            import networkx
        except ImportError as error:
            raise UnavailableError(
                "networkx is not installed; needed for topology graphs: pip install 'slurmdl[graph]'") from error

        graph: networkx.DiGraph[tuple[str, str]] = networkx.DiGraph(name=self.name)
        for zone, level, speed in zip(self.zones, self.level.tolist(), self.uplink_bandwidth.tolist(), strict=True):
            graph.add_node(("zone", zone), level=level, **({} if np.isnan(speed) else {"uplink_bandwidth": speed}))
        graph.add_nodes_from(("node", node) for node in self.nodes)
        graph.add_edges_from((("zone", self.zones[parent]), ("zone", zone))
                             for zone, parent in zip(self.zones, self.parent.tolist(), strict=True) if parent >= 0)
        graph.add_edges_from((("zone", self.zones[leaf]), ("node", node))
                             for node, leaf in zip(self.nodes, self.leaf.tolist(), strict=True) if leaf >= 0)
        return graph

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "kind": self.kind, "source": self.source, "notes": list(self.notes),
                "block_sizes": list(self.block_sizes),
                "zones": list(self.zones), "parent": self.parent.tolist(), "level": self.level.tolist(),
                "uplink_bandwidth": [None if np.isnan(b) else float(b) for b in self.uplink_bandwidth],
                "nodes": list(self.nodes), "leaf": self.leaf.tolist()}

    @classmethod
    def from_json(cls, data: Any) -> Topology:
        """Return the inverse of `to_json`; raise InputError if a field is missing, misshapen or out of range."""
        try:
            bandwidth = np.array([np.nan if b is None else float(b) for b in data["uplink_bandwidth"]], float)
            self = cls(tuple(map(str, data["zones"])), np.array(data["parent"], np.int32),
                       np.array(data["level"], np.int32), bandwidth, tuple(map(str, data["nodes"])),
                       np.array(data["leaf"], np.int32), str(data["kind"]), str(data.get("source", "")),
                       str(data.get("name", "default")), tuple(map(str, data.get("notes", ()))),
                       tuple(map(int, data.get("block_sizes", ()))))
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InputError(f"topology JSON: malformed ({type(error).__name__}: {error})") from error
        count = len(self.zones)
        for name, array, length in (("parent", self.parent, count), ("level", self.level, count),
                                    ("uplink_bandwidth", self.uplink_bandwidth, count),
                                    ("leaf", self.leaf, len(self.nodes))):
            if array.shape != (length,):
                raise InputError(f"topology JSON: {name} has {array.size} entries, expected {length}")
        for name, array in (("parent", self.parent), ("leaf", self.leaf)):
            if array.size and (array.min() < -1 or array.max() >= count):
                raise InputError(f"topology JSON: {name} has an index out of range; expected -1 to {count - 1}")
        for noun, names in (("zone", self.zones), ("node", self.nodes)):
            if len(set(names)) < len(names):
                raise InputError(f"topology JSON: duplicate {noun} name")
            if any("\n" in name for name in names):
                raise InputError(f"topology JSON: a {noun} name contains a line break")
        if count and (self.level.min() < 0 or self.level.max() >= MAX_LEVELS):
            raise InputError(f"topology JSON: level out of range; expected 0 to {MAX_LEVELS - 1}")
        inner = self.parent >= 0
        if (self.level[self.parent[inner]] <= self.level[inner]).any():
            raise InputError("topology JSON: a zone is not above its child zones; expected a higher level")
        return self


def walk_forest(children: Mapping[int, Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Yield (zone, depth), each zone before its child zones; `children` as from `children_by_zone`."""
    stack = [(zone, 0) for zone in reversed(children.get(-1, []))]
    while stack:
        zone, depth = stack.pop()
        yield zone, depth
        stack += [(child, depth + 1) for child in reversed(children.get(zone, []))]


def children_by_zone(topology: Topology) -> dict[int, list[int]]:
    """Return the child zones by zone index; -1 -> the roots."""
    children: dict[int, list[int]] = {}
    for zone, parent in enumerate(topology.parent.tolist()):
        children.setdefault(parent, []).append(zone)
    return children


def nodes_by_leaf(topology: Topology) -> dict[int, list[str]]:
    """Return the nodes by leaf zone index; -1 -> the nodes without a zone."""
    nodes: dict[int, list[str]] = {}
    for name, leaf in zip(topology.nodes, topology.leaf.tolist(), strict=True):
        nodes.setdefault(leaf, []).append(name)
    return nodes


@dataclass(frozen=True, eq=False)
class TopologySet:
    """The topologies that one source declares; each partition uses one.

    Attributes:
        topologies: at least one, in source order, with distinct names.
        default: name of the topology of partitions that name none.
    """

    topologies: tuple[Topology, ...]
    default: str

    @classmethod
    def single(cls, topology: Topology) -> TopologySet:
        return cls((topology,), topology.name)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(topology.name for topology in self.topologies)

    def get(self, name: str | None = None) -> Topology:
        """Return the topology of a name (`Topology=` of a partition), else the default; InputError if unknown."""
        wanted = name or self.default
        if wanted in self.names:
            return self.topologies[self.names.index(wanted)]
        raise InputError(f"topology {wanted!r} does not exist; expected one of {', '.join(self.names)}",
                         file=self.topologies[0].source or None)

    def to_json(self) -> dict[str, Any]:
        return {"default": self.default, "topologies": [topology.to_json() for topology in self.topologies]}

    @classmethod
    def from_json(cls, data: Any) -> TopologySet:
        """Return the inverse of `to_json`, also for the JSON of a single Topology; InputError if it is malformed."""
        if not isinstance(data, dict) or "topologies" not in data:
            return cls.single(Topology.from_json(data))
        if not isinstance(data["topologies"], list) or not data["topologies"]:
            raise InputError("topology JSON: topologies: expected a list that is not empty")
        self = cls(tuple(map(Topology.from_json, data["topologies"])), str(data.get("default", "")))
        if len(set(self.names)) < len(self.names):
            raise InputError("topology JSON: duplicate topology name")
        if self.default not in self.names:
            raise InputError(f"topology JSON: default {self.default!r} does not exist; expected one of "
                             f"{', '.join(self.names)}")
        return self
