"""Evaluation of the benchmark of bound jobs, which runs on sandboxes (make bench-binding)."""

from __future__ import annotations

from itertools import islice

import pytest

from benchmarks import binding
from benchmarks.binding import Outcome
from slurmdl.errors import SandboxError
from slurmdl.links.score_sources import parse_scores
from slurmdl.sandbox.spec import round_robin_topology

TOPOLOGY = round_robin_topology(binding.NODES, binding.ZONES)


def test_occupancies_are_different_and_repeatable():
    occupancies = list(islice(binding.random_occupancies(1, TOPOLOGY), 100))
    assert len(set(occupancies)) == 100
    assert occupancies == list(islice(binding.random_occupancies(1, TOPOLOGY), 100))
    assert {len(occupancy.busy) for occupancy in occupancies} == set(range(binding.BUSY[0], binding.BUSY[1] + 1))
    assert all(occupancy.slow_node not in occupancy.busy for occupancy in occupancies)


def test_slow_links_make_each_kind_slower():
    occupancy = binding.Occupancy((), "zoneB", "n03")
    scores = parse_scores(occupancy.scores_text(), 0.0)
    for options in binding.KINDS.values():
        count = int(options[0].removeprefix("-N"))
        fast, slow_uplink, slow_node = (
            binding.iteration_seconds(options, nodes[:count], TOPOLOGY, scores) for nodes in (
                ["n01", "n05", "n09", "n04", "n08", "n12"], ["n01", "n05", "n02", "n06", "n10", "n14"],
                ["n01", "n05", "n03", "n07", "n11", "n15"]))
        assert fast * binding.LIMIT < min(slow_uplink, slow_node), options


def test_rows_judge_bound_jobs_and_the_control():
    outcomes = [Outcome("allreduce", 1.0, 1.0, 2.0, 1.0, 3.0), Outcome("gossip", 1.0, 1.5, 1.0, 1.0, 1.0),
                Outcome("gossip", None, 1.0, 1.0)]
    rows = {row.metric: row for row in binding.outcome_rows(outcomes)}
    assert (rows["all kinds: bound jobs"].value, rows["all kinds: bound jobs"].baseline) == (2, 3)
    assert rows["all kinds: jobs for which Slurm's own choice is good enough"].value == 1
    for kind, share, met in (("all kinds", 50, False), ("allreduce", 100, True), ("gossip", 0, False)):
        row = rows[f"{kind}: bound jobs whose nodes are as good as promised"]
        assert (row.value, row.met) == (share, met)
    assert rows["all kinds: worst ratio of the time on the job's nodes to the promised one"].value == 1.5
    assert rows["all kinds: time on the nodes of Slurm's own choice, over that of the bound job"].value == \
        pytest.approx((2 + 1 / 1.5) / 2)
    control = rows["control, the same zones without numbers: jobs whose nodes are as good as promised"]
    assert (control.value, control.met) == (50, True)


def test_chosen_nodes_are_those_of_the_explanation():
    log = "zones\n  core 3 of 4\nchoice     n[1,6-7]: zoneA x2; Slurm itself would choose n[2-4], which\n"
    assert binding._chosen_nodes(log) == ["n1", "n6", "n7"]
    with pytest.raises(SandboxError, match="no choice of nodes: submitted"):
        binding._chosen_nodes("submitted as written")


def test_kinds_without_a_bound_job_have_no_share():
    rows = [row.metric for row in binding.outcome_rows([Outcome("gossip", None, 1.0, 1.0)])]
    assert "gossip: bound jobs" in rows and not any("promised" in metric for metric in rows)
