"""Rank maps in the formats of launchers; tests/golden/launchers holds the texts."""

from __future__ import annotations

import subprocess
import sys

import pytest

from slurmdl.errors import PlacementError, UsageError
from slurmdl.launch import rankmap_formats, srun
from slurmdl.launch.rankmap_formats import RankMapInput
from slurmdl.plan import Plan, decode_plan, encode_plan

#: servers on n2 and n1, workers by zone; n1 has two runs of ranks
PLAN = Plan("ps", ("n2", "n1", "n1", "n3", "n3", "n2", "n4"), ("ps",) * 2 + ("worker",) * 5, {})
NODES = ["n1", "n2", "n3", "n4"]
EVEN = Plan("allreduce", ("n3", "n3", "n1", "n1", "n2", "n2"), ("worker",) * 6, {})


@pytest.mark.parametrize("name", sorted(rankmap_formats.FORMATS.keys() - {"torchrun", "shell", "env"}))
def test_text_of_each_format(name, golden):
    golden(f"launchers/{name}.txt", rankmap_formats.format_rank_map(name, RankMapInput(PLAN, NODES)))


def test_text_of_torchrun(golden):
    map_input = RankMapInput(EVEN, NODES[:3], master_port=12345)
    golden("launchers/torchrun.txt", rankmap_formats.format_rank_map("torchrun", map_input))


def test_text_of_shell(golden):
    variables = {"SLURMDL_ROLE_RANKS": "", "SLURMDL_ZONE_RANKS": "a'b:0-6;", "SLURMDL_PLAN": "file:/a b/plan",
                 "SLURMDL_MASTER_PORT": "1"}
    map_input = RankMapInput(PLAN, NODES, job_id=7, task_variables=variables)
    golden("launchers/shell.txt", rankmap_formats.format_rank_map("shell", map_input))


def test_shell_reads_the_values_and_unsets_a_previous_map():
    variables = {"SLURMDL_PLAN": "$(echo executed) `echo executed` '\"\n;"}
    text = rankmap_formats.format_rank_map("shell", RankMapInput(PLAN, NODES, job_id=7, task_variables=variables))
    previous = {"SLURMDL_RANKMAP_ROLE_RANKS": "ps:0;", "SLURMDL_RANKMAP_JOB": "6"}
    names = ("JOB", "NODES", "ROLE_RANKS", "PLAN")
    show = "; ".join(f'printf "%s\\0" "${{SLURMDL_RANKMAP_{name}-unset}}"' for name in names)
    proc = subprocess.run(["sh", "-c", f'eval "$1"; {show}', "sh", text], env=previous, capture_output=True,
                          text=True, check=True)
    assert proc.stdout.split("\0") == ["7", "n2,n1(x2),n3(x2),n2,n4", "unset", variables["SLURMDL_PLAN"], ""]


def test_env_exports_the_plan_and_the_address_of_rank_0():
    map_input = RankMapInput(PLAN, NODES, master_port=12345, task_variables={"SLURMDL_PLAN": encode_plan(PLAN)})
    text = rankmap_formats.format_rank_map("env", map_input)
    show = "printf '%s\\0' \"$SLURMDL_PLAN\" \"$MASTER_ADDR\" \"$MASTER_PORT\""
    proc = subprocess.run(["sh", "-c", f'eval "$1"; {show}', "sh", text], capture_output=True, text=True, check=True)
    plan, *address = proc.stdout.split("\0")[:3]
    assert decode_plan(plan) == PLAN
    assert address == ["n2", "12345"]


def test_map_longer_than_a_variable_is_rejected():
    nodes = tuple(f"a-rather-long-name-of-a-node-{i}" for i in range(4000))
    plan = Plan("allreduce", nodes, ("worker",) * len(nodes), {})
    with pytest.raises(PlacementError, match="SLURMDL_RANKMAP_NODES is longer"):
        rankmap_formats.format_rank_map("shell", RankMapInput(plan, nodes))


def test_rankfile_gives_each_task_its_own_cpus():
    text = rankmap_formats.format_rank_map("openmpi-rankfile", RankMapInput(PLAN, NODES, cpus_per_task=2))
    assert text.splitlines()[:3] == ["rank 0=n2 slot=0-1", "rank 1=n1 slot=0-1", "rank 2=n1 slot=2-3"]
    assert text.splitlines()[5] == "rank 5=n2 slot=2-3"


def test_mpich_rank_order_lists_the_rank_of_each_slot():
    """intro_mpi(3): ranks that are listed first are placed on the first node. Slots: n1 n1 | n2 n2 | n3 n3."""
    assert rankmap_formats.format_rank_map("mpich-rank-order", RankMapInput(EVEN, NODES[:3])) == "2,3\n4,5\n0,1\n"


@pytest.mark.parametrize(("nodes", "message"), [
    (("n1", "n2", "n1", "n2"), "not consecutive"), (("n1", "n1", "n2"), "nodes with 1 and with 2 tasks")])
def test_torchrun_rejects_unsupported_maps(nodes, message):
    plan = Plan("allreduce", nodes, ("worker",) * len(nodes), {})
    with pytest.raises(PlacementError, match=message):
        rankmap_formats.format_rank_map("torchrun", RankMapInput(plan, NODES[:2]))


def test_text_that_does_not_parse_to_the_map_is_rejected(monkeypatch):
    format_text, parse_text = rankmap_formats.FORMATS["hydra-hostfile"]
    monkeypatch.setitem(rankmap_formats.FORMATS, "hydra-hostfile",
                        (lambda map_input: format_text(map_input).replace("n4:1\n", ""), parse_text))
    with pytest.raises(PlacementError, match="would not put every rank"):
        rankmap_formats.format_rank_map("hydra-hostfile", RankMapInput(PLAN, NODES))


@pytest.mark.parametrize("argv", [["--print-rank-map=rankfile"], ["--print-rank-map"], ["--print-rank-map="]])
def test_unknown_format_is_a_usage_error(argv):
    with pytest.raises(UsageError, match=r"--print-rank-map: .*openmpi-rankfile"):
        srun.run_srun(argv, {"SLURM_JOB_ID": "1"})


def test_messages_never_go_to_stdout():
    """Scripts evaluate the standard output of --print-rank-map=shell."""
    proc = subprocess.run(["sh", "-c", 'exec "$0" -m slurmdl srun --print-rank-map=shell 2>&-', sys.executable],
                          env={}, stdout=subprocess.PIPE, text=True, check=False)
    assert (proc.returncode, proc.stdout) == (64, "")
