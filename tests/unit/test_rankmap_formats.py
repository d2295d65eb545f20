"""Rank maps in the formats of launchers; tests/golden/launchers holds the texts."""

from __future__ import annotations

import subprocess
import sys

import pytest

from slurmdl.errors import PlacementError
from slurmdl.launch import rankmap_formats
from slurmdl.launch.rankmap_formats import FORMATS, RankMapInput, format_rank_map
from slurmdl.plan import Plan, decode_plan, encode_plan

NODES = ("n1", "n2", "n3", "n4")


def map_input(*nodes: str, **values: object) -> RankMapInput:
    return RankMapInput(Plan("allreduce", nodes, ("worker",) * len(nodes), {}), sorted(set(nodes)),
                        **values)  # type: ignore[arg-type]


#: n1 and n2 have two runs of ranks; two ranks on each node
RUNS = map_input("n2", "n1", "n1", "n3", "n3", "n2", "n4", job_id=7, task_variables={
    "SLURMDL_ROLE_RANKS": "", "SLURMDL_ZONE_RANKS": "a'b:0-6;", "SLURMDL_PLAN": "file:/a b/plan",
    "SLURMDL_MASTER_PORT": "1"})
EVEN = map_input("n3", "n3", "n1", "n1", "n2", "n2", master_port=12345)


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"env"}))
def test_text_of_each_format(name, golden):
    golden(f"launchers/{name}.txt", format_rank_map(name, EVEN if name == "torchrun" else RUNS))


@pytest.mark.parametrize(("name", "tasks", "expected"), [
    # each task has its own CPUs
    ("openmpi-rankfile", map_input("n2", "n1", "n1", "n2", cpus_per_task=2),
     "rank 0=n2 slot=0-1\nrank 1=n1 slot=0-1\nrank 2=n1 slot=2-3\nrank 3=n2 slot=2-3\n"),
    # intro_mpi(3): ranks that are listed first are placed on the first node. Slots: n1 n1 | n2 n2 | n3 n3
    ("mpich-rank-order", EVEN, "2,3\n4,5\n0,1\n")])
def test_text_of_a_map(name, tasks, expected):
    assert format_rank_map(name, tasks) == expected


@pytest.mark.parametrize(("name", "nodes", "message"), [
    ("torchrun", ("n1", "n2", "n1", "n2"), "not consecutive"),
    ("torchrun", ("n1", "n1", "n2"), "nodes with 1 and with 2 tasks"),
    ("shell", tuple(f"a-rather-long-name-of-a-node-{i}" for i in range(4000)), "SLURMDL_RANKMAP_NODES is longer")])
def test_map_that_a_format_cannot_express_is_rejected(name, nodes, message):
    with pytest.raises(PlacementError, match=rf"--print-rank-map={name}: .*{message}"):
        format_rank_map(name, map_input(*nodes))


@pytest.mark.parametrize("name", FORMATS)
def test_text_that_does_not_parse_to_the_map_is_rejected(monkeypatch, name):
    """The text of another map, in which ranks 0 and 5 are swapped."""
    other = map_input("n2", *EVEN.plan.nodes[1:5], "n3")
    text = FORMATS[name][0](EVEN if name == "torchrun" else other)
    text = text.replace("n3 --", "n4 --") if name == "torchrun" else text
    monkeypatch.setitem(rankmap_formats.FORMATS, name, (lambda _: text, FORMATS[name][1]))
    with pytest.raises(PlacementError, match="would not put every rank"):
        format_rank_map(name, EVEN)


@pytest.mark.parametrize(("name", "variables", "previous", "expected"), [
    ("shell", {"SLURMDL_PLAN": "$(echo executed) `echo executed` '\"\n;"},
     {"SLURMDL_RANKMAP_ROLE_RANKS": "ps:0;", "SLURMDL_RANKMAP_JOB": "6"},
     {"SLURMDL_RANKMAP_JOB": "7", "SLURMDL_RANKMAP_NODES": "n3(x2),n1(x2),n2(x2)",
      "SLURMDL_RANKMAP_ROLE_RANKS": "unset", "SLURMDL_RANKMAP_PLAN": "$(echo executed) `echo executed` '\"\n;"}),
    ("env", {"SLURMDL_PLAN": encode_plan(EVEN.plan)}, {"MASTER_PORT": "1"},
     {"MASTER_ADDR": "n3", "MASTER_PORT": "12345", "SLURMDL_PLAN": encode_plan(EVEN.plan)})])
def test_shell_reads_the_values_and_unsets_those_of_a_previous_map(name, variables, previous, expected):
    tasks = map_input(*EVEN.plan.nodes, job_id=7, master_port=12345, task_variables=variables)
    show = "; ".join(f'printf "%s\\0" "${{{variable}-unset}}"' for variable in expected)
    proc = subprocess.run(["sh", "-c", f'eval "$1"; {show}', "sh", format_rank_map(name, tasks)], env=previous,
                          capture_output=True, text=True, check=True)
    assert proc.stdout.split("\0")[:-1] == list(expected.values())


def test_env_of_a_map_without_variables_has_its_plan():
    plan = Plan("ps", NODES, ("ps", *("worker",) * 3), {})
    text = format_rank_map("env", RankMapInput(plan, NODES))
    assert decode_plan(text.split("\n")[0].removeprefix("export SLURMDL_PLAN=")) == plan


def test_messages_never_go_to_stdout():
    """Scripts evaluate the standard output of --print-rank-map=shell."""
    proc = subprocess.run(["sh", "-c", 'exec "$0" -m slurmdl srun --print-rank-map=shell 2>&-', sys.executable],
                          env={}, stdout=subprocess.PIPE, text=True, check=False)
    assert (proc.returncode, proc.stdout) == (64, "")
