"""SVG of a placement: zones as boxes, nodes as cells with their ranks and roles, or coordinates in a mesh."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slurmdl.cluster.snapshot import ClusterSnapshot
from slurmdl.mesh import Mesh, MeshTraffic
from slurmdl.placement.eligibility import is_idle
from slurmdl.placement.result import Placement
from slurmdl.slurm.hostlist import ranged_string
from slurmdl.text import pluralize, truncate
from slurmdl.topology.drawing import (
    MAX_NAMED_NODES,
    MAX_ROW_WIDTH,
    Box,
    Grid,
    Size,
    layout_boxes,
    svg_document,
    svg_escape,
    svg_text,
)
from slurmdl.topology.topology import Topology, nodes_by_leaf
from slurmdl.traffic import Traffic

MARGIN = 24  # pixels
MIN_WIDTH = 760.0  # pixels, for the legend

_COLORS = {"ps": "#c2410c", "worker": "#1d4ed8", "free": "#dbeafe", "busy": "#b6c2d1"}
_LEGEND = {"ps": "parameter server", "worker": "worker", "free": "idle, not chosen", "busy": "in use or not usable"}
#: colors of the coordinates along a dimension of a mesh, repeated if there are more
_COORDINATE_COLORS = ("#1d4ed8", "#c2410c", "#15803d", "#7e22ce", "#a16207", "#be185d", "#0f766e", "#475569")


def draw_placement(placement: Placement, topology: Topology, cluster: ClusterSnapshot,
                   traffic: Traffic | None = None) -> str:
    """SVG document with a box per zone and the chosen nodes in the colors of their roles.

    For a mesh the colors are the coordinates along the dimension that differs most between zones. Up to
    MAX_NAMED_NODES nodes show names and ranks. With more, only zones with chosen nodes are drawn, with their ranks;
    nodes are dots with name and ranks as tooltips.
    """
    mesh = traffic.mesh if isinstance(traffic, MeshTraffic) else None
    return _Drawing(placement, topology, cluster, mesh).render()


class _Drawing:
    """Drawing of a placement: layout from the leaves upwards, then the elements from the root downwards."""

    def __init__(self, placement: Placement, topology: Topology, cluster: ClusterSnapshot, mesh: Mesh | None) -> None:
        self.placement, self.topology = placement, topology
        self.shows_names = len(topology.nodes) <= MAX_NAMED_NODES
        self.grid = Grid(4, 76, 52) if self.shows_names else Grid(24, 8, 8, 3)
        self.leaf_nodes = {leaf: nodes for leaf, nodes in nodes_by_leaf(topology).items()
                           if leaf >= 0 and (self.shows_names or topology.zones[leaf] in placement.nodes_per_zone)}
        self.child_zones: dict[int, list[int]] = {}
        shown = {name for leaf in self.leaf_nodes for name in topology.zone_path(leaf)}
        for zone in sorted(topology.zone_index[name] for name in shown):
            self.child_zones.setdefault(int(topology.parent[zone]), []).append(zone)
        self.idle_nodes = {node.name for node in cluster.nodes if is_idle(node)}
        self.ranks: dict[str, list[int]] = {}
        self.roles: dict[str, set[str]] = {}
        self.colors, self.legend = dict(_COLORS), dict(_LEGEND)
        if placement.rank_map:
            kinds = placement.rank_map.roles
            if mesh:
                kinds = self._color_by_coordinate(mesh, placement.rank_map.nodes)
            for rank, (node, kind) in enumerate(zip(placement.rank_map.nodes, kinds, strict=True)):
                self.ranks.setdefault(node, []).append(rank)
                self.roles.setdefault(node, set()).add(kind)

    def _color_by_coordinate(self, mesh: Mesh, nodes: Sequence[str]) -> tuple[str, ...]:
        """Kind of each rank: its coordinate along the dimension that has the fewest coordinates in a zone."""
        coordinates = [mesh.coordinates(rank) for rank in range(mesh.ranks)]
        sizes = dict(zip(mesh.names, mesh.sizes, strict=True))

        def share_in_zones(name: str) -> float:
            pairs = {(self.topology.leaf_of(node), at[name]) for node, at in zip(nodes, coordinates, strict=True)}
            return len(pairs) / len({zone for zone, _ in pairs}) / sizes[name]

        dimension = min((name for name in mesh.names if sizes[name] > 1), key=share_in_zones, default=mesh.names[0])
        kinds = [f"{dimension} {i}" for i in range(sizes[dimension])]
        self.colors |= {kind: _COORDINATE_COLORS[i % len(_COORDINATE_COLORS)] for i, kind in enumerate(kinds)}
        shown = dict.fromkeys(kinds[:len(_COORDINATE_COLORS)])
        self.legend = {**{kind: kind for kind in shown}, "free": _LEGEND["free"], "busy": _LEGEND["busy"]}
        return tuple(kinds[at[dimension]] for at in coordinates)

    def render(self) -> str:
        boxes = layout_boxes(self.child_zones, self._leaf_size, MARGIN, 64, row_width=lambda sizes: MAX_ROW_WIDTH)
        width = max([box.right + MARGIN for box in boxes] + [MIN_WIDTH])
        bottom = max([box.bottom for box in boxes] + [64.0])
        heading = pluralize(len(self.placement.nodes), "node") if self.placement.rank_map else "no choice"
        return svg_document(f"{heading}: {self.placement.reason}", width, bottom + 56, [
            *(element for box in boxes for element in self._draw_zone(box)), *self._draw_legend(MARGIN, bottom + 34)])

    def _leaf_size(self, leaf: int) -> Size:
        width, height = self.grid.size(len(self.leaf_nodes.get(leaf, ())))
        return max(width, 9.0 * len(self.topology.zones[leaf])) + 24, height + 44

    def _draw_zone(self, box: Box) -> Iterator[str]:
        name, nodes = self.topology.zones[box.zone], self.leaf_nodes.get(box.zone, ())
        yield box.outline()
        yield svg_text(box.x + 12, box.y + 20, name, weight="bold")
        ranks = [] if self.shows_names else sorted(rank for node in nodes for rank in self.ranks.get(node, ()))
        if ranks:
            left = 24 + 9 * len(name)
            label = truncate(_rank_label(ranks), int((box.width - left) / 7), "…")
            yield svg_text(box.x + left, box.y + 20, label, fill="#475569", size=12)
        for i, node in enumerate(nodes):
            x, y = self.grid.cell_position(i)
            yield from self._draw_node(node, box.x + 12 + x, box.y + 32 + y)

    def _draw_node(self, node: str, x: float, y: float) -> Iterator[str]:
        ranks = self.ranks.get(node, [])
        kinds = sorted(self.roles.get(node, ())) or ["free" if node in self.idle_nodes else "busy"]
        title = svg_escape(f"{node}: {_rank_label(ranks)} ({' and '.join(kinds)})" if ranks else node)
        width = self.grid.width / len(kinds)
        # no rounded corners between two colors
        radius = 0 if len(kinds) > 1 else 4 if self.shows_names else 1
        for i, kind in enumerate(kinds):
            yield (f'<rect x="{x + i * width:g}" y="{y:g}" width="{width:g}" height="{self.grid.height:g}" '
                   f'rx="{radius}" fill="{self.colors[kind]}"><title>{title}</title></rect>')
        if self.shows_names:
            color = "white" if ranks else "#334155"
            yield svg_text(x + 8, y + 20, truncate(node, 9, "…"), fill=color, weight="bold")
            if ranks:
                label = _rank_label(ranks)
                short = label if len(label) <= 10 else label.partition(" ")[2]
                yield svg_text(x + 8, y + 40, truncate(short, 10, "…"), fill=color, size=12)

    def _draw_legend(self, x: float, y: float) -> Iterator[str]:
        for kind, meaning in self.legend.items():
            yield f'<rect x="{x:g}" y="{y - 11:g}" width="14" height="14" rx="2" fill="{self.colors[kind]}"/>'
            yield svg_text(x + 20, y, meaning)
            x += 40 + 7.5 * len(meaning)


def _rank_label(ranks: Sequence[int]) -> str:
    """`rank 5`, `ranks 1-3,7`; ranks ascend."""
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {ranged_string(map(str, ranks)).strip('[]')}"
