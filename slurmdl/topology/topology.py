"""The one canonical form of a cluster's zones, whatever it was read from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from slurmdl.errors import InputError, UnavailableError

if TYPE_CHECKING:
    import networkx


IntArray = npt.NDArray[np.int32]
#: results and arguments of the queries below
Indices = npt.NDArray[np.int64]

#: most levels of zones; real networks have three to five, and paths from a node to its root stay short
MAX_LEVELS = 64


@dataclass(frozen=True, eq=False)
class Topology:
    """A forest of zones with nodes at its leaves.

    Attributes
    ----------
    zones : names of the zones, in the order of the source (Slurm's leaf order follows it).
    parent : shape (zones,), index of the zone above, -1 for a root.
    level : shape (zones,), height: 0 = leaf switch or base block.
    speed : shape (zones,), bytes/s of the zone's uplink (`LinkSpeed`), NaN where not given.
    nodes : names of the nodes, in the order of the source.
    leaf : shape (nodes,), index of each node's leaf zone, -1 for none.
    kind : "tree", "block", "ring", "torus3d" or "flat".
    source : where it was read, for messages.
    name : its name where a source holds several; partitions refer to it.
    notes : remarks of the reader, one sentence each: what was simplified or passed over.
    block_sizes : nodes of a base block and of each level of aggregates; () where the source gives none.
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
        """A topology with no zones: every node stands alone beside the others."""
        none = np.zeros(0, np.int32)
        return cls((), none, none, np.zeros(0), tuple(nodes), np.full(len(nodes), -1, np.int32), "flat", source, name,
                   notes)

    @cached_property
    def node_index(self) -> dict[str, int]:
        return dict(zip(self.nodes, range(len(self.nodes)), strict=True))

    @cached_property
    def zone_index(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.zones)}

    @cached_property
    def node_count(self) -> Indices:
        """Nodes below each zone, at any depth; shape (zones,)."""
        total = np.bincount(self.leaf[self.leaf >= 0], minlength=len(self.zones)).astype(np.int64)
        for level in range(int(self.level.max(initial=0))):
            here = np.flatnonzero((self.level == level) & (self.parent >= 0))
            np.add.at(total, self.parent[here], total[here])
        return total

    @cached_property
    def node_begin(self) -> Indices:
        """Where each zone's nodes begin in `order`; shape (zones,). Zones below one zone lie side by side."""
        # sorted by parent, the sizes of the earlier siblings add up to the offset inside the parent
        siblings = np.argsort(self.parent, kind="stable")
        before = np.cumsum(self.node_count[siblings]) - self.node_count[siblings]
        above = self.parent[siblings]
        first = np.searchsorted(above, above)
        begin = np.empty(len(self.zones), np.int64)
        begin[siblings] = before - before[first]
        # nodes that a zone holds itself come before those of the zones below it
        own = np.bincount(self.leaf[self.leaf >= 0], minlength=len(self.zones))
        for level in range(int(self.level.max(initial=0)), -1, -1):
            here = np.flatnonzero((self.level == level) & (self.parent >= 0))
            begin[here] += begin[self.parent[here]] + own[self.parent[here]]
        return begin

    @cached_property
    def node_order(self) -> Indices:
        """Indices of the nodes such that the nodes of any zone stand together; shape (nodes,).

        Nodes without a zone stand last. See `members`.
        """
        position = np.full(len(self.nodes), len(self.nodes), np.int64)
        has_zone = self.leaf >= 0
        position[has_zone] = self.node_begin[self.leaf[has_zone]]
        return np.argsort(position, kind="stable")

    def indices_below(self, zone: int) -> Indices:
        """Indices of the nodes below a zone, at any depth; in a leaf they keep the order of the source."""
        begin = int(self.node_begin[zone])
        return self.node_order[begin:begin + int(self.node_count[zone])]

    def mask_below(self, zone: int) -> npt.NDArray[np.bool_]:
        """Which nodes lie below a zone, at any depth; shape (nodes,)."""
        inside = np.zeros(len(self.nodes), bool)
        inside[self.indices_below(zone)] = True
        return inside

    def sum_below(self, values: Indices) -> Indices:
        """Sums of a number per node over the nodes below each zone, all levels at once.

        Parameters
        ----------
        values : shape (nodes,).

        Returns
        -------
        shape (zones,).
        """
        total = np.concatenate([[0], np.cumsum(values[self.node_order])])
        return np.asarray(total[self.node_begin + self.node_count] - total[self.node_begin])

    def lowest_common_zone(self, left: Indices, right: Indices) -> Indices:
        """Lowest zone that holds both nodes of each pair.

        Parameters
        ----------
        one, other : indices of nodes, of the same shape.

        Returns
        -------
        indices of zones in that shape, -1 where no zone holds both.
        """
        a, b = self.leaf[left].astype(np.int64), self.leaf[right].astype(np.int64)
        # the lower of two zones cannot hold the other, so it is the one to raise; -1 is above all
        height = np.append(self.level, MAX_LEVELS)
        above = np.append(self.parent, -1)
        while (apart := a != b).any():
            raise_a, raise_b = apart & (height[a] <= height[b]), apart & (height[b] <= height[a])
            a, b = np.where(raise_a, above[a], a), np.where(raise_b, above[b], b)
        return a

    def ancestors(self, nodes: Indices) -> Indices:
        """The zones above each node, its leaf first, then -1; shape (nodes, greatest depth among them).

        Parameters
        ----------
        nodes : shape (nodes,), indices; -1 for a node that the topology does not know.
        """
        parent = np.append(self.parent, -1)
        current = np.append(self.leaf, -1)[nodes].astype(np.int64)
        columns = []
        while (current >= 0).any():
            columns.append(current)
            current = parent[current]
        return np.stack(columns, axis=1) if columns else np.full((len(nodes), 0), -1, np.int64)

    def path_of(self, node: str) -> tuple[str, ...]:
        """Zone path of a node, root first, leaf last; () for a node that is unknown or has no zone."""
        i = self.node_index.get(node)
        return self.zone_path(int(self.leaf[i])) if i is not None else ()

    def zone_path(self, zone: int) -> tuple[str, ...]:
        """Names from the root down to a zone, which is the last; () for -1."""
        path = self._zone_path_cache.get(zone)
        if path is None:
            path = self._zone_path_cache[zone] = (*self.zone_path(int(self.parent[zone])), self.zones[zone])
        return path

    @cached_property
    def _zone_path_cache(self) -> dict[int, tuple[str, ...]]:
        """Those that were asked for: the nodes of a leaf share one."""
        return {-1: ()}

    def leaf_of(self, node: str) -> str:
        """Leaf zone of a node, "" where it has none."""
        path = self.path_of(node)
        return path[-1] if path else ""

    def to_networkx(self) -> networkx.DiGraph[tuple[str, str]]:
        """A networkx view, edges from a zone to the zones and nodes below it.

        Its nodes are pairs ("zone", name) and ("node", name), since a zone may be named as a node is; zones have
        the attributes `level` and, where it is known, `speed` (bytes/s).

        Raises
        ------
        UnavailableError : networkx is not installed.
        """
        try:
            import networkx
        except ImportError as error:
            raise UnavailableError(
                "the graph of a topology needs the package networkx: pip install 'slurmdl[graph]'") from error

        graph: networkx.DiGraph[tuple[str, str]] = networkx.DiGraph(name=self.name)
        for zone, level, speed in zip(self.zones, self.level.tolist(), self.uplink_bandwidth.tolist(), strict=True):
            graph.add_node(("zone", zone), level=level, **({} if np.isnan(speed) else {"speed": speed}))
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
                "speed": [None if np.isnan(s) else float(s) for s in self.uplink_bandwidth],
                "nodes": list(self.nodes), "leaf": self.leaf.tolist()}

    @classmethod
    def from_json(cls, data: Any) -> Topology:
        """The inverse of `to_json`; InputError where a field is missing, of another shape or out of range."""
        try:
            speed = np.array([np.nan if s is None else float(s) for s in data["speed"]], float)
            self = cls(tuple(map(str, data["zones"])), np.array(data["parent"], np.int32),
                       np.array(data["level"], np.int32), speed, tuple(map(str, data["nodes"])),
                       np.array(data["leaf"], np.int32), str(data["kind"]), str(data.get("source", "")),
                       str(data.get("name", "default")), tuple(map(str, data.get("notes", ()))),
                       tuple(map(int, data.get("block_sizes", ()))))
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InputError(f"topology JSON: malformed ({type(error).__name__}: {error})") from error
        count = len(self.zones)
        for name, array, length in (("parent", self.parent, count), ("level", self.level, count),
                                    ("speed", self.uplink_bandwidth, count), ("leaf", self.leaf, len(self.nodes))):
            if array.shape != (length,):
                raise InputError(f"topology JSON: {name} has {array.size} entries, expected {length}")
        for name, array in (("parent", self.parent), ("leaf", self.leaf)):
            if array.size and (array.min() < -1 or array.max() >= count):
                raise InputError(f"topology JSON: {name} points outside 0..{count - 1}")
        for what, names in (("zone", self.zones), ("node", self.nodes)):
            if len(set(names)) < len(names):
                raise InputError(f"topology JSON: a {what} is named twice")
            if any("\n" in name for name in names):
                raise InputError(f"topology JSON: the name of a {what} has a line break; valid: names of one line")
        if count and (self.level.min() < 0 or self.level.max() >= MAX_LEVELS):
            raise InputError(f"topology JSON: level must be in 0..{MAX_LEVELS - 1}")
        inner = self.parent >= 0
        if (self.level[self.parent[inner]] <= self.level[inner]).any():
            raise InputError("topology JSON: a zone must have a higher level than the zones below it")
        return self


