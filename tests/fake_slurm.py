"""Slurm's commands as scripts that log their calls and print fixed answers, and the files of a small cluster."""

from __future__ import annotations

import time
from pathlib import Path


class FakeSlurm:
    """A directory for PATH with commands of Slurm, its configuration, and a log of all calls.

    Attributes:
        environ: variables with which a program uses these commands and files, and no others of this machine.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self._log = directory, directory / "calls"
        self.environ = {"PATH": f"{directory}:/usr/bin:/bin", "SLURM_CONF": str(directory / "slurm.conf"),
                        "XDG_CONFIG_HOME": str(directory / "config"), "XDG_STATE_HOME": str(directory / "state"),
                        "XDG_RUNTIME_DIR": str(directory)}

    def command(self, name: str, script: str = "") -> Path:
        """Write a command: it logs its name and arguments, then runs lines of the shell."""
        path = self.directory / name
        path.write_text(f"#!/bin/sh\nprintf '%s\\n' \"{name} $*\" >>{self._log}\n{script}\n")
        path.chmod(0o755)
        return path

    def calls(self, *names: str) -> list[str]:
        """The calls of these commands since this was last asked, all if none is named: `NAME ARGUMENTS`."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        self._log.unlink(missing_ok=True)
        return [line for line in lines if not names or line.partition(" ")[0] in names]

    def cluster(self, busy: str = "") -> None:
        """Let scontrol report n1 to n3 in zone z1, n4 to n6 in z2; those whose digit is in `busy` run jobs."""
        nodes = "".join(f"NodeName=n{i} CPUAlloc={4 * (str(i) in busy)} CPUEfctv=4 CPUTot=4 "
                        f"ActiveFeatures=z{(i + 2) // 3} RealMemory=1000 AllocMem=0 "
                        f"State={'ALLOCATED' if str(i) in busy else 'IDLE'} Partitions=main\n" for i in range(1, 7))
        (self.directory / "slurm.conf").touch()
        (self.directory / "topology.conf").write_text(
            "SwitchName=z1 Nodes=n[1-3]\nSwitchName=z2 Nodes=n[4-6]\nSwitchName=top Switches=z[1-2]\n")
        self.answer("scontrol", f"{nodes}PartitionName=main Default=YES State=UP Nodes=n[1-6]\n")

    def answer(self, name: str, text: str) -> None:
        """Let a command print a text."""
        (self.directory / f"{name}.answer").write_text(text)
        self.command(name, f"cat {self.directory}/{name}.answer")

    def predict(self, nodes: str, delay_s: int) -> None:
        """Let `sbatch --test-only` predict a start on these nodes."""
        start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + delay_s))
        self.command("sbatch", f"echo 'sbatch: Job 1 to start at {start} using 2 processors on nodes {nodes} in "
                               "partition main' >&2")

    def job(self, job_id: int, nodes: str, count: int, batch_host: str = "n1") -> None:
        """Let squeue report one running job without steps, in both formats of `jobs.query_job`."""
        self.command("squeue", f"""case $* in *--steps*) ;; *--Format*) echo '{job_id}|N/A|1|1|0' ;;
*) echo '{job_id}|{job_id}|{job_id}|N/A|RUNNING|main|||{count}|{nodes}|{batch_host}|None' ;; esac""")
