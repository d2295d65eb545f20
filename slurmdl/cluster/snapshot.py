"""Which nodes exist, what they have and what of it is free: one snapshot of the controller's view."""

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

#: what a node has of each, in numbers: the arrays of a snapshot and the fields of a node
NODE_ARRAYS = ("cpus", "cpus_unallocated", "memory", "memory_unallocated", "weight")


@dataclass(frozen=True)
class Node:
    """One node as `scontrol show node` gives it.

    Attributes
    ----------
    state : Slurm's base state and flags, upper case, without suffix marks, e.g. ("IDLE",), ("MIXED", "DRAIN").
    responding : False where the state carries the mark `*`.
    cpus, cpus_free : CPUs that jobs can be given, and those not allocated now.
    memory, memory_free : MB configured, and MB not allocated now (never the free RAM).
    features : active features.
    partitions : partitions that the node is in.
    gres : generic resources, name or name:type -> count configured.
    gres_used : the same, allocated now.
    weight : Slurm's node weight; lower is preferred.
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
    """What many nodes have in common, so that it is looked at once; the fields are those of Node.

    Generic resources are pairs of name and count.
    """

    state: tuple[str, ...]
    responding: bool = True
    features: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    gres: tuple[tuple[str, int], ...] = ()
    gres_used: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Partition:
    """One partition as `scontrol show partition` gives it.

    Attributes
    ----------
    memory_per_cpu, memory_per_node : MB that a job gets which names none (DefMemPerCPU, DefMemPerNode of the
        partition, else of the cluster); None where neither is known, which may stand for the whole node.
    topology : name of the topology that it uses (25.05 and newer), "" for the cluster's default.
    priority : PriorityTier; of several partitions Slurm tries the highest first.
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
    """One reservation as `scontrol show reservations` gives it.

    Attributes
    ----------
    nodes : names of the nodes that it holds.
    active : whether it holds them now.
    """

    name: str
    nodes: tuple[str, ...] = ()
    active: bool = True


@dataclass(frozen=True, eq=False)
class ClusterSnapshot:
    """The nodes, partitions and reservations of one cluster at one moment.

    Attributes
    ----------
    names : distinct names of the nodes, in Slurm's order.
    kind : shape (nodes,), index of each node in `kinds`.
    kinds : what the nodes have in common.
    cpus, cpus_free, memory, memory_free, weight : shape (nodes,), as in Node.
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

    @classmethod
    def from_nodes(cls, nodes: Iterable[Node], partitions: Sequence[Partition] = (),
           reservations: Sequence[Reservation] = ()) -> ClusterSnapshot:
        """The snapshot of nodes that are given one by one."""
        nodes = tuple(nodes)
        kinds: dict[NodeProfile, int] = {}
        kind = [kinds.setdefault(_node_profile(node), len(kinds)) for node in nodes]
        numbers = {name: np.array([getattr(node, name) for node in nodes], np.int64) for name in NODE_ARRAYS}
        return cls(tuple(node.name for node in nodes), np.array(kind, np.int32), tuple(kinds), **numbers,
                   partitions=tuple(partitions), reservations=tuple(reservations))

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes one by one: for a few, or for many where time does not matter."""
        columns = [getattr(self, name).tolist() for name in NODE_ARRAYS]
        shared = [{"state": kind.state, "responding": kind.responding, "features": kind.features,
                   "partitions": kind.partitions, "gres": dict(kind.gres), "gres_used": dict(kind.gres_used)}
                  for kind in self.profiles]
        return tuple(Node(name, **shared[kind], **dict(zip(NODE_ARRAYS, numbers, strict=True)))
                     for name, kind, *numbers in zip(self.names, self.profile_index.tolist(), *columns, strict=True))

    @cached_property
    def node_by_name(self) -> dict[str, Node]:
        return dict(zip(self.names, self.nodes, strict=True))

    @cached_property
    def default_partition(self) -> str | None:
        return next((p.name for p in self.partitions if p.default), None)

    def topology_of(self, partitions: Sequence[str] = ()) -> str:
        """Name of the topology that a job's first partition uses, else the default partition; "" for the default."""
        wanted = partitions[0] if partitions else self.default_partition
        return next((p.topology for p in self.partitions if p.name == wanted), "")

    def to_json(self) -> dict[str, Any]:
        return {"nodes": [asdict(n) for n in self.nodes], "partitions": [asdict(p) for p in self.partitions],
                "reservations": [asdict(r) for r in self.reservations]}

    @classmethod
    def from_json(cls, data: Any) -> ClusterSnapshot:
        """The inverse of `to_json`; InputError names the field that does not fit."""
        if not isinstance(data, dict) or "nodes" not in data:
            raise InputError("cluster JSON: an object with nodes is expected")
        nodes = parse_records(Node, data, "nodes")
        twice = next((name for name, count in Counter(node.name for node in nodes).items() if count > 1), None)
        if twice is not None:
            raise InputError(f"cluster JSON: node {twice} stands twice")
        return cls.from_nodes(nodes, parse_records(Partition, data, "partitions"),
                              parse_records(Reservation, data, "reservations"))


def _node_profile(node: Node) -> NodeProfile:
    return NodeProfile(node.state, node.responding, node.features, node.partitions, tuple(node.gres.items()),
                tuple(node.gres_used.items()))


# MERGED: Records of a JSON file, checked field by field against the dataclass that they make.

Record = TypeVar("Record")

#: numbers stay far below what 64 bits hold, so that sums of them do, too
_MAX_NUMBER = 2 ** 40


def parse_records(record_type: type[Record], data: dict[str, Any], key: str) -> list[Record]:
    """The list under a key, each entry as `make(**entry)`; an absent key is an empty list.

    Raises
    ------
    InputError : names the entry and the field that is unknown, missing or of another type, and what is valid.
    """
    entries = data.get(key, [])
    if not isinstance(entries, list):
        raise InputError(f"cluster JSON: {key}: a list is expected")
    return [_parse_record(record_type, entry, f"{key}[{i}]") for i, entry in enumerate(entries)]


def _parse_record(record_type: type[Record], entry: Any, location: str) -> Record:
    if not isinstance(entry, dict):
        raise InputError(f"cluster JSON: {location}: an object is expected")
    known = {field.name: field for field in fields(record_type)}  # type: ignore[arg-type]
    values = {}
    for name, value in entry.items():
        if name not in known:
            raise InputError(f"cluster JSON: {location}: unknown field {name!r}; valid: {', '.join(known)}")
        holds, kind = _FIELD_TYPES[str(known[name].type)]
        if not holds(value):
            raise InputError(f"cluster JSON: {location}: {name}={value!r} is not valid; valid: {kind}")
        values[name] = tuple(value) if isinstance(value, list) else value
    for name, field in known.items():
        if name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise InputError(f"cluster JSON: {location}: {name} is missing")
    return record_type(**values)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and "\n" not in value


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_NUMBER


def _is_text_list(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_count_mapping(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_count, value.values()))


#: type of a field as it is written in its dataclass -> whether a value of JSON holds it, and its name for people
_FIELD_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "str": (_is_text, "a text of one line"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "int": (_is_count, "a whole number, 0 or more"),
    "int | None": (lambda value: value is None or _is_count(value), "a whole number, 0 or more, or null"),
    "tuple[str, ...]": (_is_text_list, "a list of texts"),
    "Mapping[str, int]": (_is_count_mapping, "an object of whole numbers, 0 or more"),
}
