"""Slurm's choice of nodes by leaf, compared with hand cases and with its loops written out; slurmdl's fast search."""

import itertools

import numpy as np
import pytest
from placing import three_level, two_level

from slurmdl.cluster.snapshot import ClusterSnapshot, Node, Partition
from slurmdl.dl_options import DlOptions
from slurmdl.errors import InputError
from slurmdl.history.best_nodes import BestNodes, CommCosts
from slurmdl.history.leaves import Leaves
from slurmdl.history.slurm_rules import SlurmBlockRule, SlurmTreeRule, slurm_rule
from slurmdl.job_request import JobRequest
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.candidate_nodes import BlockRule
from slurmdl.placement.place import MAX_BLOCK_TIE, place_job
from slurmdl.topology.source import ZoneDecl, block_topology, build_topology, tree_topology
from slurmdl.topology.topology import Topology


def tree_rule(topology):
    return SlurmTreeRule(Leaves.from_topology(topology))


@pytest.mark.parametrize(("free", "nodes", "expected"), [
    ([4, 2, 3], 2, [0, 2, 0]),  # the tightest leaf
    ([3, 3, 3], 2, [2, 0, 0]),  # the first of equal ones
    ([4, 2, 3], 6, [4, 2, 0]),  # the largest, then the tightest that holds the rest
    ([4, 2, 3], 7, [4, 0, 3]),
    ([4, 2, 3], 9, [4, 2, 3]),
    ([4, 2, 3], 10, None)])
def test_leaves_below_one_switch(free, nodes, expected):
    rule = tree_rule(two_level(*[[f"{leaf}{i}" for i in range(4)] for leaf in "abc"]))
    counts = rule.choose(np.array(free), nodes)
    assert expected == (None if counts is None else counts.tolist())


@pytest.mark.parametrize(("free", "nodes", "expected"), [
    # leaves 0 to 2 are below the first switch, 3 to 5 below the second
    ([1, 1, 1, 2, 2, 0], 3, [1, 1, 1, 0, 0, 0]),  # the tightest switch that holds all, though its leaves are smaller
    ([1, 1, 1, 2, 2, 1], 4, [0, 0, 0, 2, 2, 0]),
    ([1, 2, 1, 2, 2, 1], 7, [0, 2, 0, 2, 2, 1]),  # no switch holds all: the largest leaves first
    ([0, 0, 0, 0, 0, 0], 1, None)])
def test_leaves_below_two_switches(free, nodes, expected):
    counts = tree_rule(three_level(2, 3, 2)).choose(np.array(free), nodes)
    assert expected == (None if counts is None else counts.tolist())


def test_of_several_trees_only_one_is_used():
    zones = [ZoneDecl(name, nodes=(f"{name}1", f"{name}2")) for name in "abcd"]
    forest = build_topology([*zones, ZoneDecl("left", children=("a", "b")), ZoneDecl("right", children=("c", "d"))],
                            kind="tree", source="test")
    rule = tree_rule(forest)
    assert rule.largest(np.array([2, 1, 1, 1])) == 3
    assert rule.choose(np.array([2, 1, 1, 1]), 3).tolist() == [2, 1, 0, 0]
    assert rule.choose(np.array([2, 2, 2, 2]), 3).tolist() == [0, 0, 2, 1]  # the last tree that holds it
    assert rule.choose(np.array([2, 2, 2, 2]), 5) is None


