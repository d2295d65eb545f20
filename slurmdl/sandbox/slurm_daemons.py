"""Slurm inside a sandbox: its files, its daemons, and waiting until it is ready."""

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
from slurmdl.text import sample_names
from slurmdl.topology import write

#: program -> Debian package
REQUIRED_PROGRAMS = {"slurmctld": "slurmctld", "slurmd": "slurmd", "scontrol": "slurm-client", "munged": "munge",
                     "ip": "iproute2", "tc": "iproute2", "nft": "nftables", "nsenter": "util-linux",
                     "unshare": "util-linux", "setpriv": "util-linux"}

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


def write_config_files(spec: SandboxSpec, root: Path, user: JobUser) -> None:
    """Write Slurm's configuration files to `root`/slurm, and the other files of /etc to `root`/etc."""
    etc, slurm, address = root / "etc", root / "slurm", veth_links.host_addresses(spec)
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


def start_daemons(spec: SandboxSpec, root: Path, pids: Mapping[str, int]) -> None:
    """Start munged on every host, slurmctld on the login host and slurmd on every node."""
    scripts = {
        "munged": "mkdir -p -m 755 /run/munge && exec munged --force --key-file={root}/munge.key"
                  " --log-file=/run/munge/munged.log --seed-file=/run/munge/munged.seed --num-threads=2",
        "slurmctld": "exec slurmctld",
        "slurmd": "exec slurmd -N {host}",
    }

    def start(names: Sequence[str], daemon: str) -> None:
        processes = [(name, subprocess.Popen(
            namespaces.nsenter_command(pids[name], ["sh", "-c", scripts[daemon].format(root=root, host=name)]),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})) for name in names]
        for name, process in processes:
            try:
                _, text = process.communicate(timeout=20)
            except subprocess.TimeoutExpired as error:
                process.kill()
                raise SandboxError(f"{daemon} on {name}: not started within 20 s") from error
            if process.returncode:
                raise SandboxError(f"{daemon} on {name}: {' '.join(text.split())[-300:] or 'failed'}")

    start([LOGIN, *spec.node_hosts], "munged")
    start([LOGIN], "slurmctld")
    start(spec.node_hosts, "slurmd")


def node_states(pids: Mapping[str, int]) -> dict[str, str]:
    """Return node -> state as in sinfo ("idle", "down*", ...); empty if the controller does not answer."""
    try:
        # grouped by state: one line per node (-N) takes sinfo a second for 10,000 nodes
        text = namespaces.run_on_host(pids[LOGIN], ["sinfo", "-h", "-o", "%T %N"], timeout=5)
    except SandboxError:
        return {}
    rows = (line.split() for line in text.splitlines())
    return {node: row[0] for row in rows if len(row) > 1 for node in hostlist.expand_hostlist(row[1])}


def wait_for_nodes_idle(pids: Mapping[str, int], timeout: float = 30.0) -> None:
    """Return when every node is idle; SandboxError names nodes that are not."""
    deadline = time.monotonic() + timeout
    while True:
        states = node_states(pids)
        not_idle = [node for node, state in states.items() if state.rstrip("~") != "idle"]
        if states and not not_idle:
            return
        if time.monotonic() > deadline:
            reason = f"not idle: {sample_names(not_idle)}" if not_idle else "the controller does not answer"
            raise SandboxError(f"Slurm is not ready after {timeout:g} s ({reason})")
        time.sleep(0.05)
