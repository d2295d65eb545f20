"""The first step of a job: nodes that an overallocated job keeps, its environment, and the preflight."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from placing import two_level

from slurmdl.config import Config
from slurmdl.dl_options import DlOptions
from slurmdl.errors import BadNodesError, PlacementError, UnavailableError
from slurmdl.health import exclusions, requeue
from slurmdl.health.faults import Fault
from slurmdl.health.preflight import Preflight
from slurmdl.job_request import JobRequest
from slurmdl.launch import job_start, submission_record
from slurmdl.launch.step_inputs import StepCall
from slurmdl.launch.submission_record import RequestedSize
from slurmdl.links.link_scores import LinkScore, LinkScores
from slurmdl.placement.place import select_subset
from slurmdl.placement.rank_orders import best_rank_map
from slurmdl.slurm import jobs
from slurmdl.traffic import Traffic

EIGHT = two_level(["n1", "n3", "n5", "n7"], ["n2", "n4", "n6", "n8"])
ENVIRON = {"HOME": "/", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3,5]", "SLURM_NODELIST": "n[1-3,5]",
           "SLURM_NNODES": "4", "SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_CPUS_PER_NODE": "2(x3),4", "SLURM_NTASKS": "8",
           "SLURM_NPROCS": "8", "SLURM_NTASKS_PER_NODE": "2", "SLURM_TASKS_PER_NODE": "2(x4)"}


def build_request(nodes: int, tasks: int | None = None, **options: object) -> JobRequest:
    return JobRequest(DlOptions(**options), (nodes, nodes), tasks)  # type: ignore[arg-type]


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
    environ = job_start.environ_with_nodes(job_start.environ_with_requested_size(ENVIRON, requested), kept)
    assert jobs.read_allocation(environ) == jobs.Allocation(7, ("n1", "n2", "n5"), (2, 2, 4))
    assert environ["SLURM_NNODES"] == environ["SLURM_JOB_NUM_NODES"] == "3" and environ["HOME"] == "/"
    assert (environ.get("SLURM_NTASKS"), environ.get("SLURM_NPROCS")) == (tasks, tasks)
    assert environ.get("SLURM_NTASKS_PER_NODE") == per_node and "SLURM_TASKS_PER_NODE" not in environ


@given(st.lists(st.integers(1, 4), min_size=1))
def test_counts_fold_and_expand(counts):
    assert jobs.expand_counts(jobs.fold_counts(counts)) == tuple(counts)


def step_call(environ: dict[str, str], warnings: list[str], *, size: RequestedSize | None = None,
              **values: object) -> StepCall:
    def get_slurm_config():
        raise AssertionError("slurm.conf is not needed")

    options = DlOptions(**values)  # type: ignore[arg-type]
    record = replace(submission_record.new_record(options, {}), requested_size=size)
    return StepCall(None, options, environ, record, Config(), get_slurm_config, warnings.append, LinkScores())


@pytest.fixture
def shrink(fake_slurm, monkeypatch):
    """Function that shrinks the job of ENVIRON; returns its new node list, the update of the job, and warnings."""
    def run(size: RequestedSize, kept: str, *, cpus: str = "2(x3),4", batch_host: str = "n1", dry_run: bool = False,
            excluded: tuple[str, ...] = ()):
        fake_slurm.job(7, "n[1-3,5]", 4, batch_host)
        fake_slurm.command("scontrol")
        warnings: list[str] = []

        def choose(call: StepCall, size: RequestedSize, nodes: list[str], host: str) -> tuple[str, ...]:
            assert nodes == [node for node in ("n1", "n2", "n3", "n5") if node not in excluded] and host == batch_host
            if not kept:
                raise PlacementError("the topology has no zones")
            return tuple(kept.split(","))

        monkeypatch.setattr(job_start, "choose_nodes", choose)
        call = step_call({**ENVIRON, "SLURM_JOB_CPUS_PER_NODE": cpus}, warnings, dry_run=dry_run)
        environ = job_start.reduce_job(call, size, excluded).environ
        update = [line.removeprefix("scontrol update JobId=7 NodeList=") for line in fake_slurm.calls("scontrol")]
        return environ["SLURM_JOB_NODELIST"], "".join(update), "".join(warnings)

    return run


@pytest.mark.parametrize(("size", "options", "nodes", "update", "warning"), [
    (RequestedSize(3), {"kept": "n1,n3,n5"}, "n[1,3,5]", "n1,n3,n5", ""),
    (RequestedSize(3), {"kept": "n1,n3,n5", "excluded": ("n2",)}, "n[1,3,5]", "n1,n3,n5", ""),
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


@pytest.fixture
def preflight(tmp_path):
    """Function that checks nodes, whose names are missing, and returns the warnings."""
    def run(restarts: int = 2) -> list[str]:
        warnings: list[str] = []
        environ = {"XDG_STATE_HOME": str(tmp_path), "SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "c",
                   "SLURM_RESTART_COUNT": str(restarts)}
        assert not job_start.check_nodes_once(step_call(environ, warnings, preflight=5))
        return warnings

    return run


def test_unknown_nodes_cost_a_warning(preflight):
    [warning] = preflight()
    assert warning.startswith("preflight: the nodes are not checked: SLURM_JOB_NODELIST, ")


def test_start_of_a_job_is_checked_once(preflight, tmp_path):
    exclusions.write_mark(str(tmp_path / "slurmdl/preflight/c-7-2"))
    assert not preflight() and preflight(restarts=3)


@pytest.mark.parametrize("is_writable", [True, False])
def test_mark_that_cannot_be_written_costs_a_warning(tmp_path, monkeypatch, is_writable):
    monkeypatch.setattr("slurmdl.health.preflight.run_preflight", lambda *args, **options: Preflight({}, []))
    monkeypatch.setattr("slurmdl.launch.step_inputs.load_job_topology", lambda *args, **options: (None, ""))
    (tmp_path / "slurmdl").mkdir() if is_writable else (tmp_path / "slurmdl").touch()
    warnings: list[str] = []
    call = step_call({**ENVIRON, "XDG_STATE_HOME": str(tmp_path)}, warnings, preflight=5)
    job_start.check_nodes_once(replace(call, get_slurm_config=lambda: None))
    assert os.path.exists(tmp_path / "slurmdl/preflight/-7-0") == is_writable
    assert bool(warnings) != is_writable and ("checks the nodes again" in "".join(warnings)) != is_writable


BROKEN = "preflight: n2: broken"


@pytest.mark.parametrize(("bad", "options", "excluded", "done"), [
    ([], {"nodes": 2}, set(), []),
    (["n2"], {"nodes": 2}, {"n2"}, [BROKEN, "preflight: the job continues without n2", "remember n2"]),
    (["n2"], {"nodes": 2, "batch_host": "n2"}, set(), [BROKEN, "requeue 7", "wait for the end", "remember n2"]),
    (["n2"], {}, set(), [BROKEN, "requeue 7", "wait for the end", "remember n2"]),
    (["n2"], {"on_bad_nodes": "run"}, set(), [BROKEN, "requeue 7", "wait for the end", "remember n2"]),
    (["n2"], {"requeues": False, "on_bad_nodes": "wait"},
     "preflight: n2 bad, and no requeue; the step is not started (--dl-on-bad-nodes=run starts it)",
     [BROKEN, "requeue 7 or wait", "remember n2"]),
    (["n2"], {"requeues": False, "on_bad_nodes": "run"}, set(),
     [BROKEN, "requeue 7", "remember n2", "preflight: no requeue; the step runs with n2"]),
])
def test_action_on_bad_nodes(monkeypatch, bad, options, excluded, done):
    """Bad nodes of n1 to n3: the nodes left out, and the actions and messages in their order."""
    settings = {"nodes": 3, "requeues": True, "on_bad_nodes": "stop", "batch_host": "n1", **options}
    log: list[str] = []

    def requeue_job(job_id, reasons, environ, report, may_wait):
        log.append(f"requeue {job_id}{' or wait' * may_wait}")
        if not settings["requeues"]:
            raise UnavailableError("no requeue")

    monkeypatch.setattr(requeue, "requeue_and_exclude", requeue_job)
    monkeypatch.setattr(requeue, "wait_for_job_end", lambda: log.append("wait for the end"))
    monkeypatch.setattr(exclusions, "record_exclusions",
                        lambda reasons, environ, job_id: log.append(f"remember {' '.join(reasons)}"))
    result = Preflight(dict.fromkeys(("n1", "n2", "n3")), [Fault(node, "gpu", "broken") for node in bad])
    call = step_call({**ENVIRON, "SLURMD_NODENAME": settings["batch_host"]}, log,
                     size=RequestedSize(settings["nodes"]), on_bad_nodes=settings["on_bad_nodes"])
    try:
        outcome = job_start._act_on_bad_nodes(call, result)
    except BadNodesError as error:
        outcome = str(error)
    assert (outcome, log) == (excluded, done)
