"""Rank maps in the words of launchers; what is read from each text stands in tests/golden/launchers."""

from __future__ import annotations

import subprocess
import sys

import pytest

from slurmdl.errors import PlacementError, UsageError
from slurmdl.launch import rankmap_formats, srun
from slurmdl.launch.rankmap_formats import RankMapInput
from slurmdl.plan import Plan

#: servers on n2 and n1, workers by zone; n1 has two runs of ranks
PLAN = Plan("ps", ("n2", "n1", "n1", "n3", "n3", "n2", "n4"), ("ps",) * 2 + ("worker",) * 5, {})
NODES = ["n1", "n2", "n3", "n4"]
EVEN = Plan("allreduce", ("n3", "n3", "n1", "n1", "n2", "n2"), ("worker",) * 6, {})


@pytest.mark.parametrize("form", [form for form in rankmap_formats.FORMATS if form not in ("torchrun", "shell")])
def test_text(form, golden):
    golden(f"launchers/{form}.txt", rankmap_formats.format_rank_map(form, RankMapInput(PLAN, NODES)))


def test_text_of_torchrun(golden):
    golden("launchers/torchrun.txt", rankmap_formats.format_rank_map("torchrun",
           RankMapInput(EVEN, NODES[:3], master_port=12345)))


def test_text_of_the_shell(golden):
    variables = {"SLURMDL_PS_RANKS": "", "SLURMDL_ZONE_RANKS": "a'b:0-6;", "SLURMDL_PLAN": "file:/a b/plan",
                 "SLURMDL_MASTER_PORT": "1"}
    golden(
    "launchers/shell.txt",
    rankmap_formats.format_rank_map(
        "shell",
        RankMapInput(
            PLAN,
            NODES,
            job_id=7,
             task_variables=variables)))


def test_a_shell_reads_what_was_meant_and_nothing_of_a_map_before():
    variables = {"SLURMDL_PLAN": "$(echo executed) `echo executed` '\"\n;"}
    text = rankmap_formats.format_rank_map("shell", RankMapInput(PLAN, NODES, job_id=7, task_variables=variables))
    before = {"SLURMDL_RANKMAP_PS_RANKS": "0", "SLURMDL_RANKMAP_JOB": "6"}
    names = ("JOB", "NODES", "PS_RANKS", "PLAN")
    show = "; ".join(f'printf "%s\\0" "${{SLURMDL_RANKMAP_{name}-unset}}"' for name in names)
    done = subprocess.run(["sh", "-c", f'eval "$1"; {show}', "sh", text], env=before, capture_output=True, text=True,
                          check=True)
    assert done.stdout.split("\0") == ["7", "n2,n1(x2),n3(x2),n2,n4", "unset", variables["SLURMDL_PLAN"], ""]


def test_a_map_that_is_too_long_for_a_variable():
    nodes = tuple(f"a-rather-long-name-of-a-node-{i}" for i in range(4000))
    plan = Plan("allreduce", nodes, ("worker",) * len(nodes), {})
    with pytest.raises(PlacementError, match="SLURMDL_RANKMAP_NODES is longer"):
        rankmap_formats.format_rank_map("shell", RankMapInput(plan, nodes))


def test_tasks_of_several_cpus_do_not_share_them():
    text = rankmap_formats.format_rank_map("openmpi-rankfile", RankMapInput(PLAN, NODES, cpus_per_task=2))
    assert text.splitlines()[:3] == ["rank 0=n2 slot=0-1", "rank 1=n1 slot=0-1", "rank 2=n1 slot=2-3"]
    assert text.splitlines()[5] == "rank 5=n2 slot=2-3"


def test_the_rank_order_names_the_rank_of_each_slot():
    """intro_mpi(3): ranks that are listed first are placed on the first node. Slots: n1 n1 | n2 n2 | n3 n3."""
    assert rankmap_formats.format_rank_map("mpich-rank-order", RankMapInput(EVEN, NODES[:3])) == "2,3\n4,5\n0,1\n"


@pytest.mark.parametrize(("nodes", "message"), [
    (("n1", "n2", "n1", "n2"), "not consecutive"), (("n1", "n1", "n2"), "nodes with 1 and with 2 tasks")])
def test_what_torchrun_cannot_express(nodes, message):
    plan = Plan("allreduce", nodes, ("worker",) * len(nodes), {})
    with pytest.raises(PlacementError, match=message):
        rankmap_formats.format_rank_map("torchrun", RankMapInput(plan, NODES[:2]))


def test_a_text_that_does_not_lead_back_to_the_map_is_not_handed_out(monkeypatch):
    write, read = rankmap_formats.FORMATS["hydra-hostfile"]
    monkeypatch.setitem(rankmap_formats.FORMATS, "hydra-hostfile", (lambda tasks: write(tasks).replace("n4:1\n", ""), read))
    with pytest.raises(PlacementError, match="would not put every rank"):
        rankmap_formats.format_rank_map("hydra-hostfile", RankMapInput(PLAN, NODES))


@pytest.mark.parametrize("words", [["--print-rank-map=rankfile"], ["--print-rank-map"], ["--print-rank-map="]])
def test_an_unknown_format(words):
    with pytest.raises(UsageError, match=r"valid: .*openmpi-rankfile"):
        srun.run_srun(words, {"SLURM_JOB_ID": "1"})


def test_where_stderr_is_closed_nothing_of_ours_goes_to_stdout():
    """A script evaluates what --print-rank-map=shell prints."""
    done = subprocess.run(["sh", "-c", 'exec "$0" -m slurmdl srun --print-rank-map=shell 2>&-', sys.executable],
                          env={}, stdout=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stdout) == (64, "")
