"""The searches of a placement, each compared with all choices of small cases."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from placing import SCORES, cost_of, idle, job, node, three_level, two_level

from slurmdl.dl_options import DlOptions
from slurmdl.gpu_request import GpuRequest
from slurmdl.job_request import JobRequest, JobSize
from slurmdl.links.link_scores import LinkScore, LinkScores
from slurmdl.placement import (
    all_to_all,
    arrays,
    eligibility,
    mesh_orders,
    parameter_servers,
    rank_search,
    result,
    zones,
)
from slurmdl.placement.all_to_all import AllToAllModel, narrow_time
from slurmdl.placement.candidate_nodes import CandidateNodes, build_candidate_nodes
from slurmdl.placement.iteration_cost import network_links
from slurmdl.placement.parameter_servers import PsSearch
from slurmdl.placement.place import place_job
from slurmdl.placement.rank_orders import best_rank_map
from slurmdl.placement.result import Cost, Placement, RankMap
from slurmdl.placement.zones import UNCAPPED, segment_quotas, take_nodes
from slurmdl.topology.source import ZoneDecl, build_topology
from slurmdl.topology.topology import Topology
from slurmdl.traffic import Traffic, count_shards

BYTES = 6.0
#: leaves at different depths
RAGGED = build_topology([
    ZoneDecl("z0", nodes=("n0", "n1", "n2")), ZoneDecl("z1", nodes=("n3", "n4")), ZoneDecl("z2", nodes=("n5", "n6")),
    ZoneDecl("m", children=("z1", "z2")), ZoneDecl("r", children=("z0", "m"))], kind="tree", source="test")


def random_network(seed: int, has_latency: bool = False) -> tuple[Topology, LinkScores]:
    """Up to nine nodes in two or three levels, with unequal links."""
    generator = np.random.default_rng(seed)
    names = iter(f"n{i}" for i in range(99))
    topology = three_level(2, 2, 2) if seed % 3 == 0 else RAGGED if seed % 3 == 1 else two_level(
        *([next(names) for _ in range(size)] for size in generator.integers(1, 4, int(generator.integers(2, 4)))))

    def score(*bandwidths: float) -> LinkScore:
        return LinkScore(float(generator.choice(bandwidths)), float(generator.choice([0.0, 0.2, 0.6])) * has_latency)

    return topology, LinkScores({name: score(2, 3, 10) for name in topology.nodes},
                                {name: score(1, 5, 20) for name in topology.zones}, default_latency=0.0)


def random_pool(seed: int, has_latency: bool = False) -> CandidateNodes:
    topology, scores = random_network(seed, has_latency)
    return build_candidate_nodes(JobRequest(), idle(topology), topology, scores, np.full(len(topology.nodes), 4))


def root(pool: CandidateNodes) -> int:
    return int(np.flatnonzero(pool.parent < 0)[0])


def zone_counts(pool: CandidateNodes, per_node: dict[int, int]) -> Iterator[tuple[int, int]]:
    """Sum of the values of nodes below each zone that has an uplink."""
    for zone in np.flatnonzero(pool.parent >= 0).tolist():
        yield zone, sum(count for node, count in per_node.items() if zone in pool.ancestors[node])


def all_to_all_seconds(pool: CandidateNodes, size: JobSize, nodes: tuple[int, ...]) -> float:
    per_node = dict.fromkeys(nodes, size.tasks // size.nodes)
    loads = [(count, float(pool.node_capacity[node])) for node, count in per_node.items()]
    loads += [(count, float(pool.zone_capacity[zone])) for zone, count in zone_counts(pool, per_node)]
    return max(BYTES * count * (size.tasks - count) / capacity for count, capacity in loads)


def server_seconds(pool: CandidateNodes, size: JobSize, ps: int, servers: dict[int, int]) -> float:
    """Time of one phase with these servers on each of the nodes."""
    per_node = size.tasks // size.nodes
    loads = [(count, per_node - count, float(pool.node_capacity[node])) for node, count in servers.items()]
    of_zone = dict(zone_counts(pool, servers))
    tasks = dict(zone_counts(pool, dict.fromkeys(servers, per_node)))
    loads += [(of_zone[zone], tasks[zone] - of_zone[zone], float(pool.zone_capacity[zone])) for zone in of_zone]
    return max(BYTES * float(count_shards(own, workers, ps, size.tasks - ps)) / capacity
               for own, workers, capacity in loads)


def server_maps(size: JobSize, ps: int, nodes: tuple[int, ...]) -> Iterator[dict[int, int]]:
    for counts in itertools.product(range(size.tasks // size.nodes + 1), repeat=size.nodes):
        if sum(counts) == ps:
            yield dict(zip(nodes, counts, strict=True))


SIZES = [(JobSize(2, 2), 1), (JobSize(3, 3), 1), (JobSize(4, 4), 2), (JobSize(3, 6), 2), (JobSize(4, 8), 3)]


@pytest.mark.parametrize("seed", range(12))
def test_all_to_all_model_knows_the_least_time(seed: int) -> None:
    pool = random_pool(seed)
    for size, _ in SIZES:
        choices = [*itertools.combinations(range(len(pool.leaf)), size.nodes)]
        best = min((all_to_all_seconds(pool, size, nodes) for nodes in choices), default=np.inf)
        model = AllToAllModel(pool, size, BYTES, UNCAPPED)
        top = np.array([root(pool)])
        guess = best if choices else 1.0
        low, high = narrow_time(model.can_hold_job, top, guess / 50, guess * 50, 6)
        if not choices:
            assert high == np.inf
            continue
        assert low <= best * (1 + 1e-6) and best <= high * (1 + 1e-6) and high <= low * 1.001, (size, low, best, high)
        quotas, nodes = model.node_counts_for_time(high, root(pool))
        taken = tuple(take_nodes(pool, nodes, quotas).tolist())
        assert len(taken) == size.nodes and all_to_all_seconds(pool, size, taken) <= high * (1 + 1e-6)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("max_splits", [parameter_servers.MAX_SPLITS, 0])
def test_server_search_finds_the_least_time(seed: int, max_splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameter_servers, "MAX_SPLITS", max_splits)
    pool = random_pool(seed)
    for size, ps in SIZES:
        choices = [*itertools.combinations(range(len(pool.leaf)), size.nodes)]
        if not choices:
            continue
        best = min(server_seconds(pool, size, ps, servers) for nodes in choices
                   for servers in server_maps(size, ps, nodes))
        search = PsSearch(pool, size, ps, BYTES)
        found = search.best_split(best / 50, best * 50)
        assert found is not None
        seconds, split = found
        assert split.sum() == ps and seconds == pytest.approx(best, rel=1e-4), size
        taken = tuple(search.select_nodes(seconds, split).tolist())
        assert len(set(taken)) == size.nodes
        least = min(server_seconds(pool, size, ps, servers) for servers in server_maps(size, ps, taken))
        assert least <= seconds * (1 + 1e-4)
        assert search.best_split(best / 50, best / 2) is None


@pytest.mark.parametrize("seed", range(12))
def test_widest_paths(seed: int) -> None:
    pool = random_pool(seed, has_latency=True)
    caps = zones.latency_caps(pool)
    assert len(set(caps)) == len(caps) and UNCAPPED not in caps
    for cap in (UNCAPPED, *caps):
        for zone in range(pool.zone_count):
            widths = []
            for own in range(*pool.nodes_below(zone).indices(len(pool.leaf))):
                above = [z for z in pool.ancestors[own] if z >= 0 and pool.level[z] < pool.level[zone]]
                limits = [np.inf, *cap.uplinks_s, *[np.inf] * 9]
                slow = pool.node_latency[own] > cap.node_s or any(
                    pool.zone_latency[z] > limits[1 + pool.level[z]] for z in above)
                links = [pool.node_capacity[own], *(pool.zone_capacity[z] for z in above)]
                widths.append(0.0 if slow else min(links))
            assert zones.path_widths(pool, zone, cap).tolist() == widths
            for k in range(1, len(widths) + 2):
                expected = sorted(widths, reverse=True)[k - 1] if k <= len(widths) else 0.0
                assert zones.kth_widest_paths(pool, k, cap)[zone] == expected
            assert cap.path_latency(pool)[zone] == pytest.approx(cap.node_s + sum(cap.uplinks_s[:pool.level[zone]]))


#: strategy -> how much less than the best time its lower bound may be
BOUNDS = {"ring": (DlOptions(rank0="any"), 1e-9), "all-to-all": (DlOptions("gossip", rank0="any"), 1e-6),
          "server": (DlOptions("ps", ps=1, rank0="any"), 2e-4), "servers": (DlOptions("ps", ps=2, rank0="any"), 0.34)}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("has_latency", [False, True])
@pytest.mark.parametrize("kind", BOUNDS)
def test_placement_and_lower_bound(kind: str, has_latency: bool, seed: int) -> None:
    """Compared with all choices of nodes."""
    topology, scores = random_network(seed, has_latency)
    (options, error), per_node = BOUNDS[kind], 2 if kind == "servers" else 1
    for count in range(2, min(4, len(topology.nodes)) + 1):
        placement = place_job(job(count, options, ntasks_per_node=per_node), idle(topology), topology, scores)
        choices = ([(name, per_node) for name in names] for names in itertools.combinations(topology.nodes, count))
        best = min(best_rank_map(slots, topology, scores, options.traffic, "any").cost.seconds for slots in choices)
        assert placement.rank_map is not None and placement.rank_map.cost.seconds == pytest.approx(best)
        assert placement.lower_bound is not None and placement.lower_bound_reason
        assert best * (1 - error) <= placement.lower_bound <= best * (1 + 1e-6)


@pytest.mark.parametrize("kind", ["all-to-all", "server", "servers"])
def test_lower_bound_of_uplinks(kind: str) -> None:
    """Two leaves of two nodes: half of the ranks are behind each thin uplink."""
    topology, (options, _) = two_level(["a", "b"], ["c", "d"]), BOUNDS[kind]
    placement = place_job(job(4, options, ntasks_per_node=2), idle(topology), topology, SCORES)
    assert placement.rank_map is not None and placement.lower_bound is not None
    assert placement.lower_bound == pytest.approx(placement.rank_map.cost.seconds, rel=0.01)
    assert placement.lower_bound_reason == "tasks that each zone can hold in time"


def random_flow(seed: int, ranks: int) -> npt.NDArray[np.float64]:
    """Symmetric bytes between ranks."""
    generator = np.random.default_rng(seed)
    flow = np.triu(generator.integers(0, 9, (ranks, ranks)) * (generator.random((ranks, ranks)) < 0.6), 1)
    return np.asarray(flow + flow.T, float)


def cut_bytes(flow: npt.NDArray[np.float64], first: list[int]) -> float:
    is_first = np.isin(np.arange(len(flow)), first)
    return float(flow[np.ix_(is_first, ~is_first)].sum())


@pytest.mark.parametrize("seed", range(30))
def test_split_of_ranks_sends_least(seed: int) -> None:
    flow = random_flow(seed, 10)
    for cut in (3, 5):
        order = rank_search._split_ranks(flow, cut)
        assert sorted(order.tolist()) == list(range(10))
        assert cut_bytes(flow, order[:cut].tolist()) == min(
            cut_bytes(flow, [*first]) for first in itertools.combinations(range(10), cut))
    is_second = np.arange(10) >= 5
    rank_search._kernighan_lin(flow, is_second)
    first, second = np.flatnonzero(~is_second).tolist(), np.flatnonzero(is_second).tolist()
    assert len(first) == 5
    for lost, gained in itertools.product(first, second):  # no swap helps
        assert cut_bytes(flow, [*(rank for rank in first if rank != lost), gained]) >= cut_bytes(flow, first)


def test_largest_gains() -> None:
    gain, ranks = np.array([5.0, -1, 9, 7, 2, 8]), np.array([0, 1, 3, 4, 5])
    assert set(rank_search._largest_gains(gain, ranks, 3).tolist()) == {0, 3, 5}
    assert rank_search._largest_gains(gain, ranks, 5) is ranks


def test_eigenvectors_of_many_ranks_are_approximated(monkeypatch: pytest.MonkeyPatch) -> None:
    flow = random_flow(1, 120) * np.where(np.add.outer(np.arange(120), np.arange(120)) % 2, 0.05, 1.0)
    laplacian = np.diag(flow.sum(axis=1)) - flow

    def quotients() -> list[float]:
        vectors = rank_search._fiedler_vectors(flow)
        assert np.linalg.norm(vectors, axis=1) == pytest.approx([1.0] * rank_search.FIEDLER_VECTORS)
        return [float(vector @ laplacian @ vector) for vector in vectors]

    exact = quotients()
    monkeypatch.setattr(rank_search, "MAX_EXACT_RANKS", 4)
    assert quotients() == pytest.approx(exact, rel=0.02)
    signs = np.sign(rank_search._fiedler_vectors(flow)[0])
    assert (signs == signs[0] * (-1) ** np.arange(120)).all(), "even and odd ranks send little to each other"


@pytest.mark.parametrize("kind", ["matrices", "base-2", "mesh", "groups"])
@pytest.mark.parametrize("seed", range(6))
def test_searched_ranks_are_close_to_the_best_map(kind: str, seed: int) -> None:
    generator = np.random.default_rng(seed)
    topology = two_level(["a", "b", "c"], ["d", "e"], ["f"])
    scores = LinkScores({name: LinkScore(float(generator.choice([100, 400, 1000]))) for name in topology.nodes},
                        default_zone_bandwidth=(50.0,), default_latency=0.0)
    traffic = {"matrices": Traffic("gossip", matrices=tuple(random_flow(seed + i, 6) for i in (0, 100))),
               "base-2": Traffic("gossip", 1e3, pattern="base-2"),
               "mesh": DlOptions(mesh="dp=3,tp=2", bytes="dp=1000,tp=3000").traffic,
               "groups": DlOptions(groups="x=2,y=4", bytes="x=3000,y=1000,x:y=500").traffic}[kind]
    best = min(cost_of(traffic, topology, order, scores).seconds for order in itertools.permutations(topology.nodes))
    found = best_rank_map([(name, 1) for name in topology.nodes], topology, scores, traffic, "any").cost.seconds
    assert found <= best * (1.2 if kind == "matrices" else 1 + 1e-9)


# --- parts of the searches


@pytest.mark.parametrize(("seed", "permutation"), [
    (0, [0, 1, 2, 3, 4, 5, 6, 7]), (1, [0, 7, 4, 6, 5, 1, 3, 2]), (2, [4, 1, 6, 0, 7, 2, 5, 3]),
    (-3, [0, 6, 2, 7, 4, 3, 5, 1])])
def test_permutations_of_a_seed_stay_the_same(seed: int, permutation: list[int]) -> None:
    assert arrays.seeded_permutation(8, seed).tolist() == permutation


def test_rounding_noise_is_dropped() -> None:
    values = np.array([1 / 3, 1e12 / 3, 0.0, -5.5])
    rounded = arrays.round_mantissa(values * (1 + 1e-12))
    assert (rounded == arrays.round_mantissa(values)).all() and rounded == pytest.approx(values, rel=2e-9)
    assert (arrays.round_mantissa(values * (1 + 1e-8))[:2] != rounded[:2]).all()


@pytest.mark.parametrize(("counts", "text"), [
    ({"a": 2, "b": 3}, "b x3 + a x2"), ({"a": 3, "b": 2, "c": 1, "d": 1}, "a x3 + b x2 + c x1 + d x1"),
    ({f"z{i}": 2 for i in range(6)}, "z[0-5] x2"), ({f"z{i}": i + 1 for i in range(6)}, "6 zones x1-6"),
    ({f"z{i}": i // 2 + 1 for i in range(8)}, "z[6-7] x4 + z[4-5] x3 + z[2-3] x2 + z[0-1] x1"),
    ({name * 12: 2 for name in "abcdefgh"}, "8 zones x2"), ({name * 30: 1 for name in "abc"}, " + ".join(
        f"{name * 30} x1" for name in "abc"))])
def test_label_of_zones(counts: dict[str, int], text: str) -> None:
    assert result.format_zone_counts(counts) == text


@pytest.mark.parametrize(("costs", "tie", "best"), [
    ([(2.0, 1), (1.0, 5), (1.0, 4)], 0.0, 2), ([(1.0, 5), (1.004, 4), (1.02, 1)], 0.005, 1),
    ([(1.0, 5), (1.006, 4)], 0.005, 0), ([(1.004, 4.3), (1.0, 4)], 0.005, 1),
    ([(3.0, 9), (1.0, 9), (2.0, 1)], 0.005, 1)])
def test_best_cost(costs: list[tuple[float, float]], tie: float, best: int) -> None:
    """Of seconds and bytes between zones."""
    assert result.best_cost([Cost(seconds, 9, sent) for seconds, sent in costs], tie) == best


@pytest.mark.parametrize(("choice", "is_good"), [
    ((1.0, 10.0, 99.0), True), ((1.02, 10.2, 0.0), True), ((1.03, 10.0, 0.0), False), ((1.0, 10.3, 0.0), False)])
def test_good_enough_choice(choice: tuple[float, float, float], is_good: bool) -> None:
    assert result.is_good_enough(choice, (1.0, 10.0, 5.0)) == is_good


@pytest.mark.parametrize(("seconds", "free", "bound", "slowdown", "gap"), [
    (3.0, 2.0, 2.0, 0.5, 0.5), (2.0, 2.0, 2.0, 0.0, 0.0), (2.0, None, None, 0.0, None), (0.0, 0.0, 0.0, 0.0, 0.0),
    (1.0, 0.0, 0.0, np.inf, None), (1.0, 2.0, 3.0, 0.0, 0.0)])
def test_slowdown_and_gap(seconds: float, free: float | None, bound: float | None, slowdown: float,
                          gap: float | None) -> None:
    free_cost = None if free is None else Cost(free, 0, 0)
    ranks = RankMap(("n",), ("worker",), Cost(seconds, 0, 0), any_rank0_cost=free_cost)
    assert (ranks.rank0_slowdown, Placement(rank_map=ranks, lower_bound=bound).optimality_gap) == (slowdown, gap)


@pytest.mark.parametrize(("request_", "size", "max_tasks", "tasks"), [
    # -N 3 -n 10 on nodes of 8 CPUs: the first node takes all that it can
    (job(3, ntasks=10), JobSize(3, 10), [8, 8, 8], [8, 1, 1]),
    (job(3, ntasks=10), JobSize(3, 10), [2, 8, 8], [2, 7, 1]),
    (job(2, ntasks=3, cpus_per_task=2), JobSize(2, 3), [4, 4], [2, 1]),
    (job(2, ntasks=4, gpus=GpuRequest(per_node=2, cpus_per_gpu=2)), JobSize(2, 4), [8, 8], [2, 2]),
    (job(2, ntasks=6, gpus=GpuRequest(cpus_per_gpu=1)), JobSize(2, 6), [8, 8], [5, 1]),
    (job(2, ntasks=6, ntasks_per_node=4), JobSize(2, 6), [8, 8], [3, 3]),
    (job(2, ntasks=6, exclusive=True), JobSize(2, 6), [5, 1], [5, 1]),
])
def test_tasks_are_split_as_their_cpus(request_: JobRequest, size: JobSize, max_tasks: list[int],
                                       tasks: list[int]) -> None:
    assert eligibility.split_tasks(request_, size, max_tasks) == tasks


@pytest.mark.parametrize(("state", "responding", "expected"), [
    ("IDLE", True, (True, True)), ("IDLE", False, (False, False)), ("IDLE+POWERED_DOWN", True, (True, True)),
    ("IDLE+COMPLETING", True, (False, True)), ("ALLOCATED", True, (False, True)), ("DOWN", True, (False, False)),
    ("IDLE+DRAIN", True, (False, False))])
def test_idle_nodes_and_nodes_in_service(state: str, responding: bool, expected: tuple[bool, bool]) -> None:
    own = node("n1", state, responding=responding)
    assert (eligibility.is_idle(own), eligibility.is_in_service(own)) == expected


@pytest.mark.parametrize(("sizes", "wanted", "counts"), [
    # the smallest zone that holds the rest, else the largest
    ([3, 5, 4], 4, [0, 0, 4]), ([3, 5, 4], 7, [2, 5, 0]), ([3, 5, 4], 12, [3, 5, 4]), ([2, 2, 2], 3, [2, 1, 0]),
    ([5, 4, 3], 6, [5, 0, 1]), ([3, 5, 4], 13, None), ([4, 4, 0], 8, [4, 4, 0])])
def test_quotas_in_few_zones(sizes: list[int], wanted: int, counts: list[int] | None) -> None:
    topology = two_level(*([f"{zone}{i}" for i in range(5)] for zone in "abc"))
    pool = build_candidate_nodes(JobRequest(), idle(topology), topology, LinkScores(), np.full(15, 4))
    quotas = segment_quotas(pool, root(pool), np.array([*sizes, 0]), wanted)
    assert (quotas if quotas is None else quotas.tolist()) == (counts and [*counts, 0])


def test_latency_caps_are_bounded() -> None:
    topology = two_level(*([f"{zone}{i}" for i in range(30)] for zone in "abcdefgh"))
    scores = LinkScores({name: LinkScore(rtt=1e-5 * i) for i, name in enumerate(topology.nodes, 1)},
                        {f"z{i}": LinkScore(rtt=1e-4 * i) for i in range(8)})
    pool = build_candidate_nodes(JobRequest(), idle(topology), topology, scores, np.full(240, 4))
    caps = zones.latency_caps(pool)
    assert 100 < len(caps) <= zones.MAX_LATENCY_CAPS
    assert caps[-1] == zones.LatencyCap(pool.node_latency.max(), (pool.zone_latency[:8].max(),))
    totals = [cap.node_s + sum(cap.uplinks_s) for cap in caps]
    assert totals == sorted(totals)
    relevant = zones.relevant_latency_caps(pool, 1.0, 10.0)
    assert len(relevant) == zones.MAX_RELEVANT_CAPS and relevant[-1] == caps[-1]
    # 20 times the latency of 1.55 ms is less than the 10,000th part of the time
    assert zones.relevant_latency_caps(pool, 311.0, 10.0) == [caps[-1]]
    assert len(zones.relevant_latency_caps(pool, 309.0, 10.0)) > 1


@pytest.mark.parametrize(("kind", "leaves", "node_counts"), [
    ("tree", 1, [1]), ("block", 1, [1]), ("block", 2, [1, 1, 2]), ("tree", 2, [1, 1])])
def test_blocks_are_joined_by_one_zone(kind: str, leaves: int, node_counts: list[int]) -> None:
    topology = build_topology([ZoneDecl(f"b{i}", nodes=(f"n{i}",)) for i in range(leaves)], kind=kind, source="")
    pool = build_candidate_nodes(JobRequest(), idle(topology), topology, LinkScores(), np.full(leaves, 4))
    assert pool.node_count.tolist() == node_counts
    assert pool.parent.tolist() == ([2, 2, -1] if len(node_counts) == 3 else [-1] * leaves)


def test_servers_are_peers_of_their_average_load() -> None:
    assert all_to_all.merged_bytes_per_pair(Traffic("gossip", 10.0).phases(6)) == pytest.approx(10 / 5)
    # twice 5 bytes for 2 x 6 pairs of 8 ranks
    assert all_to_all.merged_bytes_per_pair(Traffic("ps", 10.0, 2).phases(8)) == pytest.approx(2 * 5 * 12 / 64)


def test_moved_servers_keep_the_limits() -> None:
    topology = two_level(*([f"{zone}{i}" for i in range(size)] for zone, size in (("a", 3), ("b", 2), ("c", 1))))
    pool = build_candidate_nodes(JobRequest(), idle(topology), topology, LinkScores(), np.full(6, 4))
    search = PsSearch(pool, JobSize(5, 5), 4, BYTES)
    starts = search.initial_splits()
    assert (starts.sum(axis=1) == 4).all() and (starts <= [3, 2, 1]).all() and (starts >= 0).all()
    assert len({tuple(start) for start in starts.tolist()}) == len(starts) > 2 and [2, 1, 1] in starts.tolist()
    moved = {tuple(split) for split in search.neighbor_splits(np.array([2, 2, 0])).tolist()}
    assert moved == {(3, 1, 0), (1, 2, 1), (2, 1, 1)}
    singles = two_level(*([zone] for zone in "abcd"))
    pool = build_candidate_nodes(JobRequest(), idle(singles), singles, LinkScores(), np.full(4, 4))
    assert (PsSearch(pool, JobSize(4, 4), 3, BYTES).initial_splits() <= 1).all()
    all_nodes = np.arange(4)
    assert parameter_servers.limit_leaves(pool, all_nodes, JobSize(3, 3), root(pool), None) is all_nodes


@pytest.mark.parametrize("options", [DlOptions("gossip"), DlOptions("ps", ps=1)], ids=["all-to-all", "server"])
@pytest.mark.parametrize("seed", range(6))
def test_estimated_times_are_those_of_the_cost_model(options: DlOptions, seed: int) -> None:
    topology, scores = random_network(seed, has_latency=True)
    pool = build_candidate_nodes(JobRequest(), idle(topology), topology, scores, np.full(len(topology.nodes), 4))
    size = JobSize(3, 3)
    problem = zones.SearchProblem(size, options.traffic, options.traffic.phases(3))
    choices = parameter_servers.ps_choices if options.ps else all_to_all.all_to_all_choices
    proposals = [*choices(pool, problem, zones.rank_zones(pool, problem))]
    assert proposals
    ratios = []
    for proposal in proposals:
        slots = [(sorted(topology.nodes)[i], 1) for i in sorted(pool.snapshot_index[proposal.choice.nodes].tolist())]
        seconds = best_rank_map(slots, topology, scores, options.traffic, "any").cost.seconds
        ratios.append(proposal.estimated_seconds / seconds)
    assert 1 - 1e-6 <= min(ratios) < 1 + 2e-3


def test_bisection_cuts_in_the_middle_at_the_highest_border(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = two_level(*([f"{zone}{i}" for i in range(2)] for zone in "abcd"))
    links = network_links(sorted(topology.nodes), topology, LinkScores())
    cuts: list[tuple[int, int]] = []
    monkeypatch.setattr(rank_search, "_split_ranks", lambda flow, cut: (
        cuts.append((len(flow), cut)), np.arange(len(flow)))[1])
    nodes = np.repeat(np.arange(8), [1, 1, 1, 1, 1, 1, 2, 1])
    assert rank_search.bisection_map(np.zeros((9, 9)), links, nodes).tolist() == nodes.tolist()
    assert sorted(cuts) == [(2, 1), (2, 1), (2, 1), (3, 2), (4, 2), (5, 2), (9, 4)]


def test_bisection_keeps_ranks_of_a_node_that_exchange_most() -> None:
    """Ranks 0 and 2, 1 and 3, ... exchange most, and such pairs of pairs more than others."""
    links = network_links(["a", "b", "c", "d"], two_level(["a", "b"], ["c", "d"]), LinkScores())
    flow = np.zeros((8, 8))
    for left, right, size in ((0, 2, 9), (1, 3, 9), (4, 6, 9), (5, 7, 9), (0, 5, 3), (1, 4, 3), (2, 4, 1), (3, 7, 1)):
        flow[left, right] = flow[right, left] = size
    nodes = rank_search.bisection_map(flow, links, np.repeat(np.arange(4), 2)).tolist()
    assert [nodes[i] for i in (0, 1, 4, 5)] == [nodes[i] for i in (2, 3, 6, 7)]
    assert sorted(nodes) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert nodes[0] // 2 == nodes[5] // 2 != nodes[1] // 2 == nodes[4] // 2


@pytest.mark.parametrize(("count", "leaves"), [
    (4, "cccc"), (5, "aaaaa"), (9, "aaaaacccc"), (2, "cc"), (14, "aaaaabbbbbcccc")])
def test_group_takes_the_fewest_zones(count: int, leaves: str) -> None:
    topology = two_level(*([f"{zone}{i}" for i in range(size)] for zone, size in (("a", 5), ("b", 5), ("c", 4))))
    links = network_links(topology.nodes, topology, LinkScores())
    taken = mesh_orders._take_compact(links, np.arange(14), count)
    assert "".join(sorted(topology.nodes[i][0] for i in taken)) == leaves


def test_choices_of_equal_leaves_have_one_signature() -> None:
    topology = two_level(*([f"{zone}{i}" for i in range(3)] for zone in "abc"))

    def signature(scores: LinkScores, *nodes: int) -> bytes:
        pool = build_candidate_nodes(JobRequest(), idle(topology), topology, scores, np.full(9, 4))
        return pool.choice_signature(np.array(nodes))

    same, other_leaf = LinkScores(), LinkScores(zones={"z2": LinkScore(1e8)})
    assert signature(same, 0, 1, 3) == signature(same, 4, 5, 8) == signature(same, 6, 3, 7)
    assert len({signature(same, *nodes) for nodes in ((0, 1, 2), (0, 1, 3), (0, 3, 6), (0, 1), (0, 3))}) == 5
    assert signature(other_leaf, 0, 1) == signature(other_leaf, 4, 5) != signature(other_leaf, 6, 7)
    other_node = LinkScores(nodes={"a0": LinkScore(1e8)})
    assert signature(other_node, 3, 4) == signature(other_node, 4, 3) != signature(other_node, 3, 5)


@pytest.mark.parametrize("first", [None, 7])
def test_nodes_of_groups(first: int | None) -> None:
    topology = two_level(*([f"{zone}{i}" for i in range(4)] for zone in "abc"))
    links = network_links(topology.nodes, topology, LinkScores())
    choices = [*mesh_orders.group_nodes(links, np.arange(12), [5, 4, 3], first)]
    assert len({tuple(nodes.tobytes() for nodes in choice) for choice in choices}) > 4
    for choice in choices:
        assert [len(nodes) for nodes in choice] == [5, 4, 3] and len(set(np.concatenate(choice).tolist())) == 12
        assert all((np.diff(nodes) > 0).all() for nodes in choice)
        assert first is None or first in choice[0]
    zones_of_groups = [sum(len(set(links.leaf[nodes].tolist())) for nodes in choice) for choice in choices]
    assert min(zones_of_groups) == 4, "two in a zone of their own, one in two"
