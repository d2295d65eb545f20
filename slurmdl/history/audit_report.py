"""Report of an audit as text, CSV, JSON and HTML: sums over all jobs and by user, partition and size; the worst jobs.

The HTML is one file without scripts and other files; its charts are narrow enough for a phone.
"""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from html import escape
from typing import Any

import numpy as np

from slurmdl import __version__
from slurmdl.history.accounting import Int32Array, RecordProblem
from slurmdl.history.audit import Audit
from slurmdl.placement.arrays import FloatArray, IntArray
from slurmdl.text import csv_cell, escape_nonprintable, pluralize, truncate

MAX_WORST_JOBS = 20
_MAX_ROWS = 10
NO_BETTER_NODES = "no job could have had better nodes"
JOB_COLUMNS = ("job", "user", "partition", "nodes", "zones", "fewest", "comm", "node-hours", "lost")
GROUP_COLUMNS = ("", "jobs", "node-hours", "zones/job", "fewest", "extra", "comm", "lost")
_MAX_HTML_ROWS, _MAX_BARS, _MAX_ZONES_SHOWN = 20, 10, 20
_USED_COLOR, _BEST_COLOR = "#ea580c", "#2563eb"
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #0f172a; margin: 0 auto; padding: 16px; max-width: 1120px; }
h1 { font-size: 1.5em; margin: 0.2em 0; } h2 { font-size: 1.15em; margin: 1.6em 0 0.5em; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(300px, 100%), 1fr)); gap: 10px;
  margin: 0; }
