"""Slurm inside a sandbox: its files, its daemons, and when it is ready."""

from __future__ import annotations

import secrets
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from slurmdl.errors import SandboxError
from slurmdl.sandbox import namespaces, veth_links
from slurmdl.sandbox.spec import LOGIN, SandboxSpec
from slurmdl.slurm import hostlist
from slurmdl.topology import write

#: program -> Debian package that has it
REQUIRED_PROGRAMS = {"slurmctld": "slurmctld", "slurmd": "slurmd", "scontrol": "slurm-client", "munged": "munge",
            "ip": "iproute2", "tc": "iproute2", "nft": "nftables", "nsenter": "util-linux",
            "unshare": "util-linux", "setpriv": "util-linux", "sysctl": "procps"}

_OPEN_MPI_MCA = """\
# more ranks than cores: yield, and stay on the shaped interface
mpi_yield_when_idle = 1
pml = ob1
btl = tcp,self
btl_tcp_if_include = eth0
oob_tcp_if_include = eth0
hwloc_base_binding_policy = none
"""


#: Nodes of a cloud boot when they are allocated (ResumeProgram), and these never finish: nothing is sent to them,
#: they stay with their job until it is cancelled, and serve again once they were powered down (`cloud.end`).
_CLOUD_SETTINGS = {"ResumeProgram": "/bin/true", "SuspendProgram": "/bin/true", "SuspendTime": 2**30, "SuspendTimeout": 1,
          "ResumeTimeout": 65000, "ResumeRate": 0, "SuspendRate": 0, "SlurmdTimeout": 0, "MaxJobCount": 100000,
          "PrivateData": "cloud"}


@dataclass(frozen=True)
class JobUser:
    """The ordinary user who submits jobs."""

    name: str
    uid: int
    gid: int
    home: str

    def may_enter(self, directory: Path) -> bool:
        """Whether the mode of a directory lets the user pass it."""
        return self._has_mode_bits(directory, 0o1)

    def may_read(self, directory: Path) -> bool:
        """Whether the mode of a directory lets the user list and pass it."""
        return self._has_mode_bits(directory, 0o5)

    def _has_mode_bits(self, directory: Path, bits: int) -> bool:
        status = directory.stat()
        if status.st_uid == self.uid:
            bits <<= 6
        elif status.st_gid == self.gid:
            bits <<= 3
        return status.st_mode & bits == bits


def write_config_files(spec: SandboxSpec, root: Path, user: JobUser) -> None:
    """Write all configuration files: Slurm's own to `root`/slurm, the others of /etc to `root`/etc."""
    etc, slurm, address = root / "etc", root / "slurm", veth_links.host_addresses(spec)
    slurm.mkdir()
    for directory in ("slurm", "openmpi", "slurmdl"):
        (etc / directory).mkdir(parents=True)
    (slurm / "slurm.conf").write_text(_slurm_conf(spec, root, address))
    without_speeds = replace(spec.topology, kind="tree", uplink_bandwidth=np.full(len(spec.topology.zones), np.nan))
    (slurm / "topology.conf").write_text(write.format_topology_conf(without_speeds))
    if spec.zone_rate:  # which may be slower than a LinkSpeed can say
        (etc / "slurmdl/slurmdl.yaml").write_text(f"link_defaults: {{zone_bandwidth: {spec.zone_rate / 8:f}}}\n")
    (slurm / "cgroup.conf").write_text("CgroupAutomount=no\n")
    if spec.plugstack:
        (slurm / "plugstack.conf").write_text(spec.plugstack)
    for name, text in spec.config_files.items():
        (slurm / name).write_text(text)
    if spec.gres:
        kinds = {kind.split(":")[0]: kind for kind in spec.gres.split(",")}
        lines = []
        for name, kind in kinds.items():
            parts = kind.split(":")
            of_type = f" Type={parts[1]}" if len(parts) > 2 else ""
            # a gpu needs one file each, or its node counts none of them
            files = [slurm / f"{name}{i}" for i in range(int(parts[-1]))] if name == "gpu" else []
            for file in files:
                file.touch()
            what = f"File=/etc/slurm/{name}[0-{len(files) - 1}]" if files else "Flags=CountOnly"
            lines.append(f"Name={name}{of_type} Count={parts[-1]} {what}\n")
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
    """Shell text that shows a host the cluster's files in its /etc, over those of the machine.

    An overlay, not a mount on each file: the machine may replace its /etc/passwd at any time (useradd(8) renames
    a new one over it), and such a mount would then be gone.
    """
    etc, slurm = shlex.quote(f"{root}/etc"), shlex.quote(f"{root}/slurm")
    return f"mount -t overlay -o lowerdir={etc}:/etc overlay /etc\nmount --bind {slurm} /etc/slurm"


