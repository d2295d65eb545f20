"""What tests of jobs share: scripts, and what the jobs tell of their ranks."""

from __future__ import annotations

import itertools
import json
import re
import time
from pathlib import Path

#: an MPI program of the user's own: one line on each rank, with the sum over all ranks
MPI_PROGRAM = """\
import sys
import numpy as np
from mpi4py import MPI
from slurmdl.mpi_library import wait_until_ready
wait_until_ready(MPI)  # else a rank of Open MPI 4 may crash on an early message, and the others wait for it forever
comm = MPI.COMM_WORLD
total = np.zeros(1)
comm.Allreduce(np.array([comm.Get_rank() + 1.0]), total)
sys.stdout.write(f"rank {comm.Get_rank()} of {comm.Get_size()} total {total[0]}\\n")  # a line in one piece
"""

#: a script whose ranks tell where they are
MAPPED = "slurmdl srun sh -c 'echo rank $SLURM_PROCID $SLURMD_NODENAME $SLURMDL_ROLE'\n"

#: a controller that looks at every new job at once, not within its usual 3 s
AT_ONCE = ("SchedulerParameters=batch_sched_delay=0,sched_min_interval=0",)


def own_lines(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("slurmdl:")]


def ranks(text: str) -> list[str]:
    """Node of each rank, from lines `rank R NODE ROLE`."""
    found = dict(line.split()[1:3] for line in text.splitlines() if line.startswith("rank "))
    assert found.keys() == {str(rank) for rank in range(len(found))}, text
    return [found[str(rank)] for rank in range(len(found))]


def rows(text: str) -> list[list[str]]:
    """The words of each rank's line, by rank, of a job whose ranks write theirs first.

    srun may have written, too: that a connection was reset, now and then, at the end of a step where all went well.
    """
    return sorted((line.split() for line in text.splitlines() if line[:1].isdigit()), key=lambda row: int(row[0]))


def written(log: Path) -> str:
    """What a job has written so far."""
    return log.read_text() if log.exists() else ""


def wait_for_words(log: Path, words: str, seconds: float = 120) -> float:
    """Seconds until a job has written what matches a pattern."""
    began = time.monotonic()
    while not re.search(words, written(log)):
        assert time.monotonic() - began < seconds, written(log)
        time.sleep(0.02)
    return time.monotonic() - began


def trained_on(text: str) -> list[str]:
    """Node of each rank, from the first lines of the trainer."""
    places = re.search(r"^ranks: (.*)$", text, re.M)
    assert places, text
    return [place.split()[1] for place in places[1].split(", ")]


def doctor(cluster, *words: str, all_ok: bool = True) -> dict[str, str]:
    """Check -> its text; none has failed, and all are OK unless warnings may be among them.

    Where Slurm has no PMIx, the MPI that needs it is a fault, which is the cluster's.
    """
    done = cluster.run(["slurmdl", "doctor", "--json", *words], timeout=120)
    found = json.loads(done.stdout)["findings"]
    grades = ("OK",) if all_ok else ("OK", "warn")
    assert [each for each in found if each["severity"] not in grades
            and not (cluster.launcher and each["check"] == "MPI")] == [], done.stdout
    assert done.returncode == 0 or not all_ok or cluster.launcher, done.stdout
    return {each["check"]: each["text"] for each in found}


def release(cluster) -> tuple[int, ...]:
    """Of its Slurm, as (22, 5)."""
    return tuple(map(int, re.findall(r"\d+", cluster.run(["scontrol", "--version"]).stdout)[:2]))


def refusal(cluster, *words: str) -> str:
    """What plain sbatch says, which does not take this."""
    done = cluster.run(["sbatch", *words])
    assert done.returncode != 0
    return done.stderr


def zone(node: str) -> str:
    return "zoneA" if int(node[1:]) % 2 else "zoneB"


def zone_changes(nodes: list[str]) -> int:
    """How often the next rank is in another zone."""
    return sum(zone(a) != zone(b) for a, b in itertools.pairwise(nodes))


def occupy(cluster, *nodes: str) -> None:
    """Another user's job on all of these nodes, running."""
    job = cluster.submit(["sbatch", "-N", str(len(nodes)), "-w", ",".join(nodes), "--exclusive",
                          "--wrap", "sleep 90"])
    cluster.wait_for(job, {"RUNNING"})
