"""Report of an audit as one HTML file, without scripts and without other files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from slurmdl import __version__
from slurmdl.history.audit import Audit
from slurmdl.history.charts import BEST_COLOR, USED_COLOR, Bar, bar_chart, zone_chart
from slurmdl.history.report_text import (
    GROUP_COLUMNS,
    JOB_COLUMNS,
    NO_BETTER_NODES,
    describe_gain,
    describe_records,
    describe_topology,
    group_cells,
    job_cells,
    key_figures,
)
from slurmdl.history.summary import Summary
from slurmdl.text import escape_nonprintable

_MAX_ROWS = 20
_MAX_BARS = 10
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #0f172a; margin: 0 auto; padding: 16px; max-width: 1120px; }
h1 { font-size: 1.5em; margin: 0.2em 0; } h2 { font-size: 1.15em; margin: 1.6em 0 0.5em; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(300px, 100%), 1fr)); gap: 10px;
  margin: 0; }
.figures div { border: 1px solid #cbd5e1; border-radius: 8px; padding: 8px 12px; }
.figures dt { color: #475569; font-size: 0.85em; } .figures dd { margin: 0; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(320px, 100%), 1fr)); gap: 24px; }
figure { margin: 0; } figcaption { font-weight: 600; margin-bottom: 6px; } svg { width: 100%; max-width: 480px; }
.table { overflow-x: auto; } table { border-collapse: collapse; white-space: nowrap; }
th, td { padding: 3px 10px; text-align: right; border-bottom: 1px solid #e2e8f0; }
th { color: #475569; font-weight: 600; } .name { text-align: left; max-width: 16em; overflow: hidden;
  text-overflow: ellipsis; }
li { overflow-wrap: anywhere; } p { overflow-wrap: anywhere; }
"""


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
    legend = [(USED_COLOR, "used"), (BEST_COLOR, "possible")]
    yield from _figure("Leaf zones per job, by number of nodes", bar_chart(
        "leaf zones per job by number of nodes",
        [(f"{group.name} nodes", [Bar(group.used_zones / group.jobs, f"{group.used_zones / group.jobs:.1f}",
                                      USED_COLOR),
                                  Bar(group.fewest_zones / group.jobs, f"{group.fewest_zones / group.jobs:.1f}",
                                      BEST_COLOR)]) for group in summary.sizes[:_MAX_BARS]], legend))
    for strategy in audit.options.strategies:
        hours = sorted(((group.name, group.strategies[strategy].lost_node_hours) for group in summary.users),
                       key=lambda pair: (-pair[1], pair[0]))[:_MAX_BARS]
        yield from _figure(f"Node-hours lost if the strategy is {strategy}, by user", bar_chart(
            f"node-hours lost by user, {strategy}",
            [(name, [Bar(value, f"{value:,.1f}", USED_COLOR)]) for name, value in hours]))
    row = int(audit.jobs.row[audit.worst_first[0]])
    if summary.worst_jobs and row in audit.best:
        job_id = audit.table.job_ids[row]
        yield from _figure(f"Leaf zones of the worst job, {job_id}", zone_chart(
            f"leaf zones of job {job_id}", audit, audit.leaf_counts(row), audit.best[row]))
    yield "</div>"
    yield "<h2>Worst jobs</h2>"
    if not summary.worst_jobs:
        yield f"<p>{_text(NO_BETTER_NODES)}</p>"
    yield from _table(JOB_COLUMNS, [job_cells(job) for job in summary.worst_jobs[:_MAX_ROWS]], 3)
    for title, groups in summary.tables:
        hidden = len(groups) - _MAX_ROWS
        yield f"<h2>By {title}{f' (the first {_MAX_ROWS} of {len(groups):,})' if hidden > 0 else ''}</h2>"
        yield from _table(GROUP_COLUMNS, [group_cells(group) for group in groups[:_MAX_ROWS]], 1)


def _figure(caption: str, svg: str) -> Iterator[str]:
    yield f"<figure><figcaption>{_text(caption)}</figcaption>{svg}</figure>"


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
