"""What a sandbox is made of: its zones, its nodes, its links."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from slurmdl.errors import UsageError
from slurmdl.text import sample_names
from slurmdl.topology.topology import Topology

_NAME_PATTERN = re.compile(r"[a-z][a-z0-9-]{0,20}")

#: the head host: login node, controller, and the router above the roots of the zone tree
LOGIN = "login"
#: leaf i has the subnet 10.(i + 1).0.0/16
MAX_LEAVES = 250
MAX_NODES = 256


def round_robin_topology(nodes: int, zones: int) -> Topology:
    """`nodes` nodes n1, n2, ... dealt in turn to `zones` leaf switches zoneA, zoneB, ... under one root.

    The alphabetical order of the nodes is thus the worst order of ranks. One zone has no root above it.
    """
    if not 1 <= nodes <= MAX_NODES:
        raise UsageError(f"--nodes {nodes}: 1 to {MAX_NODES} expected")
    if not 1 <= zones <= min(nodes, 26):
        raise UsageError(f"--zones {zones}: 1 to {min(nodes, 26)} expected (at most one zone a node, and 26)")
    width = len(str(nodes))
    leaves = [f"zone{chr(ord('A') + i)}" for i in range(zones)]
    names = [f"n{i + 1:0{width}d}" for i in range(nodes)]
    above = ["core"] if zones > 1 else []
    return Topology(
        zones=(*leaves, *above),
        parent=np.array([zones if above else -1] * zones + [-1] * len(above), np.int32),
        level=np.array([0] * zones + [1] * len(above), np.int32),
        uplink_bandwidth=np.full(zones + len(above), np.nan),
        nodes=tuple(names), leaf=np.array([i % zones for i in range(nodes)], np.int32), source="sandbox")


@dataclass(frozen=True)
class SandboxSpec:
    """One sandbox.

    Attributes
    ----------
    node_rate, zone_rate : bits/s of a node's link, and of the link between a zone and the zone above it.
    cpus, memory : of each node; memory in MB.
    zone_features : each node carries its leaf zone's name as a feature.
    features : node -> further features; "" as the node stands for all nodes.
    gres : Slurm's Gres text for every node, "" for none.
    settings : further lines of slurm.conf.
    plugstack : text of plugstack.conf, "" for no such file.
    files : further files beside slurm.conf, name -> text.
    shares : directories that stay visible under their own path on every host.
    cloud : the nodes are names only, of any number: the controller allocates them, but no job ever runs on them.
    """

    name: str
    topology: Topology
    node_rate: float = 1e9
    zone_rate: float = 5e7
    cpus: int = 2
    memory: int = 4000
    zone_features: bool = True
    features: dict[str, str] = field(default_factory=dict)
    gres: str = ""
    slurm_conf_lines: tuple[str, ...] = ()
    plugstack: str = ""
    config_files: dict[str, str] = field(default_factory=dict)
    bind_mounts: tuple[str, ...] = ()
    cloud_nodes: bool = False

    def __post_init__(self) -> None:
        check_name(self.name)
        if not 1 <= self.cpus <= 1024:
            raise UsageError(f"--cpus {self.cpus}: 1 to 1024 expected")
        if self.memory < 1:
            raise UsageError(f"--memory {self.memory}: at least 1 (MB) expected")
        if len(self.topology.nodes) > MAX_NODES and not self.cloud_nodes:
            raise UsageError(f"{len(self.topology.nodes)} nodes: a sandbox holds at most {MAX_NODES}")
        if len(self.leaf_indices()) > MAX_LEAVES and not self.cloud_nodes:
            raise UsageError(f"{len(self.leaf_indices())} leaf zones: a sandbox holds at most {MAX_LEAVES}")
        homeless = [n for n, leaf in zip(self.topology.nodes, self.topology.leaf, strict=True) if leaf < 0]
        if homeless:
            raise UsageError(f"node {homeless[0]} is in no zone: every node of a sandbox needs one")
        for host in (*self.topology.nodes, *self.topology.zones):
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,60}", host) or host == LOGIN:
                raise UsageError(f"{host!r} cannot be the name of a host (letters, digits, . _ -; not {LOGIN!r})")
        both = set(self.topology.nodes) & set(self.topology.zones)
        if both:
            raise UsageError(f"{min(both)} is both a node and a zone: their names must differ")
        unknown = set(self.features) - {"", *self.topology.nodes}
        if unknown:
            raise UsageError(f"--features: no node {min(unknown)!r} (nodes: {sample_names(self.topology.nodes)})")

    @property
    def node_hosts(self) -> tuple[str, ...]:
        """The nodes that are hosts of this machine."""
        return () if self.cloud_nodes else self.topology.nodes

    def leaf_indices(self) -> list[int]:
        """Indices of the zones that hold nodes, in the order of the topology."""
        return sorted({int(leaf) for leaf in self.topology.leaf})

    def node_features(self, node: str) -> str:
        zone = self.topology.leaf_of(node) if self.zone_features else ""
        return ",".join(filter(None, (zone, self.features.get("", ""), self.features.get(node, ""))))

    def to_json(self) -> dict[str, Any]:
        return {**{k: v for k, v in asdict(self).items() if k != "topology"}, "topology": self.topology.to_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> SandboxSpec:
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        values["topology"] = Topology.from_json(data["topology"])
        return cls(**values)


def check_name(name: str) -> None:
    """UsageError unless `name` can name a sandbox."""
    if not _NAME_PATTERN.fullmatch(name):
        raise UsageError(f"--name {name!r}: a lower-case letter, then up to 20 of a-z, 0-9 and - expected")
