"""The heat map: how much slower than usual the ways between leaf zones, and those inside them, are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape

import numpy as np
import numpy.typing as npt

from slurmdl.links import link_table
from slurmdl.links.link_scores import LinkScores, inter_leaf_name
from slurmdl.topology.svg_layout import svg_document, truncate
from slurmdl.topology.svg_layout import svg_text as words
from slurmdl.topology.topology import Topology

#: most zones in the terminal and in the picture; of more the worst are shown
MAX_TEXT_ZONES, MAX_SVG_ZONES = 24, 96
#: characters of a zone's name
MAX_NAME_CHARS = 24
_NOT_MEASURED = "·"
_CELL_SIZE = 28
_WHITE = "#ffffff"
#: times as long as usual -> colour of cells up to there
_COLOUR_SCALE = ((1.25, "#e0f2fe"), (2.0, "#fde68a"), (4.0, "#fb923c"), (8.0, "#ef4444"), (np.inf, "#7f1d1d"))


@dataclass(frozen=True, eq=False)
class Heatmap:
    """Leaf zones against leaf zones.

    Attributes
    ----------
    zones : names.
    times : shape (zones, zones), how many times as long as usual a message takes between two zones (table.times); on
        the diagonal over the worst link of a node. NaN where nothing was measured.
    """

    zones: tuple[str, ...]
    slowdowns: npt.NDArray[np.float64]

    def worst_zones(self, count: int) -> Heatmap:
        """So many of the zones with the slowest ways, in their order."""
        if len(self.zones) <= count:
            return self
        kept = np.sort(np.argsort(-np.nan_to_num(self.slowdowns).max(axis=1), kind="stable")[:count])
        return Heatmap(tuple(self.zones[i] for i in kept.tolist()), self.slowdowns[np.ix_(kept, kept)])


def build_heatmap(scores: LinkScores, topology: Topology) -> Heatmap:
    """The heat map of all leaf zones; without a topology of those that have trunks.

    The way between two zones is as slow as was measured, else as the slower of their uplinks.
    """
    leaves = [topology.zones[leaf] for leaf in np.unique(topology.leaf[topology.leaf >= 0]).tolist()] \
        or sorted({zone for name in scores.inter_leaf for zone in name.split("|")})
    place = {zone: i for i, zone in enumerate(leaves)}
    uplink = np.full(len(leaves), np.nan)
    known = [zone for zone in leaves if zone in scores.zones]
    uplink[[place[zone] for zone in known]] = link_table.slowdowns("zone", known, scores, topology)
    times = np.fmax(uplink[:, None], uplink)
    names = [name for name in scores.inter_leaf if all(zone in place for zone in name.split("|"))]
    for name, value in zip(names, link_table.slowdowns("trunk", names, scores, topology).tolist(), strict=True):
        one, other = (place[zone] for zone in name.split("|"))
        times[one, other] = times[other, one] = value
    np.fill_diagonal(times, np.nan)
    nodes = [name for name in scores.nodes if topology.leaf_of(name) in place]
    for name, value in zip(nodes, link_table.slowdowns("node", nodes, scores, topology).tolist(), strict=True):
        i = place[topology.leaf_of(name)]
        times[i, i] = np.fmax(times[i, i], value)
    return Heatmap(tuple(leaves), times)


def heatmap_text(heatmap: Heatmap) -> str:
    """The map in characters: how many times as long as usual, 9 for all that is more."""
    shown = heatmap.worst_zones(MAX_TEXT_ZONES)
    width = min(max(map(len, shown.zones), default=0), MAX_NAME_CHARS)
    lines = [f"times as long as usual, zone by zone ({_NOT_MEASURED}: not measured, 9: nine times or more)"]
    if len(shown.zones) < len(heatmap.zones):
        lines[0] += f"; the worst {len(shown.zones)} of {len(heatmap.zones)} zones"
    for i, zone in enumerate(shown.zones):
        digits = (_NOT_MEASURED if np.isnan(value) else str(int(min(max(round(value), 1), 9)))
                  for value in shown.slowdowns[i])
        lines.append(f"{truncate(zone, width):{width}}  {' '.join(digits)}")
    return "\n".join(lines)


def heatmap_svg(heatmap: Heatmap) -> str:
    """The map as a picture, each pair of zones a cell with its figure, and their names as a tooltip."""
    shown = heatmap.worst_zones(MAX_SVG_ZONES)
    room = 24 + 7.5 * min(max(map(len, shown.zones), default=0), MAX_NAME_CHARS)
    size = _CELL_SIZE * len(shown.zones)
    title = f"the worst {len(shown.zones)} of {len(heatmap.zones)}" if len(shown.zones) < len(heatmap.zones) else \
        str(len(heatmap.zones))
    return svg_document(f"Messages between and inside {title} leaf zones: times as long as usual",
                    max(24 + room + size + room, 860), 80 + room + size + 24,
                    [*_legend_svg(24, 62), *_cells_svg(shown, 24 + room, 80 + room)])


def _legend_svg(x: float, y: float) -> Iterator[str]:
    labels = [f"up to {most:g}" if np.isfinite(
        most) else f"above {_COLOUR_SCALE[-2][0]:g}" for most, _ in _COLOUR_SCALE]
    for (_, colour), label in zip((*_COLOUR_SCALE, (np.nan, _WHITE)), (*labels, "not measured"), strict=True):
        yield f'<rect x="{x:g}" y="{y - 12:g}" width="14" height="14" fill="{colour}" stroke="#cbd5e1"/>'
        yield words(x + 20, y, label, size=12)
        x += 44 + 7 * len(label)


def _cells_svg(heatmap: Heatmap, left: float, top: float) -> Iterator[str]:
    for i, zone in enumerate(heatmap.zones):
        x, y, name = left + _CELL_SIZE * i, top + _CELL_SIZE * i, truncate(zone, MAX_NAME_CHARS)
        yield words(24, y + 18, name, size=12)
        yield f'<g transform="translate({x + 18:g} {top - 6:g}) rotate(-60)">{words(0, 0, name, size=12)}</g>'
        for j, other in enumerate(heatmap.zones):
            value, x = float(heatmap.slowdowns[i, j]), left + _CELL_SIZE * j
            colour = next((colour for most, colour in _COLOUR_SCALE if value <= most), _WHITE)
            between = f"inside {zone}, the worst node" if i == j else inter_leaf_name(
                zone, other).replace("|", " and ")
            said = "not measured" if np.isnan(value) else f"x{value:.3g}"
            yield (f'<g><title>{escape(f"{between}: {said}")}</title><rect x="{x:g}" y="{y:g}" width="{_CELL_SIZE - 1}" '
                   f'height="{_CELL_SIZE - 1}" fill="{colour}" stroke="#cbd5e1"/>')
            if not np.isnan(value):
                ink = "white" if value > _COLOUR_SCALE[2][0] else "#0f172a"
                figure = f"{value:.1f}" if value < 9.95 else f"{value:.0f}" if value < 999.5 else ">k"
                yield words(x + 4, y + 18, figure, fill=ink, size=11)
            yield "</g>"
