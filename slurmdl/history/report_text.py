"""Report of an audit as text, and its jobs as CSV."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Iterator, Sequence

from slurmdl.history.audit import Audit
from slurmdl.history.summary import GroupSums, JobResult, Summary, job_result
from slurmdl.text import csv_cell, pluralize, truncate

_MAX_ROWS = 10
_CSV_FIELDS = ("job_id", "user", "partition", "state", "start_s", "end_s", "nodes", "node_hours", "used_zones",
               "fewest_zones", "broken_segments")
_CSV_STRATEGY_FIELDS = ("factor", "leaf_order_factor", "step_factor", "lost_node_hours")


def format_audit(audit: Audit, summary: Summary) -> Iterator[str]:
    """Yield the lines of the report."""
    yield describe_gain(audit, summary)
    yield f"{describe_records(audit)}; {describe_topology(audit)}"
    yield ""
    for label, text in key_figures(audit, summary):
        yield f"{label:26}{text}"
    if summary.total.jobs:
        yield ""
        worst = [job_cells(job) for job in summary.worst_jobs[:_MAX_ROWS]]
        yield from _format_table("worst jobs", JOB_COLUMNS, worst) if worst else [NO_BETTER_NODES]
        for title, groups in summary.tables:
            yield ""
            rows = [group_cells(group) for group in groups[:_MAX_ROWS]]
            hidden = len(groups) - len(rows)
            yield from _format_table(f"by {title}{f', {hidden} more' if hidden else ''}", GROUP_COLUMNS, rows)
    yield ""
    for note in audit.notes:
        yield f"assumed: {note}"
    for problem in audit.problems:
        yield f"skipped: {problem}"


def describe_gain(audit: Audit, summary: Summary) -> str:
    """What there was to gain, and how certain this is."""
    total = summary.total
    if not total.jobs:
        return "Nothing to gain: no job ran on several nodes."
    saved = ", or ".join(f"{sums.lost_node_hours:,.1f} ({sums.lost_node_hours / total.node_hours:.1%}) with {name}"
                         for name, sums in total.strategies.items())
    return (f"Better nodes and rank order would have saved {saved}, of {total.node_hours:,.1f} node-hours on several "
            f"nodes. This is a prediction: {audit.options.comm_share:.0%} of the run time is assumed to be "
            "communication, and nodes that no job held to be free.")


def describe_records(audit: Audit) -> str:
    starts = audit.table.start_s[audit.jobs.row]
    period = f", started {format_time(int(starts.min()))} to {format_time(int(starts.max()))}" if len(starts) else ""
    return f"{pluralize(len(audit.table), 'record')} of {audit.table.source}{period}"


def describe_topology(audit: Audit) -> str:
    topology = audit.leaves.topology
    return (f"{pluralize(len(audit.leaves.order), 'node')} in {pluralize(len(audit.leaves.zones), 'leaf zone')} of "
            f"{topology.source or 'the topology'} ({topology.kind})")


def key_figures(audit: Audit, summary: Summary) -> Iterator[tuple[str, str]]:
    """Yield (label, text) of the most important results."""
    total = summary.total
    yield "jobs on several nodes", (f"{total.jobs:,} with {total.node_hours:,.1f} node-hours (and "
                                    f"{audit.one_node_jobs:,} on one node)")
    if not total.jobs:
        return
    yield "in several leaf zones", f"{total.jobs_in_several_zones:,} ({total.jobs_in_several_zones / total.jobs:.0%})"
    yield "fewer zones were possible", (f"{total.jobs_with_extra_zones:,} "
                                        f"({total.jobs_with_extra_zones / total.jobs:.0%})")
    yield "leaf zones per job", (f"{total.used_zones / total.jobs:.2f} used, {total.fewest_zones / total.jobs:.2f} "
                                 "possible")
    if audit.leaves.topology.kind == "block":
        yield "broken segments", f"{total.broken_segments:,}"
    for name, sums in total.strategies.items():
        yield f"communication, {name}", (
            f"x{sums.mean_factor:.2f} of the best nodes (x{sums.leaf_order_factor:.2f} with ranks in leaf order), "
            f"{sums.lost_node_hours:,.1f} node-hours lost ({sums.lost_node_hours / total.node_hours:.1%})")


NO_BETTER_NODES = "no job could have had better nodes"
JOB_COLUMNS = ("job", "user", "partition", "nodes", "zones", "fewest", "comm", "node-hours", "lost")
GROUP_COLUMNS = ("", "jobs", "node-hours", "zones/job", "fewest", "extra", "comm", "lost")


def job_cells(job: JobResult) -> tuple[str, ...]:
    """Cells of JOB_COLUMNS, for the first strategy."""
    strategy = next(iter(job.factor))
    return (job.job_id, job.user, job.partition, f"{job.nodes:,}", f"{job.used_zones:,}", f"{job.fewest_zones:,}",
            f"x{job.factor[strategy]:.2f}", f"{job.node_hours:,.1f}", f"{job.lost_node_hours[strategy]:,.1f}")


def group_cells(group: GroupSums) -> tuple[str, ...]:
    """Cells of GROUP_COLUMNS, for the first strategy."""
    sums = next(iter(group.strategies.values()))
    return (group.name, f"{group.jobs:,}", f"{group.node_hours:,.1f}", f"{group.used_zones / group.jobs:.2f}",
            f"{group.fewest_zones / group.jobs:.2f}", f"{group.jobs_with_extra_zones / group.jobs:.0%}",
            f"x{sums.mean_factor:.2f}", f"{sums.lost_node_hours:,.1f}")


def format_csv(audit: Audit) -> str:
    """All audited jobs as CSV with a header, worst first; times in epoch seconds."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    strategies = audit.options.strategies
    writer.writerow([*_CSV_FIELDS, *(f"{name}_{field}" for name in strategies for field in _CSV_STRATEGY_FIELDS)])
    for i in audit.worst_first.tolist():
        job = job_result(audit, i)
        values = [getattr(job, field)[name] for name in strategies for field in _CSV_STRATEGY_FIELDS]
        writer.writerow([*(f"{value:.6g}" if isinstance(value, float) else csv_cell(value) for value in (
            *(getattr(job, field) for field in _CSV_FIELDS), *values))])
    return text.getvalue()


def format_time(seconds: int) -> str:
    """Local time to the minute, "2024-05-01 12:30"."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _format_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield a table whose first column, and columns of names, are left-aligned."""
    cells = [[truncate(cell, 24) for cell in row] for row in (columns, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    is_name = [not column or column in ("job", "user", "partition") for column in columns]
    yield title
    for row in cells:
        yield "  " + "  ".join(cell.ljust(width) if name else cell.rjust(width) for cell, width, name
                               in zip(row, widths, is_name, strict=True)).rstrip()
