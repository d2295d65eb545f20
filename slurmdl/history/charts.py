"""Charts of an audit in SVG, narrow enough for a phone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from slurmdl.history.audit import Audit
from slurmdl.history.comm_costs import NodeCounts
from slurmdl.text import escape_nonprintable, pluralize, truncate
from slurmdl.topology.svg import svg_text

WIDTH = 360  # pixels
_LABEL_WIDTH, _VALUE_WIDTH, _BAR_HEIGHT = 100, 62, 14
USED_COLOR, BEST_COLOR, _OUTLINE = "#ea580c", "#2563eb", "#94a3b8"
MAX_ZONES_SHOWN = 20
_ZONE_COLUMNS, _ZONE_HEIGHT = 4, 38


@dataclass(frozen=True)
class Bar:
    """A bar of a chart; `text` stands behind it."""

    value: float
    text: str
    color: str


def bar_chart(title: str, rows: Sequence[tuple[str, Sequence[Bar]]], legend: Sequence[tuple[str, str]] = ()) -> str:
    """Horizontal bars: rows of (label, bars). `legend`: (color, meaning)."""
    largest = max((bar.value for _, bars in rows for bar in bars), default=0.0) or 1.0
    scale = (WIDTH - _LABEL_WIDTH - _VALUE_WIDTH) / largest
    elements, y = list(_draw_legend(legend)), 26 if legend else 8
    for label, bars in rows:
        middle = y + len(bars) * (_BAR_HEIGHT + 2) / 2 + 4
        elements.append(svg_text(0, middle, truncate(escape_nonprintable(label), 13, "…"), size=12))
        for bar in bars:
            width = max(bar.value * scale, 1.0)
            elements.append(f'<rect x="{_LABEL_WIDTH}" y="{y:g}" width="{width:.1f}" height="{_BAR_HEIGHT}" rx="2" '
                            f'fill="{bar.color}"/>')
            elements.append(svg_text(_LABEL_WIDTH + width + 4, y + 11, bar.text, size=11, fill="#334155"))
            y += _BAR_HEIGHT + 2
        y += 8
    return _document(title, y, elements)


def zone_chart(title: str, audit: Audit, used: NodeCounts, best: NodeCounts) -> str:
    """Leaf zones that a job used, and the best ones that it could have had, with its nodes in each."""
    elements, y = [], 4.0
    for label, counts, color in (("used", used, USED_COLOR), ("best", best, BEST_COLOR)):
        zones = len(counts[0])
        heading = f"{label}: {pluralize(zones, 'leaf zone')}"
        elements.append(svg_text(0, y + 14, heading, weight="bold", size=12))
        y += 22
        elements += _draw_zones(audit, counts, color, y)
        y += -(-min(zones, MAX_ZONES_SHOWN) // _ZONE_COLUMNS) * (_ZONE_HEIGHT + 6) + 4
        if zones > MAX_ZONES_SHOWN:
            elements.append(svg_text(0, y + 10, f"and {zones - MAX_ZONES_SHOWN} more", size=12))
            y += 20
    return _document(title, y + 4, elements)


def _draw_zones(audit: Audit, counts: NodeCounts, color: str, top: float) -> Iterator[str]:
    """One box per leaf zone, filled by the share of its nodes that the job has."""
    width = WIDTH / _ZONE_COLUMNS - 8
    for i, (leaf, count) in enumerate(list(zip(*counts, strict=True))[:MAX_ZONES_SHOWN]):
        x, y = 1 + i % _ZONE_COLUMNS * (width + 8), top + i // _ZONE_COLUMNS * (_ZONE_HEIGHT + 6)
        size = int(audit.leaves.begin[leaf + 1] - audit.leaves.begin[leaf])
        yield (f'<rect x="{x:g}" y="{y:g}" width="{width * count / size:.1f}" height="{_ZONE_HEIGHT}" rx="3" '
               f'fill="{color}" fill-opacity="0.35"/>')
        yield (f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{_ZONE_HEIGHT}" rx="3" fill="none" '
               f'stroke="{_OUTLINE}"/>')
        yield svg_text(x + 5, y + 15, truncate(escape_nonprintable(audit.leaves.names[leaf]), 11, "…"), size=12)
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
