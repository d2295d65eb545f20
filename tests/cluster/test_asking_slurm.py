"""Where placement does not see all that a job asks for, a real Slurm is asked, and its word holds."""

from __future__ import annotations

import re

import pytest

from slurmdl.cluster import load
from slurmdl.slurm import hostlist


@pytest.fixture
def reserve(cluster):
    """A function that reserves nodes for the ordinary user: name, nodes, begin."""
    made = []

    def make(name: str, nodes: str, begin: str) -> None:
        done = cluster.run(["scontrol", "create", "reservation", f"reservationname={name}", f"starttime={begin}",
                            "duration=60", f"nodes={nodes}", f"users={cluster.user}"], as_root=True)
        assert done.returncode == 0, done.stderr
        made.append(name)

    yield make
    cluster.cancel_all()
    for name in made:
        cluster.run(["scontrol", "delete", f"reservationname={name}"], as_root=True)


def decided(cluster, *words: str) -> str:
    """What a dry run says that it decided."""
    done = cluster.run(["slurmdl", "sbatch", "--dl-dry-run", *words, "--wrap=true"])
    assert done.returncode == 0, done.stderr
    return re.search("^decision: (.*)$", done.stdout, re.MULTILINE)[1]


@pytest.mark.parametrize(("words", "says"), [
    (["-N2", "--hint=nomultithread"], "--prefer=zone"), (["-N2", "--mincpus=2"], "--prefer=zone"),
    (["-N2", "--mincpus=3"], "--mincpus is not modelled, and Slurm says: "),
    (["-N2", "--tmp=1T"], "--tmp is not modelled, and Slurm says: "),
    (["-N2", "--no-requeue", "-C", "[zoneA|zoneB]"], "--nodelist=n["),
    (["-N2", "--no-requeue", "-C", "[zoneA*1&zoneB*1]"], "Slurm chooses the nodes: constraint too rich"),
    (["-N4", "--no-requeue", "-C", "(zoneA|zoneB)&zoneB"], "--nodelist=n[2,4,6,8]"),
    (["-N2", "-C", "zoneA,zoneB"], "Slurm chooses the nodes: no zone has 2 fitting nodes"),
    (["-N2", "--reservation=none"], "Slurm chooses the nodes: reservation none is unknown; known: none"),
])
def test_slurm_is_asked(cluster, words, says):
    assert says in decided(cluster, *words)


def test_a_job_of_which_slurm_was_asked_starts_where_it_was_placed(cluster):
    job = cluster.submit(["slurmdl", "sbatch", "-N2", "--hint=nomultithread", "--no-requeue", "-C", "[zoneA|zoneB]",
                          "--wrap", "sleep 5"])
    nodes = hostlist.expand_hostlist(cluster.wait_for(job, {"RUNNING"}, timeout=30)["NodeList"])
    assert len({int(node[1:]) % 2 for node in nodes}) == 1  # odd ones are in zoneA


def test_reserved_nodes_are_for_the_reservation(cluster, reserve):
    reserve("course", "n[1,3,5]", "now")
    assert "--prefer=zoneB" in decided(cluster, "-N3")
    assert "--nodelist=n[1,3,5]" in decided(cluster, "-N3", "--no-requeue", "-C", "(zoneA)", "--reservation=course")
    job = cluster.submit(["slurmdl", "sbatch", "-N2", "--no-requeue", "-C", "(zoneA)", "--reservation=course",
                          "--wrap", "sleep 5"])
    nodes = hostlist.expand_hostlist(cluster.wait_for(job, {"RUNNING"}, timeout=30)["NodeList"])
    assert set(nodes) < {"n1", "n3", "n5"}


def test_nodes_that_will_be_reserved_are_slurms_to_give(cluster, reserve):
    """Whether a job may still start there depends on how long it may run."""
    reserve("service", "n[1-8]", "now+1hour")
    assert "--prefer=zone" in decided(cluster, "-N2", "-t", "10")
    assert "the reservation service will hold some of the nodes, and Slurm " in decided(cluster, "-N2", "-t", "120")


def test_every_form_that_scontrol_prints_gives_the_same_snapshot(cluster, reserve):
    """With and without -o, as a user redirects it into a file; a reason may look like another field."""
    reserve("soon", "n[5-6]", "now+1hour")
    held = cluster.submit(["sbatch", "-N2", "-n2", "--nodelist=n[3-4]", "--wrap=sleep 60"])
    cluster.wait_for(held, {"RUNNING"})
    drained = ["scontrol", "update", "nodename=n2", "state=drain", "reason=bad disk = 3 State=IDLE CPUAlloc=2"]
    cluster.run(drained, as_root=True).check_returncode()
    shown = "scontrol {0} -d show nodes; scontrol {0} show partitions; scontrol {0} show reservations"
    directory, found = cluster.directory(), {}
    try:
        for form in ("-o", ""):
            path = directory / f"nodes{form}.txt"
            cluster.run(["sh", "-c", f"({shown.format(form)}) > {path}"]).check_returncode()
            found[form] = load.load_cluster_file(str(path))
            placed = cluster.run(["slurmdl", "place", "--cluster", str(path), "-N2"])
            assert "5 of 8 nodes idle" in placed.stdout, placed
    finally:
        cluster.run(["scontrol", "update", "nodename=n2", "state=resume"], as_root=True)
    one, several = found["-o"], found[""]
    assert several.to_json() == one.to_json()
    assert several.node["n2"].state == ("IDLE", "DRAIN")
    assert [several.node[f"n{i}"].cpus_unallocated for i in (1, 3)] == [2, 1]
    assert [(each.name, each.nodes) for each in several.reservations] == [("soon", ("n5", "n6"))]
