"""Training jobs on a cluster: accuracy, roles, and bytes sent, compared with the counters of the routers."""

from __future__ import annotations

import itertools
import json

import pytest

JOB = """\
#SBATCH -N5 --ntasks-per-node=1
#DL --dl-strategy={strategy}
{more}
slurmdl srun {launcher} python -m slurmdl.train --strategy {strategy} --steps {steps} --summary summary.json
"""


def train(cluster, strategy, more, steps, launcher=""):
    """Run the job; return its output, the bytes between zones that the routers counted, and the summary."""
    script = cluster.script(JOB.format(strategy=strategy, more=more, steps=steps,
                                       launcher=launcher or cluster.launcher))
    bytes_before = cluster.inter_zone_bytes()
    text = cluster.job_output(script, timeout=120)
    return text, cluster.inter_zone_bytes() - bytes_before, json.loads((script.parent / "summary.json").read_text())


@pytest.mark.parametrize(("strategy", "more", "steps"), [
    *(pytest.param(strategy, "", steps, marks=pytest.mark.nightly)
      for strategy, steps in (("allreduce", 40), ("gossip", 80))),
    ("ps", "#DL --dl-ps=2", 40)])
def test_training_reaches_accuracy_and_meter_matches_router_counters(cluster, strategy, more, steps):
    text, router_bytes, summary = train(cluster, strategy, more, steps)
    assert summary["test_accuracy"] >= 0.9, text
    assert summary["world_size"] == 5
    assert summary["num_servers"] == (2 if strategy == "ps" else 0)
    assert summary["num_zones"] == 2
    assert router_bytes == pytest.approx(summary["bytes_sent"]["inter_zone"], rel=0.05)


def test_hierarchical_allreduce_inter_zone_bytes_match_model(cluster):
    """The plan sets the trainer's comm pattern; each step sends 2 N (Z - 1) / Z over each of the Z = 2 uplinks.

    The training reaches the accuracy.
    """
    text, router_bytes, summary = train(cluster, "allreduce", "#DL --dl-comm-pattern=hierarchical", 40)
    assert (summary["comm_pattern"], summary["num_zones"], summary["world_size"]) == ("hierarchical", 2, 5), text
    assert summary["test_accuracy"] >= 0.9, text
    modeled_bytes = 40 * 2 * 4 * summary["parameters"]
    assert summary["bytes_sent"]["inter_zone"] == modeled_bytes
    assert router_bytes == pytest.approx(modeled_bytes, rel=0.05)


@pytest.mark.nightly  # also in test_steps.py, without training
def test_mpirun_uses_the_same_rank_map(cluster):
    _, _, summary = train(cluster, "allreduce", "", 20, "--step-starter=mpirun")
    zones = [rank["zone"] for rank in summary["rank_map"]]
    assert sum(zone != next_zone for zone, next_zone in itertools.pairwise(zones)) == 1


def test_ranks_without_pmi_use_torch(cluster):
    """MPI would run each of the ranks as a separate job of one rank: it is refused if it is asked for."""
    train = ["srun", "-N3", "--mpi=none", "python", "-m", "slurmdl.train", "--steps", "2"]
    done = cluster.run(train)
    assert done.returncode == 0, done.stderr
    nodes = [entry.split()[1] for entry in done.stdout.partition("ranks: ")[2].splitlines()[0].split(", ")]
    assert len(nodes) == len(set(nodes)) == 3
    assert "test accuracy" in done.stdout
    refused = cluster.run([*train, "--backend", "mpi"])
    assert refused.returncode != 0 and "Traceback" not in refused.stderr and "pmix" in refused.stderr
