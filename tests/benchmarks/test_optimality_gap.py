"""The exact solver against brute force, and place() against the exact solver."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.placement.optimality_gap import Case, case, outcome, rows
from slurmdl.errors import PlacementError
from slurmdl.placement import exact_solver
from slurmdl.placement.eligibility import eligible_tasks
from slurmdl.placement.iteration_cost import network_links, predict_cost
from slurmdl.placement.job_size import resolve_job_size
from slurmdl.placement.place import place_job
from slurmdl.placement.result import Cost
from slurmdl.placement.traffic import Traffic


def brute_force(given: Case, key: Callable[[Cost], tuple[float, ...]]) -> tuple[float, ...]:
    """Least key over all choices of nodes and of their servers; ranks zone by zone."""
    topology, request = given.topology, given.request
    job, ps = resolve_job_size(request), request.dl.ps
    room = eligible_tasks(request, given.cluster, "main").tasks_now
    names = [name for name, tasks in zip(given.cluster.names, room.tolist(), strict=True)
             if tasks >= job.max_tasks_per_node]
    phases = Traffic.from_options(request.dl).phases(job.tasks)
    best: tuple[float, ...] = (np.inf,)
    for nodes in itertools.combinations(sorted(names, key=topology.path_of), job.nodes):
        network = network_links(nodes, topology, given.scores)
        each = [job.tasks // job.nodes] * job.nodes
        for servers in itertools.product(*(range(min(ps, count) + 1) for count in each)):
            if sum(servers) == ps:
                order = [i for i, count in enumerate(servers) for _ in range(count)]
                order += [i for i, count in enumerate(servers) for _ in range(each[i] - count)]
                best = min(best, key(predict_cost(phases, network, np.array(order))))
    return best


def small(seed: int) -> bool:
    given = case(seed)
    return len(given.cluster.names) <= 11 and given.request.nodes is not None and given.request.nodes[0] <= 5 \
        and (given.request.ntasks_per_node or 1) * given.request.nodes[0] <= 10


@pytest.mark.parametrize("seed", [seed for seed in range(300) if small(seed)][:16])
@pytest.mark.parametrize(("least", "key"), [
    ("seconds", lambda cost: cost.sort_key[:1]), ("bytes", lambda cost: cost.sort_key[1:])], ids=["seconds", "bytes"])
def test_the_solver_against_brute_force(seed: int, least: exact_solver.Objective,
                                        key: Callable[[Cost], tuple[float, ...]]) -> None:
    given = case(seed)
    found = exact_solver.solve_exactly(given.request, given.cluster, given.topology, given.scores, 20.0, least)
    assert found.proven
    assert key(found.cost) == pytest.approx(brute_force(given, key), rel=1e-6)


def test_place_is_never_better_than_the_optimum_and_close_to_it() -> None:
    found = [one for one in map(outcome, map(case, range(10_000, 10_060))) if one is not None]
    counted = [one.placed / one.optimum for one in found if one.counts]
    assert len(counted) >= 20
    assert min(counted) >= 1 - 1e-6
    assert np.median(counted) == pytest.approx(1.0, abs=1e-6)
    assert max(counted) <= 1.25


@pytest.mark.parametrize("seed", range(30_000, 30_040))
def test_no_choice_undercuts_the_bound(seed: int) -> None:
    given = case(seed)
    try:
        found = place_job(given.request, given.cluster, given.topology, given.scores)
    except PlacementError:
        return
    assert found.rank_map is not None and found.lower_bound is not None and found.optimality_gap is not None
    best = exact_solver.solve_exactly(given.request, given.cluster, given.topology, given.scores, 20.0).cost.seconds
    assert found.lower_bound <= best * (1 + 1e-6)
    assert best <= found.rank_map.cost.seconds * (1 + 1e-6)
    if given.request.dl.strategy == "allreduce":
        assert found.lower_bound == pytest.approx(best, rel=1e-6)


def test_leaf_order_and_chance_lose() -> None:
    found = [one for one in map(outcome, map(case, range(20_000, 20_012))) if one is not None and one.counts]
    assert sum(one.leaf for one in found) > 1.1 * sum(one.placed for one in found)
    assert sum(one.chance for one in found) > 1.1 * sum(one.placed for one in found)


def test_rows_judge_every_target() -> None:
    found = {row.metric: row for row in rows(3, clusters=4)}
    assert sum(row.met is not None for row in found.values()) == 5
    assert all(row.value >= 1 - 1e-6 for name, row in found.items() if "ratio" in name or "percentile" in name)
