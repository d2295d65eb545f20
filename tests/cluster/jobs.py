"""Scripts of jobs and parsers of their output, shared by the cluster tests."""

from __future__ import annotations

import itertools
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

#: whether the slow cases run, too
NIGHTLY = os.environ.get("SLURMDL_NIGHTLY") == "1"
#: Slurm starts a requeued job again after 6 s instead of 121 s
SOON = ("AuthInfo=cred_expire=5",)
#: MPI program of a user: each rank prints a line with the sum over all ranks
MPI_PROGRAM = """\
import sys
import numpy as np
from mpi4py import MPI
from slurmdl.train.transports.mpi import wait_until_ready
wait_until_ready(MPI)  # else a rank may crash on an early message (ompi#12495)
comm = MPI.COMM_WORLD
total = np.zeros(1)
comm.Allreduce(np.array([comm.Get_rank() + 1.0]), total)
sys.stdout.write(f"rank {comm.Get_rank()} of {comm.Get_size()} total {total[0]}\\n")  # in one write
"""

#: job script; each rank prints its node and role
MAPPED = "slurmdl srun sh -c 'echo rank $SLURM_PROCID $SLURMD_NODENAME $SLURMDL_ROLE'\n"

#: schedule new jobs within a second, heterogeneous ones too (only backfill starts those); default of the sandboxes of
#: the tests
AT_ONCE = ("SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=1",)
#: schedule new jobs within 3 s, Slurm's default
DEFAULT_DELAY = ("SchedulerParameters=batch_sched_delay=3",)


def wait_until(is_true: Callable[[], object], failure: object, seconds: float = 30) -> None:
    """Wait until a condition is true; `failure` is the message if it is not, or a function that returns it."""
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, failure() if callable(failure) else failure
        time.sleep(0.1)


def slow_links(cluster, *nodes: str) -> str:
    """Return an option for link scores by which these nodes have slow links, so that Slurm's own choice is worse."""
    file = cluster.directory("scores") / "scores.json"
    file.write_text(json.dumps({"nodes": {node: {"throughput": 1e6} for node in nodes}}))
    return f"--dl-link-scores={file}"


def slurmdl_messages(stderr: str) -> list[str]:
    """Return the messages of slurmdl in an error output."""
    return [line for line in stderr.splitlines() if line.startswith("slurmdl:")]


def rank_nodes(text: str) -> list[str]:
    """Return the node of each rank, from lines `rank R NODE ROLE`."""
    node_of_rank = dict(line.split()[1:3] for line in text.splitlines() if line.startswith("rank "))
    assert node_of_rank.keys() == {str(rank) for rank in range(len(node_of_rank))}, text
    return [node_of_rank[str(rank)] for rank in range(len(node_of_rank))]


def rows(text: str) -> list[list[str]]:
    """Return the fields of each rank's line, by rank; a line begins with the rank.

    Ignores all other lines: at the end of a successful step, srun sometimes reports a reset connection.
    """
    return sorted((line.split() for line in text.splitlines() if line[:1].isdigit()), key=lambda row: int(row[0]))


def read_log(log: Path) -> str:
    """Return the current output of a job."""
    return log.read_text() if log.exists() else ""


def wait_for_pattern(log: Path, pattern: str, seconds: float = 120) -> float:
    """Wait until the output of a job matches a pattern; return the elapsed seconds."""
    start = time.monotonic()
    while not re.search(pattern, read_log(log)):
        assert time.monotonic() - start < seconds, read_log(log)
        time.sleep(0.02)
    return time.monotonic() - start


def trainer_nodes(text: str) -> list[str]:
    """Return the node of each rank, from the first lines of the trainer."""
    places = re.search(r"^ranks: (.*)$", text, re.M)
    assert places, text
    return [place.split()[1] for place in places[1].split(", ")]


def run_doctor(cluster, *args: str, all_ok: bool = True) -> dict[str, str]:
    """Run `slurmdl doctor`; return check -> text. Asserts that no check fails, or, if `all_ok`, warns.

    The MPI check may fail if Slurm has no PMIx.
    """
    done = cluster.run(["slurmdl", "doctor", "--json", *args], timeout=120)
    findings = json.loads(done.stdout)["findings"]
    severities = ("OK",) if all_ok else ("OK", "warn")
    assert [finding for finding in findings if finding["severity"] not in severities
            and not (cluster.launcher and finding["check"] == "MPI")] == [], done.stdout
    assert done.returncode == 0 or not all_ok or cluster.launcher, done.stdout
    return {finding["check"]: finding["text"] for finding in findings}


def slurm_release(cluster) -> tuple[int, ...]:
    """Return the release of the cluster's Slurm, for example (22, 5)."""
    return tuple(map(int, re.findall(r"\d+", cluster.run(["scontrol", "--version"]).stdout)[:2]))


def skip_before_torch_2(cluster) -> None:
    """Skip a test that needs DeviceMesh, or torchrun with a local address; Debian 12 has PyTorch 1.13."""
    version = cluster.run(["python3", "-c", "import torch; print(torch.__version__)"]).stdout.strip()
    if version.startswith("1."):
        pytest.skip(f"the cluster has PyTorch {version}; expected 2 or newer")


def sbatch_error(cluster, *args: str) -> str:
    """Return the error output of plain sbatch, which must reject `args`."""
    done = cluster.run(["sbatch", *args])
    assert done.returncode != 0
    return done.stderr


def zone(node: str) -> str:
    return "zoneA" if int(node[1:]) % 2 else "zoneB"


def zone_changes(nodes: list[str]) -> int:
    """Return the number of consecutive ranks that are in different zones."""
    return sum(zone(a) != zone(b) for a, b in itertools.pairwise(nodes))


def occupy(cluster, *nodes: str) -> None:
    """Start an exclusive job on `nodes`."""
    cluster.start(["sbatch", "-N", str(len(nodes)), "-w", ",".join(nodes), "--exclusive", "--wrap", "sleep 90"])


class Health:
    """A user's calls on a cluster, with a list of bad nodes of their own."""

    def __init__(self, cluster) -> None:
        self.cluster, self.state = cluster, cluster.directory("state")
        self.env = {"XDG_STATE_HOME": str(self.state)}

    def run(self, *argv: str):
        return self.cluster.run(["slurmdl", *argv], env=self.env)

    def submit(self, script: str, *options: str, program: str = "sbatch") -> int:
        return self.cluster.sbatch(script, *options, program=program, env=self.env)

    def start(self, script: str, *options: str) -> int:
        """Submit a job and wait until it runs."""
        job = self.submit(script, *options)
        self.cluster.wait_for(job, {"RUNNING"})
        return job

    def history(self) -> str:
        return self.run("preflight", "--history").stdout


def started_on(text: str, restart: int) -> set[str]:
    match = re.search(rf"start {restart} on \S+ with (.*)", text)
    assert match, text
    return set(match[1].split())
