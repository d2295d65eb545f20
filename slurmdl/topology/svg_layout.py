"""Layout of zones in SVG 1.1: nested boxes, cells in rows, text."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

Size = tuple[float, float]
_HEADING_CHAR_WIDTH, _HEADING_LINE_HEIGHT = 9.5, 20  # pixels, DejaVu Sans Bold


@dataclass(frozen=True)
class Box:
    """Position and size of a zone, in pixels."""

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
    """Cells of a leaf zone: cells per row, cell size and gap in pixels."""

    columns: int
    width: float
    height: float
    gap: float = 8

    def size(self, cells: int) -> Size:
        columns, rows = min(cells, self.columns) or 1, -(-cells // self.columns) or 1
        return columns * (self.width + self.gap) - self.gap, rows * (self.height + self.gap) - self.gap

    def cell_position(self, cell: int) -> Size:
        """Return the offset of a cell from the first one."""
        row, column = divmod(cell, self.columns)
        return column * (self.width + self.gap), row * (self.height + self.gap)


@dataclass(frozen=True)
class Spacing:
    """Pixels between boxes, inside a box, and above its content for the name."""

    gap: float = 16
    padding: float = 16
    header: float = 32


def layout_boxes(children: Mapping[int, Sequence[int]], leaf_size: Callable[[int], Size], x: float, y: float, *,
                 spacing: Spacing = Spacing(), row_width: Callable[[Sequence[Size]], float]) -> list[Box]:
    """Return the boxes of all zones, each before the boxes inside it, in the order of `children`.

    Parameters
    ----------
    children : zone -> child zones; -1 -> the roots. A forest.
    leaf_size : size of the box of a zone without child zones.
    x, y : upper left corner of the first box.
    row_width : pixels after which boxes of these sizes continue in the next row.
    """
    order, stack = list[int](), list(reversed(children.get(-1, ())))
    while stack:
        zone = stack.pop()
        order.append(zone)
        stack += reversed(children.get(zone, ()))
    size: dict[int, Size] = {}

    def place_rows(zones: Sequence[int], x: float, y: float) -> list[Box]:
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
            boxes = place_rows(children[zone], 0, 0)
            size[zone] = (max(box.right for box in boxes) + 2 * spacing.padding,
                          max(box.bottom for box in boxes) + spacing.header + spacing.padding)
        else:
            size[zone] = leaf_size(zone)
    placed = {box.zone: box for box in (place_rows(children[-1], x, y) if -1 in children else ())}
    for zone in order:
        if zone in children:
            box = placed[zone]
            placed.update((inner.zone, inner)
                          for inner in place_rows(children[zone], box.x + spacing.padding, box.y + spacing.header))
    return [placed[zone] for zone in order]


def svg_text(x: float, y: float, content: str, *, fill: str = "#0f172a", size: int = 13,
             weight: str = "normal") -> str:
    return (f'<text x="{x:g}" y="{y:g}" fill="{fill}" font-size="{size}" font-weight="{weight}">'
            f'{escape(content)}</text>')


def svg_document(heading: str, width: float, height: float, elements: Sequence[str]) -> str:
    """Return the SVG document: a heading above the elements, on white.

    A heading of several lines moves the elements down.
    """
    lines = textwrap.wrap(heading, int((width - 36) / _HEADING_CHAR_WIDTH))
    offset = _HEADING_LINE_HEIGHT * (len(lines) - 1)
    moved = [f'<g transform="translate(0 {offset})">', *elements, "</g>"] if offset > 0 else elements
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height + offset:g}" '
        f'viewBox="0 0 {width:g} {height + offset:g}" font-family="sans-serif" font-size="13">',
        f'<rect width="{width:g}" height="{height + offset:g}" fill="white"/>',
        *(svg_text(24, 34 + _HEADING_LINE_HEIGHT * i, line, size=15, weight="bold") for i, line in enumerate(lines)),
        *moved, "</svg>", ""])
