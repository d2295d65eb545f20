"""Options that placement does not model: the answer of a real Slurm decides."""

from __future__ import annotations

import re

import pytest
from jobs import slow_links

from slurmdl.cluster import load
from slurmdl.slurm import hostlist


@pytest.fixture
def reserve(cluster):
    """A function (name, nodes, start time) that reserves nodes for the ordinary user."""
    names = []

    def make(name: str, nodes: str, start_time: str) -> None:
        cluster.root("scontrol", "create", "reservation", f"reservationname={name}", f"starttime={start_time}",
                     "duration=60", f"nodes={nodes}", f"users={cluster.user}")
        names.append(name)

    yield make
    cluster.cancel_all()
    for name in names:
        cluster.run(["scontrol", "delete", f"reservationname={name}"], as_root=True)


def dry_run_decision(cluster, *args: str) -> str:
    """Return the decision in the output of a dry run."""
    done = cluster.run(["slurmdl", "sbatch", "--dl-dry-run", *args, "--wrap=true"])
    assert done.returncode == 0, done.stderr
    return re.search("^decision: (.*)$", done.stdout, re.MULTILINE)[1]


@pytest.mark.parametrize(("args", "fact"), [
    (["-N2", "--no-requeue", "--hint=nomultithread"], "--nodelist=n["),
    (["-N2", "--no-requeue", "--mincpus=2"], "--nodelist=n["),
    (["-N2", "--mincpus=3"], "--mincpus is not modelled, and Slurm rejects it: "),
    (["-N2", "--tmp=1T"], "--tmp is not modelled, and Slurm rejects it: "),
    (["-N2", "--no-requeue", "-C", "[zoneA|zoneB]"], "--nodelist=n["),
    (["-N2", "--no-requeue", "-C", "[zoneA*1&zoneB*1]"], "Slurm chooses the nodes: constraint too rich"),
    (["-N4", "--no-requeue", "-C", "(zoneA|zoneB)&zoneB"], "Slurm itself would choose n[2,4,6,8]"),
    (["-N2", "-C", "zoneA,zoneB"], "Slurm chooses the nodes: no zone has 2 fitting nodes"),
    (["-N2", "--reservation=none"], "Slurm chooses the nodes: reservation none is unknown; known: none"),
])
def test_slurm_decides_unmodelled_requests(cluster, args, fact):
    assert fact in dry_run_decision(cluster, *args, slow_links(cluster, "n1", "n2"))


def test_job_for_several_partitions_is_placed_in_those_that_are_up(cluster):
    cluster.root("scontrol", "create", "partitionname=closed", "nodes=ALL", "state=DOWN")
    try:
        up = cluster.run(["sinfo", "-h", "-o", "%R"]).stdout.split()[0]
        slow = slow_links(cluster, "n1", "n2")
        assert "--nodelist=n[" in dry_run_decision(cluster, "-N2", "--no-requeue", "-p", f"closed,{up}", slow)
        assert "partition closed is DOWN" in dry_run_decision(cluster, "-N2", "-p", "closed", slow)
        job = cluster.submit(["slurmdl", "sbatch", "-N2", "--no-requeue", "-p", f"closed,{up}", slow, "--wrap=true"])
        assert cluster.wait(job)["Partition"] == up
    finally:
        cluster.cancel_all()
        cluster.run(["scontrol", "delete", "partitionname=closed"], as_root=True)


def test_job_confirmed_by_slurm_starts_on_its_nodes(cluster):
    job = cluster.start(["slurmdl", "sbatch", "-N2", "--hint=nomultithread", "--no-requeue", "-C", "[zoneA|zoneB]",
                         "--wrap", "sleep 5"])
    nodes = hostlist.expand_hostlist(cluster.job(job)["NodeList"])
    assert len({int(node[1:]) % 2 for node in nodes}) == 1  # odd nodes are in zoneA


def test_reserved_nodes_are_used_with_the_reservation_only(cluster, reserve):
    reserve("course", "n[1,3,5]", "now")
    assert "Slurm itself would choose n[2,4,6]" in dry_run_decision(cluster, "-N3")
    assert "--nodelist=n[4,6,8]" in dry_run_decision(cluster, "-N3", "--no-requeue", slow_links(cluster, "n2"))
    options = ("--no-requeue", "-C", "(zoneA)", "--reservation=course")
    assert "Slurm itself would choose n[1,3,5]" in dry_run_decision(cluster, "-N3", *options)
    job = cluster.start(["slurmdl", "sbatch", "-N2", *options, "--wrap", "sleep 5"])
    assert set(hostlist.expand_hostlist(cluster.job(job)["NodeList"])) < {"n1", "n3", "n5"}


def test_slurm_decides_on_nodes_with_a_future_reservation(cluster, reserve):
    """The time limit of a job decides whether it may start there."""
    reserve("service", "n[1-8]", "now+1hour")
    slow = slow_links(cluster, "n1", "n3", "n5", "n7")  # all of zoneA
    assert "--prefer=zoneB" in dry_run_decision(cluster, "-N2", "-t", "10", slow)
    decision = dry_run_decision(cluster, "-N2", "-t", "120", slow)
    assert "the reservation service will hold some of the nodes, and Slurm " in decision


def test_both_output_forms_of_scontrol_give_the_same_snapshot(cluster, reserve):
    """With and without -o, written to a file. The reason of a drained node may look like other fields."""
    reserve("soon", "n[5-6]", "now+1hour")
    cluster.start(["sbatch", "-N2", "-n2", "--nodelist=n[3-4]", "--wrap=sleep 60"])
    commands = "scontrol {0} -d show nodes; scontrol {0} show partitions; scontrol {0} show reservations"
    directory, snapshots = cluster.directory(), {}
    with cluster.drained("n2", reason="bad disk = 3 State=IDLE CPUAlloc=2"):
        for option in ("-o", ""):
            path = directory / f"nodes{option}.txt"
            cluster.run(["sh", "-c", f"({commands.format(option)}) > {path}"]).check_returncode()
            snapshots[option] = load.load_cluster_file(str(path))
            result = cluster.run(["slurmdl", "place", "--cluster", str(path), "-N2"])
            assert "5 of 8 nodes idle" in result.stdout, result
    one_line, multi_line = snapshots["-o"], snapshots[""]
    assert multi_line.to_json() == one_line.to_json()
    assert multi_line.node_by_name["n2"].state == ("IDLE", "DRAIN")
    assert [multi_line.node_by_name[f"n{i}"].cpus_unallocated for i in (1, 3)] == [2, 1]
    assert [(record.name, record.nodes) for record in multi_line.reservations] == [("soon", ("n5", "n6"))]
