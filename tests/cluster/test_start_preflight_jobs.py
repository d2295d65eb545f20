"""The preflight of `slurmdl srun --dl-preflight` on a real Slurm: a job with a bad node."""

from __future__ import annotations

import json
import re
import time

import pytest
from conftest import Cluster
from jobs import SOON, Health, started_on

from slurmdl.sandbox import namespaces

#: two steps; the nodes are checked before the first one only
STEPS = """\
#SBATCH --requeue --open-mode=append
#DL --dl-preflight=25 --dl-explain
echo "start ${SLURM_RESTART_COUNT-0} on $SLURM_JOB_NODELIST" with "$(scontrol show hostnames | tr '\\n' ' ')"
for step in one two; do
    slurmdl srun sh -c "echo step $step on \\$SLURMD_NODENAME"
    echo "status $?"
done
"""
#: the bad node; it is never the first one, which runs the batch script
BAD = "n3"


def fill_disk(cluster: Cluster, node: str) -> None:
    """Leave 50 MB free in /tmp: a fault that is found whatever else the machine of the sandbox does."""
    namespaces.run_on_host(cluster.sandbox.pids[node], ["mount", "-t", "tmpfs", "-o", "size=50M,mode=1777", "tmpfs",
                                                        "/tmp"])


@pytest.fixture(scope="module")
def _cluster_with_bad_node(new_sandbox) -> Cluster:
    cluster = new_sandbox(nodes=4, slurm_conf_lines=SOON)
    fill_disk(cluster, BAD)
    return cluster


@pytest.fixture
def with_bad_node(_cluster_with_bad_node) -> Health:
    """A cluster of four nodes, one of which has a full disk."""
    return Health(_cluster_with_bad_node)


def nodes_of_steps(text: str) -> dict[str, set[str]]:
    """The nodes on which each step ran."""
    return {step: set(re.findall(rf"step {step} on (\S+)", text)) for step in ("one", "two")}


def test_srun_requeues_the_job_without_the_bad_node(with_bad_node):
    cluster = with_bad_node.cluster
    record = cluster.wait(with_bad_node.submit(STEPS, "-N3", program="slurmdl sbatch"), 120)
    text = cluster.text_of(record)
    assert BAD in started_on(text, 0) and BAD not in started_on(text, 1), text
    assert (record["JobState"], record["Restarts"], record["ExcNodeList"]) == ("COMPLETED", "1", BAD), text
    assert list(nodes_of_steps(text).values()) == 2 * [{"n1", "n2", "n4"}], text
    assert text.count("1 of 3 nodes bad") == 1 and text.count("0 of 3 nodes bad") == 1, text
    assert f"{BAD} of " in with_bad_node.history()


def test_spare_node_replaces_the_bad_node(with_bad_node):
    cluster = with_bad_node.cluster
    record = cluster.wait(with_bad_node.submit(STEPS, "-N3", "--dl-node-binding=late", program="slurmdl sbatch"), 120)
    text = cluster.text_of(record)
    assert BAD in started_on(text, 0), text
    assert (record["JobState"], record["Restarts"]) == ("COMPLETED", "0"), text
    assert list(nodes_of_steps(text).values()) == 2 * [{"n1", "n2", "n4"}], text
    assert f"slurmdl: preflight: the job continues without {BAD}" in text
    assert text.count(" of 4 nodes bad") == 1, text


TRAINS = """\
#SBATCH -N4 --ntasks-per-node=1 --requeue --open-mode=append
echo "start ${SLURM_RESTART_COUNT-0} on $SLURM_JOB_NODELIST" with "$(scontrol show hostnames | tr '\\n' ' ')"
slurmdl srun python -m slurmdl.train --strategy allreduce --steps 100 --summary summary.json
echo "status $?"
"""


@pytest.mark.nightly
def test_bad_node_that_recovers_before_the_next_start_is_left_out(new_sandbox):
    """The training ends with the model of an undisturbed one. In one zone: ranks in others sum in another order."""
    cluster = new_sandbox(nodes=5, zones=1, slurm_conf_lines=SOON)
    health = Health(cluster)
    undisturbed, path = cluster.script(TRAINS), cluster.script(TRAINS)
    text = cluster.job_output(undisturbed, env=health.env, timeout=120)
    assert BAD in started_on(text, 0) and text.rstrip().endswith("status 0"), text
    fill_disk(cluster, BAD)
    job = cluster.sbatch(path, "--dl-preflight=25", env=health.env)
    cluster.wait_for(job, {"RUNNING"})
    record = cluster.wait_for(job, {"PENDING"}, 90)
    namespaces.run_on_host(cluster.sandbox.pids[BAD], ["umount", "/tmp"])
    assert record["Restarts"] == "1"
    record = cluster.wait(job, 120)
    text = cluster.text_of(record)
    assert text.rstrip().endswith("status 0"), text
    assert (record["JobState"], record["Restarts"], record["ExcNodeList"]) == ("COMPLETED", "1", BAD), text
    assert BAD in started_on(text, 0), text
    assert started_on(text, 1) == {"n1", "n2", "n4", "n5"}, text
    summaries = [json.loads((script.parent / "summary.json").read_text()) for script in (undisturbed, path)]
    for key in ("steps", "parameters_crc32", "test_accuracy"):
        assert summaries[0][key] == summaries[1][key], key
    assert {place["node"] for place in summaries[1]["rank_map"]} == {"n1", "n2", "n4", "n5"}


@pytest.mark.nightly
def test_job_that_needs_the_bad_node_stops_runs_or_waits(with_bad_node):
    """All four nodes are needed: the user chooses."""
    cluster = with_bad_node.cluster

    def output(*options: str) -> str:
        return cluster.output(with_bad_node.submit(STEPS, "-N4", *options, program="slurmdl sbatch"), 120)

    text = output()
    assert text.count("status 78") == 2 and "step" not in re.sub("the step", "", text), text
    assert re.search(rf"slurmdl: preflight: {BAD} bad, and job \d+ needs 4 nodes; without {BAD} partition main has 3 "
                     r"in service; the step is not started \(--dl-on-bad-nodes=run starts it\)", text)
    text = output("--dl-on-bad-nodes=run")
    assert nodes_of_steps(text)["two"] == {"n1", "n2", "n3", "n4"}
    assert f"the step runs with {BAD}" in text and text.count("status 0") == 2


@pytest.mark.nightly
def test_job_waits_for_a_node_that_is_drained_now(new_sandbox):
    """Five of six nodes are in service, one of them is bad: the job waits until the sixth one is back."""
    cluster = new_sandbox(nodes=6, slurm_conf_lines=SOON)
    cluster.run(["scontrol", "update", "NodeName=n6", "State=DRAIN", "Reason=test"], as_root=True)
    fill_disk(cluster, BAD)
    health = Health(cluster)
    job = health.submit(STEPS, "-N5", "--dl-on-bad-nodes=wait", program="slurmdl sbatch")
    cluster.wait_for(job, {"RUNNING"})
    record = cluster.wait_for(job, {"PENDING"}, 90)
    assert (record["Restarts"], record["ExcNodeList"]) == ("1", BAD)
    time.sleep(10)
    assert cluster.job(job)["JobState"] == "PENDING"
    cluster.run(["scontrol", "update", "NodeName=n6", "State=RESUME"], as_root=True)
    text = cluster.output(job, 90)
    assert nodes_of_steps(text)["two"] == {"n1", "n2", "n4", "n5", "n6"}, text
