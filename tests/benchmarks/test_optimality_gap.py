"""Exact solver compared with brute force, and `place_job` compared with the exact solver."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.placement import exact_solver
from benchmarks.placement.optimality_gap import Case, draw_case, rows, solve_case
from slurmdl.errors import PlacementError
from slurmdl.job_request import resolve_job_size
from slurmdl.placement.eligibility import eligible_tasks
from slurmdl.placement.iteration_cost import network_links, predict_cost
from slurmdl.placement.place import place_job
from slurmdl.placement.result import Cost


def brute_force(instance: Case, key: Callable[[Cost], tuple[float, ...]]) -> tuple[float, ...]:
    """Least key over all choices of nodes and servers; ranks ordered by zone."""
    topology, request = instance.topology, instance.request
    job, ps = resolve_job_size(request), request.options.ps
    tasks_now = eligible_tasks(request, instance.cluster, "main").tasks_now
    names = [name for name, tasks in zip(instance.cluster.names, tasks_now.tolist(), strict=True)
             if tasks >= job.max_tasks_per_node]
    phases = request.options.traffic.phases(job.tasks)
    best: tuple[float, ...] = (np.inf,)
    for nodes in itertools.combinations(sorted(names, key=topology.path_of), job.nodes):
        network = network_links(nodes, topology, instance.scores)
        tasks_per_node = job.tasks // job.nodes
        for servers in itertools.product(range(min(ps, tasks_per_node) + 1), repeat=job.nodes):
            if sum(servers) == ps:
                order = [i for i, count in enumerate(servers) for _ in range(count)]
                order += [i for i, count in enumerate(servers) for _ in range(tasks_per_node - count)]
                best = min(best, key(predict_cost(phases, network, np.array(order))))
    return best


def is_small(seed: int) -> bool:
    instance = draw_case(seed)
    request = instance.request
    return len(instance.cluster.names) <= 11 and request.nodes is not None and request.nodes[0] <= 5 \
        and (request.ntasks_per_node or 1) * request.nodes[0] <= 10


@pytest.mark.parametrize("seed", [seed for seed in range(300) if is_small(seed)][:16])
@pytest.mark.parametrize(("objective", "key"), [
    ("seconds", lambda cost: cost.sort_key[:1]), ("bytes", lambda cost: cost.sort_key[1:])], ids=["seconds", "bytes"])
def test_solver_finds_the_brute_force_optimum(seed: int, objective: exact_solver.Objective,
                                              key: Callable[[Cost], tuple[float, ...]]) -> None:
    instance = draw_case(seed)
    exact = exact_solver.solve_exactly(instance.request, instance.cluster, instance.topology, instance.scores, 20.0,
                                       objective)
    assert exact.proven
    assert key(exact.cost) == pytest.approx(brute_force(instance, key), rel=1e-6)


def test_placement_is_close_to_the_optimum() -> None:
    outcomes = [result for result in map(solve_case, map(draw_case, range(10_000, 10_060))) if result is not None]
    ratios = [result.placed / result.optimum for result in outcomes if result.counts]
    assert len(ratios) >= 20
    assert min(ratios) >= 1 - 1e-6
    assert np.median(ratios) == pytest.approx(1.0, abs=1e-6)
    assert max(ratios) <= 1.25


@pytest.mark.parametrize("seed", range(30_000, 30_040))
def test_lower_bound_is_below_the_optimum(seed: int) -> None:
    instance = draw_case(seed)
    try:
        placement = place_job(instance.request, instance.cluster, instance.topology, instance.scores)
    except PlacementError:
        return
    assert placement.rank_map is not None
    assert placement.lower_bound is not None and placement.optimality_gap is not None
    best = exact_solver.solve_exactly(instance.request, instance.cluster, instance.topology,
                                      instance.scores, 20.0).cost.seconds
    assert placement.lower_bound <= best * (1 + 1e-6)
    assert best <= placement.rank_map.cost.seconds * (1 + 1e-6)
    if instance.request.options.strategy == "allreduce":
        assert placement.lower_bound == pytest.approx(best, rel=1e-6)


def test_outcome_leaf_order_and_random_choice_are_slower() -> None:
    cases = map(draw_case, range(20_000, 20_012))
    results = [result for result in map(solve_case, cases) if result and result.counts]
    placed = sum(result.placed for result in results)
    assert sum(result.leaf for result in results) > 1.1 * placed
    assert sum(result.random_choice for result in results) > 1.1 * placed


def test_optimality_gap_rows_have_all_targets() -> None:
    by_metric = {row.metric: row for row in rows(3, clusters=4)}
    assert sum(row.met is not None for row in by_metric.values()) == 5
    assert all(row.value >= 1 - 1e-6 for name, row in by_metric.items() if "ratio" in name or "percentile" in name)
