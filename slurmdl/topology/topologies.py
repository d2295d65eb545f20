"""Several topologies of one cluster, of which each partition uses one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from slurmdl.errors import InputError
from slurmdl.topology.model import Topology


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
