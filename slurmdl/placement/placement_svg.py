"""A picture of a placement: zones as boxes, nodes as cells with their ranks and roles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from slurmdl.cluster.snapshot import ClusterSnapshot
from slurmdl.placement.eligibility import is_idle
from slurmdl.placement.result import Placement
from slurmdl.text import truncate
from slurmdl.topology.svg_layout import Box, Grid, Size, layout_boxes, svg_document, svg_text
from slurmdl.topology.topology import Topology

#: most nodes that are drawn with their names; above that each node is a dot
MAX_NAMED_NODES = 64

#: pixels after which zones go on in the next row
MAX_ROW_WIDTH = 1280

_COLORS = {"ps": "#c2410c", "worker": "#1d4ed8", "free": "#dbeafe", "busy": "#b6c2d1"}
_LEGEND = {"ps": "parameter server", "worker": "worker", "free": "idle, not chosen", "busy": "in use or not usable"}


def draw_placement(placement: Placement, topology: Topology, cluster: ClusterSnapshot) -> str:
    """The SVG document: each zone a box around the zones and nodes below it, the chosen nodes in colour.

    A node with tasks of both roles has both colours. Up to MAX_NAMED nodes carry their names and ranks; above
    that only the zones with chosen nodes are drawn, each with the ranks in it, and nodes are dots (a viewer shows
    name and ranks of the one below the pointer).
    """
    return _Drawing(placement, topology, cluster).render()


class _Drawing:
    """Layout from the leaves upwards, then the elements from the root downwards."""

    def __init__(self, placement: Placement, topology: Topology, cluster: ClusterSnapshot) -> None:
        self.placement, self.topology = placement, topology
        used = set(placement.nodes_per_zone)
        self.shows_names = len(topology.nodes) <= MAX_NAMED_NODES
        self.grid = Grid(4, 76, 52) if self.shows_names else Grid(24, 8, 8, 3)
        self.leaf_nodes: dict[int, list[str]] = {}
        for node, leaf in zip(topology.nodes, topology.leaf.tolist(), strict=True):
            if leaf >= 0 and (self.shows_names or topology.zones[leaf] in used):
                self.leaf_nodes.setdefault(leaf, []).append(node)
        self.child_zones: dict[int, list[int]] = {}
        drawn = {zone for leaf in self.leaf_nodes for zone in self._zones_to_root(leaf)}
        for zone in sorted(drawn):
            self.child_zones.setdefault(int(topology.parent[zone]), []).append(zone)
        self.idle_nodes = {node.name for node in cluster.nodes if is_idle(node)}
        self.ranks: dict[str, list[int]] = {}
        self.roles: dict[str, set[str]] = {}
        if placement.rank_map:
            for rank, (node, role) in enumerate(zip(placement.rank_map.nodes, placement.rank_map.roles, strict=True)):
                self.ranks.setdefault(node, []).append(rank)
                self.roles.setdefault(node, set()).add(role)

    def _zones_to_root(self, zone: int) -> Iterator[int]:
        while zone >= 0:
            yield zone
            zone = int(self.topology.parent[zone])

    def render(self) -> str:
        boxes = layout_boxes(self.child_zones, self._leaf_size, 24, 64, row_width=lambda sizes: MAX_ROW_WIDTH)
        width = max([box.right + 24 for box in boxes] + [760.0])
        bottom = max([box.bottom for box in boxes] + [64.0])
        chosen = f"{len(self.placement.nodes)} nodes" if self.placement.rank_map else "no choice"
        return svg_document(f"{chosen}: {self.placement.reason}", width, bottom + 56, [
            *(element for box in boxes for element in self._draw_zone(box)), *self._draw_legend(24, bottom + 34)])

    def _leaf_size(self, leaf: int) -> Size:
        width, height = self.grid.size(len(self.leaf_nodes.get(leaf, ())))
        return max(width, 9.0 * len(self.topology.zones[leaf])) + 24, height + 44

    def _draw_zone(self, box: Box) -> Iterator[str]:
        name, members = self.topology.zones[box.zone], self.leaf_nodes.get(box.zone, ())
        yield box.outline()
        yield svg_text(box.x + 12, box.y + 20, name, weight="bold")
        ranks = [] if self.shows_names else sorted(rank for node in members for rank in self.ranks.get(node, ()))
        if ranks:
            left = 24 + 9 * len(name)
            yield svg_text(box.x + left, box.y + 20, truncate(_rank_label(ranks), int((box.width - left) / 7), "…"), fill="#475569",
                       size=12)
        for i, node in enumerate(members):
            x, y = self.grid.cell_position(i)
            yield from self._draw_node(node, box.x + 12 + x, box.y + 32 + y)

    def _draw_node(self, node: str, x: float, y: float) -> Iterator[str]:
        ranks = self.ranks.get(node, [])
        kinds = sorted(self.roles.get(node, ())) or ["free" if node in self.idle_nodes else "busy"]
        title = escape(f"{node}: {_rank_label(ranks)} ({' and '.join(kinds)})" if ranks else node)
        width = self.grid.width / len(kinds)
        for i, kind in enumerate(kinds):
            # the corners between two colours stay square
            yield (f'<rect x="{x + i * width:g}" y="{y:g}" width="{width:g}" height="{self.grid.height:g}" '
                   f'rx="{0 if len(kinds) > 1 else 4 if self.shows_names else 1}" fill="{_COLORS[kind]}">'
                   f'<title>{title}</title></rect>')
        if self.shows_names:
            ink = "white" if ranks else "#334155"
            yield svg_text(x + 8, y + 20, truncate(node, 9, "…"), fill=ink, weight="bold")
            if ranks:
                yield svg_text(x + 8, y + 40, truncate(_rank_label(ranks), 11, "…"), fill=ink, size=12)

    def _draw_legend(self, x: float, y: float) -> Iterator[str]:
        for kind, meaning in _LEGEND.items():
            yield f'<rect x="{x:g}" y="{y - 11:g}" width="14" height="14" rx="2" fill="{_COLORS[kind]}"/>'
            yield svg_text(x + 20, y, meaning)
            x += 40 + 7.5 * len(meaning)


def _rank_label(ranks: Sequence[int]) -> str:
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {_format_spans(ranks)}"


def _format_spans(ranks: Sequence[int]) -> str:
    """1,2,3,7 -> 1-3,7."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
