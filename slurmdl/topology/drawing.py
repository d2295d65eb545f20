"""Pictures of zones: a text tree that fits a terminal, in which similar siblings share a line, and SVG 1.1.

SVG shows zones as nested boxes, nodes as named cells or dots; other pictures are drawn with the same boxes and texts.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

import numpy as np

from slurmdl import units
from slurmdl.slurm.hostlist import fold_hostlist
from slurmdl.text import escape_nonprintable, pluralize, truncate
from slurmdl.topology.topology import Topology, children_by_zone, nodes_by_leaf, walk_forest

_MAX_FOLD_LEVELS = 16  # levels that are folded one by one until the tree fits; higher levels are folded at once
_MAX_NAME_WIDTH = 36
Size = tuple[float, float]
_HEADING_CHAR_WIDTH, _HEADING_LINE_HEIGHT = 9.5, 20  # pixels, DejaVu Sans Bold
MAX_NAMED_NODES = 64  # with more nodes, each is a dot
MAX_DOTS = 20_000  # with more nodes, each leaf zone shows its node count
MAX_ROW_WIDTH = 1280  # pixels
_ASPECT_RATIO = 1.6


def summarize_topology(topology: Topology) -> str:
    """Return kind, size and source in one line."""
    prefix = f"{topology.name}: " if topology.name != "default" else ""
    return (f"{prefix}{topology.kind}, {pluralize(len(topology.zones), 'zone')}, "
            f"{pluralize(len(topology.nodes), 'node')} ({topology.source})")


def format_tree(topology: Topology, *, width: int = 80, height: int | None = 24) -> str:
    """Return the zones, indented by depth, with their nodes.

    Args:
        width: characters per line; longer lines are truncated.
        height: maximum number of lines; None for one line per zone. If the tree is larger, siblings of equal shape
            share a line, from the leaves up; if it still does not fit, siblings of equal level do.
    """
    lines = [summarize_topology(topology)]
    nodes = nodes_by_leaf(topology)
    rows = _fold_to_height(topology, None if height is None else height - 2)
    children = children_by_zone(topology)
    names = ["  " * depth + truncate(fold_hostlist(topology.zones[zone] for zone in zones), _MAX_NAME_WIDTH)
             for zones, depth in rows]
    column = max(map(len, names), default=0)
    for name, (zones, _) in zip(names, rows, strict=True):
        hosts = fold_hostlist(node for zone in zones for node in nodes.get(zone, ()))
        size = _describe_zones(topology, zones, [len(children.get(zone, ())) for zone in zones])
        lines.append(truncate(f"{name:{column}}  {size}  {hosts}".rstrip(), width))
    if -1 in nodes:
        hosts = fold_hostlist(nodes[-1])
        lines.append(truncate(f"without a zone: {pluralize(len(nodes[-1]), 'node')}  {hosts}", width))
    return "\n".join(lines + [f"note: {note}" for note in topology.notes])


def _fold_to_height(topology: Topology, max_rows: int | None) -> list[tuple[tuple[int, ...], int]]:
    """Return (zones that share a line, depth) of the first folding with at most `max_rows` lines."""
    children, shapes, top = children_by_zone(topology), _shape_ids(topology), int(topology.level.max(initial=0)) + 1
    rows = _fold_siblings(children, range(len(topology.zones)))
    if max_rows is None or len(rows) <= max_rows:
        return rows
    for fold_below in [*range(1, min(top, _MAX_FOLD_LEVELS)), top]:
        for group_keys in (shapes, topology.level.tolist()):
            keys = [(1, group_keys[zone]) if level < fold_below else (0, zone)
                    for zone, level in enumerate(topology.level.tolist())]
            rows = _fold_siblings(children, keys)
            if len(rows) <= max_rows:
                return rows
    return rows


def _fold_siblings(children: dict[int, list[int]], keys: Sequence[object]) -> list[tuple[tuple[int, ...], int]]:
    """Merge siblings of equal key into one row, and likewise their children."""
    rows: list[tuple[tuple[int, ...], int]] = []
    stack: list[tuple[tuple[int, ...], int]] = [((-1,), -1)]
    while stack:
        zones, depth = stack.pop()
        if depth >= 0:
            rows.append((zones, depth))
        groups: dict[object, list[int]] = {}
        for zone in zones:
            for child in children.get(zone, ()):
                groups.setdefault(keys[child], []).append(child)
        stack += [(tuple(group), depth + 1) for group in reversed(groups.values())]
    return rows


def _shape_ids(topology: Topology) -> list[int]:
    """Return a number per zone; equal if node counts and shapes of the child zones are equal."""
    node_counts = np.bincount(topology.leaf[topology.leaf >= 0], minlength=len(topology.zones)).tolist()
    children, ids, shape = children_by_zone(topology), dict[object, int](), [0] * len(topology.zones)
    for zone in np.argsort(topology.level, kind="stable").tolist():
        key = node_counts[zone], *sorted(shape[child] for child in children.get(zone, ()))
        shape[zone] = ids.setdefault(key, len(ids))
    return shape


def _describe_zones(topology: Topology, zones: Sequence[int], child_counts: Sequence[int]) -> str:
    node_counts, speeds = topology.node_count[list(zones)].tolist(), topology.uplink_bandwidth[list(zones)]
    speed = f", {units.format_bit_rate(speeds[0])}" if speeds.min() == speeds.max() else ""  # False if NaN
    if len(zones) == 1:
        return pluralize(node_counts[0], "node") + speed
    parts = [_format_range(child_counts, "zone")] * bool(max(child_counts)) + [_format_range(node_counts, "node")]
    return f"{pluralize(len(zones), 'zone')}, {' and '.join(parts)} each{speed}"


def _format_range(counts: Sequence[int], noun: str) -> str:
    low, high = min(counts), max(counts)
    return pluralize(high, noun) if low == high else f"{low} to {pluralize(high, noun)}"


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

    Args:
        children: zone -> child zones; -1 -> the roots. A forest.
        leaf_size: size of the box of a zone without child zones.
        x, y: upper left corner of the first box.
        row_width: pixels after which boxes of these sizes continue in the next row.
    """
    order = [zone for zone, _ in walk_forest(children)]
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


