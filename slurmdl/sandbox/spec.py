"""Description of a sandbox: its zones, nodes and links."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slurmdl.errors import UsageError
from slurmdl.text import sample_names
from slurmdl.topology.topology import Topology

LOGIN = "login"  # host of the controller and of logins, and the router above the root zones
MAX_LEAVES = 250  # leaf i has the subnet 10.(i + 1).0.0/16
MAX_NODES = 256


def round_robin_topology(nodes: int, zones: int) -> Topology:
    """Return nodes n1, n2, ... assigned round-robin to leaf switches zoneA, zoneB, ... under one root.

    The alphabetical node order is thus the worst rank order. A single zone has no root above it.
    """
    if not 1 <= nodes <= MAX_NODES:
        raise UsageError(f"--nodes={nodes}: expected 1 to {MAX_NODES}")
    if not 1 <= zones <= min(nodes, 26):
        raise UsageError(f"--zones={zones}: expected 1 to {min(nodes, 26)} (at most 26, and one per node)")
    width = len(str(nodes))
    leaves = [f"zone{chr(ord('A') + i)}" for i in range(zones)]
    names = [f"n{i + 1:0{width}d}" for i in range(nodes)]
    roots = ["core"] if zones > 1 else []
    return Topology(
        zones=(*leaves, *roots),
        parent=np.array([zones if roots else -1] * zones + [-1] * len(roots), np.int32),
        level=np.array([0] * zones + [1] * len(roots), np.int32),
        uplink_bandwidth=np.full(zones + len(roots), np.nan),
        nodes=tuple(names), leaf=np.array([i % zones for i in range(nodes)], np.int32), source="sandbox")


@dataclass(frozen=True)
class SandboxSpec:
    """One sandbox.

    Attributes:
        node_rate, zone_rate: bits/s of a node's link and of a zone's uplink.
        cpus, memory: per node; memory in MB.
        zone_features: each node has its leaf zone as a feature.
        features: node -> further features; "" for all nodes.
        gres: Gres of every node in slurm.conf syntax, "" for none.
        slurm_conf_lines: further lines of slurm.conf.
        plugstack: text of plugstack.conf, "" for no file.
        config_files: further files next to slurm.conf, name -> text.
        bind_mounts: directories that every host sees under their own path.
        cloud_nodes: the nodes are names only: the controller allocates them, but no job runs on them.
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
            raise UsageError(f"--cpus={self.cpus}: expected 1 to 1024")
        if self.memory < 1:
            raise UsageError(f"--memory={self.memory}: expected at least 1 (MB)")
        if len(self.topology.nodes) > MAX_NODES and not self.cloud_nodes:
            raise UsageError(f"{len(self.topology.nodes)} nodes: expected at most {MAX_NODES}")
        if len(self.leaf_indices()) > MAX_LEAVES and not self.cloud_nodes:
            raise UsageError(f"{len(self.leaf_indices())} leaf zones: expected at most {MAX_LEAVES}")
        zoneless = [n for n, leaf in zip(self.topology.nodes, self.topology.leaf, strict=True) if leaf < 0]
        if zoneless:
            raise UsageError(f"node {zoneless[0]}: in no zone; expected one")
        for host in (*self.topology.nodes, *self.topology.zones):
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,60}", host) or host == LOGIN:
                raise UsageError(f"{host!r}: invalid host name; expected letters, digits, . _ -, not {LOGIN!r}")
        if duplicates := set(self.topology.nodes) & set(self.topology.zones):
            raise UsageError(f"{min(duplicates)}: name of a node and of a zone; expected different names")
        if unknown := set(self.features) - {"", *self.topology.nodes}:
            raise UsageError(f"--features: no node {min(unknown)!r}; expected one of "
                             f"{sample_names(self.topology.nodes)}")

    @property
    def node_hosts(self) -> tuple[str, ...]:
        """The nodes that are hosts on this machine."""
        return () if self.cloud_nodes else self.topology.nodes

    def leaf_indices(self) -> list[int]:
        """Return the indices of the zones with nodes, in topology order."""
        return sorted({int(leaf) for leaf in self.topology.leaf})

    def node_features(self, node: str) -> str:
        zone = self.topology.leaf_of(node) if self.zone_features else ""
        return ",".join(filter(None, (zone, self.features.get("", ""), self.features.get(node, ""))))

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "topology": self.topology.to_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> SandboxSpec:
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        return cls(**values | {"topology": Topology.from_json(data["topology"])})


def check_name(name: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,20}", name):
        raise UsageError(f"--name={name}: expected a lower-case letter, then up to 20 of a-z, 0-9 and -")
