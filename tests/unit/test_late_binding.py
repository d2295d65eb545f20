"""The nodes that an overallocated job keeps, and the environment of its steps."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from placing import SCORES, two_level

from slurmdl.dl_options import DlOptions
from slurmdl.errors import PlacementError
from slurmdl.job_request import JobRequest
from slurmdl.launch import late_binding
from slurmdl.launch.submission_record import RequestedSize
from slurmdl.links.link_scores import LinkScore, LinkScores
from slurmdl.placement.place import select_subset
from slurmdl.placement.rank_orders import best_rank_map
from slurmdl.slurm import jobs
from slurmdl.slurm.jobs import JobRecord
from slurmdl.traffic import Traffic

EIGHT = two_level(["n1", "n3", "n5", "n7"], ["n2", "n4", "n6", "n8"])
ENVIRON = {"HOME": "/", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3,5]", "SLURM_NODELIST": "n[1-3,5]",
           "SLURM_NNODES": "4", "SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_CPUS_PER_NODE": "2(x3),4", "SLURM_NTASKS": "8",
           "SLURM_NPROCS": "8", "SLURM_NTASKS_PER_NODE": "2", "SLURM_TASKS_PER_NODE": "2(x4)"}


def build_request(nodes: int, tasks: int | None = None, **dl: object) -> JobRequest:
    return JobRequest(DlOptions(**dl), (nodes, nodes), tasks)  # type: ignore[arg-type]


def test_node_of_another_zone_is_dropped():
    assert select_subset(["n1", "n2", "n3", "n5"], build_request(3), "n1", EIGHT, SCORES) == ("n1", "n3", "n5")


def test_node_with_a_slow_link_is_dropped():
    slow = LinkScores(nodes={"n3": LinkScore(10.0)}, default_node_bandwidth=1000.0, default_zone_bandwidth=(50.0,))
    assert select_subset(["n1", "n3", "n5", "n7"], build_request(3), "n1", EIGHT, slow) == ("n1", "n5", "n7")


def test_node_of_the_batch_script_is_kept():
    assert select_subset(["n1", "n2", "n3", "n5"], build_request(3), "n2", EIGHT, SCORES).count("n2") == 1


@given(st.lists(st.sampled_from(EIGHT.nodes), min_size=3, max_size=6, unique=True), st.integers(0, 5),
       st.lists(st.sampled_from([100.0, 400.0, 1000.0]), min_size=8, max_size=8))
def test_kept_nodes_are_the_best_with_the_batch_host(names, host_number, speeds):
    """Compare with all subsets; a batch host outside the best choice is kept by one exchange."""
    allocated = sorted(names)
    host = allocated[host_number % len(allocated)]
    scores = LinkScores(nodes={n: LinkScore(s) for n, s in zip(EIGHT.nodes, speeds, strict=True)},
                        default_zone_bandwidth=(50.0,), default_latency=0.0)
    kept = select_subset(allocated, build_request(len(allocated) - 1), host, EIGHT, scores)
    assert host in kept and len(kept) == len(allocated) - 1 and list(kept) == [n for n in allocated if n in kept]

    def seconds(nodes: tuple[str, ...]) -> float:
        return best_rank_map([(n, 1) for n in nodes], EIGHT, scores, Traffic("allreduce")).cost.seconds

    best = min(seconds(nodes) for nodes in itertools.combinations(allocated, len(kept)) if host in nodes)
    assert seconds(kept) <= best * (1 + 1e-9)


@pytest.mark.parametrize(("requested", "tasks", "per_node"), [
    (RequestedSize(3), None, None), (RequestedSize(3, 5), "5", None), (RequestedSize(3, None, 2), None, "2"),
    (RequestedSize(3, 6, 2), "6", "2")])
def test_environment_of_a_shrunk_job(requested, tasks, per_node):
    kept = jobs.read_allocation(ENVIRON).restricted_to(("n1", "n2", "n5"))
    environ = late_binding.environ_with_nodes(late_binding.environ_with_requested_size(ENVIRON, requested), kept)
    assert jobs.read_allocation(environ) == jobs.Allocation(7, ("n1", "n2", "n5"), (2, 2, 4))
    assert environ["SLURM_NNODES"] == environ["SLURM_JOB_NUM_NODES"] == "3" and environ["HOME"] == "/"
    assert (environ.get("SLURM_NTASKS"), environ.get("SLURM_NPROCS")) == (tasks, tasks)
    assert environ.get("SLURM_NTASKS_PER_NODE") == per_node and "SLURM_TASKS_PER_NODE" not in environ


@given(st.lists(st.integers(1, 4), min_size=1))
def test_counts_fold_and_expand(counts):
    assert jobs.expand_counts(jobs.fold_counts(counts)) == tuple(counts)


@pytest.fixture
def shrink(fake_slurm):
    """Function that shrinks the job of ENVIRON; returns its new node list, the update of the job, and warnings."""
    def run(size: RequestedSize, kept: str, *, cpus: str = "2(x3),4", batch_host: str = "n1", dry_run: bool = False):
        fake_slurm.job(7, "n[1-3,5]", 4, batch_host)
        fake_slurm.command("scontrol")
        warnings: list[str] = []

        def choose(job: JobRecord) -> tuple[str, ...]:
            if not kept:
                raise PlacementError("the topology has no zones")
            return tuple(kept.split(","))

        environ = late_binding.shrink_job({**ENVIRON, "SLURM_JOB_CPUS_PER_NODE": cpus}, size, choose, warnings.append,
                                          dry_run=dry_run)
        update = [call.removeprefix("scontrol update JobId=7 NodeList=") for call in fake_slurm.calls("scontrol")]
        return environ["SLURM_JOB_NODELIST"], "".join(update), "".join(warnings)

    return run


@pytest.mark.parametrize(("size", "options", "nodes", "update", "warning"), [
    (RequestedSize(3), {"kept": "n1,n3,n5"}, "n[1,3,5]", "n1,n3,n5", ""),
    (RequestedSize(3), {"kept": "n1,n3,n5", "dry_run": True}, "n[1,3,5]", "", ""),
    (RequestedSize(4), {"kept": "n1,n3,n5"}, "n[1-3,5]", "", ""),  # no more nodes than needed
    # more nodes than a job of two requests: another job that inherited the record
    (RequestedSize(2), {"kept": "n1,n3,n5"}, "n[1-3,5]", "", ""),
    # the CPUs that Slurm 24.11 allocates for 5 tasks on 3 to 4 nodes of 2 CPUs
    (RequestedSize(3, 5), {"kept": "n1,n3,n5", "cpus": "2,1(x3)"}, "n[1-3,5]", "",
     "the job keeps its 4 nodes, and the step has all of them: "
     "5 tasks do not fit the 4 CPUs that it has on 3 of them"),
    (RequestedSize(3, 5), {"kept": "n1,n2,n5", "cpus": "2(x2),1(x2)"}, "n[1-2,5]", "n1,n2,n5", ""),
    # none can be chosen: the first ones, with that of the batch script
    (RequestedSize(3), {"kept": "", "batch_host": "n5"}, "n[1-2,5]", "n5,n1,n2",
     "the topology has no zones; the step runs on the first 3 nodes of the job")])
def test_job_is_shrunk_to_the_requested_nodes(shrink, size, options, nodes, update, warning):
    assert shrink(size, **options) == (nodes, update, warning)
