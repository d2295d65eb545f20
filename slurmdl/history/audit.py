"""Audit of past jobs: leaf zones used and the fewest possible, and what that means for their communication."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from slurmdl import units
from slurmdl.errors import InputError
from slurmdl.history.accounting import Int32Array, JobTable, RecordProblem
from slurmdl.history.best_nodes import STRATEGIES, BestNodes, CommCosts
from slurmdl.history.leaves import MAX_UNKNOWN, Leaves, NodeLists
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement import explain
from slurmdl.placement.arrays import BoolArray, FloatArray, IntArray, run_starts
from slurmdl.text import pluralize, sample_names, truncate
from slurmdl.topology.topology import Topology

MAX_PICTURED_JOBS = 5  # worst jobs whose best nodes are kept
_MAX_KEPT = 1000  # jobs of which these are selected
_ROUNDING = 1e-9  # relative difference of equal times
_MAX_SINGLE_UPDATES = 4  # nodes of a job above which NumPy updates them faster than a loop


@dataclass(frozen=True)
class AuditOptions:
    """What is audited, and what is assumed.

    Attributes:
        strategies: names in best_nodes.STRATEGIES; the first one ranks the jobs.
        model_bytes: bytes of one replica of the parameters.
        comm_share: share of the run time that jobs spent in communication, 0 to 1.
        since_s, until_s: epoch seconds between which audited jobs started; None for no limit.
        users, partitions: audited ones; () for all.
    """

    strategies: tuple[str, ...] = ("allreduce", "gossip")
    model_bytes: float = 100e6
    comm_share: float = 0.3
    since_s: int | None = None
    until_s: int | None = None
    users: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class AuditedJobs:
    """Jobs on several nodes; arrays of shape (jobs,), in the order of the records.

    Attributes:
        row: index in the JobTable.
        nodes, used_zones, fewest_zones: nodes, leaf zones, and the fewest leaf zones that were possible.
        broken_segments: of blocks, see `count_broken_segments`; 0 for other topologies.
        node_hours: nodes times hours of run time.
        factor: shape (strategies, jobs), communication time on the used nodes over that on the best nodes, from 1.
        leaf_order_factor: the same with the ranks on the used nodes in leaf order, so that only the nodes count.
    """

    row: IntArray
    nodes: IntArray
    used_zones: IntArray
    fewest_zones: IntArray
    broken_segments: IntArray
    node_hours: FloatArray
    factor: FloatArray
    leaf_order_factor: FloatArray

    def __len__(self) -> int:
        return len(self.row)

    @property
    def has_extra_zones(self) -> BoolArray:
        return self.used_zones > self.fewest_zones


@dataclass(frozen=True, eq=False)
class Audit:
    """Result of an audit.

    Attributes:
        table: the records, with their problems and notes.
        end_s: end of each record; of a running job the latest time in the records.
        lists: their nodes in the leaf zones of the topology.
        problems: of the records and of their nodes.
        notes: assumptions, one sentence each.
        one_node_jobs: jobs of the period that ran on one node.
        best: row -> its best nodes per leaf zone, of the worst jobs.
    """

    table: JobTable
    options: AuditOptions
    jobs: AuditedJobs
    end_s: IntArray
    lists: NodeLists
    problems: tuple[RecordProblem | str, ...]
    notes: tuple[str, ...]
    one_node_jobs: int
    best: dict[int, IntArray] = field(default_factory=dict)

    @property
    def leaves(self) -> Leaves:
        return self.lists.leaves

    @cached_property
    def lost_node_hours(self) -> FloatArray:
        """Node-hours that the slower communication took, shape (strategies, jobs)."""
        return self.jobs.node_hours * self.options.comm_share * (1 - 1 / self.jobs.factor)

    @cached_property
    def step_factor(self) -> FloatArray:
        """Step time on the used nodes over that on the best nodes, shape (strategies, jobs)."""
        return 1 / (1 - self.options.comm_share * (1 - 1 / self.jobs.factor))

    @cached_property
    def worst_first(self) -> IntArray:
        """Indices of the audited jobs: most lost node-hours first, then most node-hours times extra zones."""
        jobs = self.jobs
        extra = jobs.node_hours * (jobs.used_zones - jobs.fewest_zones)
        return np.lexsort((jobs.row, -extra, -np.round(self.lost_node_hours[0], 9)))

    @cached_property
    def improvable(self) -> BoolArray:
        """Whether an audited job could have used fewer leaf zones, or communicated faster; shape (jobs,)."""
        return np.asarray(self.jobs.has_extra_zones | (self.jobs.factor > 1 + _ROUNDING).any(axis=0))

    def leaf_counts(self, row: int) -> IntArray:
        """Nodes of a record per leaf zone, shape (leaves,)."""
        return np.bincount(self.lists.leaves_of(int(self.table.hostlist[row])), minlength=len(self.leaves.size))


def audit_jobs(table: JobTable, topology: Topology, scores: LinkScores,
               options: AuditOptions = AuditOptions()) -> Audit:
    """Audit the jobs of a period; all records together say which nodes were free.

    `scores` give the defaults of links; its measured links are not used. Raises InputError if the topology has no
    zones, or if no job can be audited, and UsageError for an unknown strategy.
    """
    scores = replace(scores, nodes={}, zones={}, inter_leaf={})
    if topology.kind == "flat":
        raise InputError("has no zones with nodes: there is nothing to audit", topology.source or "the topology")
    leaves = Leaves.from_topology(topology)
    costs = CommCosts(leaves, scores, options.strategies, options.model_bytes)
    lists = NodeLists.expand(table.hostlists, leaves)
    latest = int(max(table.end_s.max(initial=0), table.start_s.max(initial=0)))
    end_s = np.where((table.end_s < 0) & table.has_run, latest, table.end_s)
    selected = _in_period(table, end_s, options)
    complete = np.append(lists.is_complete, False)[table.hostlist]
    node_count = np.append(lists.counts, 0)[table.hostlist]
    if not (selected & complete).any():
        why = _why_none(table, lists, selected, end_s, options)
        raise InputError(f"no job to audit: {why}", table.source)
    rows = np.flatnonzero(selected & complete & (node_count > 1))
    used_zones = np.append(_zones_per_list(lists), 0)[table.hostlist[rows]]
    node_hours = node_count[rows] * (end_s - table.start_s)[rows] / 3600
    fewest_zones, factors, best = _compare_with_best(table, end_s, lists, costs, rows, used_zones, node_hours)
    broken_segments = np.zeros(len(rows), np.int64)
    if topology.kind == "block":
        for i in np.flatnonzero(used_zones > 1).tolist():
            counts = np.bincount(lists.leaves_of(int(table.hostlist[rows[i]])))
            broken_segments[i] = count_broken_segments(counts.tolist(), leaves.block_size)
    jobs = AuditedJobs(rows, node_count[rows], used_zones, fewest_zones, broken_segments, node_hours,
                       factor=factors[0], leaf_order_factor=factors[1])
    one_node_jobs = int((selected & (node_count == 1) & complete).sum())
    notes = (*_assumptions(topology, scores, options), *_notes(table, lists, topology, end_s, rows, options))
    return Audit(table, options, jobs, end_s, lists, _all_problems(table, lists, selected, end_s), notes,
                 one_node_jobs, best)


def count_broken_segments(counts: Sequence[int], base_size: int) -> int:
    """Segments that a job could have and has not, from its nodes per base block.

    Records name no --segment, so a segment is a base block, or the whole job if it is smaller.
    """
    size = min(sum(counts), base_size)
    return sum(counts) // size - sum(count // size for count in counts)


def _in_period(table: JobTable, end_s: IntArray, options: AuditOptions) -> BoolArray:
    """Records that ran, of the period, users and partitions."""
    selected = table.has_run & (end_s > table.start_s)
    if options.since_s is not None:
        selected &= table.start_s >= options.since_s
    if options.until_s is not None:
        selected &= table.start_s < options.until_s
    for names, index, wanted in ((table.users, table.user, options.users),
                                 (table.partitions, table.partition, options.partitions)):
        if wanted:
            selected &= np.isin(index, [i for i, name in enumerate(names) if name in wanted])
    return selected


def _zones_per_list(lists: NodeLists) -> IntArray:
    """Number of leaf zones of each node list."""
    leaves, zones = lists.leaves, np.zeros(len(lists.counts), np.int64)
    step = 100_000  # lists at a time, to bound the memory
    for first in range(0, len(zones), step):
        counts = lists.counts[first:first + step]
        begin = lists.begin[first]
        leaf = leaves.leaf_of_node[lists.numbers[begin:begin + counts.sum()]]
        pairs = np.unique(np.repeat(np.arange(len(counts)), counts) * len(leaves.size) + leaf)
        zones[first:first + step] = np.bincount(pairs // len(leaves.size), minlength=len(counts))
    return zones


def _compare_with_best(
        table: JobTable, end_s: IntArray, lists: NodeLists, costs: CommCosts, rows: IntArray, used_zones: IntArray,
        node_hours: FloatArray) -> tuple[IntArray, FloatArray, dict[int, IntArray]]:
    """The fewest zones, (factor, leaf_order_factor) and the worst jobs' best nodes, of the jobs in `rows`.

    Jobs in one leaf zone cannot be better.
    """
    fewest_zones, factors = np.ones(len(rows), np.int64), np.ones((2, len(costs.traffic), len(rows)))
    search, root = BestNodes(costs, is_quick=True), lists.leaves.root
    has_roots = bool(np.ptp(root))
    wanted = np.zeros(len(table), bool)
    wanted[rows[used_zones > 1]] = True
    position = np.full(len(table), -1)
    position[rows] = np.arange(len(rows))
    kept: list[tuple[float, float, int, IntArray]] = []
    for row, free in iter_free_counts(table, end_s, lists, wanted):
        numbers, i = lists.of(int(table.hostlist[row])), int(position[row])
        leaf = lists.leaves.leaf_of_node[numbers]
        if has_roots:  # jobs do not span roots, unless this one does
            free = np.where(np.isin(root, root[leaf]), free, 0)
        fewest = int(np.searchsorted(np.cumsum(np.sort(free)[::-1]), len(numbers))) + 1
        own, best, counts = search.compare(np.bincount(leaf, minlength=len(free)), free)
        factor = [max(used / least, 1.0) for used, least in zip(costs.of_nodes(numbers, own), best, strict=True)]
        fewest_zones[i], factors[0, :, i] = fewest, factor
        factors[1, :, i] = [used / least for used, least in zip(own, best, strict=True)]
        hours = float(node_hours[i])
        lost, extra = (1 - 1 / factor[0]) * hours, (int(used_zones[i]) - fewest) * hours
        kept.append((round(lost, 9), extra, -row, counts))  # rows differ, so counts are not compared
        if len(kept) > _MAX_KEPT:
            kept = sorted(kept, reverse=True)[:MAX_PICTURED_JOBS]
    best_of_worst = {-row: counts for _, _, row, counts in sorted(kept, reverse=True)[:MAX_PICTURED_JOBS]}
    return fewest_zones, factors, best_of_worst


def partition_nodes(table: JobTable, lists: NodeLists) -> dict[int, IntArray]:
    """Node numbers, ascending, that jobs of each partition used; partition -> nodes."""
    ran = table.has_run
    pairs = np.unique(table.partition[ran].astype(np.int64) << 32 | table.hostlist[ran])
    nodes: dict[int, IntArray] = {}
    for partition in np.unique(pairs >> 32).tolist():
        used = np.zeros(int(lists.numbers.max(initial=-1)) + 1, bool)
        for index in (pairs[pairs >> 32 == partition] & 0xFFFFFFFF).tolist():
            used[lists.of(index)] = True
        nodes[partition] = np.flatnonzero(used)
    return nodes


def iter_free_counts(table: JobTable, end_s: IntArray, lists: NodeLists,
                     wanted: BoolArray) -> Iterator[tuple[int, IntArray]]:
    """Yield (row, free nodes of each leaf zone when that job started) for the wanted rows, by start.

    Free are the job's own nodes, and the nodes that a job of its partition used at any time and that no other job
    held at that moment. Jobs that end at the same second have released their nodes; jobs that start at the same
    second hold theirs.

    Args:
        end_s: end of each record, also of running jobs.
        wanted: mask of rows; jobs with a run time.
    """
    busy = np.zeros(lists.leaves.nodes, np.int32)
    count = memoryview(busy)
    free_of = {partition: _FreeNodes(nodes, lists.leaves)
               for partition, nodes in partition_nodes(table, lists).items()}
    rows = np.flatnonzero(table.has_run & (end_s > table.start_s))
    # ends before starts at the same second
    event_time = np.concatenate([end_s[rows], table.start_s[rows]])
    is_start = np.repeat([False, True], len(rows))
    order = np.lexsort((is_start, event_time))
    times = event_time[order]
    # an event is row + 1 for a start and -(row + 1) for an end
    events = np.where(is_start, 1, -1)[order] * (np.concatenate([rows, rows])[order] + 1)
    # memory views: single elements of arrays are slow
    hostlist, begin, numbers = memoryview(table.hostlist), memoryview(lists.begin), memoryview(lists.numbers)
    is_wanted = memoryview(wanted)
    pending: list[int] = []
    last = len(events) - 1
    for i, (event, when) in enumerate(zip(events.tolist(), times.tolist(), strict=True)):
        row = abs(event) - 1
        index = hostlist[row]
        low, high = begin[index], begin[index + 1]
        step = 1 if event > 0 else -1
        if high - low <= _MAX_SINGLE_UPDATES:
            for k in range(low, high):
                count[numbers[k]] += step
        else:
            busy[lists.numbers[low:high]] += step
        if event > 0 and is_wanted[row]:
            pending.append(row)
        if pending and (i == last or times[i + 1] != when):
            for row in pending:
                yield row, free_of[int(table.partition[row])].counts(busy, lists.of(hostlist[row]))
            pending.clear()


class _FreeNodes:
    """Free nodes of one partition per leaf zone."""

    def __init__(self, nodes: IntArray, leaves: Leaves) -> None:
        self.leaf_of_node, self.leaf_count = leaves.leaf_of_node, len(leaves.size)
        #: a slice is faster than an index array
        self.nodes = slice(None) if len(nodes) == leaves.nodes else nodes
        leaf = self.leaf_of_node[nodes]
        self.first = run_starts(leaf)
        self.leaf = leaf[self.first]

    def counts(self, busy: Int32Array, own: Int32Array) -> IntArray:
        free = np.bincount(self.leaf_of_node[own], minlength=self.leaf_count)
        free[self.leaf] += np.add.reduceat(busy[self.nodes] == 0, self.first, dtype=np.int64)
        return free


def _all_problems(table: JobTable, lists: NodeLists, selected: BoolArray,
                  end_s: IntArray) -> tuple[RecordProblem | str, ...]:
    problems: list[RecordProblem | str] = list(table.problems)
    incomplete = ~np.append(lists.is_complete, True)[table.hostlist]
    source = lists.leaves.topology.source or "the topology"
    if lists.unknown:
        bound = "at least " if len(lists.unknown) == MAX_UNKNOWN else ""
        problems.append(f"{bound}{pluralize(len(lists.unknown), 'node')} in no zone of {source}: "
                        f"{sample_names(lists.unknown, 4)}; jobs on them are not audited")
    if lists.unreadable:
        problems.append(f"{pluralize(len(lists.unreadable), 'unreadable node list')}: jobs on them are not audited; "
                        f"the first is {truncate(lists.unreadable[0], 60)!r}")
    if skipped := int((selected & incomplete).sum()):
        problems.append(f"{pluralize(skipped, 'job')} not audited for these reasons")
    if instant := int((table.has_run & (end_s <= table.start_s)).sum()):
        problems.append(f"{pluralize(instant, 'job')} with a run time of 0 s: not audited")
    return tuple(problems)


def _why_none(table: JobTable, lists: NodeLists, selected: BoolArray, end_s: IntArray, options: AuditOptions) -> str:
    """Why no record can be audited; at least one of the reasons holds."""
    ran = table.has_run & (end_s > table.start_s)
    if not ran.any():
        return f"{pluralize(len(table), 'record')}, none with a run time and nodes"
    if not selected.any():
        limits = [option for option, value in (("--since", options.since_s), ("--until", options.until_s),
                                               ("--user", options.users), ("--partition", options.partitions))
                  if value not in (None, ())]
        return f"{pluralize(int(ran.sum()), 'job')} in the records, none selected by {', '.join(limits)}"
    if lists.unknown:
        known, source = lists.leaves.node_names[:4], lists.leaves.topology.source or "the topology"
        return (f"nodes of the records are in no zone of {source}: "
                f"{sample_names(lists.unknown, 3)}; expected {', '.join(known)}"
                f"{', ...' if lists.leaves.nodes > len(known) else ''}")
    return f"{pluralize(len(lists.unreadable), 'unreadable node list')}, e.g. {truncate(lists.unreadable[0], 60)!r}"


def _assumptions(topology: Topology, scores: LinkScores, options: AuditOptions) -> list[str]:
    notes = ["a node was free if no record held it and some job of the partition used it at any time; nodes that "
             "were down or reserved at that moment count as free",
             f"communication: one rank per node, the job alone on the network, "
             f"{units.format_bytes(options.model_bytes)} per exchange, "
             f"{explain.unmeasured_link_assumption(topology, scores)}",
             f"{options.comm_share:.0%} of the run time was communication (--comm-share)"]
    notes += [f"records name no strategy; {strategy} is {STRATEGIES[strategy]}" for strategy in options.strategies]
    if topology.kind == "block":
        notes.append("records name no --segment; a segment is a base block, or the whole job if it is smaller")
    return notes


def _notes(table: JobTable, lists: NodeLists, topology: Topology, end_s: IntArray, rows: IntArray,
           options: AuditOptions) -> tuple[str, ...]:
    notes = [*topology.notes, *table.notes]
    if lists.same_host:
        example = next(iter(lists.same_host.items()))
        notes.append(f"{pluralize(len(lists.same_host), 'node name')} with or without a domain, unlike in the "
                     f"topology: {example[0]} is taken as {example[1]}")
    if running := int(((table.end_s < 0) & table.has_run).sum()):
        notes.append(f"{pluralize(running, 'job')} without end: taken as running until the last time in the records")
    ended = end_s[table.has_run]
    if options.since_s is None and len(rows) and (early := int((table.start_s[rows] < ended.min()).sum())):
        notes.append(f"{pluralize(early, 'audited job')} started before the first recorded end: records of other "
                     "jobs of that moment may be missing, so that fewer zones seem possible; --since leaves such "
                     "jobs out")
    return tuple(notes)
