"""The scores of links as rows, the worst first, and as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl import units
from slurmdl.links import capacity
from slurmdl.links.link_scores import LinkScore, LinkScores
from slurmdl.topology.topology import Topology

FloatArray = npt.NDArray[np.float64]

#: bytes of the message by whose time links are compared
MESSAGE_BYTES = 1e6


@dataclass(frozen=True)
class LinkRow:
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
    slowdown: float
    score: LinkScore

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self.score), "kind": self.kind, "name": self.name, "zone": self.zone, "times": self.slowdown}


def link_rows(scores: LinkScores, topology: Topology) -> list[LinkRow]:
    """All links with a score, the worst first."""
    found = []
    for kind, links, above in (("node", scores.nodes, topology.leaf_of), ("zone", scores.zones, _parent_zone_lookup(topology)),
                               ("trunk", scores.inter_leaf, lambda name: "")):
        factor = slowdowns(kind, tuple(links), scores, topology)
        found += [LinkRow(kind, name, above(name), float(f"{times_:.4g}"), links[name])
                  for name, times_ in zip(links, factor.tolist(), strict=True)]
    return sorted(found, key=lambda row: (-row.slowdown, row.kind, row.name))


def slowdowns(kind: str, names: Sequence[str], scores: LinkScores, topology: Topology) -> FloatArray:
    """How many times as long a message takes over these links as over those that were not measured; 1 for these.

    Returns
    -------
    shape (names,).
    """
    def seconds(known: LinkScores) -> FloatArray:
        if kind == "node":
            carried, delay = capacity.node_links(names, known)
        elif kind == "zone":
            carried, delay = _uplink_capacity(names, known, topology)
        else:
            carried, delay = capacity.inter_leaf_paths(
                names, np.full(len(names), known.default_node_bandwidth), known)
        return np.asarray(MESSAGE_BYTES / carried + 2 * delay)

    exact = replace(scores, tolerance=0.0)
    return np.asarray(seconds(exact) / seconds(replace(exact, nodes={}, zones={}, inter_leaf={})))


def _uplink_capacity(names: Sequence[str], scores: LinkScores, topology: Topology) -> tuple[FloatArray, FloatArray]:
    index = np.array([topology.zone_index.get(name, -1) for name in names], np.int64)
    known = index >= 0
    level, size, speed = np.zeros(len(names), np.int64), np.ones(len(names), np.int64), np.full(len(names), np.nan)
    level[known], size[known], speed[known] = (each[index[known]]
                                               for each in (topology.level, topology.node_count, topology.uplink_bandwidth))
    return capacity.zone_uplinks(names, level, size, speed, scores)


def _parent_zone_lookup(topology: Topology) -> Any:
    parent: Mapping[str, str] = {zone: topology.zones[above] if above >= 0 else ""
                                 for zone, above in zip(topology.zones, topology.parent.tolist(), strict=True)}
    return lambda name: parent.get(name, "")


def format_link_table(rows: Sequence[LinkRow], max_rows: int) -> str:
    """A table of the first rows, at most `height` of them."""
    if not rows:
        return "no link has a score"
    head = ("link", "", "zone", "time", "throughput", "round trip", "p99", "loss", "age", "samples", "source")
    lines = [head, *(_row_cells(row) for row in rows[:max_rows])]
    width = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = ["  ".join(cell.ljust(w) if i < 3 else cell.rjust(w)
                       for i, (cell, w) in enumerate(zip(line, width, strict=True))).rstrip() for line in lines]
    if len(rows) > max_rows:
        shown.append(f"and {len(rows) - max_rows} more, none of them worse (--all shows them)")
    return "\n".join(shown)


def _row_cells(row: LinkRow) -> tuple[str, ...]:
    score = row.score
    return (row.name, row.kind, row.zone, f"x{row.slowdown:.3g}",
            "-" if score.throughput is None else units.format_bit_rate(score.throughput),
            *(units.format_duration(each) if each else "-" for each in (score.rtt, score.rtt_p99)),
            f"{score.loss:.2%}" if score.loss else "0",
            format_age(score.age), str(score.samples), score.source or "-")


def format_age(seconds: float) -> str:
    """As people say it: 12 s, 3 min, 5 h, 2 d."""
    for unit, size in (("s", 60), ("min", 60), ("h", 24)):
        if seconds < size:
            return f"{seconds:.0f} {unit}"
        seconds /= size
    return f"{seconds:.0f} d"
