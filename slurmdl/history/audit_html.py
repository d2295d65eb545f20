"""Report of an audit as one HTML file, without scripts and other files; its charts are narrow enough for a phone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

import numpy as np

from slurmdl import __version__
from slurmdl.history.audit import Audit
from slurmdl.history.audit_report import (
    GROUP_COLUMNS,
    JOB_COLUMNS,
    NO_BETTER_NODES,
    Summary,
    describe_gain,
    describe_records,
    describe_topology,
    group_cells,
    job_cells,
    key_figures,
)
from slurmdl.placement.arrays import IntArray
from slurmdl.text import escape_nonprintable, pluralize, truncate
from slurmdl.topology.drawing import svg_text

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
WIDTH = 360  # pixels
_LABEL_WIDTH, _VALUE_WIDTH, _BAR_HEIGHT = 100, 62, 14
USED_COLOR, BEST_COLOR, _OUTLINE = "#ea580c", "#2563eb", "#94a3b8"
MAX_ZONES_SHOWN = 20
_ZONE_COLUMNS, _ZONE_HEIGHT = 4, 38


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
        [(f"{group.name} nodes", [(zones / group.jobs, f"{zones / group.jobs:.1f}", color) for zones, color in (
            (group.used_zones, USED_COLOR), (group.fewest_zones, BEST_COLOR))])
         for group in summary.sizes[:_MAX_BARS]], legend))
    for strategy in audit.options.strategies:
        hours = sorted(((group.name, group.strategies[strategy].lost_node_hours) for group in summary.users),
                       key=lambda pair: (-pair[1], pair[0]))[:_MAX_BARS]
        yield from _figure(f"Node-hours lost if the strategy is {strategy}, by user", bar_chart(
            f"node-hours lost by user, {strategy}",
            [(name, [(value, f"{value:,.1f}", USED_COLOR)]) for name, value in hours]))
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


def bar_chart(title: str, rows: Sequence[tuple[str, Sequence[tuple[float, str, str]]]],
              legend: Sequence[tuple[str, str]] = ()) -> str:
    """Horizontal bars: rows of (label, bars), bars of (value, text behind it, color). `legend`: (color, meaning)."""
    largest = max((value for _, bars in rows for value, _, _ in bars), default=0.0) or 1.0
    scale = (WIDTH - _LABEL_WIDTH - _VALUE_WIDTH) / largest
    elements, y = list(_draw_legend(legend)), 26 if legend else 8
    for label, bars in rows:
        middle = y + len(bars) * (_BAR_HEIGHT + 2) / 2 + 4
        elements.append(svg_text(0, middle, truncate(escape_nonprintable(label), 13, "…"), size=12))
        for value, text, color in bars:
            width = max(value * scale, 1.0)
            elements.append(f'<rect x="{_LABEL_WIDTH}" y="{y:g}" width="{width:.1f}" height="{_BAR_HEIGHT}" rx="2" '
                            f'fill="{color}"/>')
            elements.append(svg_text(_LABEL_WIDTH + width + 4, y + 11, text, size=11, fill="#334155"))
            y += _BAR_HEIGHT + 2
        y += 8
    return _document(title, y, elements)


def zone_chart(title: str, audit: Audit, used: IntArray, best: IntArray) -> str:
    """Leaf zones that a job used, and the best ones that it could have had; nodes in each, shape (leaves,)."""
    elements, y = [], 4.0
    for label, counts, color in (("used", used, USED_COLOR), ("best", best, BEST_COLOR)):
        zones = int(np.count_nonzero(counts))
        heading = f"{label}: {pluralize(zones, 'leaf zone')}"
        elements.append(svg_text(0, y + 14, heading, weight="bold", size=12))
        y += 22
        elements += _draw_zones(audit, counts, color, y)
        y += -(-min(zones, MAX_ZONES_SHOWN) // _ZONE_COLUMNS) * (_ZONE_HEIGHT + 6) + 4
        if zones > MAX_ZONES_SHOWN:
            elements.append(svg_text(0, y + 10, f"and {zones - MAX_ZONES_SHOWN} more", size=12))
            y += 20
    return _document(title, y + 4, elements)


def _draw_zones(audit: Audit, counts: IntArray, color: str, top: float) -> Iterator[str]:
    """One box per leaf zone, filled by the share of its nodes that the job has."""
    width = WIDTH / _ZONE_COLUMNS - 8
    for i, leaf in enumerate(np.flatnonzero(counts)[:MAX_ZONES_SHOWN].tolist()):
        x, y = 1 + i % _ZONE_COLUMNS * (width + 8), top + i // _ZONE_COLUMNS * (_ZONE_HEIGHT + 6)
        count, size = int(counts[leaf]), int(audit.leaves.size[leaf])
        yield (f'<rect x="{x:g}" y="{y:g}" width="{width * count / size:.1f}" height="{_ZONE_HEIGHT}" rx="3" '
               f'fill="{color}" fill-opacity="0.35"/>')
        yield (f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{_ZONE_HEIGHT}" rx="3" fill="none" '
               f'stroke="{_OUTLINE}"/>')
        yield svg_text(x + 5, y + 15, truncate(escape_nonprintable(audit.leaves.zone_names[leaf]), 11, "…"), size=12)
        yield svg_text(x + 5, y + 31, f"{count} of {size}", size=11, fill="#334155")


def _draw_legend(legend: Sequence[tuple[str, str]]) -> Iterator[str]:
    x = 0.0
    for color, meaning in legend:
        yield f'<rect x="{x:g}" y="2" width="12" height="12" rx="2" fill="{color}"/>'
        yield svg_text(x + 17, 12, meaning, size=12)
        x += 34 + 6.5 * len(meaning)


def _document(title: str, height: float, elements: Sequence[str]) -> str:
    """An SVG element with a title for screen readers."""
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img" '
            f'font-family="sans-serif"><title>{escape(escape_nonprintable(title))}</title>{"".join(elements)}</svg>')
