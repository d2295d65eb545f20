"""Tables of link scores, worst links first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from slurmdl import units
from slurmdl.links import capacity
from slurmdl.links.link_scores import FloatArray, LinkScore, LinkScores
from slurmdl.topology.topology import Topology

MESSAGE_BYTES = 1e6  # size of the message whose transfer time compares links


@dataclass(frozen=True)
class LinkRow:
    """One link.

    Attributes:
        kind: one of samples.LINK_KINDS.
        zone: leaf zone of a node, parent of a zone, "" if there is none.
        slowdown: transfer time of MESSAGE_BYTES relative to a link without a score.
    """

    kind: str
    name: str
    zone: str
    slowdown: float
    score: LinkScore


def link_rows(scores: LinkScores, topology: Topology) -> list[LinkRow]:
    """Rows of all links with a score, worst first."""
    parent: Mapping[str, str] = {zone: topology.zones[index] if index >= 0 else ""
                                 for zone, index in zip(topology.zones, topology.parent.tolist(), strict=True)}
    rows = []
    for kind, links in scores.by_kind.items():
        factors = _slowdowns(kind, tuple(links), scores, topology)
        rows += [LinkRow(kind, name, topology.leaf_of(name) if kind == "node" else parent.get(name, ""),
                         float(f"{factor:.4g}"), links[name])
                 for name, factor in zip(links, factors.tolist(), strict=True)]
    return sorted(rows, key=lambda row: (-row.slowdown, row.kind, row.name))


def _slowdowns(kind: str, names: Sequence[str], scores: LinkScores, topology: Topology) -> FloatArray:
    """Transfer times of a message over these links relative to links without a score, shape (names,)."""
    def transfer_seconds(assumed: LinkScores) -> FloatArray:
        if kind == "node":
            bandwidth, latency = capacity.node_links(names, assumed)
        elif kind == "zone":
            bandwidth, latency = _uplink_capacity(names, assumed, topology)
        else:
            defaults = np.full(len(names), assumed.default_node_bandwidth)
            bandwidth, latency = capacity.inter_leaf_paths(names, defaults, assumed)
        return np.asarray(MESSAGE_BYTES / bandwidth + 2 * latency)  # the links of sender and receiver, one way each

    exact = replace(scores, tolerance=0.0)
    unmeasured = replace(exact, nodes={}, zones={}, inter_leaf={})
    return np.asarray(transfer_seconds(exact) / transfer_seconds(unmeasured))


def _uplink_capacity(names: Sequence[str], scores: LinkScores, topology: Topology) -> tuple[FloatArray, FloatArray]:
    index = np.array([topology.zone_index.get(name, -1) for name in names], np.int64)
    # index -1 selects the appended values, those of a leaf zone with one node
    return capacity.zone_uplinks(names, np.append(topology.level, 0)[index], np.append(topology.node_count, 1)[index],
                                 np.append(topology.uplink_bandwidth, np.nan)[index], scores)


def format_link_table(rows: Sequence[LinkRow], max_rows: int) -> str:
    if not rows:
        return "no link has a score"
    header = ("link", "kind", "zone", "slowdown", "throughput", "rtt", "p99", "loss", "age", "samples", "source")
    cells = [header, *(_row_cells(row) for row in rows[:max_rows])]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) if i < 3 else cell.rjust(width)
                       for i, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip() for row in cells]
    if len(rows) > max_rows:
        lines.append(f"and {len(rows) - max_rows} more, none slower (--all shows them)")
    return "\n".join(lines)


def _row_cells(row: LinkRow) -> tuple[str, ...]:
    score = row.score
    return (row.name, row.kind, row.zone, f"x{row.slowdown:.3g}",
            "-" if score.throughput is None else units.format_bit_rate(score.throughput),
            *(units.format_duration(each) if each else "-" for each in (score.rtt, score.rtt_p99)),
            f"{score.loss:.2%}" if score.loss else "0",
            format_age(score.age), str(score.samples), score.source or "-")


def format_age(seconds: float) -> str:
    """Age in its largest unit: "12 s", "3 min", "5 h", "2 d"."""
    for unit, size in (("s", 60), ("min", 60), ("h", 24)):
        if seconds < size:
            return f"{seconds:.0f} {unit}"
        seconds /= size
    return f"{seconds:.0f} d"
