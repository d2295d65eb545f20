"""Topology as SVG: nested boxes of zones, with nodes as named cells or dots."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from slurmdl.text import truncate
from slurmdl.topology.svg_layout import Box, Grid, Size, Spacing, layout_boxes, svg_document, svg_text
from slurmdl.topology.text_tree import children_by_zone, nodes_by_leaf, summarize_topology
from slurmdl.topology.topology import Topology

MAX_NAMED_NODES = 64  # with more nodes, each is a dot
MAX_DOTS = 20_000  # with more nodes, each leaf zone shows its node count
MAX_ROW_WIDTH = 1280  # pixels
_ASPECT_RATIO = 1.6


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
        yield f"<g><title>{escape(name)}{f', {len(nodes)} nodes' if nodes else ''}</title>"
        yield box.outline(self.spacing.padding / 2, dashed)
        max_chars = int((box.width - self.spacing.padding) / (0.6 * self.font_size))
        yield svg_text(box.x + self.spacing.padding, box.y + (20 if self.shows_names else 13),
                       truncate(name, max_chars, "…"), size=self.font_size, weight="bold")
        yield "</g>"
        if not self.shows_dots:
            nodes = [f"{len(nodes)} nodes"] if nodes else []
        for i, node in enumerate(nodes):
            x, y = self.grid.cell_position(i)
            yield from self._draw_node(node, box.x + self.spacing.padding + x, box.y + self.spacing.header + y)

    def _draw_node(self, node: str, x: float, y: float) -> Iterator[str]:
        if not self.shows_dots:
            yield svg_text(x, y + 6, node, size=8)
            return
        yield (f'<rect x="{x:g}" y="{y:g}" width="{self.grid.width:g}" height="{self.grid.height:g}" '
               f'rx="{4 if self.shows_names else 1}" fill="{"#dbeafe" if self.shows_names else "#3b82f6"}">'
               f"<title>{escape(node)}</title></rect>")
        if self.shows_names:
            yield svg_text(x + 8, y + 21, truncate(node, 9, "…"), fill="#334155")


def _landscape_width(sizes: Sequence[Size]) -> float:
    """Return a row width such that the rows of these boxes are wider than high."""
    return max([width for width, _ in sizes] + [math.sqrt(_ASPECT_RATIO * sum((w + 6) * (h + 6) for w, h in sizes))])