def leaf_after_leaf(leaves, free, missing):
    """The loop of _eval_nodes_topo over all leaf switches, for whole nodes."""
    parent = leaves.topology.parent
    in_zone = dict.fromkeys(range(len(parent)), 0)
    path = {leaf: [zone for zone in leaves.ancestors[leaf].tolist() if zone >= 0] for leaf in range(len(free))}
    for leaf, nodes in enumerate(free):
        for zone in path[leaf]:
            in_zone[zone] += nodes
    left, counts, distance = list(free), [0] * len(free), [0] * len(free)

    def compare(i, j):
        while True:
            fits = in_zone[i] >= missing, in_zone[j] >= missing
            if all(fits):
                if in_zone[i] != in_zone[j]:
                    return (1 if in_zone[i] < in_zone[j] else -1), True
                break
            if any(fits):
                return (1 if fits[0] else -1), fits[0]
            if parent[i] == parent[j]:
                break
            i, j = parent[i], parent[j]
        return np.sign(in_zone[i] - in_zone[j]), fits[0]

    while missing > 0:
        best = -1
        for leaf in range(len(free)):
            if not left[leaf]:
                continue
            if best < 0:
                best = leaf
                continue
            order, fit = compare(path[leaf][0], path[best][0])
            if (distance[leaf] < distance[best] and fit) or (distance[leaf] == distance[best] and order > 0):
                best = leaf
        taken = left[best]
        counts[best] = min(taken, missing)
        missing -= taken
        for zone in path[best]:
            in_zone[zone] -= taken
        left[best] = 0
        for leaf in range(len(free)):
            common = set(path[leaf]) & set(path[best])
            distance[leaf] += len(path[leaf]) + len(path[best]) - 2 * len(common)
    return counts


def test_tree_rule_equals_the_loop_over_all_leaves():
    rule = tree_rule(tree_topology((1, 2, 5, 15, 120)))
    generator = np.random.default_rng(0)
    for _ in range(150):
        free = generator.integers(0, 9, 15) * (generator.random(15) < 0.7)
        if free.sum():
            nodes = int(generator.integers(1, free.sum() + 1))
            assert rule.choose(free, nodes).tolist() == leaf_after_leaf(rule.leaves, free.tolist(), nodes)


