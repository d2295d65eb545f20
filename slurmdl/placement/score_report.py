"""Which scores a choice was made by: the links that are slower than usual, and what became of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from slurmdl import units
from slurmdl.cluster.snapshot import ClusterSnapshot
from slurmdl.dl_options import DlOptions, is_comm_pattern
from slurmdl.links import link_table
from slurmdl.links.capacity import OVERSUBSCRIPTION
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.eligibility import is_idle
from slurmdl.placement.result import Placement, RankMap
from slurmdl.topology.topology import Topology

#: a link counts as slow from so many times the usual time on (see table.times)
SLOWDOWN_THRESHOLD = 1.25
#: most links that are told
MAX_REPORTED_LINKS = 12


@dataclass(frozen=True)
class DecisiveScore:
    """A score that the choice was made by.

    Attributes
    ----------
    kind : "node", "zone" or "trunk".
    times : how many times as long as usual a message takes over the link.
    age : seconds since the newest sample.
    verdict : "left out", "used", or "used, the busiest link".
    """

    kind: str
    name: str
    slowdown: float
    age: float
    samples: int
    loss: float
    verdict: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def decisive_scores(placement: Placement, topology: Topology, cluster: ClusterSnapshot,
             scores: LinkScores) -> list[DecisiveScore]:
    """The slow links among those that the job could use now, and the busiest link of the choice; worst first."""
    return _slow_links(placement.nodes, [node.name for node in cluster.nodes if is_idle(node)],
                 placement.rank_map.cost.bottleneck_link if placement.rank_map else "", topology, scores)


def decisive_step_scores(ranks: RankMap, allocated: Sequence[str],
                         topology: Topology, scores: LinkScores) -> list[DecisiveScore]:
    """The same of a step, which could use the nodes of its job only."""
    return _slow_links(ranks.nodes, allocated, ranks.cost.bottleneck_link, topology, scores)


def _slow_links(nodes: Sequence[str], available: Sequence[str], bottleneck_link: str, topology: Topology,
          scores: LinkScores) -> list[DecisiveScore]:
    used, within = _used_link_names(nodes, topology), {*nodes, *available}
    return [DecisiveScore(row.kind, row.name, row.slowdown, row.score.age, row.score.samples, row.score.loss,
                     "used, the busiest link" if row.name == bottleneck_link else "used" if row.name in used else "left out")
            for row in link_table.link_rows(scores, topology)
            if row.name == bottleneck_link or (row.slowdown >= SLOWDOWN_THRESHOLD and (row.kind != "node" or row.name in within))]


def _used_link_names(nodes: Sequence[str], topology: Topology) -> set[str]:
    """Names of the nodes, of the zones above them, and of the ways between their leaf zones."""
    leaves = sorted({leaf for node in nodes if (leaf := topology.leaf_of(node))})
    return {*nodes, *(zone for node in nodes for zone in topology.path_of(node)),
            *(f"{one}|{other}" for i, one in enumerate(leaves) for other in leaves[i + 1:])}


def format_score_report(decisive: list[DecisiveScore], scores: LinkScores) -> Iterator[str]:
    """What is told of them: how many links have scores, how old these are, then link by link."""
    ages = [score.age for links in (scores.nodes, scores.zones, scores.inter_leaf) for score in links.values()]
    counts = ", ".join(f"{len(links)} {name}" for name, links in (
        ("nodes", scores.nodes), ("zones", scores.zones), ("ways between zones", scores.inter_leaf)) if links)
    yield f"scores     of {counts}, {link_table.format_age(min(ages))} to {link_table.format_age(max(ages))} old" if min(ages) != max(ages) \
        else f"scores     of {counts}, {link_table.format_age(min(ages))} old"
    shown = decisive[:MAX_REPORTED_LINKS]
    width = max((len(each.name) for each in shown), default=0)
    for each in shown:
        loss = f", {each.loss:.2%} loss" if each.loss else ""
        yield (f"  {each.name:{width}}  {each.verdict}: {each.slowdown:.3g} times as long as usual{loss}, "
               f"{link_table.format_age(each.age)} old, samples: {each.samples}")
    if len(decisive) > len(shown):
        yield f"  and {len(decisive) - len(shown)} more"


# MERGED: What predictions rest on: the bytes that are sent, and the links that were not measured.

def format_assumptions(dl: DlOptions, topology: Topology, scores: LinkScores) -> str:
    """The assumptions in a few words: "model 100 MB (default), links 10 Gbit/s (default), uplinks by LinkSpeed"."""
    return f"{traffic_assumption(dl)}, {link_assumption(topology, scores)}"


def traffic_assumption(dl: DlOptions) -> str:
    if dl.comm_pattern and not is_comm_pattern(dl.comm_pattern):
        return f"traffic of {dl.comm_pattern}"
    return f"model {units.format_bytes(dl.model_bytes)}{' (default)' if dl.model_bytes == DlOptions.model_bytes else ''}"


def link_assumption(topology: Topology, scores: LinkScores) -> str:
    return f"{unmeasured_link_assumption(topology, scores)}{', or as measured' if scores.link_count else ''}"


def unmeasured_link_assumption(topology: Topology, scores: LinkScores) -> str:
    """What is assumed of the links of nodes, and of the uplinks of zones that have a zone above them."""
    default = " (default)" if scores.default_node_bandwidth == LinkScores.default_node_bandwidth else ""
    said = f"links {units.format_bit_rate(scores.default_node_bandwidth)}{default}"
    below = topology.parent >= 0
    if below.any():
        known = np.isfinite(topology.uplink_bandwidth[below])
        other = "/".join(map(units.format_bit_rate, scores.default_zone_bandwidth)
                         ) or f"1/{OVERSUBSCRIPTION:g} of their nodes"
        said += f", uplinks {'by LinkSpeed' if known.all() else f'by LinkSpeed or {other}' if known.any() else other}"
    return said
