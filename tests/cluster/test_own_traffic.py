"""User-defined traffic matrices on a real Slurm: the file applies to the job; an invalid file does not prevent it."""

from __future__ import annotations

import pytest
from jobs import rows

#: traffic matrix; even ranks communicate with even ranks, odd ranks with odd ranks
PAIRED = "\n".join(",".join("9e6" if i != j and (i - j) % 2 == 0 else "0" for j in range(8)) for i in range(8))

PROGRAM = "slurmdl srun -n 8 sh -c 'echo $SLURM_PROCID $SLURMDL_ZONE'"


def zones(text: str) -> list[str]:
    """Return the zone of each rank."""
    return [row[1] for row in rows(text)]


def test_communicating_ranks_get_one_zone(cluster):
    """The path is relative to the submission directory; the job starts in another directory."""
    directory = cluster.directory()
    cluster.run(["sh", "-c", f"echo '{PAIRED}' > traffic.csv; mkdir elsewhere"], directory=directory)
    script = cluster.script(PROGRAM)
    args = ["slurmdl", "sbatch", "-N8", "-D", "elsewhere", "--output", f"{directory}/slurm-%j.out"]
    plain, mapped = (zones(cluster.output(cluster.submit([*args, *more, str(script)], directory=directory)))
                     for more in ([], ["--dl-comm-pattern=traffic.csv"]))
    assert len(set(plain[:4])) == len(set(plain[4:])) == 1, "a ring"
    assert len(set(mapped[::2])) == len(set(mapped[1::2])) == 1 and mapped[0] != mapped[1]


def test_base_graph_crosses_zones_at_one_distance(cluster):
    script = cluster.script(f"{PROGRAM} 2>&1")
    rank_zones = zones(cluster.job_output(script, "-N8", "--dl-strategy=gossip", "--dl-comm-pattern=base-2"))
    bits = [bit for bit in (1, 2, 4) if any(rank_zones[rank] != rank_zones[rank ^ bit] for rank in range(8))]
    assert len(bits) == 1, "exactly one of the three distances crosses the zones"


@pytest.mark.parametrize(("text", "fact"), [
    ("0,1\n1,0", "a matrix of 2 x 2 for 8 ranks"), ("0,1,2\n1,0,2", "is not square"),
    ("0,x\n1,0", "is not a row of"), ("0,nan\n1,0", "is nan")])
def test_invalid_file_does_not_prevent_the_job(cluster, text, fact):
    directory = cluster.directory()
    cluster.run(["sh", "-c", f"echo '{text}' > traffic.csv"], directory=directory)
    script = cluster.script("srun hostname")
    args = ["slurmdl", "sbatch", "-N8", "--dl-comm-pattern=traffic.csv"]
    done = cluster.run([*args, str(script)], directory=directory)
    first, *rest = done.stderr.splitlines()
    assert done.returncode == 0 and done.stdout.startswith("Submitted batch job ")
    # a matrix of another size is valid, but not for this job
    outcome = "Slurm chooses the nodes" if "ranks" in fact else "submitted as written"
    assert first.startswith(f"slurmdl: {outcome}: ") and fact in first and "traffic.csv" in first
    assert all("ranks will not be mapped" in line for line in rest)
    strict = cluster.run([*args, "--dl-strict", str(script)], directory=directory)
    assert (strict.stdout, strict.stderr.count("\n")) == ("", 1)
    assert strict.returncode == (75 if "ranks" in fact else 65) and fact in strict.stderr
    explained = cluster.run(["slurmdl", "place", *args[2:]], directory=directory)
    assert fact in explained.stdout + explained.stderr and "Traceback" not in explained.stderr