def _slurm_conf(spec: SandboxSpec, root: Path, address: Mapping[str, str]) -> str:
    chosen = {line.split("=", 1)[0].lower() for line in spec.slurm_conf_lines}
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
        "SlurmdParameters": "config_overrides",  # nodes have the CPUs that the spec says, not the machine's
        "TopologyPlugin": "topology/tree",
        "ReturnToService": 2,
        "SlurmdTimeout": 15,
        "KillWait": 5,
        "MessageTimeout": 10,
        **(_CLOUD_SETTINGS if spec.cloud_nodes else {}),
        **({"GresTypes": ",".join(sorted({g.split(":")[0] for g in spec.gres.split(",")}))} if spec.gres else {}),
    }
    lines = [f"{key}={value}" for key, value in settings.items() if key.lower() not in chosen]
    lines += spec.slurm_conf_lines
    alike: dict[tuple[str, str], list[str]] = {}
    for node in spec.topology.nodes:
        # a name that no host has would let the controller wait seconds for the resolver: here nobody listens
        where = f"NodeAddr={address[LOGIN]} State=CLOUD" if spec.cloud_nodes else f"NodeAddr={address[node]}"
        alike.setdefault((where, spec.node_features(node)), []).append(node)
    for (where, features), nodes in alike.items():
        lines.append(f"NodeName={hostlist.fold_hostlist(nodes)} {where} CPUs={spec.cpus} RealMemory={spec.memory}"
                     + (f" Features={features}" if features else "") + (f" Gres={spec.gres}" if spec.gres else ""))
    lines.append("PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP")
    return "\n".join(map(str, lines)) + "\n"


def start_daemons(spec: SandboxSpec, root: Path, pids: Mapping[str, int]) -> None:
    """Start munged on each host, slurmctld on the login host and a slurmd on each node."""
    script = {
        "munged": "mkdir -p -m 755 /run/munge && exec munged --force --key-file={root}/munge.key"
                  " --log-file=/run/munge/munged.log --seed-file=/run/munge/munged.seed --num-threads=2",
        "slurmctld": "exec slurmctld",
        "slurmd": "exec slurmd -N {host}",
    }

    def begin(names: Sequence[str], daemon: str) -> None:
        started = [(name, subprocess.Popen(
            namespaces.nsenter_command(pids[name], ["sh", "-c", script[daemon].format(root=root, host=name)]),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})) for name in names]
        for name, child in started:
            try:
                _, text = child.communicate(timeout=20)
            except subprocess.TimeoutExpired as error:
                child.kill()
                raise SandboxError(f"{daemon} on {name} does not come up within 20 s") from error
            if child.returncode:
                raise SandboxError(f"{daemon} on {name}: {' '.join(text.split())[-300:] or 'failed'}")

    begin([LOGIN, *spec.node_hosts], "munged")
    begin([LOGIN], "slurmctld")
    begin(spec.node_hosts, "slurmd")


def node_states(pids: Mapping[str, int]) -> dict[str, str]:
    """Node -> state as sinfo words it ("idle", "down*", ...); empty while the controller does not answer."""
    try:
        # by state: a line for each node (-N) would take sinfo a second for 10,000
        text = namespaces.run_on_host(pids[LOGIN], ["sinfo", "-h", "-o", "%T %N"], timeout=5)
    except SandboxError:
        return {}
    rows = (line.split() for line in text.splitlines())
    return {node: row[0] for row in rows if len(row) > 1 for node in hostlist.expand_hostlist(row[1])}


def wait_until_ready(pids: Mapping[str, int], timeout: float = 30.0) -> None:
    """Return when the controller calls every node idle; SandboxError names those that are not."""
    deadline = time.monotonic() + timeout
    while True:
        states = node_states(pids)
        late = [node for node, state in states.items() if state.rstrip("~") != "idle"]
        if states and not late:
            return
        if time.monotonic() > deadline:
            what = f"not idle: {', '.join(late[:8])}" if late else "the controller does not answer"
            raise SandboxError(f"Slurm is not ready after {timeout:g} s ({what})")
        time.sleep(0.05)
