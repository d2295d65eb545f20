"""`slurmdl bench run` by an ordinary user on a cluster: cells that train, fail, or cannot run."""

from __future__ import annotations

import csv
import json
import re

import pytest

SPEC = """\
frameworks: [slurmdl, ddp, absent.py, post-local]
strategies: [ps]
models: {{"mlp:16": digits}}
nodes: [2]
placements: [slurmdl]
repeats: 1
steps: 6
warmup_steps: 2
step_starter: {launcher}
target_accuracy: 0.1
evaluate_every: 3
"""
#: adapter whose cells end by an action
ENDS = """\
import os, subprocess, time, torch
STRATEGIES = ('x',)
def unavailable_reason(): return ''
def setup(*arguments): {action}
"""
#: adapter of a framework that is not installed
ABSENT = """\
STRATEGIES = ('x',)
def unavailable_reason(): return 'it is not installed'
def setup(*arguments): raise AssertionError
"""


def launcher_of(cluster):
    return cluster.launcher.partition("=")[2] or "srun"


def read_report(folder):
    with open(folder / "report.csv", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.nightly
def test_bench_run_reports_all_frameworks(cluster):
    """Each cell has results or the reason for their absence; a second run repeats no cell."""
    folder = cluster.directory("matrix")
    (folder / "absent.py").write_text(ABSENT)
    (folder / "spec.yaml").write_text(SPEC.format(launcher=launcher_of(cluster)))
    done = cluster.run(["slurmdl", "bench", "run", "spec.yaml"], directory=folder, timeout=400)
    assert done.returncode == 0, done.stderr
    rows = read_report(folder / "spec")
    assert len(rows) == 4
    for row in rows:
        if row["framework"] == "absent.py":
            assert row["status"] == "missing: it is not installed", row
            continue
        assert row["status"].startswith("done"), (row, done.stderr)
        assert float(row["images/s"]) > 0
        assert float(row["time to accuracy (s)"]) > 0
        assert float(row["memory"]) > 50e6
        assert float(row["intra-zone bytes"]) + float(row["inter-zone bytes"]) > 0
    second = cluster.run(["slurmdl", "bench", "run", "spec.yaml"], directory=folder, timeout=300)
    assert (second.returncode, "done" in second.stderr) == (0, False)


def test_bench_run_reports_impossible_cells_and_runs_the_rest(cluster):
    """A cell with more nodes than the cluster has, an adapter that raises an exception, and a cancelled cell."""
    folder = cluster.directory("matrix")
    (folder / "raises.py").write_text("STRATEGIES = ('x',)\ndef unavailable_reason(): return ''\n"
                                      "def setup(*arguments): raise RuntimeError('adapter error')\n")
    (folder / "ends.py").write_text(ENDS.format(
        action="subprocess.run(['scancel', os.environ['SLURM_JOB_ID']]); time.sleep(100)"))
    (folder / "spec.yaml").write_text(
        f"frameworks: [{folder}/ends.py, {folder}/raises.py, slurmdl]\nmodels: {{mlp: digits}}\nnodes: [1, 100]\n"
        f"placements: [slurm]\nrepeats: 1\nsteps: 2\nstep_starter: {launcher_of(cluster)}\n")
    results = folder / "it's at 100%j #1"
    done = cluster.run(["slurmdl", "bench", "run", "spec.yaml", "--results", str(results)], directory=folder,
                       timeout=300)
    assert done.returncode == 0, done.stderr
    status = {(row["framework"].rpartition("/")[2], row["nodes"]): row["status"] for row in read_report(results)}
    assert status["slurmdl", "1"].startswith("done")
    assert status["slurmdl", "100"].startswith("refused: ")
    assert status["ends.py", "1"].startswith("cancelled")
    assert status["raises.py", "1"].startswith("failed: ") and "adapter error" in status["raises.py", "1"]
    assert json.loads((results / "spec.json").read_text())["nodes"] == [1, 100]


@pytest.mark.nightly
@pytest.mark.parametrize(("action", "status"), [
    ("torch.empty(1 << 50)", "failed: .*allocate"), ("time.sleep(1000)", "time limit")])
def test_bench_run_reports_cause_of_ended_cell_and_runs_the_rest(cluster, action, status):
    """A cell that is ended by lack of memory, or the time limit."""
    folder = cluster.directory("matrix")
    (folder / "ends.py").write_text(ENDS.format(action=action))
    (folder / "spec.yaml").write_text(
        f"frameworks: [{folder}/ends.py, slurmdl]\nmodels: {{mlp: digits}}\nnodes: [2]\nplacements: [slurm]\n"
        f"repeats: 1\nsteps: 2\ntime_limit_minutes: 1\nstep_starter: {launcher_of(cluster)}\n")
    done = cluster.run(["slurmdl", "bench", "run", "spec.yaml", "--results", "here"], directory=folder, timeout=400)
    assert done.returncode == 0, done.stderr
    ended, other = sorted(read_report(folder / "here"), key=lambda row: row["framework"] == "slurmdl")
    assert re.match(status, ended["status"]), ended
    assert other["status"].startswith("done"), other
