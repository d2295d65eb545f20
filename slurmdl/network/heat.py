"""The heat map: how much slower than usual the ways between leaf zones, and those inside them, are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape

import numpy as np
import numpy.typing as npt

from slurmdl.network import table
from slurmdl.network.model import LinkScores, trunk
from slurmdl.topology.drawing import document, fitting
from slurmdl.topology.drawing import text as words
from slurmdl.topology.model import Topology

#: most zones in the terminal and in the picture; of more the worst are shown
MAX_TEXT, MAX_CELLS = 24, 96
#: characters of a zone's name
MAX_NAME = 24
_NOT = "·"
_CELL = 28
_WHITE = "#ffffff"
#: times as long as usual -> colour of cells up to there
_COLOURS = ((1.25, "#e0f2fe"), (2.0, "#fde68a"), (4.0, "#fb923c"), (8.0, "#ef4444"), (np.inf, "#7f1d1d"))


@dataclass(frozen=True, eq=False)
class Heat:
    """Leaf zones against leaf zones.

    Attributes
    ----------
    zones : names.
    times : shape (zones, zones), how many times as long as usual a message takes between two zones (table.times); on
        the diagonal over the worst link of a node. NaN where nothing was measured.
    """

    zones: tuple[str, ...]
    times: npt.NDArray[np.float64]

    def worst(self, count: int) -> Heat:
        """So many of the zones with the slowest ways, in their order."""
        if len(self.zones) <= count:
            return self
        kept = np.sort(np.argsort(-np.nan_to_num(self.times).max(axis=1), kind="stable")[:count])
        return Heat(tuple(self.zones[i] for i in kept.tolist()), self.times[np.ix_(kept, kept)])


def of(scores: LinkScores, topology: Topology) -> Heat:
    """The heat map of all leaf zones; without a topology of those that have trunks.

    The way between two zones is as slow as was measured, else as the slower of their uplinks.
    """
    leaves = [topology.zones[leaf] for leaf in np.unique(topology.leaf[topology.leaf >= 0]).tolist()] \
        or sorted({zone for name in scores.trunks for zone in name.split("|")})
    place = {zone: i for i, zone in enumerate(leaves)}
    uplink = np.full(len(leaves), np.nan)
    known = [zone for zone in leaves if zone in scores.zones]
    uplink[[place[zone] for zone in known]] = table.times("zone", known, scores, topology)
    times = np.fmax(uplink[:, None], uplink)
    names = [name for name in scores.trunks if all(zone in place for zone in name.split("|"))]
    for name, value in zip(names, table.times("trunk", names, scores, topology).tolist(), strict=True):
        one, other = (place[zone] for zone in name.split("|"))
        times[one, other] = times[other, one] = value
    np.fill_diagonal(times, np.nan)
    nodes = [name for name in scores.nodes if topology.leaf_of(name) in place]
    for name, value in zip(nodes, table.times("node", nodes, scores, topology).tolist(), strict=True):
        i = place[topology.leaf_of(name)]
        times[i, i] = np.fmax(times[i, i], value)
    return Heat(tuple(leaves), times)


def text(heat: Heat) -> str:
    """The map in characters: how many times as long as usual, 9 for all that is more."""
    shown = heat.worst(MAX_TEXT)
    width = min(max(map(len, shown.zones), default=0), MAX_NAME)
    lines = [f"times as long as usual, zone by zone ({_NOT}: not measured, 9: nine times or more)"]
    if len(shown.zones) < len(heat.zones):
        lines[0] += f"; the worst {len(shown.zones)} of {len(heat.zones)} zones"
    for i, zone in enumerate(shown.zones):
        digits = (_NOT if np.isnan(value) else str(int(min(max(round(value), 1), 9))) for value in shown.times[i])
        lines.append(f"{fitting(zone, width):{width}}  {' '.join(digits)}")
    return "\n".join(lines)


def svg(heat: Heat) -> str:
    """The map as a picture, each pair of zones a cell with its figure, and their names as a tooltip."""
    shown = heat.worst(MAX_CELLS)
    room = 24 + 7.5 * min(max(map(len, shown.zones), default=0), MAX_NAME)
    size = _CELL * len(shown.zones)
    title = f"the worst {len(shown.zones)} of {len(heat.zones)}" if len(shown.zones) < len(heat.zones) else \
        str(len(heat.zones))
    return document(f"Messages between and inside {title} leaf zones: times as long as usual",
                    max(24 + room + size + room, 860), 80 + room + size + 24,
                    [*_legend(24, 62), *_cells(shown, 24 + room, 80 + room)])


def _legend(x: float, y: float) -> Iterator[str]:
    labels = [f"up to {most:g}" if np.isfinite(most) else f"above {_COLOURS[-2][0]:g}" for most, _ in _COLOURS]
    for (_, colour), label in zip((*_COLOURS, (np.nan, _WHITE)), (*labels, "not measured"), strict=True):
        yield f'<rect x="{x:g}" y="{y - 12:g}" width="14" height="14" fill="{colour}" stroke="#cbd5e1"/>'
        yield words(x + 20, y, label, size=12)
        x += 44 + 7 * len(label)


def _cells(heat: Heat, left: float, top: float) -> Iterator[str]:
    for i, zone in enumerate(heat.zones):
        x, y, name = left + _CELL * i, top + _CELL * i, fitting(zone, MAX_NAME)
        yield words(24, y + 18, name, size=12)
        yield f'<g transform="translate({x + 18:g} {top - 6:g}) rotate(-60)">{words(0, 0, name, size=12)}</g>'
        for j, other in enumerate(heat.zones):
            value, x = float(heat.times[i, j]), left + _CELL * j
            colour = next((colour for most, colour in _COLOURS if value <= most), _WHITE)
            between = f"inside {zone}, the worst node" if i == j else trunk(zone, other).replace("|", " and ")
            said = "not measured" if np.isnan(value) else f"x{value:.3g}"
            yield (f'<g><title>{escape(f"{between}: {said}")}</title><rect x="{x:g}" y="{y:g}" width="{_CELL - 1}" '
                   f'height="{_CELL - 1}" fill="{colour}" stroke="#cbd5e1"/>')
            if not np.isnan(value):
                ink = "white" if value > _COLOURS[2][0] else "#0f172a"
                figure = f"{value:.1f}" if value < 9.95 else f"{value:.0f}" if value < 999.5 else ">k"
                yield words(x + 4, y + 18, figure, fill=ink, size=11)
            yield "</g>"
