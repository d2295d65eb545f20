"""Nodes that Slurm chooses, as a number of nodes per leaf zone.

Jobs need whole nodes of equal weight, and neither nodes nor switches by name. Written from these functions of Slurm
24.11.5: _eval_nodes_topo in src/plugins/topology/tree/eval_nodes_tree.c, eval_nodes_block in
src/plugins/topology/block/eval_nodes_block.c.
"""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import numpy as np

from slurmdl.errors import InputError
from slurmdl.history.leaves import Leaves
from slurmdl.placement.arrays import IntArray
from slurmdl.placement.candidate_nodes import BlockRule, block_rule


class SlurmRule(Protocol):
    """Slurm's choice for one kind of topology; `free` has shape (leaves,)."""

    def choose(self, free: IntArray, nodes: int) -> IntArray | None:
        """Nodes per leaf, shape (leaves,), or None if the job cannot start."""

    def fits(self, free: IntArray, nodes: int) -> bool:
        """Whether the job can start."""

    def largest(self, free: IntArray) -> int:
        """Nodes of the largest job that can start."""


def slurm_rule(leaves: Leaves) -> SlurmRule:
    """The rule of blocks, or of trees, which a flat topology follows as a single leaf; InputError for other kinds."""
    kind = leaves.topology.kind
    if kind not in ("tree", "block", "flat"):
        raise InputError(f"topology/{kind}: its node selection is not simulated; expected tree, block or flat",
                         leaves.topology.source)
    return SlurmBlockRule(leaves) if kind == "block" else SlurmTreeRule(leaves)


def pack_siblings(free: IntArray, nodes: int) -> IntArray:
    """Choice among the leaves of one switch: whole leaves, the largest first, and the tightest fit for the rest."""
    order = np.argsort(-free, kind="stable")
    held = np.cumsum(free[order])
    missing = nodes - np.append(0, held[:-1])
    whole = int((free[order] >= missing).argmax())  # leaves that are used up before the rest fits one
    counts = np.zeros_like(free)
    counts[order[:whole]] = free[order[:whole]]
    rest, candidates = int(missing[whole]), np.sort(order[whole:])
    candidates = candidates[free[candidates] >= rest]
    counts[candidates[free[candidates].argmin()]] = rest
    return counts


