"""Which nodes exist, what they have and what of it is free: one snapshot of the controller's view."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from slurmdl.errors import InputError


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
    cpus_free: int = 1
    memory: int = 1
    memory_free: int = 1
    features: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    gres: Mapping[str, int] = field(default_factory=dict)
    gres_used: Mapping[str, int] = field(default_factory=dict)
    weight: int = 1


@dataclass(frozen=True)
class Partition:
    """One partition as `scontrol show partition` gives it.

    Attributes
    ----------
    memory_per_cpu, memory_per_node : MB that a job gets which names none (DefMemPerCPU, DefMemPerNode of the
        partition, else of the cluster); None where neither is known, which may stand for the whole node.
    topology : name of the topology that it uses (25.05 and newer), "" for the cluster's default.
    """

    name: str
    default: bool = False
    state: str = "UP"
    oversubscribe: str = "NO"
    memory_per_cpu: int | None = None
    memory_per_node: int | None = None
    topology: str = ""


@dataclass(frozen=True)
class ClusterSnapshot:
    """The nodes and partitions of one cluster at one moment."""

    nodes: tuple[Node, ...]
    partitions: tuple[Partition, ...] = ()

    @cached_property
    def node(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def default_partition(self) -> str | None:
        return next((p.name for p in self.partitions if p.default), None)

    def topology_of(self, partitions: Sequence[str] = ()) -> str:
        """Name of the topology that a job's first partition uses, else the default partition; "" for the default."""
        wanted = partitions[0] if partitions else self.default_partition
        return next((p.topology for p in self.partitions if p.name == wanted), "")

    def to_json(self) -> dict[str, Any]:
        return {"nodes": [asdict(n) for n in self.nodes], "partitions": [asdict(p) for p in self.partitions]}

    @classmethod
    def from_json(cls, data: Any) -> ClusterSnapshot:
        """The inverse of `to_json`; InputError names the field that does not fit."""
        try:
            nodes: list[dict[str, Any]] = [
                {k: tuple(v) if isinstance(v, list) else v for k, v in n.items()} for n in data["nodes"]]
            return cls(tuple(Node(**n) for n in nodes), tuple(Partition(**p) for p in data.get("partitions", [])))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"cluster JSON: malformed ({type(error).__name__}: {error})") from error
