"""The benchmark of meshes on few and small cases; it runs as a whole in `make bench-mesh`."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.mesh import groups, optimality, rules, step_time
from benchmarks.mesh.exact_mesh import solve_mesh
from slurmdl.mesh import MeshTraffic
from slurmdl.placement.iteration_cost import network_links, predict_cost
from slurmdl.traffic import Traffic

pytest.importorskip("ortools")


def small_cases() -> list[optimality.Case]:
    """Six drawn cases with at most five ranks, one on each node."""
    drawn = filter(None, map(optimality.draw_case, itertools.count()))
    small = (case for case in drawn if case.ranks_per_node == 1 and case.request.nodes and case.request.nodes[0] < 6)
    return list(itertools.islice(small, 6))


@pytest.mark.parametrize("case", small_cases())
def test_exact_optimum_is_that_of_all_maps(case: optimality.Case) -> None:
    """Every choice of nodes and ranks on the first six nodes is tried."""
    traffic = case.request.options.traffic
    assert isinstance(traffic, MeshTraffic)
    ranks = traffic.mesh.ranks
    names = case.cluster.names[:6]
    network = network_links(names, case.topology, case.scores)
    phases = traffic.phases(ranks)
    best = min(predict_cost(phases, network, np.array(order)).seconds
               for order in itertools.permutations(range(len(names)), ranks))
    exact = solve_mesh(phases, network, ranks, 1, np.arange(ranks), 20.0)
    assert exact.proven and exact.seconds == pytest.approx(best, rel=1e-4)


def test_placements_are_compared_with_the_optimum() -> None:
    rows = {row.metric: row for row in optimality.rows(7, instances=4)}
    assert rows["instances with a proven optimum"].value >= 4
    assert rows["predicted seconds / optimum, median"].value == pytest.approx(1.0, abs=0.1)


def test_groups_are_compared_with_the_optimum() -> None:
    rows = {row.metric: row for row in groups.rows(7, instances=8)}
    assert rows["instances with a proven optimum"].value >= 8
    assert rows["predicted seconds / optimum, 99th percentile"].value == pytest.approx(1.0, abs=0.1)


def test_rules_choose_whole_blocks_first() -> None:
    block = np.repeat(np.arange(3), [4, 6, 5])
    free = np.array([0, 1, 2, 4, 5, 6, 7, 8, 10, 11, 12, 13])  # 3, 5 and 4 of them
    for rule, wanted, per_block in ((rules.best_fit, 7, [2, 5, 0]), (rules.contiguous, 5, [0, 5, 0]),
                                    (rules.segments, 8, [0, 4, 4])):
        nodes = rule(block, wanted, free)
        assert nodes is not None and np.bincount(block[nodes], minlength=3).tolist() == per_block, rule
    assert rules.best_fit(block, 13, free) is None


@pytest.mark.parametrize(("noise", "met"), [(0.0, True), (5.0, False)])
def test_predictions_must_order_the_measured_steps(monkeypatch: pytest.MonkeyPatch, noise: float, met: bool) -> None:
    generator = np.random.default_rng(1)
    network: list[object] = []

    def measure(sandbox: object, traffic: Traffic, maps: list[np.ndarray]) -> list[float]:
        if not network:
            network.append(step_time.make_network(step_time.round_robin_topology(8, 4)))
        return [predict_cost(traffic.phases(8), network[0], order).seconds  # type: ignore[arg-type]
                * float(np.exp(noise * generator.standard_normal())) for order in maps]

    monkeypatch.setattr(step_time, "_measure", measure)
    sandbox = SimpleNamespace(spec=SimpleNamespace(name="none", topology=step_time.round_robin_topology(8, 4)),
                              shape_link=lambda link, rate: None)
    monkeypatch.setattr(step_time.lifecycle, "sandbox_up", lambda spec: sandbox)
    monkeypatch.setattr(step_time.lifecycle, "sandbox_down", lambda name: None)
    rows = list(step_time.rows(1))
    judged = [row.met for row in rows if "rank correlation" in row.metric]
    assert judged == [met] * len(step_time.MESHES)
    controls = [row.value for row in rows if "control" in row.metric]
    assert all(abs(value) < 0.6 for value in controls)
