"""Sums of an audit: all jobs, and by user, partition and job size; and the worst jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from slurmdl.history.accounting import IntArray, RecordProblem
from slurmdl.history.audit import Audit

MAX_WORST_JOBS = 20


@dataclass(frozen=True)
class StrategySums:
    """Sums for one assumed strategy.

    Attributes:
        mean_factor: communication time on the used nodes over that on the best ones, mean by node-hours; 1 if there
            is no job.
        leaf_order_factor: the same with the ranks on the used nodes in leaf order.
        lost_node_hours: node-hours that the slower communication took.
    """

    mean_factor: float
    leaf_order_factor: float
    lost_node_hours: float


@dataclass(frozen=True)
class GroupSums:
    """Sums over jobs on several nodes.

    Attributes:
        jobs_in_several_zones: jobs on nodes of more than one leaf zone.
        jobs_with_extra_zones: jobs that used more leaf zones than necessary at their start.
        used_zones, fewest_zones, broken_segments: summed over the jobs.
    """

    name: str
    jobs: int
    node_hours: float
    jobs_in_several_zones: int
    jobs_with_extra_zones: int
    used_zones: int
    fewest_zones: int
    broken_segments: int
    strategies: dict[str, StrategySums]


@dataclass(frozen=True)
class JobResult:
    """One audited job; times in epoch seconds, `end_s` is -1 while it runs. `factor` etc.: strategy -> value."""

    job_id: str
    user: str
    partition: str
    state: str
    start_s: int
    end_s: int
    nodes: int
    node_hours: float
    used_zones: int
    fewest_zones: int
    broken_segments: int
    factor: dict[str, float]
    leaf_order_factor: dict[str, float]
    step_factor: dict[str, float]
    lost_node_hours: dict[str, float]


@dataclass(frozen=True)
class Summary:
    """All sums; groups with most lost node-hours first, sizes ascending.

    `worst_jobs` are jobs that could have used fewer leaf zones or communicated faster, at most MAX_WORST_JOBS.
    """

    total: GroupSums
    users: tuple[GroupSums, ...]
    partitions: tuple[GroupSums, ...]
    sizes: tuple[GroupSums, ...]
    worst_jobs: tuple[JobResult, ...]

    @property
    def tables(self) -> tuple[tuple[str, tuple[GroupSums, ...]], ...]:
        """(kind of group, groups) in the order of reports."""
        return ("job size", self.sizes), ("user", self.users), ("partition", self.partitions)


def summarize_audit(audit: Audit) -> Summary:
    table, jobs = audit.table, audit.jobs
    size_class = np.ceil(np.log2(np.maximum(jobs.nodes, 2))).astype(np.int64)
    sizes = [_sum_jobs(audit, f"{2 ** (k - 1) + 1}-{2 ** k}" if k > 1 else "2", np.flatnonzero(size_class == k))
             for k in np.unique(size_class).tolist()]
    worst = audit.worst_first[audit.improvable[audit.worst_first]]
    return Summary(_sum_jobs(audit, "all", np.arange(len(jobs))), _by_name(audit, table.users, table.user[jobs.row]),
                   _by_name(audit, table.partitions, table.partition[jobs.row]), tuple(sizes),
                   tuple(job_result(audit, i) for i in worst[:MAX_WORST_JOBS].tolist()))


def job_result(audit: Audit, i: int) -> JobResult:
    """Result of an audited job by its index."""
    table, jobs = audit.table, audit.jobs
    row = int(jobs.row[i])

    def by_strategy(values: np.typing.NDArray[np.float64]) -> dict[str, float]:
        return dict(zip(audit.options.strategies, values[:, i].tolist(), strict=True))

    return JobResult(table.job_ids[row], table.users[table.user[row]], table.partitions[table.partition[row]],
                     table.states[table.state[row]], int(table.start_s[row]), int(table.end_s[row]),
                     int(jobs.nodes[i]), float(jobs.node_hours[i]), int(jobs.used_zones[i]),
                     int(jobs.fewest_zones[i]), int(jobs.broken_segments[i]), by_strategy(jobs.factor),
                     by_strategy(jobs.leaf_order_factor), by_strategy(audit.step_factor),
                     by_strategy(audit.lost_node_hours))


def audit_to_json(audit: Audit, summary: Summary) -> dict[str, Any]:
    """The audit as values for JSON."""
    topology, table, options = audit.leaves.topology, audit.table, audit.options
    starts = table.start_s[audit.jobs.row]
    return {"records": len(table), "source": table.source,
            "first_start_s": int(starts.min()) if len(starts) else None,
            "last_start_s": int(starts.max()) if len(starts) else None,
            "topology": {"source": topology.source, "kind": topology.kind, "leaf_zones": len(audit.leaves.zones),
                         "nodes": len(audit.leaves.order)},
            "comm_share": options.comm_share, "model_bytes": options.model_bytes,
            "strategies": list(options.strategies), "one_node_jobs": audit.one_node_jobs,
            "total": asdict(summary.total), **{key: [asdict(group) for group in getattr(summary, key)]
                                               for key in ("users", "partitions", "sizes")},
            "worst_jobs": [asdict(job) for job in summary.worst_jobs], "assumptions": list(audit.notes),
            "problems": [asdict(problem) if isinstance(problem, RecordProblem) else {"text": problem}
                         for problem in audit.problems]}


def _by_name(audit: Audit, names: Sequence[str], index: np.typing.NDArray[np.int32]) -> tuple[GroupSums, ...]:
    order = np.argsort(index, kind="stable")
    present, begin = np.unique(index[order], return_index=True)
    members = np.split(order, begin[1:])
    groups = [_sum_jobs(audit, names[i] or "unknown", rows)
              for i, rows in zip(present.tolist(), members, strict=False)]
    first = audit.options.strategies[0]
    return tuple(sorted(groups, key=lambda group: (-round(group.strategies[first].lost_node_hours, 6),
                                                   -group.jobs_with_extra_zones, -group.node_hours, group.name)))


def _sum_jobs(audit: Audit, name: str, i: IntArray) -> GroupSums:
    jobs = audit.jobs
    hours = jobs.node_hours[i]
    total = float(hours.sum())
    strategies = {}
    for k, strategy in enumerate(audit.options.strategies):
        factor, leaf_order = (float((values[k, i] * hours).sum() / total) if total else 1.0
                              for values in (jobs.factor, jobs.leaf_order_factor))
        strategies[strategy] = StrategySums(factor, leaf_order, float(audit.lost_node_hours[k, i].sum()))
    return GroupSums(name, len(i), total, int((jobs.used_zones[i] > 1).sum()), int(jobs.has_extra_zones[i].sum()),
                     int(jobs.used_zones[i].sum()), int(jobs.fewest_zones[i].sum()),
                     int(jobs.broken_segments[i].sum()), strategies)
