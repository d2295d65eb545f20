"""Description of a sandbox: its zones, nodes, links and user, and the configuration files of its Slurm."""

from __future__ import annotations

import re
import secrets
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from slurmdl.errors import UsageError
from slurmdl.slurm import hostlist
from slurmdl.text import sample_names
from slurmdl.topology import write
from slurmdl.topology.topology import Topology

LOGIN = "login"  # host of the controller and of logins, and the router above the root zones
MAX_LEAVES = 250  # leaf i has the subnet 10.(i + 1).0.0/16
MAX_NODES = 256
_OPEN_MPI_MCA = """\
# more ranks than cores: yield, and stay on the shaped interface
mpi_yield_when_idle = 1
pml = ob1
btl = tcp,self
btl_tcp_if_include = eth0
oob_tcp_if_include = eth0
hwloc_base_binding_policy = none
"""

#: Cloud nodes boot when they are allocated (ResumeProgram), and these never finish booting: nothing is sent to them,
#: they stay allocated until the job is canceled, and are available again after power-down.
_CLOUD_SETTINGS = {"ResumeProgram": "/bin/true", "SuspendProgram": "/bin/true", "SuspendTime": 2**30,
                   "SuspendTimeout": 1, "ResumeTimeout": 65000, "ResumeRate": 0, "SuspendRate": 0, "SlurmdTimeout": 0,
                   "MaxJobCount": 100000, "PrivateData": "cloud"}


@dataclass(frozen=True)
class JobUser:
    """The ordinary user who submits jobs."""

    name: str
    uid: int
    gid: int
    home: str

    def has_access(self, directory: Path, bits: int) -> bool:
        """Whether the directory's mode grants the user `bits`: 1 to enter it, 4 to list it."""
        status = directory.stat()
        if status.st_uid == self.uid:
            bits <<= 6
        elif status.st_gid == self.gid:
            bits <<= 3
        return status.st_mode & bits == bits



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


def leaf_subnet(spec: SandboxSpec, leaf: int) -> int:
    """Return the second byte of the addresses in a leaf zone."""
    return spec.leaf_indices().index(leaf) + 1


def host_addresses(spec: SandboxSpec) -> dict[str, str]:
    """Return the addresses of all nodes and of the login host."""
    addresses = {LOGIN: "10.0.0.1"}
    if spec.cloud_nodes:
        return addresses
    count: Counter[int] = Counter()
    for name, leaf in zip(spec.topology.nodes, spec.topology.leaf.tolist(), strict=True):
        count[leaf] += 1
        addresses[name] = f"10.{leaf_subnet(spec, leaf)}.0.{count[leaf]}"
    return addresses


def write_config_files(spec: SandboxSpec, root: Path, user: JobUser) -> None:
    """Write Slurm's configuration files to `root`/slurm, and the other files of /etc to `root`/etc."""
    etc, slurm, address = root / "etc", root / "slurm", host_addresses(spec)
    slurm.mkdir()
    for directory in ("slurm", "openmpi", "slurmdl"):
        (etc / directory).mkdir(parents=True)
    (slurm / "slurm.conf").write_text(_slurm_conf(spec, root, address))
    without_speeds = replace(spec.topology, kind="tree", uplink_bandwidth=np.full(len(spec.topology.zones), np.nan))
    (slurm / "topology.conf").write_text(write.format_topology_conf(without_speeds))
    if spec.zone_rate:  # may be below the smallest plausible LinkSpeed
        (etc / "slurmdl/slurmdl.yaml").write_text(f"link_defaults: {{zone_bandwidth: {spec.zone_rate / 8:f}}}\n")
    (slurm / "cgroup.conf").write_text("CgroupAutomount=no\n")
    if spec.plugstack:
        (slurm / "plugstack.conf").write_text(spec.plugstack)
    for name, text in spec.config_files.items():
        (slurm / name).write_text(text)
    if spec.gres:
        lines, by_name = [], {gres.split(":")[0]: gres.split(":") for gres in spec.gres.split(",")}
        for name, *gres_type, count in by_name.values():
            # a gpu needs one file each, or its node counts none of them
            files = [slurm / f"{name}{i}" for i in range(int(count))] if name == "gpu" else []
            for file in files:
                file.touch()
            type_option = f" Type={gres_type[0]}" if gres_type else ""
            option = f"File=/etc/slurm/{name}[0-{len(files) - 1}]" if files else "Flags=CountOnly"
            lines.append(f"Name={name}{type_option} Count={count} {option}\n")
        (slurm / "gres.conf").write_text("".join(lines))
    (etc / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"{a} {h}\n" for h, a in address.items()))
    (etc / "openmpi/openmpi-mca-params.conf").write_text(_OPEN_MPI_MCA)
    key = root / "munge.key"
    key.touch(0o400)
    key.write_bytes(secrets.token_bytes(1024))
    passwd, group = Path("/etc/passwd").read_text(), Path("/etc/group").read_text()
    if not any(line.split(":")[0] == user.name for line in passwd.splitlines()):
        passwd += f"{user.name}:x:{user.uid}:{user.gid}::{user.home}:/bin/bash\n"
        group += f"{user.name}:x:{user.gid}:\n"
    (etc / "passwd").write_text(passwd)
    (etc / "group").write_text(group)


