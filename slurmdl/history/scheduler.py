"""A simulated cluster: jobs start first come, first served with EASY backfill; their run time depends on their nodes.

The first waiting job has a reservation at the earliest time at which it can start if all jobs run up to their limits.
Another job may start before it if the reservation still holds. Reference: Lifka, The ANL/IBM SP scheduling system,
JSSPP 1995. In Slurm: SchedulerParameters=bf_job_part_count_reserve=1 with equal priorities.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from slurmdl.errors import InputError
from slurmdl.history.best_nodes import BestNodes, CommCosts
from slurmdl.history.leaves import Leaves
from slurmdl.history.slurm_rules import SlurmRule, slurm_rule
from slurmdl.history.traces import JobTrace
from slurmdl.placement.arrays import BoolArray, FloatArray, IntArray
from slurmdl.placement.result import is_good_enough
from slurmdl.text import pluralize

#: (free nodes per leaf zone, wanted nodes) -> nodes per leaf zone, or None if the job cannot start; shapes (leaves,)
NodeChoice = Callable[[IntArray, int], IntArray | None]


@dataclass(frozen=True, eq=False)
class Machine:
    """A cluster with its rule and cost model; built once for all policies of a trace."""

    costs: CommCosts

    @property
    def leaves(self) -> Leaves:
        return self.costs.leaves

    @cached_property
    def rule(self) -> SlurmRule:
        return slurm_rule(self.leaves)

    @cached_property
    def best(self) -> BestNodes:
        return BestNodes(self.costs, self.rule)

    def bind(self, free: IntArray, nodes: int) -> IntArray | None:
        """Choose as `slurmdl sbatch` does: slurmdl's choice, unless Slurm's own is good enough."""
        best, own = self.best.choose(free, nodes), self.rule.choose(free, nodes)
        if best is None or own is None:
            return best
        return own if is_good_enough(self.costs.sort_key(own), self.costs.sort_key(best)) else best

    @cached_property
    def _ideal_seconds(self) -> dict[int, float]:
        return {}

    def factor(self, counts: IntArray) -> float:
        """Communication time on these nodes over that of slurmdl's choice on the empty cluster; 1 for one node."""
        nodes = int(counts.sum())
        if nodes not in self._ideal_seconds:
            best = self.best.choose(self.leaves.size, nodes) if nodes > 1 else None
            self._ideal_seconds[nodes] = 0.0 if best is None else self.costs.sort_key(best)[0]
        ideal = self._ideal_seconds[nodes]
        return self.costs.sort_key(counts)[0] / ideal if ideal else 1.0

    def never_starts(self, trace: JobTrace) -> BoolArray:
        """Whether Slurm's rule rejects a job on the empty cluster; shape (jobs,)."""
        sizes = np.unique(trace.nodes)
        rejected = [size for size in sizes.tolist() if self.rule.choose(self.leaves.size, size) is None]
        return np.isin(trace.nodes, rejected)


@dataclass(frozen=True)
class Communication:
    """Which jobs are bound by communication, and by how much.

    Attributes:
        bound_share: share of the jobs with several nodes, drawn by `seed`.
        comm_share: share of communication in the recorded run time of such a job.
        fixed_run_times: the simulation keeps the recorded run times; the resulting ones are only reported.
    """

    bound_share: float = 0.5
    comm_share: float = 0.3
    fixed_run_times: bool = False

    def bound_jobs(self, trace: JobTrace, seed: int) -> BoolArray:
        draws = np.random.default_rng([seed, 1]).random(len(trace))
        return np.asarray((trace.nodes > 1) & (draws < self.bound_share))

    def resulting_run_s(self, run_s: float, factor: float) -> float:
        return run_s * (1 - self.comm_share + self.comm_share * factor)


@dataclass(frozen=True)
class SchedulerTiming:
    """Delays of a real controller, for its calibration; all zero in a replay.

    Attributes:
        backfill_interval_s: time between backfill passes; 0: at every event.
        completing_s: time from the end of a job until its nodes are free.
        start_s: time from the decision to the start of the job.
    """

    backfill_interval_s: float = 0.0
    completing_s: float = 0.0
    start_s: float = 0.0


@dataclass(frozen=True, eq=False)
class Schedule:
    """Outcome of a simulation; arrays of shape (jobs,).

    Attributes:
        start_s, run_s: start, and run time in this schedule.
        factor: predicted communication time over that of the reference; 1 for jobs on a single node.
        zones: leaf zones in use by the job.
        utilization: share of the node-time allocated until the last submission.
        useful: the same, each job weighted by its recorded over its resulting run time.
        leaf_nodes, startable_nodes: largest job that could start inside one leaf, and at all: averages over time, as
            shares of the cluster.
        nodes: node indices of each job, if they were kept.
    """

    start_s: FloatArray
    run_s: FloatArray
    factor: FloatArray
    zones: IntArray
    utilization: float
    useful: float
    leaf_nodes: float
    startable_nodes: float
    nodes: tuple[IntArray, ...] = ()