class SlurmTreeRule:
    """topology/tree: greedy, one leaf after the other, by the summed distance to the leaves in use.

    Leaves below one switch are compared first, then these winners in the order of the switches. Slurm compares all
    leaves in their own order, which is the same unless leaves of several switches alternate.
    """

    def __init__(self, leaves: Leaves) -> None:
        self.leaves = leaves
        self._roots, self._root = np.unique(leaves.root, return_inverse=True)
        ancestors = leaves.ancestors
        parent = ancestors[:, 1] if ancestors.shape[1] > 1 else np.full(len(ancestors), -1)
        # a leaf without a parent is a group of its own
        group_key = np.where(parent >= 0, parent, -2 - np.arange(len(parent)))
        _, first, group = np.unique(group_key, return_index=True, return_inverse=True)
        # groups in the order of their first leaves in the topology
        first = first[np.argsort(leaves.zone[first])]
        rank = np.empty_like(first)
        rank[group[first]] = np.arange(len(first))
        self._group = rank[group]
        self._order = np.argsort(self._group, kind="stable")
        self._begin = np.searchsorted(self._group[self._order], np.arange(len(first)))
        paths = [[zone for zone in row if zone >= 0] or [-1] for row in ancestors[first].tolist()]
        self._distance = np.array([[_hops(a, b) for b in paths] for a in paths])
        #: zones above the leaves of each group, from their switch upwards
        self._above: list[list[int]] = [path[1:] for path in paths]
        self._zones = len(leaves.topology.zones)

    def fits(self, free: IntArray, nodes: int) -> bool:
        return self.largest(free) >= nodes

    def largest(self, free: IntArray) -> int:
        return int(free.sum() if len(self._roots) == 1 else np.bincount(self._root, free).max())

    def choose(self, free: IntArray, nodes: int) -> IntArray | None:
        if len(self._roots) > 1:
            below = np.bincount(self._root, free)
            enough = np.flatnonzero(below >= nodes)
            if not len(enough):
                return None
            # the last one of the highest level
            level = self.leaves.topology.level[self._roots[enough]]
            free = np.where(self._root == enough[np.flatnonzero(level == level.max())[-1]], free, 0)
        elif free.sum() < nodes:
            return None
        if len(self._begin) == 1:
            return pack_siblings(free, nodes)
        return self._choose_greedily(free, nodes)

    def _choose_greedily(self, free: IntArray, missing: int) -> IntArray:
        left = free[self._order]
        counts = np.zeros_like(left)
        in_zone = np.zeros(self._zones + 1, np.int64)
        for column in self.leaves.ancestors[:, 1:].T:
            np.add.at(in_zone, column, free)
        zone_free = in_zone.tolist()
        distance = np.zeros(len(self._begin), np.int64)
        most = int(free.max())
        while missing > 0:
            # scores above `most`: leaves that fit, the tightest first; below: the others, the largest first
            score = np.where(left >= missing, 2 * most + 1 - left, left)
            group_score = np.maximum.reduceat(score, self._begin)
            group = self._best_group(group_score.tolist(), distance.tolist(), most, missing, zone_free)
            begin = int(self._begin[group])
            leaf = begin + int((score[begin:] == group_score[group]).argmax())
            taken = int(left[leaf])
            for zone in self._above[group]:
                zone_free[zone] -= taken
            counts[leaf], left[leaf] = min(missing, taken), 0
            missing -= taken
            distance += self._distance[group]
        result = np.zeros_like(counts)
        result[self._order] = counts
        return result

    def _best_group(self, scores: list[int], distance: list[int], most: int, missing: int,
                    zone_free: list[int]) -> int:
        """The group whose best leaf wins; a score of 0 stands for no free node."""
        best = -1
        for group, score in enumerate(scores):
            if score and (best < 0 or (distance[group] <= distance[best] and self._is_better(
                    group, score, best, scores[best], distance[group] < distance[best], most, missing, zone_free))):
                best = group
        return best

    def _is_better(self, group: int, score: int, best: int, best_score: int, is_closer: bool, most: int,
                   missing: int, zone_free: list[int]) -> bool:
        """Whether a leaf that is not farther beats the best one so far: at the lowest level at which one fits."""
        if score > most or best_score > most:
            return score > most if is_closer else score > best_score
        for zone, best_zone in zip(self._above[group], self._above[best], strict=False):
            if zone == best_zone:
                break
            fit, best_fit = zone_free[zone] >= missing, zone_free[best_zone] >= missing
            if fit or best_fit:
                if is_closer or fit != best_fit:
                    return fit
                return zone_free[zone] < zone_free[best_zone]
            score, best_score = zone_free[zone], zone_free[best_zone]
        return not is_closer and score > best_score


def _hops(path: list[int], other: list[int]) -> int:
    """Links between two leaves below the ends of these paths, leaf first; of one switch: 2."""
    if path[0] == other[0]:
        return 2 if len(path) > 1 else 0
    common = set(path) & set(other)
    return sum(zone not in common for zone in path) + sum(zone not in common for zone in other)


