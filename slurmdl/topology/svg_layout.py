"""What pictures of zones share: boxes in boxes, cells in rows, text. Hand-written SVG 1.1."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

Size = tuple[float, float]
#: pixels of a character of the heading, as wide as DejaVu Sans Bold has them, and from line to line
_HEADING_CHAR_WIDTH, _HEADING_LINE_HEIGHT = 9.5, 20


@dataclass(frozen=True)
class Box:
    """A zone as it is drawn: position and size in pixels."""

    zone: int
    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def bottom(self) -> float:
        return self.y + self.height

    def outline(self, radius: float = 8, extra: str = "") -> str:
        return (f'<rect x="{self.x:g}" y="{self.y:g}" width="{self.width:g}" height="{self.height:g}" '
                f'rx="{radius:g}" fill="none" stroke="#64748b"{extra}/>')


@dataclass(frozen=True)
class Grid:
    """Cells of a leaf zone: so many to a row, each so wide and high, with a gap between."""

    columns: int
    width: float
    height: float
    gap: float = 8

    def size(self, cells: int) -> Size:
        columns, rows = min(cells, self.columns) or 1, -(-cells // self.columns) or 1
        return columns * (self.width + self.gap) - self.gap, rows * (self.height + self.gap) - self.gap

    def cell_position(self, cell: int) -> Size:
        """Position of a cell, from the upper left corner of the first."""
        row, column = divmod(cell, self.columns)
        return column * (self.width + self.gap), row * (self.height + self.gap)


@dataclass(frozen=True)
class Spacing:
    """Pixels between boxes, around what is in a box, and above that for the name."""

    gap: float = 16
    padding: float = 16
    header: float = 32


def layout_boxes(children: Mapping[int, Sequence[int]], leaf_size: Callable[[int], Size], x: float, y: float, *,
           spacing: Spacing = Spacing(), row_width: Callable[[Sequence[Size]], float]) -> list[Box]:
    """Boxes of all zones, each before those inside it, in the order of `below`.

    Parameters
    ----------
    below : zone -> the zones inside it; -1 -> the outermost. A forest.
    leaf_size : size of the box of a zone that has none inside.
    x, y : upper left corner of the first box.
    width_of : pixels after which boxes of these sizes go on in the next row.
    """
    order, stack = list[int](), list(reversed(children.get(-1, ())))
    while stack:
        zone = stack.pop()
        order.append(zone)
        stack += reversed(children.get(zone, ()))
    size: dict[int, Size] = {}

    def rows(zones: Sequence[int], x: float, y: float) -> list[Box]:
        boxes: list[Box] = []
        limit = row_width([size[zone] for zone in zones])
        left, top, bottom = x, y, y
        for zone in zones:
            width, height = size[zone]
            if left > x and left - x + width > limit:
                left, top = x, bottom + spacing.gap
            boxes.append(Box(zone, left, top, width, height))
            left, bottom = left + width + spacing.gap, max(bottom, top + height)
        return boxes

    for zone in reversed(order):
        if zone in children:
            boxes = rows(children[zone], 0, 0)
            size[zone] = (max(box.right for box in boxes) + 2 * spacing.padding,
                          max(box.bottom for box in boxes) + spacing.header + spacing.padding)
        else:
            size[zone] = leaf_size(zone)
    placed = {box.zone: box for box in (rows(children[-1], x, y) if -1 in children else ())}
    for zone in order:
        if zone in children:
            box = placed[zone]
            placed.update(
    (inner.zone,
    inner) for inner in rows(
        children[zone],
        box.x + spacing.padding,
         box.y + spacing.header))
    return [placed[zone] for zone in order]


def svg_text(x: float, y: float, content: str, *, fill: str = "#0f172a",
             size: int = 13, weight: str = "normal") -> str:
    return (f'<text x="{x:g}" y="{y:g}" fill="{fill}" font-size="{size}" font-weight="{weight}">'
            f'{escape(content)}</text>')


def svg_document(heading: str, width: float, height: float, elements: Sequence[str]) -> str:
    """The SVG document of these elements, on white, below a heading.

    The elements begin where one line of heading ends, and are moved down where it takes more.
    """
    lines = textwrap.wrap(heading, int((width - 36) / _HEADING_CHAR_WIDTH))
    down = _HEADING_LINE_HEIGHT * (len(lines) - 1)
    moved = [f'<g transform="translate(0 {down})">', *elements, "</g>"] if down > 0 else elements
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height + down:g}" '
        f'viewBox="0 0 {width:g} {height + down:g}" font-family="sans-serif" font-size="13">',
        f'<rect width="{width:g}" height="{height + down:g}" fill="white"/>',
        *(svg_text(24, 34 + _HEADING_LINE_HEIGHT * i, line, size=15, weight="bold") for i, line in enumerate(lines)),
        *moved, "</svg>", ""])