# MERGED: Several topologies of one cluster, of which each partition uses one.

@dataclass(frozen=True, eq=False)
class TopologySet:
    """The topologies that one source declares.

    Attributes
    ----------
    each : at least one, in the order of the source, with distinct names.
    default : name of the one that holds where a partition names none.
    """

    topologies: tuple[Topology, ...]
    default: str

    @classmethod
    def single(cls, topology: Topology) -> TopologySet:
        """A source with a single topology."""
        return cls((topology,), topology.name)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(topology.name for topology in self.topologies)

    def get(self, name: str | None = None) -> Topology:
        """The topology of a name, as a partition's `Topology=` gives it; None or "" stands for the default.

        Raises
        ------
        InputError : there is none of that name.
        """
        wanted = name or self.default
        for topology in self.topologies:
            if topology.name == wanted:
                return topology
        raise InputError(f"no topology is named {wanted!r}; valid: {', '.join(self.names)}",
                         file=self.topologies[0].source or None)

    def to_json(self) -> dict[str, Any]:
        return {"default": self.default, "topologies": [topology.to_json() for topology in self.topologies]}

    @classmethod
    def from_json(cls, data: Any) -> TopologySet:
        """The inverse of `to_json`; the JSON of a single Topology is taken, too.

        Raises
        ------
        InputError : a field is missing or malformed, a name stands twice, or the default does not exist.
        """
        if not isinstance(data, dict) or "topologies" not in data:
            return cls.single(Topology.from_json(data))
        if not isinstance(data["topologies"], list) or not data["topologies"]:
            raise InputError("topology JSON: topologies must be a list of at least one")
        self = cls(tuple(map(Topology.from_json, data["topologies"])), str(data.get("default", "")))
        if len(set(self.names)) < len(self.names):
            raise InputError("topology JSON: a topology is named twice")
        if self.default not in self.names:
            raise InputError(f"topology JSON: default is {self.default!r}; valid: {', '.join(self.names)}")
        return self
