"""The preflight of `slurmdl srun`: once per start of a job, and no fault of its own costs a step."""

from __future__ import annotations

import pytest

from slurmdl.config import Config
from slurmdl.dl_options import DlOptions
from slurmdl.launch import start_preflight

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
