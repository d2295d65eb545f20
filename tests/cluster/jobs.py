"""What tests of jobs share: scripts, and what the jobs tell of their ranks."""

from __future__ import annotations

import itertools

#: a script whose ranks tell where they are
MAPPED = "slurmdl srun sh -c 'echo rank $SLURM_PROCID $SLURMD_NODENAME $SLURMDL_ROLE'\n"

#: a controller that looks at every new job at once, not within its usual 3 s
AT_ONCE = ("SchedulerParameters=batch_sched_delay=0,sched_min_interval=0",)


def own_lines(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("slurmdl:")]


def ranks(text: str) -> list[str]:
    """Node of each rank, from lines `rank R NODE ROLE`."""
    found = dict(line.split()[1:3] for line in text.splitlines() if line.startswith("rank "))
    return [found[str(rank)] for rank in range(len(found))]


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
