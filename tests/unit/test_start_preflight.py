"""The preflight of `slurmdl srun`: once per start of a job, and no fault of its own costs a step."""

from __future__ import annotations

import pytest

from slurmdl.config import Config
from slurmdl.dl_options import DlOptions
from slurmdl.errors import BadNodesError, UnavailableError
from slurmdl.health.faults import Fault
from slurmdl.health.preflight import Preflight
from slurmdl.launch import start_preflight
from slurmdl.launch.submission_record import RequestedSize

ENVIRON = {"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "c", "SLURM_RESTART_COUNT": "2"}


def no_query():
    raise AssertionError("slurm.conf is not needed")


@pytest.fixture
def check(tmp_path):
    """Function that checks nodes and returns what it warns of."""
    def run(**environ: str) -> list[str]:
        warnings: list[str] = []
        environ = {"XDG_STATE_HOME": str(tmp_path), **ENVIRON, **environ}
        assert not start_preflight.check_nodes_once(DlOptions(preflight=5), None, Config(), no_query, environ,
                                                    warnings.append)
        return warnings

    return run


def test_unknown_nodes_cost_a_warning(check):
    [warning] = check()
    assert warning.startswith("preflight: the nodes are not checked: SLURM_JOB_NODELIST, ")


def test_marked_start_is_not_checked_again(check, tmp_path):
    mark = tmp_path / "slurmdl/preflight/c-7-2"
    start_preflight._write_mark(str(mark), pytest.fail)
    assert mark.exists() and not check()
    assert check(SLURM_RESTART_COUNT="3"), "another start"


def test_mark_that_cannot_be_written_costs_a_warning(tmp_path):
    (tmp_path / "file").touch()
    warnings: list[str] = []
    start_preflight._write_mark(str(tmp_path / "file/c-1-0"), warnings.append)
    assert "the next step of the job checks the nodes again" in warnings[0]


@pytest.fixture
def act(monkeypatch):
    """Function that acts on bad nodes of n1 to n3, and returns the nodes left out, and what was done and said."""
    def run(*bad: str, nodes: int = 3, requeues: bool = True, on_bad_nodes: str = "stop", batch_host: str = "n1"):
        done: list[str] = []

        def requeue(job_id, reasons, environ, report, may_wait):
            done.append(f"requeue {job_id}{' or wait' * may_wait}")
            if not requeues:
                raise UnavailableError("no requeue")

        monkeypatch.setattr(start_preflight, "requeue_and_exclude", requeue)
        monkeypatch.setattr(start_preflight, "wait_for_job_end", lambda: done.append("wait for the end"))
        monkeypatch.setattr(start_preflight.exclusions, "record_exclusions",
                            lambda reasons, environ, job_id: done.append(f"remember {' '.join(reasons)}"))
        result = Preflight(dict.fromkeys(("n1", "n2", "n3")), [Fault(node, "gpu", "broken") for node in bad])
        try:
            left_out = start_preflight._act(result, DlOptions(on_bad_nodes=on_bad_nodes), RequestedSize(nodes, None),
                                            {**ENVIRON, "SLURMD_NODENAME": batch_host}, done.append)
        except BadNodesError as error:
            return str(error), done
        return left_out, done

    return run


BROKEN = "preflight: n2: broken"


@pytest.mark.parametrize(("bad", "options", "left_out", "done"), [
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
def test_action_on_bad_nodes(act, bad, options, left_out, done):
    assert act(*bad, **options) == (left_out, done)