class SlurmBlockRule:
    """topology/block without segments: the tightest aggregate of the smallest size that can hold the job, in it
    the fewest next smaller aggregates and base blocks."""

    def __init__(self, leaves: Leaves) -> None:
        self.leaves = leaves
        self._rules: dict[int, BlockRule] = {}

    def rule(self, nodes: int) -> BlockRule:
        """Limits for a job of this size."""
        if nodes not in self._rules:
            self._rules[nodes] = block_rule(self.leaves.topology, nodes)
        return self._rules[nodes]

    def fits(self, free: IntArray, nodes: int) -> bool:
        return self.choose(free, nodes) is not None

    def available(self, free: IntArray, nodes: int) -> IntArray:
        """Nodes that the job could use of each aggregate of its size."""
        rule, parts_needed = self.rule(nodes), self._max_parts(nodes)
        if rule.parent_blocks == rule.child_blocks * parts_needed:
            return _sum_runs(free, rule.parent_blocks)
        parts = _sum_runs(free, rule.child_blocks)
        # as in Slurm: an incomplete part at the end of the whole topology is not counted
        per_aggregate = rule.parent_blocks // rule.child_blocks
        if rule.parent_blocks >= len(free):
            parts = parts[:per_aggregate]
        padded = np.append(parts, np.zeros(-len(parts) % per_aggregate, np.int64)).reshape(-1, per_aggregate)
        return np.asarray(np.sort(padded, axis=1)[:, max(0, per_aggregate - parts_needed):].sum(axis=1))

    def _max_parts(self, nodes: int) -> int:
        """Parts that a job may use, without the bound of BlockRule by the parts of an aggregate."""
        return -(-nodes // (self.rule(nodes).child_blocks * self.leaves.block_size))

    def largest(self, free: IntArray) -> int:
        total = int(free.sum())
        for first, last in reversed(self._size_ranges):
            if first <= total:
                usable = min(int(self.available(free, last).max()), last)
                if usable >= first:
                    return usable
        return 0

    @cached_property
    def _size_ranges(self) -> list[tuple[int, int]]:
        """First and last size of the jobs with equal limits, ascending."""
        rules = [(self.rule(nodes), self._max_parts(nodes)) for nodes in range(1, self.leaves.nodes + 1)]
        begin = [i for i in range(len(rules)) if i == 0 or rules[i] != rules[i - 1]]
        return [(first + 1, last) for first, last in zip(begin, [*begin[1:], len(rules)], strict=True)]

    def choose(self, free: IntArray, nodes: int) -> IntArray | None:
        rule, available = self.rule(nodes), self.available(free, nodes)
        enough = np.flatnonzero(available >= nodes)
        if not len(enough):
            return None
        total = _sum_runs(free, rule.parent_blocks)[enough]
        # the last one of those with the fewest free nodes
        aggregate = int(enough[np.flatnonzero(total == total.min())[-1]])
        begin = aggregate * rule.parent_blocks
        blocks = free[begin:begin + rule.parent_blocks]
        chosen = _choose_blocks(blocks, begin, nodes, rule, self._max_parts(nodes))
        if chosen is None:
            return None
        counts = np.zeros_like(free)
        counts[begin:begin + len(blocks)] = chosen
        return counts


def _sum_runs(values: IntArray, length: int) -> IntArray:
    """Sums of runs of `length` values; the last run may be shorter."""
    return np.asarray(np.add.reduceat(values, np.arange(0, len(values), length)))


def _choose_blocks(free: IntArray, begin: int, missing: int, rule: BlockRule, max_parts: int) -> IntArray | None:
    """Nodes per block of one aggregate, whose first block is `begin`.

    Slurm compares block after block. Here the blocks of each part are compared first, then the best ones in their
    order, which gives the same choice, since a part's blocks are contiguous.
    """
    has_limit = rule.parent_blocks != rule.child_blocks * max_parts
    part_of = (begin + np.arange(len(free))) // rule.child_blocks if has_limit else np.zeros(len(free), np.int64)
    part_begin = np.flatnonzero(np.diff(part_of, prepend=-1))
    part_end = [*part_begin[1:].tolist(), len(free)]
    part_free: list[int] = np.add.reduceat(free, part_begin).tolist()
    left, counts, most = free.copy(), np.zeros_like(free), int(free.max())
    used_parts: set[int] = set()
    while missing > 0:
        # scores above `most`: blocks that fit, the tightest first; below: the others; -1: blocks in use
        score = np.where(left >= missing, 2 * most + 1 - left, left)
        part_score = np.maximum.reduceat(score, part_begin)
        best = -1
        for part, value in enumerate(part_score.tolist()):
            if value < 0:
                continue
            if best < 0 or _is_better_part(part, best, used_parts, part_free, missing,
                                           value >= part_score[best]):
                best = part
        if best < 0 or (has_limit and best not in used_parts and len(used_parts) >= max_parts):
            return None
        begin_of_best, end = int(part_begin[best]), part_end[best]
        # the last one of equal blocks
        block = end - 1 - int((score[begin_of_best:end][::-1] == part_score[best]).argmax())
        if not left[block]:
            return None  # as in Slurm, which does not look further
        counts[block] = min(missing, int(left[block]))
        missing -= int(counts[block])
        left[block] = -1
        used_parts.add(best)
    return counts


def _is_better_part(part: int, best: int, used: set[int], free: list[int], missing: int,
                    has_better_block: bool) -> bool:
    """Whether a part beats an earlier one: in use already, then the tightest that fits, then the fullest."""
    if (part in used) != (best in used):
        return part in used
    fit, best_fit = free[part] >= missing, free[best] >= missing
    if fit != best_fit:
        return fit
    if free[part] != free[best]:
        return free[part] < free[best] if fit else free[part] > free[best]
    return has_better_block
