"""Slurm as the oracle: a real slurmctld reads a topology.conf, and says whether and how.

Each file is given to a slurmctld of its own, in namespaces of its own (network, mounts, processes), which end
with it. That needs no munge, no slurmd and no host of the cluster, and takes about 50 ms.

SLURMDL_ORACLE_ROOT names a directory with another Debian, where another release of Slurm is installed; then that
one is asked: `debootstrap --variant=minbase trixie DIR`, then in it `apt-get install slurmctld slurm-client
iproute2`.
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

#: the nodes that the cluster has
NODES = [f"n{i}" for i in range(1, 41)]

_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_AT = "/mnt"  # where Slurm sees the directory of a case
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

# Slurm resolves names only where an address beside 127.0.0.1 is there; 1AA1 is its port, 6817. For a file that is
# not there 22.05 waits a minute before it gives up: nobody has to wait for that here.
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
class Verdict:
    """What slurmctld made of a file: whether it came up, what `scontrol -o show topology` said, and its log."""

    accepted: bool
    text: str
    log: str


def ask(directory: Path, files: Mapping[str, bytes], plugin: str = "tree") -> Verdict:
    """The verdict on the topology.conf among `files`, which are laid into the new directory `directory`."""
    directory.mkdir()
    (directory / "state").mkdir()
    (directory / "slurm.conf").write_text(_SLURM_CONF.format(plugin=plugin))
    for name, content in files.items():
        (directory / name).write_bytes(content)
    enter = f"mount --bind {shlex.quote(str(directory))} {shlex.quote(ROOT + _AT)}\n"
    enter += (f"mount -t proc proc {shlex.quote(ROOT)}/proc\nexec chroot {shlex.quote(ROOT)} " if ROOT else "exec ")
    done = subprocess.run(
        ["timeout", "-k1", "15", "unshare", "--net", "--mount", "--pid", "--uts", "--fork", "--kill-child=KILL",
         "--mount-proc", "sh", "-c", f"{enter}sh -c {shlex.quote(_SCRIPT)}"],
        capture_output=True, text=True, errors="replace", check=False, stdin=subprocess.DEVNULL,
        env={"SLURM_CONF": f"{_AT}/slurm.conf", "PATH": _PATH})
    log = (directory / "log").read_text(errors="replace") if (directory / "log").exists() else ""
    up = "Running as primary controller" in log
    # it says why it ends, dies of a signal, as 22.05 does of `Switches=,`, or hangs for ever, as 26.05 does of it
    refused = "fatal: " in log or "retrying in" in log or done.returncode in (124, 134, 139)
    assert up != refused, f"exit status {done.returncode}: {log[-2000:]}{done.stderr}"
    return Verdict(up, done.stdout, log)


def ask_many(directory: Path, cases: Sequence[Mapping[str, bytes]], at_once: int = 4) -> list[Verdict]:
    """The verdicts on many cases, in their order, several at once; case i is laid into `directory`/i."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(ask, (directory / str(i) for i in range(len(cases))), cases))


def hostnames(directory: Path, expressions: Sequence[str], at_once: int = 2) -> list[list[str] | None]:
    """What `scontrol show hostnames` gives for each expression, None where it refuses it.

    A complaint on stderr is a refusal: with three groups and more, a bad one is only complained about and left out.
    """
    (directory / "slurm.conf").write_text("ClusterName=oracle\nSlurmctldHost=localhost\n")
    prefix = []
    if ROOT:
        shutil.copy(directory / "slurm.conf", f"{ROOT}/tmp/slurm.conf")
        prefix = ["chroot", ROOT]
    env = {"PATH": _PATH, "SLURM_CONF": "/tmp/slurm.conf" if ROOT else str(directory / "slurm.conf")}

    def one(expression: str) -> list[str] | None:
        try:
            done = subprocess.run([*prefix, "scontrol", "show", "hostnames", expression], capture_output=True,
                                  text=True, timeout=10, check=False, env=env, stdin=subprocess.DEVNULL)
        except subprocess.TimeoutExpired:  # newer releases hang on a few that are damaged
            return None
        return None if done.stderr else done.stdout.split("\n")[:-1]

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(one, expressions))


def missing() -> str:
    """Why there is no oracle here, "" where there is one."""
    if os.geteuid():
        return "needs root, to make namespaces"
    return "" if ROOT or shutil.which("slurmctld", path=_PATH) else "slurmctld is not installed"
