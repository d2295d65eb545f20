"""Scripts of users' own in jobs: on the library, on plain PyTorch, on plain MPI."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from jobs import MPI_PROGRAM

EXAMPLES = Path(__file__).parents[2] / "examples"
JOB = """\
#SBATCH -N4 --ntasks-per-node=1
#DL --dl-strategy={strategy}
export OMP_NUM_THREADS=1
slurmdl srun {more} python {program}
"""
def output(cluster, program: str, strategy: str = "allreduce", more: str = "") -> str:
    script = cluster.script(JOB.format(strategy=strategy, program=program, more=more or cluster.launcher))
    for example in EXAMPLES.glob("*.py"):
        shutil.copy(example, script.parent)
    (script.parent / "plain_mpi.py").write_text(MPI_PROGRAM)
    job = cluster.submit(["slurmdl", "sbatch", str(script)], directory=script.parent)
    return cluster.output(job, timeout=180)


def accuracy(text: str) -> float:
    return float(next(line for line in text.splitlines() if line.startswith("accuracy")).split()[1].rstrip("%"))


def test_ddp_runs_as_it_is(cluster):
    text = output(cluster, "ddp.py")
    assert accuracy(text) > 85, text
    assert len({line.split(" on ")[1] for line in text.splitlines() if line.startswith("rank ")}) == 4, text


@pytest.mark.parametrize("more", ["", "--launcher=mpirun"])
def test_mpi4py_runs_as_it_is(cluster, more):
    text = output(cluster, "plain_mpi.py", more=more)
    assert sorted(line for line in text.splitlines() if line.startswith("rank")) == [
        f"rank {rank} of 4 total 10.0" for rank in range(4)]


@pytest.mark.parametrize("strategy", ["gossip", "ps"])
def test_the_library_takes_strategy_and_zones_from_the_job(cluster, strategy):
    """Four nodes fit into a zone, and are placed there."""
    text = output(cluster, "wrap_script.py", strategy)
    assert accuracy(text) > 85, text
    shown = " ".join(text.split())
    assert f"strategy {strategy}" in shown
    assert "zones 1" in shown
    assert "bytes, across 0" in shown