def block_after_block(free, begin, missing, rule: BlockRule, base):
    """The loop of eval_nodes_block over the blocks of an aggregate, for whole nodes."""
    new_parts = -(-missing // (rule.child_blocks * base))
    counts, used, has_limit = [0] * len(free), set(), rule.parent_blocks != rule.child_blocks * new_parts
    part = [(begin + i) // rule.child_blocks for i in range(len(free))]
    part_free = {p: sum(nodes for nodes, q in zip(free, part, strict=True) if q == p) for p in part}
    while True:
        best, best_fit, best_same = -1, False, True
        for i, nodes in enumerate(free):
            if i in used:
                continue
            fit = nodes >= missing
            if has_limit and (best < 0 or part[i] != part[best]):
                same = any(part[j] == part[i] for j in used)
                if best < 0 or (same and not best_same):
                    best, best_fit, best_same = i, fit, same
                    continue
                if best_same and not same:
                    continue
                mine, other = part_free[part[i]], part_free[part[best]]
                # sorted by: fits; then the fewest nodes if both fit, else the most
                rank, best_rank = ((total >= missing, -total if total >= missing else total)
                                   for total in (mine, other))
                if rank > best_rank:
                    best, best_fit, best_same = i, fit, same
                if rank != best_rank:
                    continue
            if best < 0 or (fit and not best_fit) or (fit and nodes <= free[best]) or (
                    not fit and not best_fit and nodes >= free[best]):
                best, best_fit = i, fit
        if best < 0 or not free[best] or (new_parts <= 0 and not best_same):
            return None
        used.add(best)
        counts[best] = min(missing, free[best])
        missing -= counts[best]
        if not missing:
            return counts
        new_parts -= not best_same


@pytest.mark.parametrize(("blocks", "sizes"), [(12, (6, 24)), (13, (6, 12, 48)), (9, (6,))])
def test_block_rule_equals_the_loop_over_all_blocks(blocks, sizes):
    rule = SlurmBlockRule(Leaves.from_topology(block_topology((blocks, blocks * 6), sizes)))
    generator = np.random.default_rng(1)
    compared = 0
    for _ in range(250):
        free = generator.integers(0, 7, blocks) * (generator.random(blocks) < 0.7)
        nodes = int(generator.integers(1, max(2, free.sum() + 1)))
        limits = rule.rule(nodes)
        chosen = rule.choose(free, nodes)
        if chosen is None:
            continue
        begin = int(np.flatnonzero(chosen)[0]) // limits.parent_blocks * limits.parent_blocks
        end = begin + limits.parent_blocks
        inside = free[begin:end].tolist()
        assert chosen[begin:end].tolist() == block_after_block(inside, begin, nodes, limits, 6)
        assert limits.allows(np.flatnonzero(chosen))
        compared += 1
    assert compared > 80


def test_block_rule_takes_the_tightest_aggregate_that_holds_the_job_and_never_splits_small_jobs():
    rule = SlurmBlockRule(Leaves.from_topology(block_topology((4, 24), (6, 12))))
    assert rule.choose(np.array([5, 4, 3, 2]), 6) is None  # fits a base block, so it must be in one
    assert rule.choose(np.array([6, 4, 5, 4]), 8).tolist() == [0, 0, 5, 3]
    assert rule.choose(np.array([6, 6, 6, 6]), 24).tolist() == [6, 6, 6, 6]
    assert rule.largest(np.array([5, 4, 3, 2])) == 14  # 13 to 24 nodes may use all blocks
    assert rule.largest(np.array([5, 0, 0, 2])) == 5
    assert rule.largest(np.array([0, 0, 1, 0])) == 1


def test_the_largest_job_of_blocks_is_the_largest_that_has_enough_nodes():
    rule = SlurmBlockRule(Leaves.from_topology(block_topology((7, 28), (4, 8, 16))))
    generator = np.random.default_rng(2)
    for _ in range(60):
        free = generator.integers(0, 5, 7)
        sizes = [n for n in range(1, 29) if (rule.available(free, n) >= n).any()]
        assert rule.largest(free) == max(sizes, default=0)


def test_groups_of_leaves_tie_in_the_order_of_the_topology():
    """Slurm compares leaves in its own order, which need not be depth first."""
    zones = [ZoneDecl(f"l{i}", nodes=(f"n{i}", f"m{i}")) for i in range(3)]
    switches = [ZoneDecl(f"s{i}", children=(f"l{i}",)) for i in range(3)]
    topology = build_topology([*zones, *switches, ZoneDecl("p", children=("s0", "s2")),
                               ZoneDecl("q", children=("s1",)), ZoneDecl("r", children=("p", "q"))], kind="tree",
                              source="test")
    leaves = Leaves.from_topology(topology)
    assert leaves.zone_names == ("l0", "l2", "l1")
    assert slurm_rule(leaves).choose(np.array([0, 2, 2]), 2).tolist() == [0, 0, 2]


def test_zones_above_leaves_of_a_tree_that_is_declared_from_its_root():
    zones = [ZoneDecl("root", children=("a", "b")), ZoneDecl("a", nodes=("n1", "n2")), ZoneDecl("b", nodes=("n3",))]
    leaves = Leaves.from_topology(build_topology(zones, kind="tree", source="test"))
    assert (leaves.topology.zone_index["root"], leaves.zone_names, leaves.root.tolist()) == (0, ("a", "b"), [0, 0])
    assert leaves.ancestors.tolist() == [[1, 0], [2, 0]]
    assert leaves.upper_zones == ((1, 0, 2),)


def random_tree(generator, has_halls):
    """Two or three levels, or four with two halls, with leaves of different sizes."""
    zones, rows, nodes = [], 4 if has_halls else int(generator.integers(1, 4)), 0
    for row in range(rows):
        leaves = [f"l{row}-{i}" for i in range(generator.integers(2, 5))]
        for leaf in leaves:
            size = int(generator.integers(3, 13))
            zones.append(ZoneDecl(leaf, nodes=tuple(f"n{nodes + i:03}" for i in range(size))))
            nodes += size
        zones.append(ZoneDecl(f"r{row}", children=tuple(leaves)))
    top = [f"r{row}" for row in range(rows)]
    if has_halls:
        zones += [ZoneDecl("h0", children=tuple(top[:1])), ZoneDecl("h1", children=tuple(top[1:]))]
        top = ["h0", "h1"]
    return build_topology([*zones, ZoneDecl("root", children=tuple(top))], kind="tree", source="test")


def compare_with_place_job(generator, kind, strategy):
    """Times of a search and of a quick one over that of place_job, for a random job on a random cluster."""
    blocks = int(generator.integers(4, 10))
    topology = (block_topology((blocks, 6 * blocks), (6, 12, 24)) if kind == "block"
                else random_tree(generator, has_halls=kind == "halls"))
    scores = LinkScores(default_zone_bandwidth=((6.25e8,), (1.25e9, 3e9), ())[generator.integers(3)])
    leaves = Leaves.from_topology(topology)
    rule, costs = slurm_rule(leaves), CommCosts(leaves, scores, [strategy], 1e8)
    busy = generator.random(leaves.nodes) < generator.uniform(0.1, 0.7)
    free = np.bincount(leaves.leaf_of_node[~busy], minlength=len(leaves.size))
    nodes = int(generator.integers(2, max(3, free.sum())))
    counts = BestNodes(costs, rule).choose(free, nodes)
    if counts is None:
        return None
    assert counts.sum() == nodes
    assert (counts <= free).all()
    snapshot = ClusterSnapshot.from_nodes(
        [Node(name, ("ALLOCATED",) if taken else ("IDLE",), True, 4, 0 if taken else 4, 4000, 0 if taken else 4000,
              partitions=("main",)) for name, taken in zip(leaves.node_names, busy.tolist(), strict=True)],
        (Partition("main", True),))
    request = JobRequest(DlOptions(strategy=strategy, bytes="100M", rank0="any"), (nodes, nodes),
                         ntasks_per_node=1, exclusive=True)
    placed = place_job(request, snapshot, topology, scores)
    leaf = [leaves.leaf_of_node[leaves.node_names.index(name)] for name in placed.nodes]
    seconds = placed.rank_map.cost.seconds
    assert costs.of_counts(np.bincount(leaf, minlength=len(free)))[0] == pytest.approx(seconds, rel=1e-9)
    quick = min(costs.of_counts(quota)[0] for _, quota in
                BestNodes(costs, is_quick=True).candidates(free, nodes))
    return costs.of_counts(counts)[0] / seconds, quick / seconds


@pytest.mark.parametrize(("kind", "strategy", "least", "equal", "quick_equal"), [
    ("tree", "allreduce", 1, 1, 1), ("block", "allreduce", 1, 1, 1), ("tree", "gossip", 1, 0.85, 0.7),
    ("halls", "gossip", 1, 0.75, 0.3), ("block", "gossip", 1 / (1 + MAX_BLOCK_TIE), 0.9, 0)])
def test_best_nodes_beside_those_of_place_job(kind, strategy, least, equal, quick_equal):
    """A ring is always as fast; dense traffic mostly, else slower. On blocks both may prefer slower whole ones."""
    generator = np.random.default_rng(4)
    ratios = filter(None, (compare_with_place_job(generator, kind, strategy) for _ in range(200)))
    thorough, quick = np.array(list(itertools.islice(ratios, 25))).T
    assert least * (1 - 1e-9) <= thorough.min() and thorough.max() < 1.4
    assert (abs(thorough - 1) < 1e-9).mean() >= equal
    assert (abs(quick - 1) < 1e-9).mean() >= quick_equal
    if kind != "block":
        assert (quick >= thorough * (1 - 1e-9)).all()


def test_flat_and_unsupported_topologies():
    flat = Leaves.from_topology(Topology.flat(("a", "b", "c")))
    assert slurm_rule(flat).choose(np.array([3]), 2).tolist() == [2]
    assert flat.fewest[3] == 1
    ring = build_topology([ZoneDecl("r", nodes=("a", "b"))], kind="ring", source="test")
    with pytest.raises(InputError, match=r"topology/ring: .* expected tree, block or flat"):
        slurm_rule(Leaves.from_topology(ring))
