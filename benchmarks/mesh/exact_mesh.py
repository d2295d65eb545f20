"""Exact optimum of the nodes and ranks of a small mesh, by constraint programming (CP-SAT of OR-tools).

Independent of the search of `place_job`: one variable per pair of rank and node, one per message and link on its way,
the predicted seconds as objective. Links without latency and with one rail only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from ortools.sat.python import cp_model

from slurmdl.placement.arrays import IntArray
from slurmdl.placement.iteration_cost import NetworkLinks, predict_cost
from slurmdl.traffic import Phase

TIME_SCALE = 10**7  # predicted seconds of the first solution, in the solver's integers


@dataclass(frozen=True, eq=False)
class ExactMesh:
    """Best solution found: the node of each rank, its predicted seconds, and whether no other takes less."""

    node_of_rank: IntArray
    seconds: float
    proven: bool


def solve_mesh(phases: list[Phase], network: NetworkLinks, ranks: int, ranks_per_node: int, first: IntArray,
               time_limit_s: float) -> ExactMesh:
    """Choose nodes, all with `ranks_per_node` ranks, and their ranks with the least predicted seconds.

    `first` is a known solution, the node of each rank; the solver starts from it. All nodes may be chosen.
    """
    model, nodes = cp_model.CpModel(), range(len(network.nodes))
    known = predict_cost(phases, network, first).seconds
    if not known:
        return ExactMesh(first, 0.0, True)
    is_at = [[model.new_bool_var("") for _ in nodes] for _ in range(ranks)]
    is_used = [model.new_bool_var("") for _ in nodes]
    for rank in range(ranks):
        model.add_exactly_one(is_at[rank])
    for node in nodes:
        model.add(sum(row[node] for row in is_at) == ranks_per_node * is_used[node])
    for rank, node in enumerate(first.tolist()):
        for other in nodes:
            model.add_hint(is_at[rank][other], other == node)
    # nodes below each link; a zone above all nodes carries nothing
    below = [[node] for node in nodes]
    below += [np.flatnonzero((network.ancestors == zone).any(axis=1)).tolist() for zone in range(len(network.zones))]
    capacity = [*network.node_capacity.tolist(), *network.zone_capacity.tolist()]
    inside: list[list[Any]] = []
    for members in below:
        variables = []
        for rank in range(ranks):
            variable = model.new_bool_var("")
            model.add(variable == sum(is_at[rank][node] for node in members))
            variables.append(variable)
        inside.append(variables)
    # in a network of two tiers a node's link carries only what leaves the leaf zone
    leaf_capacity = network.leaf_capacity.tolist()
    link_of_zone = len(network.nodes)
    busy = []
    scale = TIME_SCALE / known
    for phase in phases:
        slowest = model.new_int_var(0, 4 * TIME_SCALE, "")
        busy.append(slowest)
        size = np.broadcast_to(phase.bytes_per_pair, phase.source.shape).tolist()
        pairs = list(zip(phase.source.tolist(), phase.target.tolist(), size, strict=True))
        for link, members in enumerate(below):
            if len(members) == len(network.nodes) or not pairs:
                continue
            leaf = inside[link_of_zone + int(network.leaf[link])] if leaf_capacity and link < link_of_zone else None
            for first_end, second_end in ((0, 1), (1, 0)):  # out of the link, and into it
                over_link, in_leaf = [], []
                for pair in pairs:
                    here, there, count = pair[first_end], pair[second_end], pair[2]
                    crosses = model.new_bool_var("")
                    outside = inside[link][there] if leaf is None else leaf[there]
                    model.add(crosses >= inside[link][here] - outside)
                    over_link.append(round(count / capacity[link] * scale) * crosses)
                    if leaf is not None:
                        stays = model.new_bool_var("")
                        model.add(stays >= inside[link][here] + leaf[there] - inside[link][there] - 1)
                        in_leaf.append(round(count / leaf_capacity[link] * scale) * stays)
                model.add(slowest >= sum(over_link))
                if in_leaf:
                    model.add(slowest >= sum(in_leaf))
    model.minimize(sum(busy))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 1
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return ExactMesh(first, known, False)
    found = np.array([next(node for node in nodes if solver.value(row[node])) for row in is_at], np.int64)
    seconds = predict_cost(phases, network, found).seconds
    proven = status == cp_model.OPTIMAL
    return ExactMesh(found, seconds, proven) if seconds <= known else ExactMesh(first, known, proven)
