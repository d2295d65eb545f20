"""A cluster with another release of Slurm on one host, in a chroot of the Debian that has the release.

The host (benchmarks.chroot_host) runs munged, slurmctld and one slurmd per node, each on a separate port.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pytest
from conftest import Cluster

from benchmarks.chroot_host import enter_chroot, first_process, is_set_up, root_of, start_host, write_munge_key
from slurmdl.sandbox.spec import LOGIN, round_robin_topology
from slurmdl.topology import write

#: Debian releases with Slurm 24.11 and 26.05
RELEASES = [pytest.param("trixie", marks=pytest.mark.nightly), "forky"]
USER, USER_ID = "dluser", 31415
_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
#: Slurm resolves names only if there is an address other than 127.0.0.1
_ADDRESS = "10.9.9.9"
_SLURM_CONF = """\
ClusterName=other
SlurmctldHost=login({address})
SlurmUser=root
AuthType=auth/munge
StateSaveLocation={base}/spool/ctld
SlurmdSpoolDir={base}/spool/%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd-%n.pid
SlurmctldLogFile={base}/slurmctld.log
SlurmdLogFile={base}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=100
SlurmdParameters=config_overrides
TopologyPlugin=topology/tree
ReturnToService=2
KillWait=5
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=1
"""
_NODE = "NodeName=n{i} NodeHostname=login NodeAddr={address} Port={port} CPUs=2 RealMemory=4000 Features={zone}\n"
_PARTITION = "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"

_START_HOST = """\
ip link set lo up
ip addr add {address}/32 dev lo
hostname login
mount -t proc proc {root}/proc
mount --rbind /sys {root}/sys
mount --rbind /dev {root}/dev
mount -t tmpfs tmpfs {root}/run
mount -t tmpfs -o mode=1777 tmpfs {root}/tmp
mkdir -p {root}{base} {root}/etc/slurm
mount --bind {base} {root}{base}
mount --bind {base}/slurm {root}/etc/slurm
for file in passwd shadow group hosts; do touch {root}/etc/$file; mount --bind {base}/$file {root}/etc/$file; done
chroot {root} sh -euc '
    mkdir -p -m 755 /run/munge
    munged --force --key-file={base}/munge.key --log-file=/run/munge/log --seed-file=/run/munge/seed --num-threads=2
    slurmctld
    for i in $(seq {nodes}); do slurmd -N n$i; done'
