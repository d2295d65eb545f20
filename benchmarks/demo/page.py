"""The table and the picture of the demo as an HTML page without other files."""

from __future__ import annotations

from xml.sax.saxutils import escape

from benchmarks.demo.jobs import PLACED, Outcomes
from benchmarks.demo.picture import draw_demo
from benchmarks.demo.report import Line, make_lines

_HEADERS = ("job", "placement", "nodes", "zones", "s/step", "gain over the better")
_STYLE = """\
body { font: 16px/1.5 system-ui, sans-serif; color: #0f172a; background: #fff; max-width: 800px; margin: 2em auto;
  padding: 0 1em }
svg { max-width: 100%; height: auto }
div { overflow-x: auto }
table { border-collapse: collapse; white-space: nowrap }
th, td { padding: .2em .8em .2em 0; text-align: left; border-bottom: 1px solid #cbd5e1 }
.slurmdl { font-weight: bold }
pre { font-size: 13px; overflow-x: auto; background: #f1f5f9; padding: 1em; border-radius: 6px }"""


def format_page(outcomes: Outcomes, heading: str, closing: str) -> str:
    """HTML document: the picture, the table, and the text that follows them on the screen."""
    rows = "\n".join(map(_table_row, make_lines(outcomes)))
    headers = "".join(f"<th>{header}</th>" for header in _HEADERS)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>slurmdl demo</title>
<style>
{_STYLE}
</style>
</head>
<body>
<h1>slurmdl demo</h1>
<p>{escape(heading)}</p>
{draw_demo(outcomes)}<div><table>
<tr>{headers}</tr>
{rows}
</table></div>
<pre>{escape(closing)}</pre>
</body>
</html>
"""


def _table_row(line: Line) -> str:
    cells = (line.job, line.placement, line.nodes, str(line.zones), f"{line.seconds:.3f}", line.gain)
    style = ' class="slurmdl"' if line.placement == PLACED else ""
    return f"<tr{style}>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
