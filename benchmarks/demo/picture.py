"""The table of the demo as an SVG: a group of bars for each job."""

from __future__ import annotations

from xml.sax.saxutils import escape

from benchmarks.demo.jobs import PLACED, Outcomes
from benchmarks.demo.report import Line, make_lines

TITLES = {"mesh": "mesh dp=4,tp=2 on a fragmented cluster", "bad link": "a node with a bad link: all-reduce",
          "ps": "2 parameter servers, 4 workers", "allreduce": "training across two slow zones: allreduce",
          "islands": "the same with islands, compared with allreduce"}
#: pixels
WIDTH, BAR_X, BAR_WIDTH, ROW, GAP = 760, 110, 400, 20, 34
_COLOR, _PLACED_COLOR = "#94a3b8", "#1d4ed8"


def draw_demo(outcomes: Outcomes) -> str:
    """SVG document; the bars of a job are relative to its slowest step."""
    parts, y, previous = [], 16, ""
    parts.append(_text(16, y + 12, "Seconds per step on a real Slurm (sandbox on one machine)", "font-weight='bold'"))
    y += 22
    for line in make_lines(outcomes):
        if line.job != previous:
            y += GAP
            parts.append(_text(16, y - 8, TITLES[line.job], "font-weight='bold'"))
            previous = line.job
        parts += _bar(line, y)
        y += ROW
    return (f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{y + 16}' "
            f"viewBox='0 0 {WIDTH} {y + 16}' font-family='system-ui,sans-serif' font-size='13'>\n"
            f"<rect width='100%' height='100%' fill='#fff'/>\n" + "\n".join(parts) + "\n</svg>\n")


def _bar(line: Line, y: int) -> list[str]:
    is_placed = line.placement == PLACED
    width = max(BAR_WIDTH * line.share, 2)
    gain = f" ({line.gain if line.gain != 'none' else 'no gain'})" if line.gain else ""
    return [_text(16, y + 13, line.placement),
            f"<rect x='{BAR_X}' y='{y + 2}' width='{width:.1f}' height='{ROW - 5}' rx='2' "
            f"fill='{_PLACED_COLOR if is_placed else _COLOR}'/>",
            _text(BAR_X + width + 8, y + 13, f"{line.seconds:.3f} s{gain}", "font-weight='bold'" * is_placed)]


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y}' fill='#0f172a' {attributes}>{escape(text)}</text>"
