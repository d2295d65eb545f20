"""Heat map of the slowdowns of paths between and inside leaf zones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape

import numpy as np

from slurmdl.links import link_table
from slurmdl.links.link_scores import FloatArray, LinkScores, inter_leaf_name
from slurmdl.text import truncate
from slurmdl.topology.svg_layout import svg_document, svg_text
from slurmdl.topology.topology import Topology

#: zones shown in the terminal and in SVG; of more zones only the worst are shown
MAX_TEXT_ZONES, MAX_SVG_ZONES = 24, 96
MAX_NAME_CHARS = 24
_NOT_MEASURED = "·"
_CELL_SIZE = 28
_WHITE = "#ffffff"
#: upper bound of the slowdown -> color of the cell
_COLOR_SCALE = ((1.25, "#e0f2fe"), (2.0, "#fde68a"), (4.0, "#fb923c"), (8.0, "#ef4444"), (np.inf, "#7f1d1d"))


@dataclass(frozen=True, eq=False)
class Heatmap:
    """Matrix of leaf zones.

    Attributes
    ----------
    zones : names.
    slowdowns : shape (zones, zones), link_table.slowdowns of the path between two zones; on the diagonal of the
        zone's worst node. NaN if not measured.
    """

    zones: tuple[str, ...]
    slowdowns: FloatArray

    def worst_zones(self, count: int) -> Heatmap:
        """The `count` zones with the slowest paths, in their order."""
        if len(self.zones) <= count:
            return self
        kept = np.sort(np.argsort(-np.nan_to_num(self.slowdowns).max(axis=1), kind="stable")[:count])
        return Heatmap(tuple(self.zones[i] for i in kept.tolist()), self.slowdowns[np.ix_(kept, kept)])


def build_heatmap(scores: LinkScores, topology: Topology) -> Heatmap:
    """Heat map of all leaf zones; without a topology, of those with inter-leaf scores.

    A path without a score has the slowdown of the slower of its two uplinks.
    """
    leaves = [topology.zones[leaf] for leaf in np.unique(topology.leaf[topology.leaf >= 0]).tolist()] \
        or sorted({zone for name in scores.inter_leaf for zone in name.split("|")})
    position = {zone: i for i, zone in enumerate(leaves)}
    uplinks = np.full(len(leaves), np.nan)
    measured = [zone for zone in leaves if zone in scores.zones]
    uplinks[[position[zone] for zone in measured]] = link_table.slowdowns("zone", measured, scores, topology)
    matrix = np.fmax(uplinks[:, None], uplinks)
    paths = [name for name in scores.inter_leaf if all(zone in position for zone in name.split("|"))]
    for name, value in zip(paths, link_table.slowdowns("inter_leaf", paths, scores, topology).tolist(), strict=True):
        i, j = (position[zone] for zone in name.split("|"))
        matrix[i, j] = matrix[j, i] = value
    np.fill_diagonal(matrix, np.nan)
    nodes = [name for name in scores.nodes if topology.leaf_of(name) in position]
    for name, value in zip(nodes, link_table.slowdowns("node", nodes, scores, topology).tolist(), strict=True):
        i = position[topology.leaf_of(name)]
        matrix[i, i] = np.fmax(matrix[i, i], value)
    return Heatmap(tuple(leaves), matrix)


def heatmap_text(heatmap: Heatmap) -> str:
    """The heat map as text with one digit per cell."""
    shown = heatmap.worst_zones(MAX_TEXT_ZONES)
    width = min(max(map(len, shown.zones), default=0), MAX_NAME_CHARS)
    lines = [f"slowdown between leaf zones ({_NOT_MEASURED}: not measured, 9: nine or more)"]
    if len(shown.zones) < len(heatmap.zones):
        lines[0] += f"; the worst {len(shown.zones)} of {len(heatmap.zones)} zones"
    for i, zone in enumerate(shown.zones):
        digits = (_NOT_MEASURED if np.isnan(value) else str(int(min(max(round(value), 1), 9)))
                  for value in shown.slowdowns[i])
        lines.append(f"{truncate(zone, width, '…'):{width}}  {' '.join(digits)}")
    return "\n".join(lines)


def heatmap_svg(heatmap: Heatmap) -> str:
    """The heat map as SVG; tooltips give the zones and the slowdown of each cell."""
    shown = heatmap.worst_zones(MAX_SVG_ZONES)
    label_width = 24 + 7.5 * min(max(map(len, shown.zones), default=0), MAX_NAME_CHARS)
    size = _CELL_SIZE * len(shown.zones)
    count = f"the worst {len(shown.zones)} of {len(heatmap.zones)}" if len(shown.zones) < len(heatmap.zones) \
        else str(len(heatmap.zones))
    return svg_document(f"Slowdown of messages between and inside {count} leaf zones",
                        max(24 + label_width + size + label_width, 860), 80 + label_width + size + 24,
                        [*_legend_svg(24, 62), *_cells_svg(shown, 24 + label_width, 80 + label_width)])


def _legend_svg(x: float, y: float) -> Iterator[str]:
    labels = [f"up to {bound:g}" if np.isfinite(bound) else f"above {_COLOR_SCALE[-2][0]:g}"
              for bound, _ in _COLOR_SCALE]
    for (_, color), label in zip((*_COLOR_SCALE, (np.nan, _WHITE)), (*labels, "not measured"), strict=True):
        yield f'<rect x="{x:g}" y="{y - 12:g}" width="14" height="14" fill="{color}" stroke="#cbd5e1"/>'
        yield svg_text(x + 20, y, label, size=12)
        x += 44 + 7 * len(label)


def _cells_svg(heatmap: Heatmap, left: float, top: float) -> Iterator[str]:
    for i, zone in enumerate(heatmap.zones):
        x, y, name = left + _CELL_SIZE * i, top + _CELL_SIZE * i, truncate(zone, MAX_NAME_CHARS, "…")
        yield svg_text(24, y + 18, name, size=12)
        yield f'<g transform="translate({x + 18:g} {top - 6:g}) rotate(-60)">{svg_text(0, 0, name, size=12)}</g>'
        for j, column in enumerate(heatmap.zones):
            value, x = float(heatmap.slowdowns[i, j]), left + _CELL_SIZE * j
            color = next((color for bound, color in _COLOR_SCALE if value <= bound), _WHITE)
            path = f"inside {zone}, worst node" if i == j else inter_leaf_name(zone, column).replace("|", " and ")
            text = "not measured" if np.isnan(value) else f"x{value:.3g}"
            yield (f'<g><title>{escape(f"{path}: {text}")}</title><rect x="{x:g}" y="{y:g}" width="{_CELL_SIZE - 1}" '
                   f'height="{_CELL_SIZE - 1}" fill="{color}" stroke="#cbd5e1"/>')
            if not np.isnan(value):
                ink = "white" if value > _COLOR_SCALE[2][0] else "#0f172a"
                number = f"{value:.1f}" if value < 9.95 else f"{value:.0f}" if value < 999.5 else ">k"
                yield svg_text(x + 4, y + 18, number, fill=ink, size=11)
            yield "</g>"
