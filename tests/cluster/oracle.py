"""Slurm as the oracle: a real slurmctld reads a topology.conf, and accepts or rejects it.

Each file is read by a new slurmctld in new namespaces (network, mounts, processes). This needs no munge, slurmd or
host of the cluster, and takes about 50 ms.

SLURMDL_ORACLE_ROOT selects the root directory of another Debian with another Slurm release. To create it, run
`debootstrap --variant=minbase trixie DIR`, then `apt-get install slurmctld slurm-client iproute2` in DIR.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = os.environ.get("SLURMDL_ORACLE_ROOT", "")

#: nodes of the cluster
NODES = [f"n{i}" for i in range(1, 41)]

_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_MOUNT_POINT = "/mnt"  # mount point of a case's directory
_MAX_SCONTROL_BYTES = 2 << 30  # address space; some invalid hostlists take all memory of the machine
_SLURM_CONF = """\
ClusterName=oracle
SlurmctldHost=oracle(10.9.9.9)
SlurmUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation=/mnt/state
SlurmctldPidFile=/mnt/pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
TopologyPlugin=topology/{plugin}
MailProg=/bin/true
ResumeProgram=/bin/true
SuspendProgram=/bin/true
NodeName=n[1-40] NodeAddr=10.9.9.9 State=CLOUD
PartitionName=main Nodes=ALL
"""

# Slurm resolves names only if there is an address other than 127.0.0.1; 1AA1 is slurmctld's port, 6817. If a file is
# missing, 22.05 retries for a minute: end it at once.
_SCRIPT = """\
ulimit -c 0
ip link set lo up && ip addr add 10.9.9.9/32 dev lo && hostname oracle
slurmctld -D -c >/mnt/log 2>&1 &
daemon=$!
until grep -q :1AA1 /proc/net/tcp; do
    kill -0 $daemon 2>/dev/null || { wait $daemon; exit; }
    grep -q 'retrying in' /mnt/log && exit 3
    sleep 0.01
done
timeout 10 scontrol -o show topology 2>/mnt/error
"""


@dataclass(frozen=True)
class Outcome:
    """Result for a file: whether slurmctld started, the output of `scontrol -o show topology`, and the log."""

    accepted: bool
    text: str
    log: str


def outcome_of(directory: Path, files: Mapping[str, bytes], plugin: str = "tree") -> Outcome:
    """Return the outcome for the topology.conf among `files`, which are written to the new directory `directory`."""
    directory.mkdir()
    (directory / "state").mkdir()
    (directory / "slurm.conf").write_text(_SLURM_CONF.format(plugin=plugin))
    for name, content in files.items():
        (directory / name).write_bytes(content)
    enter = f"mount --bind {shlex.quote(str(directory))} {shlex.quote(ROOT + _MOUNT_POINT)}\n"
    enter += (f"mount -t proc proc {shlex.quote(ROOT)}/proc\nexec chroot {shlex.quote(ROOT)} " if ROOT else "exec ")
    done = subprocess.run(
        ["timeout", "-k1", "15", "unshare", "--net", "--mount", "--pid", "--uts", "--fork", "--kill-child=KILL",
         "--mount-proc", "sh", "-c", f"{enter}sh -c {shlex.quote(_SCRIPT)}"],
        capture_output=True, text=True, errors="replace", check=False, stdin=subprocess.DEVNULL,
        env={"SLURM_CONF": f"{_MOUNT_POINT}/slurm.conf", "PATH": _PATH})
    log = (directory / "log").read_text(errors="replace") if (directory / "log").exists() else ""
    accepted = "Running as primary controller" in log
    # a fatal error, a signal (22.05 with `Switches=,`), or a hang (26.05 with it)
    rejected = "fatal: " in log or "retrying in" in log or done.returncode in (124, 134, 139)
    assert accepted != rejected, f"exit status {done.returncode}: {log[-2000:]}{done.stderr}"
    return Outcome(accepted, done.stdout, log)


def ask_slurmctld(directory: Path, cases: Sequence[Mapping[str, bytes]], max_workers: int = 4) -> list[Outcome]:
    """Return the outcomes of many cases, in order; case i is in `directory`/i."""
    with ThreadPoolExecutor(max_workers) as pool:
        return list(pool.map(outcome_of, (directory / str(i) for i in range(len(cases))), cases))


def hostnames(directory: Path, expressions: Sequence[str], max_workers: int = 2) -> list[list[str] | None]:
    """Return the output of `scontrol show hostnames` for each expression, or None if it is rejected.

    Any message on stderr is a rejection: with three and more groups, scontrol only reports and skips an invalid one.
    So is a crash.
    """
    (directory / "slurm.conf").write_text("ClusterName=oracle\nSlurmctldHost=localhost\n")
    prefix = ["prlimit", f"--as={_MAX_SCONTROL_BYTES}"]
    if ROOT:
        shutil.copy(directory / "slurm.conf", f"{ROOT}/tmp/slurm.conf")
        prefix += ["chroot", ROOT]
    env = {"PATH": _PATH, "SLURM_CONF": "/tmp/slurm.conf" if ROOT else str(directory / "slurm.conf")}

    def expand(expression: str) -> list[str] | None:
        try:
            done = subprocess.run([*prefix, "scontrol", "show", "hostnames", expression], capture_output=True,
                                  text=True, timeout=120, check=False, env=env, stdin=subprocess.DEVNULL)
        except subprocess.TimeoutExpired:  # newer releases hang on some invalid expressions
            return None
        return None if done.stderr or done.returncode < 0 else done.stdout.split("\n")[:-1]

    with ThreadPoolExecutor(max_workers) as pool:
        return list(pool.map(expand, expressions))


def unavailable_reason() -> str:
    """Return the reason why the oracle cannot run on this machine, or ""."""
    if os.geteuid():
        return "needs root, to create namespaces"
    return "" if ROOT or shutil.which("slurmctld", path=_PATH) else "slurmctld is not installed"