class Simulation:
    """One simulation.

    Args:
        choice: of jobs that slurmdl does not place.
        placed: whether slurmdl places each job; shape (jobs,).
        bound: whether each job is bound by communication.
    """

    def __init__(self, trace: JobTrace, machine: Machine, choice: NodeChoice, placed: BoolArray,
                 bound: BoolArray, communication: Communication,
                 timing: SchedulerTiming | None = None, keep_nodes: bool = False) -> None:
        self.trace, self.machine, self.choice, self.placed, self.bound = trace, machine, choice, placed, bound
        self.communication, self.timing, self.keep_nodes = communication, timing or SchedulerTiming(), keep_nodes
        leaves = machine.leaves
        self.free = leaves.size.copy()
        self.total_free = int(self.free.sum())
        #: time at which each node is free at the latest, by the limit of its job; -inf if it is free
        self.free_at = np.full(leaves.nodes, -np.inf)
        self.start_s = np.full(len(trace), np.nan)
        self.run_s = trace.run_s.copy()
        self.factor = np.ones(len(trace))
        self.zones = np.ones(len(trace), np.int64)
        self.nodes: dict[int, IntArray] = {}
        self.kept: list[IntArray] = [np.zeros(0, np.int64)] * len(trace) if keep_nodes else []
        self.ends: list[tuple[float, int]] = []
        self.queue = np.zeros(0, np.int64)
        self.is_head_blocked = False
        #: the first waiting job's nodes, and at the time of its reservation the free nodes and those it leaves free
        self.reserved, self.spare, self.shadow_s = 0, 0, np.inf
        self.shadow_free = self.free
        self._last_s = 0.0
        self._busy = self._useful = self._leaf = self._startable = 0.0
        self._useful_nodes = 0.0

    def run(self) -> Schedule:
        """Simulate until the last job has started.

        Raises InputError if a job cannot start even on the empty cluster; see `replay.usable_trace`.
        """
        submit, jobs, arrived, started = self.trace.submit_s, len(self.trace), 0, 0
        interval, next_pass = self.timing.backfill_interval_s, 0.0
        while started < jobs:
            now = min(submit[arrived] if arrived < jobs else np.inf, self.ends[0][0] if self.ends else np.inf,
                      next_pass if interval and len(self.queue) else np.inf)
            if now == np.inf:
                size = pluralize(int(self.trace.nodes[self.queue[0]]), "node")
                raise InputError(f"a job of {size} can never start", self.trace.source)
            self._account(float(now))
            has_ended = False
            while self.ends and self.ends[0][0] <= now:
                self._release(heapq.heappop(self.ends)[1])
                has_ended = True
            first_new = len(self.queue)
            last = arrived
            while last < jobs and submit[last] <= now:
                last += 1
            if last > arrived:
                self.queue = np.concatenate([self.queue, np.arange(arrived, last)])
                arrived = last
            is_pass = not interval or now >= next_pass
            if is_pass and interval:
                next_pass = (now // interval + 1) * interval
            # without an end nothing changed for jobs that wait already
            is_changed = has_ended or not self.is_head_blocked
            started += self._schedule(float(now), 0 if is_changed or interval else first_new, is_changed, is_pass)
        window = float(submit[-1]) * self.machine.leaves.nodes or 1.0
        return Schedule(self.start_s, self.run_s, self.factor, self.zones, self._busy / window,
                        self._useful / window, self._leaf / window, self._startable / window, tuple(self.kept))

    def _account(self, now: float) -> None:
        """Add the time since the last event to the averages, up to the last submission."""
        length = min(now, float(self.trace.submit_s[-1])) - self._last_s
        if length > 0:
            self._busy += length * (self.machine.leaves.nodes - self.total_free)
            self._useful += length * self._useful_nodes
            self._leaf += length * int(self.free.max())
            self._startable += length * self.machine.rule.largest(self.free)
            self._last_s += length

    def _schedule(self, now: float, first: int, is_changed: bool, backfills: bool) -> int:
        """Start jobs from the queue, backfilled ones from position `first`; return their number."""
        started: list[int] = []
        if is_changed:
            self.is_head_blocked = False
            for position, job in enumerate(self.queue.tolist()):
                counts = self._choose(job, self.free)
                if counts is None:
                    self.is_head_blocked = True
                    self._reserve(job)
                    break
                self._start(now, job, counts)
                started.append(position)
            first = max(first, len(started) + 1)
        if self.is_head_blocked and backfills and self.total_free:
            started += self._backfill(now, max(first, 1))
        if started:
            self.queue = np.delete(self.queue, started)
        return len(started)

    def _choose(self, job: int, free: IntArray) -> IntArray | None:
        wanted = int(self.trace.nodes[job])
        if wanted > self.total_free:
            return None
        return (self.machine.bind if self.placed[job] else self.choice)(free, wanted)

    def _reserve(self, job: int) -> None:
        """Find the earliest time at which the job can start by the limits of the running jobs."""
        wanted = int(self.trace.nodes[job])
        # at least this many nodes must be free; more times are tried only if the rule does not accept them
        self.shadow_s = float(np.partition(self.free_at, wanted - 1)[wanted - 1])
        self.shadow_free = self._free_by(self.shadow_s)
        if not self.machine.rule.fits(self.shadow_free, wanted):
            times = np.unique(self.free_at[self.free_at > self.shadow_s])
            low, high = 0, len(times) - 1
            while low < high:
                middle = (low + high) // 2
                if self.machine.rule.fits(self._free_by(float(times[middle])), wanted):
                    high = middle
                else:
                    low = middle + 1
            self.shadow_s = float(times[low])
            self.shadow_free = self._free_by(self.shadow_s)
        self.reserved, self.spare = wanted, int(self.shadow_free.sum()) - wanted

    def _free_by(self, time_s: float) -> IntArray:
        """Nodes per leaf that are free at a time by the limits of the running jobs."""
        leaves = self.machine.leaves
        return np.bincount(leaves.leaf_of_node[self.free_at <= time_s], minlength=len(leaves.size))

    def _backfill(self, now: float, first: int) -> list[int]:
        """Start the jobs from position `first` that keep the reservation; return their positions."""
        waiting = self.queue[first:]
        nodes, ends = self.trace.nodes[waiting], now + self.trace.limit_s[waiting]
        started: list[int] = []
        position = 0
        while position < len(waiting) and self.total_free:
            possible = (nodes[position:] <= self.total_free) & (
                (ends[position:] <= self.shadow_s) | (nodes[position:] <= self.spare))
            found = int(possible.argmax()) if len(possible) else 0
            if not len(possible) or not possible[found]:
                break
            position += found
            if self._start_backfilled(now, int(waiting[position])):
                started.append(first + position)
            position += 1
        return started

    def _start_backfilled(self, now: float, job: int) -> bool:
        counts = self._choose(job, self.free)
        if counts is None:
            return False
        if now + self._limit(job, counts) > self.shadow_s:
            left = self.shadow_free - counts
            if not self._keeps_reservation(left):
                # as Slurm, without the nodes of the reservation
                reserved = self.machine.rule.choose(self.shadow_free, self.reserved)
                if reserved is None:
                    return False
                usable = np.minimum(self.free, self.shadow_free - reserved)
                counts = self._choose(job, usable)
                if counts is None or not self._keeps_reservation(self.shadow_free - counts):
                    return False
                left = self.shadow_free - counts
                if now + self._limit(job, counts) <= self.shadow_s:
                    left = self.shadow_free
            self.shadow_free = left
            self.spare = int(left.sum()) - self.reserved
        self._start(now, job, counts)
        return True

    def _keeps_reservation(self, left: IntArray) -> bool:
        return bool((left >= 0).all()) and self.machine.rule.fits(left, self.reserved)

    def _run_time(self, job: int, counts: IntArray) -> float:
        run_s = float(self.trace.run_s[job])
        return self.communication.resulting_run_s(run_s, self.machine.factor(counts)) if self.bound[job] else run_s

    def _limit(self, job: int, counts: IntArray) -> float:
        """The job's limit; a job that its nodes slow down gets as much longer as it needs."""
        limit = float(self.trace.limit_s[job])
        return limit if self.communication.fixed_run_times else max(limit, self._run_time(job, counts))

    def _start(self, now: float, job: int, counts: IntArray) -> None:
        leaves, timing = self.machine.leaves, self.timing
        nodes = np.concatenate([
            leaves.begin[leaf] + np.flatnonzero(self.free_at[leaves.begin[leaf]:leaves.begin[leaf + 1]] == -np.inf)[
                :counts[leaf]] for leaf in np.flatnonzero(counts).tolist()])
        begin = now + timing.start_s
        self.start_s[job] = begin
        self.zones[job] = np.count_nonzero(counts)
        self.factor[job] = self.machine.factor(counts)
        self.run_s[job] = self._run_time(job, counts)
        occupied = float(self.trace.run_s[job]) if self.communication.fixed_run_times else self.run_s[job]
        self.free_at[nodes] = begin + self._limit(job, counts)
        self.free -= counts
        self.total_free -= len(nodes)
        self._useful_nodes += self._useful_rate(job, len(nodes))
        self.nodes[job] = nodes
        if self.keep_nodes:
            self.kept[job] = nodes
        heapq.heappush(self.ends, (begin + occupied + timing.completing_s, job))

    def _useful_rate(self, job: int, nodes: int) -> float:
        fixed = self.communication.fixed_run_times
        return nodes if fixed else nodes * float(self.trace.run_s[job] / self.run_s[job])

    def _release(self, job: int) -> None:
        nodes = self.nodes.pop(job)
        self._useful_nodes -= self._useful_rate(job, len(nodes))
        self.free_at[nodes] = -np.inf
        leaves = self.machine.leaves
        self.free += np.bincount(leaves.leaf_of_node[nodes], minlength=len(leaves.size))
        self.total_free += len(nodes)
