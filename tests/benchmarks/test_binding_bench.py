"""Evaluation of the benchmark of bound jobs, which runs on sandboxes (make bench-binding)."""

from __future__ import annotations

from itertools import islice

import pytest
from judging import check_rows

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
    rows = [*binding.outcome_rows([
        Outcome("allreduce", 1.0, 1.0, 2.0, 1.0, 3.0), Outcome("gossip", 1.0, 1.5, 1.0, 1.0, 1.0),
        Outcome("gossip", None, 1.0, 1.0)])]
    promised = "bound jobs whose nodes are as good as promised"
    check_rows(rows, {
        "all kinds: bound jobs": 2, "all kinds: jobs for which Slurm's own choice is good enough": 1,
        f"all kinds: {promised}": (50, False), f"allreduce: {promised}": (100, True),
        f"gossip: {promised}": (0, False),
        "all kinds: worst ratio of the time on the job's nodes to the promised one": 1.5,
        "all kinds: time on the nodes of Slurm's own choice, over that of the bound job": (2 + 1 / 1.5) / 2,
        "control, the same zones without numbers: jobs whose nodes are as good as promised": (50, True)})
    assert next(row for row in rows if row.metric == "all kinds: bound jobs").baseline == 3
    # kinds without a bound job have no share
    metrics = [row.metric for row in binding.outcome_rows([Outcome("gossip", None, 1.0, 1.0)])]
    assert "gossip: bound jobs" in metrics and not any("promised" in metric for metric in metrics)


def test_chosen_nodes_are_those_of_the_explanation():
    log = "zones\n  core 3 of 4\nchoice     n[1,6-7]: zoneA x2; Slurm itself would choose n[2-4], which\n"
    assert binding._chosen_nodes(log) == ["n1", "n6", "n7"]
    with pytest.raises(SandboxError, match="no choice of nodes: submitted"):
        binding._chosen_nodes("submitted as written")
