"""Scripts of jobs and parsers of their output, shared by the cluster tests."""

from __future__ import annotations

import itertools
import json
import re
import time
from pathlib import Path

#: an MPI program of a user: each rank prints a line with the sum over all ranks
MPI_PROGRAM = """\
import sys
import numpy as np
from mpi4py import MPI
from slurmdl.mpi_library import wait_until_ready
wait_until_ready(MPI)  # else a rank of Open MPI 4 may crash on an early message, and the others wait for it forever
comm = MPI.COMM_WORLD
total = np.zeros(1)
comm.Allreduce(np.array([comm.Get_rank() + 1.0]), total)
sys.stdout.write(f"rank {comm.Get_rank()} of {comm.Get_size()} total {total[0]}\\n")  # in one write
"""

#: a script whose ranks print their nodes and roles
MAPPED = "slurmdl srun sh -c 'echo rank $SLURM_PROCID $SLURMD_NODENAME $SLURMDL_ROLE'\n"

#: schedule every new job at once, not within the default 3 s
AT_ONCE = ("SchedulerParameters=batch_sched_delay=0,sched_min_interval=0",)


def own_lines(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("slurmdl:")]


def ranks(text: str) -> list[str]:
    """Node of each rank, from lines `rank R NODE ROLE`."""
    node_of_rank = dict(line.split()[1:3] for line in text.splitlines() if line.startswith("rank "))
    assert node_of_rank.keys() == {str(rank) for rank in range(len(node_of_rank))}, text
    return [node_of_rank[str(rank)] for rank in range(len(node_of_rank))]


def rows(text: str) -> list[list[str]]:
    """The fields of each rank's line, by rank; a line begins with the rank.

    Other lines are ignored: at the end of a successful step srun sometimes reports a reset connection.
    """
    return sorted((line.split() for line in text.splitlines() if line[:1].isdigit()), key=lambda row: int(row[0]))


def written(log: Path) -> str:
    """The present output of a job."""
    return log.read_text() if log.exists() else ""


def wait_for_words(log: Path, pattern: str, seconds: float = 120) -> float:
    """Wait until the output of a job matches a pattern; return the seconds."""
    start = time.monotonic()
    while not re.search(pattern, written(log)):
        assert time.monotonic() - start < seconds, written(log)
        time.sleep(0.02)
    return time.monotonic() - start


def trained_on(text: str) -> list[str]:
    """Node of each rank, from the first lines of the trainer."""
    places = re.search(r"^ranks: (.*)$", text, re.M)
    assert places, text
    return [place.split()[1] for place in places[1].split(", ")]


def doctor(cluster, *args: str, all_ok: bool = True) -> dict[str, str]:
    """Run the doctor and return check -> text; no check may fail, nor warn if `all_ok`.

    If Slurm has no PMIx, the check of the MPI may fail.
    """
    done = cluster.run(["slurmdl", "doctor", "--json", *args], timeout=120)
    findings = json.loads(done.stdout)["findings"]
    severities = ("OK",) if all_ok else ("OK", "warn")
    assert [each for each in findings if each["severity"] not in severities
            and not (cluster.launcher and each["check"] == "MPI")] == [], done.stdout
    assert done.returncode == 0 or not all_ok or cluster.launcher, done.stdout
    return {each["check"]: each["text"] for each in findings}


def release(cluster) -> tuple[int, ...]:
    """Release of the cluster's Slurm, for example (22, 5)."""
    return tuple(map(int, re.findall(r"\d+", cluster.run(["scontrol", "--version"]).stdout)[:2]))


def refusal(cluster, *args: str) -> str:
    """The stderr of plain sbatch, which rejects these arguments."""
    done = cluster.run(["sbatch", *args])
    assert done.returncode != 0
    return done.stderr


def zone(node: str) -> str:
    return "zoneA" if int(node[1:]) % 2 else "zoneB"


def zone_changes(nodes: list[str]) -> int:
    """Number of ranks whose next rank is in another zone."""
    return sum(zone(a) != zone(b) for a, b in itertools.pairwise(nodes))


def occupy(cluster, *nodes: str) -> None:
    """Start a job that occupies these nodes."""
    job = cluster.submit(["sbatch", "-N", str(len(nodes)), "-w", ",".join(nodes), "--exclusive",
                          "--wrap", "sleep 90"])
    cluster.wait_for(job, {"RUNNING"})
