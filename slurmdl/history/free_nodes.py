"""Free nodes at the start of a job, from the records of the jobs that ran at that moment."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from slurmdl.history.accounting import IntArray, JobTable
from slurmdl.history.job_nodes import LeafZones, NodeLists

_MAX_SINGLE_UPDATES = 4  # nodes of a job above which NumPy updates them faster than a loop


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


def iter_free_counts(table: JobTable, end_s: IntArray, lists: NodeLists, leaves: LeafZones,
                     wanted: np.typing.NDArray[np.bool_]) -> Iterator[tuple[int, IntArray]]:
    """Yield (row, free nodes of each leaf zone when that job started) for the wanted rows, by start.

    Free are the job's own nodes, and the nodes that a job of its partition used at any time and that no other job
    held at that moment. Jobs that end at the same second have released their nodes; jobs that start at the same
    second hold theirs.

    Args:
        end_s: end of each record, also of running jobs.
        wanted: mask of rows; jobs with a run time.
    """
    busy = np.zeros(len(leaves.order), np.int32)
    count = memoryview(busy)
    free_of = {partition: _FreeNodes(nodes, leaves) for partition, nodes in partition_nodes(table, lists).items()}
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

    def __init__(self, nodes: IntArray, leaves: LeafZones) -> None:
        self.leaf_of_node, self.leaf_count = leaves.leaf_of_node, len(leaves.zones)
        #: a slice is faster than an index array
        self.nodes = slice(None) if len(nodes) == len(leaves.order) else nodes
        leaf = self.leaf_of_node[nodes]
        self.first = np.flatnonzero(np.append(True, leaf[1:] != leaf[:-1])) if len(leaf) else np.zeros(0, np.int64)
        self.leaf = leaf[self.first]

    def counts(self, busy: np.typing.NDArray[np.int32], own: np.typing.NDArray[np.int32]) -> IntArray:
        free = np.bincount(self.leaf_of_node[own], minlength=self.leaf_count)
        free[self.leaf] += np.add.reduceat(busy[self.nodes] == 0, self.first, dtype=np.int64)
        return free
