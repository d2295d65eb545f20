"""The one canonical form of a cluster's zones, whatever it was read from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.errors import InputError

IntArray = npt.NDArray[np.int32]


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
    kind : "tree", "block" or "flat".
    source : where it was read, for messages.
    """

    zones: tuple[str, ...]
    parent: IntArray
    level: IntArray
    speed: npt.NDArray[np.float64]
    nodes: tuple[str, ...]
    leaf: IntArray
    kind: str = "tree"
    source: str = ""

    @classmethod
    def flat(cls, nodes: Sequence[str], source: str = "no topology") -> Topology:
        """A topology with no zones: every node stands alone beside the others."""
        none = np.zeros(0, np.int32)
        return cls((), none, none, np.zeros(0), tuple(nodes), np.full(len(nodes), -1, np.int32), "flat", source)

    @cached_property
    def node_index(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.nodes)}

    @cached_property
    def zone_index(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.zones)}

    def path(self, node: str) -> tuple[str, ...]:
        """Zone path of a node, root first, leaf last; () for a node that is unknown or has no zone."""
        i = self.node_index.get(node)
        zone = int(self.leaf[i]) if i is not None else -1
        path: list[str] = []
        while zone >= 0:
            path.append(self.zones[zone])
            zone = int(self.parent[zone])
        return tuple(reversed(path))

    def leaf_of(self, node: str) -> str:
        """Leaf zone of a node, "" where it has none."""
        path = self.path(node)
        return path[-1] if path else ""

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "source": self.source, "zones": list(self.zones),
                "parent": self.parent.tolist(), "level": self.level.tolist(),
                "speed": [None if np.isnan(s) else float(s) for s in self.speed],
                "nodes": list(self.nodes), "leaf": self.leaf.tolist()}

    @classmethod
    def from_json(cls, data: Any) -> Topology:
        """The inverse of `to_json`; InputError where a field is missing, of another shape or out of range."""
        try:
            speed = np.array([np.nan if s is None else float(s) for s in data["speed"]], float)
            self = cls(tuple(map(str, data["zones"])), np.array(data["parent"], np.int32),
                       np.array(data["level"], np.int32), speed, tuple(map(str, data["nodes"])),
                       np.array(data["leaf"], np.int32), str(data["kind"]), str(data.get("source", "")))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InputError(f"topology JSON: malformed ({type(error).__name__}: {error})") from error
        count = len(self.zones)
        for name, array, length in (("parent", self.parent, count), ("level", self.level, count),
                                    ("speed", self.speed, count), ("leaf", self.leaf, len(self.nodes))):
            if array.shape != (length,):
                raise InputError(f"topology JSON: {name} has {array.size} entries, expected {length}")
        for name, array in (("parent", self.parent), ("leaf", self.leaf)):
            if array.size and (array.min() < -1 or array.max() >= count):
                raise InputError(f"topology JSON: {name} points outside 0..{count - 1}")
        return self
