"""A picture of the zones: each a box around those below it, nodes as cells with names, or as dots."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from slurmdl.topology.drawing import Box, Grid, Size, Space, document, fitting, layout, text
from slurmdl.topology.model import Topology
from slurmdl.topology.tree import children, members, summary

#: most nodes that are drawn with their names; above that each is a dot
MAX_NAMED = 64
#: most nodes that are drawn one by one; above that a zone shows their number
MAX_DOTS = 20_000
#: pixels after which named boxes go on in the next row
MAX_WIDTH = 1280
#: width by height that rows of boxes are laid out for
_ASPECT = 1.6


def svg(topology: Topology) -> str:
    """The SVG document. Boxes and dots carry their names as tooltips.

    Up to MAX_NAMED nodes have their names in them; up to MAX_DOTS each node is a dot; above that each leaf zone
    shows its number of nodes.
    """
    return _Drawing(topology).document()


class _Drawing:
    """Sizes and marks for this number of nodes, then the elements."""

    def __init__(self, topology: Topology) -> None:
        self.topology, self.below, self.members = topology, children(topology), members(topology)
        count, largest = len(topology.nodes), max(map(len, self.members.values()), default=1)
        self.named, self.dots = count <= MAX_NAMED, count <= MAX_DOTS
        columns = math.ceil(math.sqrt(_ASPECT * largest))
        self.grid = Grid(4, 76, 32) if self.named else Grid(columns, 6, 6, 2)
        self.space, self.font = (Space(), 13) if self.named else (Space(6, 6, 18), 9)
        if -1 in self.members:  # nodes without a zone: one more box, which has no name
            self.below.setdefault(-1, []).append(len(topology.zones))
            self.members[len(topology.zones)] = self.members.pop(-1)

    def document(self) -> str:
        boxes = layout(self.below, self._size, 24, 56, space=self.space,
                       width_of=(lambda sizes: MAX_WIDTH) if self.named else _landscape)
        width = max([box.right + 24 for box in boxes] + [480.0])
        bottom = max([box.bottom for box in boxes] + [56.0])
        return document(summary(self.topology), width, bottom + 24,
                        [element for box in boxes for element in self._zone(box)])

    def _name(self, zone: int) -> str:
        return self.topology.zones[zone] if zone < len(self.topology.zones) else "no zone"

    def _size(self, leaf: int) -> Size:
        width, height = self.grid.size(len(self.members.get(leaf, ())) if self.dots else 1)
        name = min(len(self._name(leaf)), 24)
        return max(width, 0.65 * self.font * name) + 2 * self.space.side, height + self.space.head + self.space.side

    def _zone(self, box: Box) -> Iterator[str]:
        name, nodes = self._name(box.zone), self.members.get(box.zone, [])
        dashed = ' stroke-dasharray="4"' if box.zone >= len(self.topology.zones) else ""
        yield f"<g><title>{escape(name)}{f', {len(nodes)} nodes' if nodes else ''}</title>"
        yield box.outline(self.space.side / 2, dashed)
        room = int((box.width - self.space.side) / (0.6 * self.font))
        yield text(box.x + self.space.side, box.y + (20 if self.named else 13), fitting(name, room), size=self.font,
                   weight="bold")
        yield "</g>"
        if not self.dots:
            nodes = [f"{len(nodes)} nodes"] if nodes else []
        for i, node in enumerate(nodes):
            x, y = self.grid.at(i)
            yield from self._node(node, box.x + self.space.side + x, box.y + self.space.head + y)

    def _node(self, node: str, x: float, y: float) -> Iterator[str]:
        if not self.dots:
            yield text(x, y + 6, node, size=8)
            return
        yield (f'<rect x="{x:g}" y="{y:g}" width="{self.grid.width:g}" height="{self.grid.height:g}" '
               f'rx="{4 if self.named else 1}" fill="{"#dbeafe" if self.named else "#3b82f6"}">'
               f"<title>{escape(node)}</title></rect>")
        if self.named:
            yield text(x + 8, y + 21, fitting(node, 9), fill="#334155")


def _landscape(sizes: Sequence[Size]) -> float:
    """Pixels of a row such that rows of these boxes together are wider than high."""
    return max([width for width, _ in sizes] + [math.sqrt(_ASPECT * sum((w + 6) * (h + 6) for w, h in sizes))])