def svg_escape(text: str) -> str:
    """Text as content of an element; XML 1.0 has no control characters."""
    return escape(escape_nonprintable(text))


def svg_text(x: float, y: float, content: str, *, fill: str = "#0f172a", size: int = 13,
             weight: str = "normal") -> str:
    return (f'<text x="{x:g}" y="{y:g}" fill="{fill}" font-size="{size}" font-weight="{weight}">'
            f'{svg_escape(content)}</text>')


def svg_document(heading: str, width: float, height: float, elements: Sequence[str]) -> str:
    """Return the SVG document: a heading and, moved down by its further lines, the elements, on white."""
    lines = textwrap.wrap(heading, int((width - 36) / _HEADING_CHAR_WIDTH))
    offset = _HEADING_LINE_HEIGHT * (len(lines) - 1)
    moved = [f'<g transform="translate(0 {offset})">', *elements, "</g>"] if offset > 0 else elements
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height + offset:g}" '
        f'viewBox="0 0 {width:g} {height + offset:g}" font-family="sans-serif" font-size="13">',
        f'<rect width="{width:g}" height="{height + offset:g}" fill="white"/>',
        *(svg_text(24, 34 + _HEADING_LINE_HEIGHT * i, line, size=15, weight="bold") for i, line in enumerate(lines)),
        *moved, "</svg>", ""])


def draw_topology(topology: Topology) -> str:
    """Return the SVG document; boxes and dots carry their names as tooltips."""
    return _Drawing(topology).render()


