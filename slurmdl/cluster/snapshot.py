"""Cluster snapshot: nodes, their resources and what is unallocated, partitions, reservations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from slurmdl.errors import InputError

IntArray = npt.NDArray[np.int64]
Record = TypeVar("Record")

#: numeric fields of Node, which are arrays of ClusterSnapshot
NODE_ARRAYS = ("cpus", "cpus_unallocated", "memory", "memory_unallocated", "weight")
MAX_NUMBER = 2 ** 40  # sums stay below 2**63


@dataclass(frozen=True)
class Node:
    """One node as `scontrol show node` gives it.

    Attributes:
        state: Slurm's base state and flags, upper case, without suffix marks, e.g. ("IDLE",), ("MIXED", "DRAIN").
        responding: False if the state has the mark `*`.
        cpus, cpus_unallocated: CPUs for jobs, and those not allocated now.
        memory, memory_unallocated: MB configured, and MB not allocated now (not the free RAM).
        gres, gres_used: generic resources, name or name:type -> count configured, count allocated now.
        weight: Slurm's node weight; lower is preferred.
    """

    name: str
    state: tuple[str, ...]
    responding: bool = True
    cpus: int = 1
    cpus_unallocated: int = 1
    memory: int = 1
    memory_unallocated: int = 1
    features: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    gres: Mapping[str, int] = field(default_factory=dict)
    gres_used: Mapping[str, int] = field(default_factory=dict)
    weight: int = 1


@dataclass(frozen=True)
class NodeProfile:
    """Fields of Node that many nodes share; generic resources are pairs of name and count."""

    state: tuple[str, ...]
    responding: bool = True
    features: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    gres: tuple[tuple[str, int], ...] = ()
    gres_used: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Partition:
    """One partition as `scontrol show partition` gives it.

    Attributes:
        memory_per_cpu, memory_per_node: default MB of a job (DefMemPerCPU, DefMemPerNode of the partition, else of
            the cluster); None if unknown, which may mean the whole node.
        topology: name of its topology (25.05 and newer), "" for the cluster's default.
        priority: PriorityTier; Slurm tries the partition with the highest one first.
    """

    name: str
    default: bool = False
    state: str = "UP"
    oversubscribe: str = "NO"
    memory_per_cpu: int | None = None
    memory_per_node: int | None = None
    topology: str = ""
    priority: int = 1


@dataclass(frozen=True)
class Reservation:
    """One reservation as `scontrol show reservations` gives it; it holds `nodes` now if `active`."""

    name: str
    nodes: tuple[str, ...] = ()
    active: bool = True


@dataclass(frozen=True, eq=False)
class ClusterSnapshot:
    """The nodes, partitions and reservations of one cluster at one moment.

    Attributes:
        names: unique node names, in Slurm's order.
        profile_index: shape (nodes,), index of each node in `profiles`.
        cpus, cpus_unallocated, memory, memory_unallocated, weight: shape (nodes,), as in Node.
        name: ClusterName, or "" if unknown.
    """

    names: tuple[str, ...]
    profile_index: npt.NDArray[np.int32]
    profiles: tuple[NodeProfile, ...]
    cpus: IntArray
    cpus_unallocated: IntArray
    memory: IntArray
    memory_unallocated: IntArray
    weight: IntArray
    partitions: tuple[Partition, ...] = ()
    reservations: tuple[Reservation, ...] = ()
    name: str = ""

    @classmethod
    def from_nodes(cls, nodes: Iterable[Node], partitions: Sequence[Partition] = (),
                   reservations: Sequence[Reservation] = (), name: str = "") -> ClusterSnapshot:
        nodes = tuple(nodes)
        profiles: dict[NodeProfile, int] = {}
        profile_index = [profiles.setdefault(
            NodeProfile(node.state, node.responding, node.features, node.partitions, tuple(node.gres.items()),
                        tuple(node.gres_used.items())), len(profiles)) for node in nodes]
        arrays = {name: np.array([getattr(node, name) for node in nodes], np.int64) for name in NODE_ARRAYS}
        return cls(tuple(node.name for node in nodes), np.array(profile_index, np.int32), tuple(profiles), **arrays,
                   partitions=tuple(partitions), reservations=tuple(reservations), name=name)

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes as objects; slow for many nodes."""
        columns = [getattr(self, name).tolist() for name in NODE_ARRAYS]
        shared = [{**vars(profile), "gres": dict(profile.gres), "gres_used": dict(profile.gres_used)}
                  for profile in self.profiles]
        return tuple(Node(name, **shared[profile], **dict(zip(NODE_ARRAYS, numbers, strict=True)))
                     for name, profile, *numbers in zip(self.names, self.profile_index.tolist(), *columns,
                                                        strict=True))

    @cached_property
    def node_by_name(self) -> dict[str, Node]:
        return dict(zip(self.names, self.nodes, strict=True))

    @cached_property
    def default_partition(self) -> str | None:
        return next((p.name for p in self.partitions if p.default), None)

    def topology_of(self, partitions: Sequence[str] = ()) -> str:
        """Return the topology name of a job's first partition, else of the default partition; "" for the default."""
        wanted = partitions[0] if partitions else self.default_partition
        return next((p.topology for p in self.partitions if p.name == wanted), "")

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "nodes": [asdict(n) for n in self.nodes],
                "partitions": [asdict(p) for p in self.partitions],
                "reservations": [asdict(r) for r in self.reservations]}

    @classmethod
    def from_json(cls, data: Any) -> ClusterSnapshot:
        """Return the inverse of `to_json`; InputError names the invalid field."""
        if not isinstance(data, dict) or "nodes" not in data:
            raise InputError("cluster JSON: expected an object with nodes")
        nodes = parse_records(Node, data, "nodes")
        duplicate = next((name for name, count in Counter(node.name for node in nodes).items() if count > 1), None)
        if duplicate is not None:
            raise InputError(f"cluster JSON: duplicate node {duplicate}")
        name = data.get("name", "")
        if not _is_text(name):
            raise InputError(f"cluster JSON: name={name!r}: expected a string of one line")
        return cls.from_nodes(nodes, parse_records(Partition, data, "partitions"),
                              parse_records(Reservation, data, "reservations"), name)