def config_mount_script(root: Path) -> str:
    """Return shell text that mounts the cluster's files over the machine's /etc on a host.

    An overlay: useradd(8) renames a new file over /etc/passwd, which removes a mount on the single file.
    """
    etc, slurm = shlex.quote(f"{root}/etc"), shlex.quote(f"{root}/slurm")
    return f"mount -t overlay -o lowerdir={etc}:/etc overlay /etc\nmount --bind {slurm} /etc/slurm"


def _slurm_conf(spec: SandboxSpec, root: Path, address: Mapping[str, str]) -> str:
    overridden = {line.split("=", 1)[0].lower() for line in spec.slurm_conf_lines}
    settings = {
        "ClusterName": spec.name,
        "SlurmctldHost": f"{LOGIN}({address[LOGIN]})",
        "SlurmUser": "root",
        "AuthType": "auth/munge",
        "StateSaveLocation": root / "spool/ctld",
        "SlurmdSpoolDir": f"{root}/spool/%n",
        "SlurmctldPidFile": "/run/slurmctld.pid",
        "SlurmdPidFile": "/run/slurmd.pid",
        "SlurmctldLogFile": root / "log/slurmctld.log",
        "SlurmdLogFile": f"{root}/log/%n.log",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "MpiDefault": "none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_CPU_Memory",
        "DefMemPerCPU": 100,
        "SlurmdParameters": "config_overrides",  # CPUs of the spec, not of the machine
        "TopologyPlugin": "topology/tree",
        "ReturnToService": 2,
        "SlurmdTimeout": 15,
        "KillWait": 5,
        "MessageTimeout": 10,
        **(_CLOUD_SETTINGS if spec.cloud_nodes else {}),
        **({"GresTypes": ",".join(sorted({g.split(":")[0] for g in spec.gres.split(",")}))} if spec.gres else {}),
    }
    lines = [f"{key}={value}" for key, value in settings.items() if key.lower() not in overridden]
    lines += spec.slurm_conf_lines
    nodes_by_settings: dict[tuple[str, str], list[str]] = {}
    for node in spec.topology.nodes:
        # with an unknown host name the controller would wait seconds for the resolver
        location = f"NodeAddr={address[LOGIN]} State=CLOUD" if spec.cloud_nodes else f"NodeAddr={address[node]}"
        nodes_by_settings.setdefault((location, spec.node_features(node)), []).append(node)
    for (location, features), nodes in nodes_by_settings.items():
        lines.append(f"NodeName={hostlist.fold_hostlist(nodes)} {location} CPUs={spec.cpus} RealMemory={spec.memory}"
                     + (f" Features={features}" if features else "") + (f" Gres={spec.gres}" if spec.gres else ""))
    lines.append("PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP")
    return "\n".join(map(str, lines)) + "\n"