.figures div { border: 1px solid #cbd5e1; border-radius: 8px; padding: 8px 12px; }
.figures dt { color: #475569; font-size: 0.85em; } .figures dd { margin: 0; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(320px, 100%), 1fr)); gap: 24px; }
figure { margin: 0; max-width: 480px; font-size: 0.85em; } figcaption { font-weight: 600; margin-bottom: 6px; }
.bar { display: grid; grid-template-columns: 7em 1fr 5em; gap: 6px; overflow: hidden; }
.bar i { display: block; height: 1em; border-radius: 2px; min-width: 1px; } .key { padding: 0 1em; }
.zones { display: grid; grid-template-columns: repeat(4, 1fr); gap: 6px; }
.zones div { border: 1px solid #94a3b8; border-radius: 3px; padding: 2px 5px; overflow: hidden; }
.table { overflow-x: auto; } table { border-collapse: collapse; white-space: nowrap; }
th, td { padding: 3px 10px; text-align: right; border-bottom: 1px solid #e2e8f0; }
th { color: #475569; font-weight: 600; } .name { text-align: left; max-width: 16em; overflow: hidden;
  text-overflow: ellipsis; }
li { overflow-wrap: anywhere; } p { overflow-wrap: anywhere; }
"""



@dataclass(frozen=True)
class StrategySums:
    """Sums for one assumed strategy.

    Attributes:
        mean_factor: communication time on the used nodes over that on the best ones, mean by node-hours; 1 without
            jobs.
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


_STRATEGY_FIELDS = ("factor", "leaf_order_factor", "step_factor", "lost_node_hours")
_JOB_FIELDS = tuple(field.name for field in fields(JobResult) if field.name not in _STRATEGY_FIELDS)


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

    def by_strategy(values: FloatArray) -> dict[str, float]:
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
            "topology": {"source": topology.source, "kind": topology.kind,
                         "leaf_zones": int(np.count_nonzero(audit.leaves.size)), "nodes": audit.leaves.nodes},
            "comm_share": options.comm_share, "model_bytes": options.model_bytes,
            "strategies": list(options.strategies), "one_node_jobs": audit.one_node_jobs,
            "total": asdict(summary.total), **{key: [asdict(group) for group in getattr(summary, key)]
                                               for key in ("users", "partitions", "sizes")},
            "worst_jobs": [asdict(job) for job in summary.worst_jobs], "assumptions": list(audit.notes),
            "problems": [asdict(problem) if isinstance(problem, RecordProblem) else {"text": problem}
                         for problem in audit.problems]}


def _by_name(audit: Audit, names: Sequence[str], index: Int32Array) -> tuple[GroupSums, ...]:
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
    zones = pluralize(int(np.count_nonzero(audit.leaves.size)), "leaf zone")
    return (f"{pluralize(audit.leaves.nodes, 'node')} in {zones} of {topology.source or 'the topology'} "
            f"({topology.kind})")


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
    writer.writerow([*_JOB_FIELDS, *(f"{name}_{field}" for name in strategies for field in _STRATEGY_FIELDS)])
    for i in audit.worst_first.tolist():
        job = job_result(audit, i)
        values = [getattr(job, field)[name] for name in strategies for field in _STRATEGY_FIELDS]
        writer.writerow([*(f"{value:.6g}" if isinstance(value, float) else csv_cell(value) for value in (
            *(getattr(job, field) for field in _JOB_FIELDS), *values))])
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


def format_html(audit: Audit, summary: Summary) -> str:
    """The report; names of the records are escaped."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return "\n".join([
        "<!DOCTYPE html>", '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Audit of jobs and leaf zones</title><style>{_STYLE}</style></head><body>",
        "<h1>Audit of jobs and leaf zones</h1>",
        f"<p><strong>{_text(describe_gain(audit, summary))}</strong></p>",
        f"<p>{_text(describe_records(audit))}; {_text(describe_topology(audit))}</p>",
        '<dl class="figures">', *(f"<div><dt>{_text(label)}</dt><dd>{_text(text)}</dd></div>"
                                  for label, text in key_figures(audit, summary)), "</dl>",
        *(_charts_and_tables(audit, summary) if summary.total.jobs else ()),
        *_list("Assumptions", audit.notes), *_list("Skipped", list(map(str, audit.problems))),
        f"<p>slurmdl {_text(__version__)}</p>", "</body></html>", ""])


def _charts_and_tables(audit: Audit, summary: Summary) -> Iterator[str]:
    yield '<h2>Pictures</h2><div class="charts">'
    yield from _bar_chart(
        "Leaf zones per job, by number of nodes",
        [(f"{group.name} nodes", [(zones / group.jobs, f"{zones / group.jobs:.1f}", color) for zones, color in (
            (group.used_zones, _USED_COLOR), (group.fewest_zones, _BEST_COLOR))])
         for group in summary.sizes[:_MAX_BARS]], [(_USED_COLOR, "used"), (_BEST_COLOR, "possible")])
    for strategy in audit.options.strategies:
        hours = sorted(((group.name, group.strategies[strategy].lost_node_hours) for group in summary.users),
                       key=lambda pair: (-pair[1], pair[0]))[:_MAX_BARS]
        yield from _bar_chart(f"Node-hours lost if the strategy is {strategy}, by user",
                              [(name, [(value, f"{value:,.1f}", _USED_COLOR)]) for name, value in hours])
    row = int(audit.jobs.row[audit.worst_first[0]])
    if summary.worst_jobs and row in audit.best:
        yield from _zone_chart(f"Leaf zones of the worst job, {audit.table.job_ids[row]}", audit, (
            ("used", audit.leaf_counts(row), _USED_COLOR), ("best", audit.best[row], _BEST_COLOR)))
    yield "</div>"
    yield "<h2>Worst jobs</h2>"
    if not summary.worst_jobs:
        yield f"<p>{_text(NO_BETTER_NODES)}</p>"
    yield from _table(JOB_COLUMNS, [job_cells(job) for job in summary.worst_jobs[:_MAX_HTML_ROWS]], 3)
    for title, groups in summary.tables:
        hidden = len(groups) - _MAX_HTML_ROWS
        yield f"<h2>By {title}{f' (the first {_MAX_HTML_ROWS} of {len(groups):,})' if hidden > 0 else ''}</h2>"
        yield from _table(GROUP_COLUMNS, [group_cells(group) for group in groups[:_MAX_HTML_ROWS]], 1)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], names: int) -> Iterator[str]:
    """A table that scrolls sideways; the first `names` columns are left-aligned."""
    def row(cells: Sequence[str], tag: str) -> str:
        return "".join(f'<{tag}{" class=name" if i < names else ""}>{_text(cell)}</{tag}>'
                       for i, cell in enumerate(cells))

    yield '<div class="table"><table>'
    yield f"<tr>{row(columns, 'th')}</tr>"
    for cells in rows:
        yield f"<tr>{row(cells, 'td')}</tr>"
    yield "</table></div>"


def _list(title: str, items: Sequence[str]) -> Iterator[str]:
    if items:
        yield f"<h2>{title}</h2><ul>"
        yield from (f"<li>{_text(item)}</li>" for item in items)
        yield "</ul>"


def _text(text: str) -> str:
    return escape(escape_nonprintable(text))


def _bar_chart(caption: str, rows: Sequence[tuple[str, Sequence[tuple[float, str, str]]]],
               legend: Sequence[tuple[str, str]] = ()) -> Iterator[str]:
    """Horizontal bars: rows of (label, bars), bars of (value, text behind it, color). `legend`: (color, meaning)."""
    largest = max((value for _, bars in rows for value, _, _ in bars), default=0.0) or 1.0
    yield f"<figure><figcaption>{_text(caption)}</figcaption>"
    for color, meaning in legend:
        yield f'<span class="key" style="border-left: 1em solid {color}">{meaning}</span>'
    for label, bars in rows:
        for i, (value, text, color) in enumerate(bars):
            yield (f'<div class="bar"><span>{"" if i else _text(truncate(label, 13, "…"))}</span>'
                   f'<span><i style="width: {value / largest:.1%}; background: {color}"></i></span>{text}</div>')
    yield "</figure>"


def _zone_chart(caption: str, audit: Audit, choices: Sequence[tuple[str, IntArray, str]]) -> Iterator[str]:
    """A box per leaf zone, filled by the share of its nodes; choices are (label, nodes of each leaf zone, color)."""
    yield f"<figure><figcaption>{_text(caption)}</figcaption>"
    for label, counts, color in choices:
        zones = np.flatnonzero(counts).tolist()
        yield f'{label}: {pluralize(len(zones), "leaf zone")}<div class="zones">'
        for leaf in zones[:_MAX_ZONES_SHOWN]:
            count, size = int(counts[leaf]), int(audit.leaves.size[leaf])
            yield (f'<div style="background: linear-gradient(90deg, {color}59 {count / size:.1%}, transparent 0)">'
                   f"{_text(audit.leaves.zone_names[leaf])}<br>{count} of {size}</div>")
        yield "</div>"
        if len(zones) > _MAX_ZONES_SHOWN:
            yield f"and {len(zones) - _MAX_ZONES_SHOWN} more<br>"
    yield "</figure>"