exec env -i --ignore-signal=CHLD sleep infinity
"""


class RootCluster(Cluster):
    """`nodes` nodes n1, n2, ... in two zones, with the Slurm in `root`; `base` is a new directory for its files.

    `cgroup` is the text of cgroup.conf, whose default Slurm 22.05 does not support. `lines` are the node and
    partition lines of slurm.conf, by default identical nodes whose feature is their zone, in one partition; nodes
    other than n1, n2, ... have no slurmd. `files` are added to /etc/slurm.
    """

    def __init__(self, root: Path, base: Path, nodes: int, plugin: Path | None,
                 cgroup: str = "CgroupPlugin=disabled", lines: str = "",
                 files: Mapping[str, str] = MappingProxyType({})) -> None:
        self.topology, self.shared = round_robin_topology(nodes, 2), base / "shared"
        self.user, self.ids = USER, (USER_ID, USER_ID)
        self._root, self._base, self.sandbox, self.etc = root, base, self, base / "slurm"
        for name in ("slurm", "spool/ctld", "shared", *(f"spool/n{i + 1}" for i in range(nodes))):
            (base / name).mkdir(parents=True)
        base.chmod(0o755)
        self.shared.chmod(0o1777)
        etc = self.etc
        own_lines = "".join(_NODE.format(i=i, port=17000 + i, zone=self.topology.leaf_of(f"n{i}"),
                                         address=_ADDRESS) for i in range(1, nodes + 1)) + _PARTITION
        (etc / "slurm.conf").write_text((_SLURM_CONF + (lines or own_lines)).format(
            base=base, nodes=nodes, last=17000 + nodes, address=_ADDRESS))
        (etc / "topology.conf").write_text(write.format_topology_conf(self.topology))
        (etc / "cgroup.conf").write_text(f"{cgroup}\n")
        if plugin:
            (etc / "slurmdl.so").write_bytes(plugin.read_bytes())
            (etc / "plugstack.conf").write_text("optional /etc/slurm/slurmdl.so\n")
        for name, text in files.items():
            (etc / name).write_text(text)
        (base / "hosts").write_text(f"127.0.0.1 localhost\n{_ADDRESS} login\n")
        (base / "passwd").write_text((root / "etc/passwd").read_text()
                                     + f"{USER}:x:{USER_ID}:{USER_ID}::{self.shared}:/bin/sh\n")
        (base / "group").write_text((root / "etc/group").read_text() + f"{USER}:x:{USER_ID}:\n")
        shadow = base / "shadow"  # required by su(1), which slurmd runs to load a user's environment
        shadow.touch(0o600)
        shadow.write_text((root / "etc/shadow").read_text() + f"{USER}:*:20000::::::\n")
        write_munge_key(base / "munge.key")
        script = _START_HOST.format(root=shlex.quote(str(root)), base=base, nodes=nodes, address=_ADDRESS)
        self._process = start_host(script, base / "make.log", _PATH)
        self._pid = 0
        try:
            self._wait_ready(nodes)
        except BaseException:
            self.down()
            raise

    def _wait_ready(self, nodes: int) -> None:
        deadline = time.monotonic() + 60
        while True:
            log = (self._base / "make.log").read_text()
            assert self._process.poll() is None, log
            self._pid = first_process(self._process)
            ready = is_set_up(self._pid)
            states = self.node_states() if ready else {}
            if ready and all(states.get(f"n{i + 1}") == "idle" for i in range(nodes)):
                return
            assert time.monotonic() < deadline, f"Slurm is not ready: {states or log}"
            time.sleep(0.1)

    def down(self) -> None:
        """Stop the host and all its processes."""
        self._process.kill()
        self._process.wait()

    def node_states(self) -> dict[str, str]:
        """Return node -> state as printed by sinfo."""
        text = self.run(["sinfo", "-h", "-N", "-o", "%N %T"]).stdout
        return {line.split()[0]: line.split()[1] for line in text.splitlines()}

    def run(self, argv: Sequence[str], *, host: str = LOGIN, as_root: bool = False, stdin: str = "",
            directory: Path | None = None, env: dict[str, str] | None = None,
            timeout: float = 60) -> subprocess.CompletedProcess[str]:
        drop = [] if as_root else ["setpriv", f"--reuid={USER_ID}", f"--regid={USER_ID}", "--init-groups"]
        enter = [*enter_chroot(self._pid, self._root), *drop, "sh", "-c", 'cd -- "$1"; shift; exec "$@"', "sh",
                 str(directory or self.shared), *argv]
        return subprocess.run(enter, input=stdin, capture_output=True, text=True, timeout=timeout, check=False,
                              env={"PATH": _PATH, "HOME": str(self.shared), "USER": USER, "LOGNAME": USER,
                                   "SHELL": "/bin/sh", "LC_ALL": "C", **(env or {})})

    def _unsupported(self, *_: object, **__: object) -> None:
        raise NotImplementedError("this cluster has only one host")

    stop_daemon = start_daemon = freeze_daemon = power_off = _unsupported
    shape_link = inter_zone_bytes = controller_log = _unsupported


def skip_reason(suite: str, target: str = "test-plugin-releases") -> str:
    """Return the reason why a chroot of `suite` cannot run a cluster, or ""; `make target` creates the chroot."""
    if os.geteuid():
        return "namespaces need root"
    return "" if (root_of(suite) / ".slurmdl").exists() else f"no chroot of Debian {suite}: run make {target}"