def parse_records(record_type: type[Record], data: dict[str, Any], key: str) -> list[Record]:
    """Build records from the list under a key, if any; InputError names an invalid entry and its field."""
    entries = data.get(key, [])
    if not isinstance(entries, list):
        raise InputError(f"cluster JSON: {key}: expected a list")
    return [_parse_record(record_type, entry, f"{key}[{i}]") for i, entry in enumerate(entries)]


def _parse_record(record_type: type[Record], entry: Any, location: str) -> Record:
    if not isinstance(entry, dict):
        raise InputError(f"cluster JSON: {location}: expected an object")
    known = {declared.name: declared for declared in fields(record_type)}  # type: ignore[arg-type]
    values = {}
    for name, value in entry.items():
        if name not in known:
            raise InputError(f"cluster JSON: {location}: unknown field {name!r}; expected one of {', '.join(known)}")
        is_valid, type_name = _FIELD_TYPES[str(known[name].type)]
        if not is_valid(value):
            raise InputError(f"cluster JSON: {location}: {name}={value!r}: expected {type_name}")
        values[name] = tuple(value) if isinstance(value, list) else value
    for name, declared in known.items():
        if name not in values and declared.default is MISSING and declared.default_factory is MISSING:
            raise InputError(f"cluster JSON: {location}: {name} is missing")
    return record_type(**values)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and "\n" not in value


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_NUMBER


#: annotation of a field -> predicate of valid JSON values, and a name for messages
_FIELD_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "str": (_is_text, "a string of one line"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "int": (_is_count, "an integer, 0 or more"),
    "int | None": (lambda value: value is None or _is_count(value), "an integer, 0 or more, or null"),
    "tuple[str, ...]": (lambda value: isinstance(value, list) and all(map(_is_text, value)), "a list of strings"),
    "Mapping[str, int]": (lambda value: isinstance(value, dict) and all(map(_is_count, value.values())),
                          "an object of integers, 0 or more"),
}