class _Drawing:
    """Dimensions for the node count, and the elements."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.child_zones, self.leaf_nodes = children_by_zone(topology), nodes_by_leaf(topology)
        count, largest = len(topology.nodes), max(map(len, self.leaf_nodes.values()), default=1)
        self.shows_names, self.shows_dots = count <= MAX_NAMED_NODES, count <= MAX_DOTS
        columns = math.ceil(math.sqrt(_ASPECT_RATIO * largest))
        self.grid = Grid(4, 76, 32) if self.shows_names else Grid(columns, 6, 6, 2)
        self.spacing, self.font_size = (Spacing(), 13) if self.shows_names else (Spacing(6, 6, 18), 9)
        if -1 in self.leaf_nodes:  # nodes without a zone get an extra box
            self.child_zones.setdefault(-1, []).append(len(topology.zones))
            self.leaf_nodes[len(topology.zones)] = self.leaf_nodes.pop(-1)

    def render(self) -> str:
        boxes = layout_boxes(self.child_zones, self._leaf_size, 24, 56, spacing=self.spacing,
                             row_width=(lambda sizes: MAX_ROW_WIDTH) if self.shows_names else _landscape_width)
        width = max([box.right + 24 for box in boxes] + [480.0])
        bottom = max([box.bottom for box in boxes] + [56.0])
        return svg_document(summarize_topology(self.topology), width, bottom + 24,
                            [element for box in boxes for element in self._draw_zone(box)])

    def _zone_name(self, zone: int) -> str:
        return self.topology.zones[zone] if zone < len(self.topology.zones) else "no zone"

    def _leaf_size(self, leaf: int) -> Size:
        width, height = self.grid.size(len(self.leaf_nodes.get(leaf, ())) if self.shows_dots else 1)
        name_length = min(len(self._zone_name(leaf)), 24)
        return (max(width, 0.65 * self.font_size * name_length) + 2 * self.spacing.padding,
                height + self.spacing.header + self.spacing.padding)

    def _draw_zone(self, box: Box) -> Iterator[str]:
        name, nodes = self._zone_name(box.zone), self.leaf_nodes.get(box.zone, [])
        dashed = ' stroke-dasharray="4"' if box.zone >= len(self.topology.zones) else ""
        size = f", {pluralize(len(nodes), 'node')}" if nodes else ""
        yield f"<g><title>{svg_escape(name)}{size}</title>"
        yield box.outline(self.spacing.padding / 2, dashed)
        max_chars = int((box.width - self.spacing.padding) / (0.6 * self.font_size))
        yield svg_text(box.x + self.spacing.padding, box.y + (20 if self.shows_names else 13),
                       truncate(name, max_chars, "…"), size=self.font_size, weight="bold")
        yield "</g>"
        if not self.shows_dots:
            nodes = [pluralize(len(nodes), "node")] if nodes else []
        for i, node in enumerate(nodes):
            x, y = self.grid.cell_position(i)
            yield from self._draw_node(node, box.x + self.spacing.padding + x, box.y + self.spacing.header + y)

    def _draw_node(self, node: str, x: float, y: float) -> Iterator[str]:
        if not self.shows_dots:
            yield svg_text(x, y + 6, node, size=8)
            return
        yield (f'<rect x="{x:g}" y="{y:g}" width="{self.grid.width:g}" height="{self.grid.height:g}" '
               f'rx="{4 if self.shows_names else 1}" fill="{"#dbeafe" if self.shows_names else "#3b82f6"}">'
               f"<title>{svg_escape(node)}</title></rect>")
        if self.shows_names:
            yield svg_text(x + 8, y + 21, truncate(node, 9, "…"), fill="#334155")


def _landscape_width(sizes: Sequence[Size]) -> float:
    """Return a row width such that the rows of these boxes are wider than high."""
    return max([width for width, _ in sizes] + [math.sqrt(_ASPECT_RATIO * sum((w + 6) * (h + 6) for w, h in sizes))])
