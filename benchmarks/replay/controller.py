"""A real slurmctld with cloud nodes and no compute daemons: the installed one, or one of a newer Slurm in a chroot.

Jobs get nodes and stay in CONFIGURING until they are canceled. A canceled job's nodes are free at once, since they
never answer; `ResumeTimeout` is longer than any run.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from benchmarks import cloud_nodes
from benchmarks.chroot_host import enter_chroot, first_process, is_set_up, root_of, start_host, write_munge_key
from slurmdl.errors import SandboxError
from slurmdl.sandbox import lifecycle, namespaces
from slurmdl.sandbox.spec import LOGIN, SandboxSpec
from slurmdl.slurm import hostlist
from slurmdl.topology import write
from slurmdl.topology.topology import Topology

#: EASY backfill in the order of submission, with reactions and a resolution of a second
SCHEDULER_LINES = ("SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=1,bf_resolution=1,"
                   "bf_job_part_count_reserve=1,bf_max_job_test=2000,default_queue_depth=2000",
                   "PriorityType=priority/basic")
SUITE = "trixie"  # Debian 13: Slurm 24.11
_START_TIMEOUT_S = 60
_ADDRESS, _PATH = "10.9.8.7", "/usr/sbin:/usr/bin:/sbin:/bin"
_SLURM_CONF = """\
ClusterName=replay
SlurmctldHost=login({address})
SlurmUser=root
AuthType=auth/munge
StateSaveLocation={base}/state
SlurmctldPidFile=/run/slurmctld.pid
SlurmctldLogFile={base}/slurmctld.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=100
TopologyPlugin=topology/{kind}
ResumeProgram=/bin/true
SuspendProgram=/bin/true
SuspendTime=INFINITE
ResumeTimeout=65000
ResumeRate=0
SlurmdTimeout=0
MaxJobCount=100000
PrivateData=cloud
NodeName={nodes} NodeAddr={address} State=CLOUD CPUs=1 RealMemory=1000
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_START_HOST = """\
ip link set lo up
ip addr add {address}/32 dev lo
hostname login
mount -t proc proc {root}/proc
mount --rbind /dev {root}/dev
mount -t tmpfs tmpfs {root}/run
mount -t tmpfs -o mode=1777 tmpfs {root}/tmp
mkdir -p {root}{base} {root}/etc/slurm
mount --bind {base} {root}{base}
mount --bind {base}/etc {root}/etc/slurm
touch {root}/etc/hosts
mount --bind {base}/hosts {root}/etc/hosts
chroot {root} sh -euc '
    mkdir -p -m 755 /run/munge
    munged --force --key-file={base}/munge.key --log-file=/run/munge/log --seed-file=/run/munge/seed
    slurmctld'
exec env -i --ignore-signal=CHLD sleep infinity
"""


class Controller(Protocol):
    """A running slurmctld."""

    release: str

    def run(self, argv: Sequence[str], stdin: str = "") -> str:
        """Run a command of Slurm and return its output; SandboxError if it fails."""

    def close(self) -> None:
        """Stop all its processes."""


class SandboxController:
    """The installed Slurm in a sandbox; SandboxError if it cannot start."""

    def __init__(self, topology: Topology) -> None:
        self.sandbox = lifecycle.sandbox_up(SandboxSpec(
            f"replay-{os.getpid()}", topology, cpus=1, cloud_nodes=True, zone_features=False,
            slurm_conf_lines=SCHEDULER_LINES))
        self.release = self.run(["scontrol", "--version"]).split()[-1]
        try:
            # 22.05 chooses powered down nodes last: allocate all once, after which they are only starting
            job = cloud_nodes.submit_job(self.sandbox, ["-N", str(len(topology.nodes)), "--exclusive"])
            cloud_nodes.wait_for_nodes(self.sandbox, job)
            self.run(["scancel", str(job)])
        except BaseException:
            self.close()
            raise

    def run(self, argv: Sequence[str], stdin: str = "") -> str:
        return namespaces.run_on_host(self.sandbox.pids[LOGIN], list(argv), stdin=stdin)

    def close(self) -> None:
        lifecycle.sandbox_down(self.sandbox.spec.name)


class ChrootController:
    """The Slurm of another Debian release; SandboxError if it cannot start."""

    def __init__(self, topology: Topology) -> None:
        root = root_of(SUITE)
        self._base = Path(tempfile.mkdtemp(prefix="slurmdl-replay-"))
        self._base.chmod(0o755)
        for name in ("etc", "state"):
            (self._base / name).mkdir()
        lines = _SLURM_CONF.format(address=_ADDRESS, base=self._base, kind=topology.kind,
                                   nodes=hostlist.fold_hostlist(topology.nodes))
        (self._base / "etc/slurm.conf").write_text(lines + "\n".join(SCHEDULER_LINES) + "\n")
        (self._base / "etc/cgroup.conf").write_text("CgroupPlugin=disabled\n")
        (self._base / "etc/topology.conf").write_text(write.format_topology_conf(topology))
        (self._base / "hosts").write_text(f"127.0.0.1 localhost\n{_ADDRESS} login\n")
        write_munge_key(self._base / "munge.key")
        script = _START_HOST.format(root=shlex.quote(str(root)), base=self._base, address=_ADDRESS)
        self._root, self._log = root, self._base / "start.log"
        self._process = start_host(script, self._log, _PATH)
        try:
            self._pid = self._wait_ready()
            self.release = self.run(["scontrol", "--version"]).split()[-1]
        except BaseException:
            self.close()
            raise

    def _wait_ready(self) -> int:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            pid = first_process(self._process)
            if is_set_up(pid):
                self._pid = pid
                try:
                    self.run(["scontrol", "ping"])
                    return pid
                except SandboxError:
                    pass  # not ready
            time.sleep(0.2)
        raise SandboxError(f"Slurm in {self._root}: not ready: {' '.join(self._log.read_text().split())[-300:]}")

    def run(self, argv: Sequence[str], stdin: str = "") -> str:
        done = subprocess.run([*enter_chroot(self._pid, self._root), *argv], input=stdin, capture_output=True,
                              text=True, timeout=60, check=False,
                              env={"PATH": _PATH, "LC_ALL": "C", "HOME": "/root"})
        if done.returncode:
            raise SandboxError(f"{argv[0]}: {' '.join((done.stderr or done.stdout).split())[-300:]}")
        return done.stdout

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._base, ignore_errors=True)


def start_controller(topology: Topology) -> Controller:
    """Start the newer Slurm if its chroot exists, else the installed one, which has no blocks; SandboxError if none
    can start."""
    if os.geteuid():
        raise SandboxError("a controller needs root")
    if (root_of(SUITE) / ".slurmdl").exists():
        return ChrootController(topology)
    if topology.kind == "block":
        raise SandboxError(f"topology/block needs a newer Slurm: tools/debian-chroot {SUITE} slurmctld slurmd "
                           "slurm-client munge")
    return SandboxController(topology)
