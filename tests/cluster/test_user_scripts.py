"""User scripts in jobs: with the library, with plain PyTorch, and with plain MPI."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from jobs import MPI_PROGRAM

EXAMPLES = Path(__file__).parents[2] / "examples"
JOB = """\
#SBATCH -N{nodes} --ntasks-per-node=1
#DL --dl-strategy={strategy}
export OMP_NUM_THREADS=1
slurmdl srun {option} python {program}
"""


def run_script(cluster, program: str, strategy: str = "allreduce", option: str = "", nodes: int = 2) -> str:
    """Run a script in a job; return its output."""
    script = cluster.script(JOB.format(strategy=strategy, program=program, option=option or cluster.launcher,
                                       nodes=nodes))
    for example in EXAMPLES.glob("*.py"):
        shutil.copy(example, script.parent)
    (script.parent / "plain_mpi.py").write_text(MPI_PROGRAM)
    return cluster.job_output(script, timeout=180)


def parse_accuracy(text: str) -> float:
    return float(next(line for line in text.splitlines() if line.startswith("accuracy")).split()[1].rstrip("%"))


def test_ddp_script_runs_unchanged(cluster):
    text = run_script(cluster, "ddp.py")
    assert parse_accuracy(text) > 85, text
    assert len({line.split(" on ")[1] for line in text.splitlines() if line.startswith("rank ")}) == 2, text


@pytest.mark.parametrize("option", ["", "--step-starter=mpirun"])
def test_mpi4py_script_runs_unchanged(cluster, option):
    text = run_script(cluster, "plain_mpi.py", option=option, nodes=4)
    assert sorted(line for line in text.splitlines() if line.startswith("rank")) == [
        f"rank {rank} of 4 total 10.0" for rank in range(4)]


@pytest.mark.parametrize("strategy", ["gossip", pytest.param("ps", marks=pytest.mark.nightly)])
def test_library_takes_strategy_and_zones_from_the_job(cluster, strategy):
    """Placement puts the nodes in one zone."""
    text = run_script(cluster, "wrap_script.py", strategy, nodes=3 if strategy == "ps" else 2)
    assert parse_accuracy(text) > 85, text
    compact = " ".join(text.split())
    assert f"strategy {strategy}" in compact
    assert "zones 1" in compact
    assert "bytes, inter-zone 0" in compact
    assert "seconds/step" in compact


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["allreduce", "gossip", "ps"])
@pytest.mark.parametrize("framework", ["lightning", "accelerate"])
def test_frameworks_train_by_the_library(cluster, framework, strategy):
    """Installed by `make launchers`."""
    pytest.importorskip(framework)
    text = run_script(cluster, f"{framework}_digits.py", strategy, nodes=3)
    assert parse_accuracy(text) > 85, text
    compact = " ".join(text.split())
    assert f"strategy {strategy}" in compact and "ranks 3" in compact
