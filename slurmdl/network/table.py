"""The scores of links as rows, the worst first, and as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl import units
from slurmdl.network import capacity
from slurmdl.network.model import LinkScore, LinkScores
from slurmdl.topology.model import Topology

FloatArray = npt.NDArray[np.float64]

#: bytes of the message by whose time links are compared
MESSAGE = 1e6


@dataclass(frozen=True)
class Row:
    """One link.

    Attributes
    ----------
    kind : "node", "zone" or "trunk".
    zone : leaf zone of a node, zone above a zone, "" where there is none.
    times : how many times as long a message of MESSAGE bytes takes over it as over one of which nothing is known.
    """

    kind: str
    name: str
    zone: str
    times: float
    score: LinkScore

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self.score), "kind": self.kind, "name": self.name, "zone": self.zone, "times": self.times}


def rows(scores: LinkScores, topology: Topology) -> list[Row]:
    """All links with a score, the worst first."""
    found = []
    for kind, links, above in (("node", scores.nodes, topology.leaf_of), ("zone", scores.zones, _above(topology)),
                               ("trunk", scores.trunks, lambda name: "")):
        factor = times(kind, tuple(links), scores, topology)
        found += [Row(kind, name, above(name), float(f"{times_:.4g}"), links[name])
                  for name, times_ in zip(links, factor.tolist(), strict=True)]
    return sorted(found, key=lambda row: (-row.times, row.kind, row.name))


def times(kind: str, names: Sequence[str], scores: LinkScores, topology: Topology) -> FloatArray:
    """How many times as long a message takes over these links as over those that were not measured; 1 for these.

    Returns
    -------
    shape (names,).
    """
    def seconds(known: LinkScores) -> FloatArray:
        if kind == "node":
            carried, delay = capacity.node_links(names, known)
        elif kind == "zone":
            carried, delay = _uplinks(names, known, topology)
        else:
            carried, delay = capacity.trunks(names, np.full(len(names), known.node_default), known)
        return np.asarray(MESSAGE / carried + 2 * delay)

    exact = replace(scores, margin=0.0)
    return np.asarray(seconds(exact) / seconds(replace(exact, nodes={}, zones={}, trunks={})))


def _uplinks(names: Sequence[str], scores: LinkScores, topology: Topology) -> tuple[FloatArray, FloatArray]:
    index = np.array([topology.zone_index.get(name, -1) for name in names], np.int64)
    known = index >= 0
    level, size, speed = np.zeros(len(names), np.int64), np.ones(len(names), np.int64), np.full(len(names), np.nan)
    level[known], size[known], speed[known] = (each[index[known]]
                                               for each in (topology.level, topology.size, topology.speed))
    return capacity.zone_uplinks(names, level, size, speed, scores)


def _above(topology: Topology) -> Any:
    parent: Mapping[str, str] = {zone: topology.zones[above] if above >= 0 else ""
                                 for zone, above in zip(topology.zones, topology.parent.tolist(), strict=True)}
    return lambda name: parent.get(name, "")


def text(rows: Sequence[Row], height: int) -> str:
    """A table of the first rows, at most `height` of them."""
    if not rows:
        return "no link has a score"
    head = ("link", "", "zone", "time", "throughput", "round trip", "p99", "loss", "age", "samples", "source")
    lines = [head, *(_cells(row) for row in rows[:height])]
    width = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = ["  ".join(cell.ljust(w) if i < 3 else cell.rjust(w)
                       for i, (cell, w) in enumerate(zip(line, width, strict=True))).rstrip() for line in lines]
    if len(rows) > height:
        shown.append(f"and {len(rows) - height} more, none of them worse (--all shows them)")
    return "\n".join(shown)


def _cells(row: Row) -> tuple[str, ...]:
    score = row.score
    return (row.name, row.kind, row.zone, f"x{row.times:.3g}",
            "-" if score.throughput is None else units.rate(score.throughput),
            *(units.duration(each) if each else "-" for each in (score.delay, score.delay_tail)),
            f"{score.loss:.2%}" if score.loss else "0",
            age(score.age), str(score.samples), score.source or "-")


def age(seconds: float) -> str:
    """As people say it: 12 s, 3 min, 5 h, 2 d."""
    for unit, size in (("s", 60), ("min", 60), ("h", 24)):
        if seconds < size:
            return f"{seconds:.0f} {unit}"
        seconds /= size
    return f"{seconds:.0f} d"
