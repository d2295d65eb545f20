"""Training jobs on a real cluster: accuracy, roles, and bytes that the routers between the zones confirm."""

from __future__ import annotations

import itertools
import json

import pytest

JOB = """\
#SBATCH -N6 --ntasks-per-node=1
#DL --dl-strategy={strategy}
{more}
slurmdl srun {launcher} python -m slurmdl.train --strategy {strategy} --steps {steps} --summary summary.json
"""


@pytest.mark.parametrize(("strategy", "more", "steps"), [
    ("allreduce", "", 40), ("gossip", "", 80), ("ps", "#DL --dl-ps=2", 60)])
def test_it_learns_and_its_meter_agrees_with_the_routers(cluster, strategy, more, steps):
    script = cluster.script(JOB.format(strategy=strategy, more=more, steps=steps, launcher=cluster.launcher))
    before = cluster.inter_zone_bytes()
    job = cluster.submit(["slurmdl", "sbatch", str(script)], directory=script.parent)
    text = cluster.output(job, timeout=120)
    crossed = cluster.inter_zone_bytes() - before
    summary = json.loads((script.parent / "summary.json").read_text())
    assert summary["accuracy"] >= 0.9, text
    assert summary["ranks"] == 6
    assert summary["ps"] == (2 if strategy == "ps" else 0)
    assert summary["zones"] == 2
    assert crossed == pytest.approx(summary["bytes"]["across"], rel=0.05)


def test_hierarchical_allreduce_crosses_the_zones_as_modelled(cluster):
    """The plan brings the pattern to the trainer: 2 N (Z - 1) / Z over each of Z = 2 uplinks and step."""
    script = cluster.script(JOB.format(strategy="allreduce", more="#DL --dl-comm-pattern=hierarchical", steps=40,
                                       launcher=cluster.launcher))
    before = cluster.inter_zone_bytes()
    job = cluster.submit(["slurmdl", "sbatch", str(script)], directory=script.parent)
    text = cluster.output(job, timeout=120)
    crossed = cluster.inter_zone_bytes() - before
    summary = json.loads((script.parent / "summary.json").read_text())
    assert (summary["traffic"], summary["zones"], summary["ranks"]) == ("hierarchical", 2, 6), text
    modelled = 40 * 2 * 4 * summary["parameters"]
    assert summary["bytes"]["across"] == modelled
    assert crossed == pytest.approx(modelled, rel=0.05)


def test_mpirun_gives_the_same_map(cluster):
    script = cluster.script(JOB.format(strategy="allreduce", more="", steps=20, launcher="--launcher=mpirun"))
    job = cluster.submit(["slurmdl", "sbatch", str(script)], directory=script.parent)
    cluster.output(job, timeout=120)
    placed = json.loads((script.parent / "summary.json").read_text())["map"]
    zones = [place["zone"] for place in placed]
    assert sum(a != b for a, b in itertools.pairwise(zones)) == 1


def test_the_wrong_pmi_is_refused_not_run_six_times(cluster):
    done = cluster.run(["srun", "-N6", "--mpi=none", "python", "-m", "slurmdl.train", "--steps", "1"])
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert "pmix" in done.stderr
