"""`slurmdl bench run` on a real cluster, by an ordinary user: cells that train, that fail, and that cannot be."""

from __future__ import annotations

import csv
import json
import re

import pytest

SPEC = """\
frameworks: [slurmdl, ddp, ddp-mpi, post-local, horovod]
strategies: [gossip, ps]
models: {{"mlp:16": digits}}
nodes: [2]
placements: [slurm, slurmdl]
repeats: 1
steps: 6
warmup_steps: 2
launcher: {launcher}
target_accuracy: 0.1
evaluate_every: 3
"""
#: framework that this machine cannot have -> why
LACKING = {"horovod": "Horovod is not installed", "ddp-mpi": "this PyTorch is built without MPI"}


def launcher(cluster):
    return cluster.launcher.partition("=")[2] or "srun"


def table(folder):
    with open(folder / "report.csv", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_frameworks_side_by_side(cluster):
    """All cells have figures; what is not installed says so; the end is a report, and nothing is run twice."""
    folder = cluster.directory("matrix")
    (folder / "spec.yaml").write_text(SPEC.format(launcher=launcher(cluster)))
    done = cluster.run(["slurmdl", "bench", "run", "spec.yaml"], directory=folder, timeout=400)
    assert done.returncode == 0, done.stderr
    rows = table(folder / "spec")
    assert len(rows) == 12
    for row in rows:
        if row["framework"] in LACKING:
            assert row["status"].startswith(f"missing: {LACKING[row['framework']]}"), row
            continue
        assert row["status"].startswith("done"), (row, done.stderr)
        assert float(row["images/s"]) > 0
        assert float(row["time to accuracy (s)"]) > 0
        assert float(row["memory"]) > 50e6
        assert float(row["intra-zone bytes"]) + float(row["inter-zone bytes"]) > 0
    again = cluster.run(["slurmdl", "bench", "run", "spec.yaml"], directory=folder, timeout=60)
    assert (again.returncode, "done" in again.stderr) == (0, False)


def test_cells_that_cannot_be_say_so_and_the_rest_goes_on(cluster):
    """More nodes than there are; an adapter that raises; and one that takes too much time is for the time limit."""
    folder = cluster.directory("matrix")
    (folder / "raises.py").write_text("STRATEGIES = ('x',)\ndef unavailable_reason(): return ''\n"
                                      "def setup(*given): raise RuntimeError('of its own')\n")
    (folder / "spec.yaml").write_text(
        f"frameworks: [slurmdl, {folder}/raises.py]\nmodels: {{mlp: digits}}\nnodes: [1, 100]\nplacements: [slurm]\n"
        f"repeats: 1\nsteps: 2\nlauncher: {launcher(cluster)}\n")
    done = cluster.run(["slurmdl", "bench", "run", "spec.yaml", "--results", "here"], directory=folder, timeout=300)
    assert done.returncode == 0, done.stderr
    status = {(row["framework"].rpartition("/")[2], row["nodes"]): row["status"] for row in table(folder / "here")}
    assert status["slurmdl", "1"].startswith("done")
    assert status["slurmdl", "100"].startswith("refused: ")
    assert status["raises.py", "1"].startswith("failed: ") and "of its own" in status["raises.py", "1"]
    assert json.loads((folder / "here" / "spec.json").read_text())["nodes"] == [1, 100]


@pytest.mark.parametrize(("does", "status"), [
    ("subprocess.run(['scancel', os.environ['SLURM_JOB_ID']]); time.sleep(100)", "cancelled"),
    ("torch.empty(1 << 50)", "failed: .*allocate"),
    pytest.param("time.sleep(1000)", "time limit", marks=pytest.mark.nightly)])
def test_a_cell_that_is_ended_says_by_what_and_the_rest_goes_on(cluster, does, status):
    """By somebody, by the lack of memory, by the time limit."""
    folder = cluster.directory("matrix")
    (folder / "ends.py").write_text("import os, subprocess, time, torch\nSTRATEGIES = ('x',)\n"
                                    f"def unavailable_reason(): return ''\ndef setup(*given): {does}\n")
    (folder / "spec.yaml").write_text(
        f"frameworks: [{folder}/ends.py, slurmdl]\nmodels: {{mlp: digits}}\nnodes: [2]\nplacements: [slurm]\n"
        f"repeats: 1\nsteps: 2\ntime_limit_minutes: 1\nlauncher: {launcher(cluster)}\n")
    done = cluster.run(["slurmdl", "bench", "run", "spec.yaml", "--results", "here"], directory=folder, timeout=400)
    assert done.returncode == 0, done.stderr
    ended, other = sorted(table(folder / "here"), key=lambda row: row["framework"] == "slurmdl")
    assert re.match(status, ended["status"]), ended
    assert other["status"].startswith("done"), other
