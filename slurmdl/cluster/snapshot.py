"""Cluster snapshot: nodes, their resources and what is unallocated, partitions, reservations."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from slurmdl import records
from slurmdl.errors import InputError
from slurmdl.records import Line, Valid

IntArray = npt.NDArray[np.int64]

#: numeric fields of Node, which are arrays of ClusterSnapshot
NODE_ARRAYS = ("cpus", "cpus_unallocated", "memory", "memory_unallocated", "weight")
#: what Slurm's commands print for no value
NULL_VALUES = frozenset(("(null)", "N/A", "n/a"))
MAX_NUMBER = 2 ** 40  # sums stay below 2**63
Count = Annotated[int, Valid(lambda number: 0 <= number <= MAX_NUMBER, "an integer, 0 or more")]


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

    name: Line
    state: tuple[Line, ...]
    responding: bool = True
    cpus: Count = 1
    cpus_unallocated: Count = 1
    memory: Count = 1
    memory_unallocated: Count = 1
    features: tuple[Line, ...] = ()
    partitions: tuple[Line, ...] = ()
    gres: Mapping[str, Count] = field(default_factory=dict)
    gres_used: Mapping[str, Count] = field(default_factory=dict)
    weight: Count = 1


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

    name: Line
    default: bool = False
    state: Line = "UP"
    oversubscribe: Line = "NO"
    memory_per_cpu: Count | None = None
    memory_per_node: Count | None = None
    topology: Line = ""
    priority: Count = 1


@dataclass(frozen=True)
class Reservation:
    """One reservation as `scontrol show reservations` gives it; it holds `nodes` now if `active`."""

    name: Line
    nodes: tuple[Line, ...] = ()
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
        return records.to_json(_Contents(self.nodes, self.partitions, self.reservations, self.name))

    @classmethod
    def from_json(cls, data: Any) -> ClusterSnapshot:
        """Return the inverse of `to_json`; InputError names the invalid field."""
        contents = records.from_json(_Contents, data, "cluster JSON")
        duplicate = next((name for name, count in Counter(node.name for node in contents.nodes).items() if count > 1),
                         None)
        if duplicate is not None:
            raise InputError(f"cluster JSON: duplicate node {duplicate}")
        return cls.from_nodes(contents.nodes, contents.partitions, contents.reservations, contents.name)


@dataclass(frozen=True)
class _Contents:
    """A snapshot as JSON."""

    nodes: tuple[Node, ...]
    partitions: tuple[Partition, ...] = ()
    reservations: tuple[Reservation, ...] = ()
    name: Line = ""


def parse_gres(text: str) -> dict[str, int]:
    """Parse `gpu:a100:4(S:0-1),tmp:1K` -> {"gpu:a100": 4, "tmp": 1024}; indices and sockets are ignored.

    Repeated names, one per set of cores, are summed.
    """
    counts: dict[str, int] = {}
    if text in NULL_VALUES:
        return counts
    for part in re.sub(r"\([^)]*\)", "", text).replace(":no_consume", "").split(","):
        match = re.fullmatch(r"(.+?)(?::([0-9]{1,15})([KMGTP]?))?", part.strip())
        if match:
            count = int(match[2] or 1) * 1024 ** " KMGTP".index(match[3] or " ")
            counts[match[1]] = min(MAX_NUMBER, counts.get(match[1], 0) + count)
    return counts
