"""Report of the slow links and whether a choice uses them, and of the assumptions of predictions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from slurmdl import units
from slurmdl.cluster.snapshot import ClusterSnapshot
from slurmdl.dl_options import DlOptions, is_comm_pattern
from slurmdl.links.capacity import OVERSUBSCRIPTION
from slurmdl.links.link_scores import LinkScores
from slurmdl.links.link_table import format_age, link_rows
from slurmdl.placement.eligibility import is_idle
from slurmdl.placement.mesh_traffic import DEFAULT_MODEL
from slurmdl.placement.result import Placement, RankMap
from slurmdl.topology.topology import Topology

SLOWDOWN_THRESHOLD = 1.25  # slowdown from which a link counts as slow (see link_table.LinkRow)
MAX_REPORTED_LINKS = 12


@dataclass(frozen=True)
class DecisiveScore:
    """Score of a link that influenced a choice.

    `kind` is one of samples.LINK_KINDS, `slowdown` the transfer time of a message relative to a link without a score,
    and `age` in seconds since the newest sample. `verdict` is "left out", "used", or "used, the busiest link".
    """

    kind: str
    name: str
    slowdown: float
    age: float
    samples: int
    loss: float
    verdict: str


def decisive_scores(placement: Placement, topology: Topology, cluster: ClusterSnapshot,
                    scores: LinkScores) -> list[DecisiveScore]:
    """Slow links among those available to the job now, and the busiest link of the choice; the worst first."""
    return decisive_step_scores(placement.rank_map, [node.name for node in cluster.nodes if is_idle(node)], topology,
                                scores)


def decisive_step_scores(ranks: RankMap | None, available: Sequence[str], topology: Topology,
                         scores: LinkScores) -> list[DecisiveScore]:
    """Like `decisive_scores`, for ranks that can use only the available nodes."""
    nodes, bottleneck_link = (set(ranks.nodes), ranks.cost.bottleneck_link) if ranks else (set[str](), "")
    leaves = sorted({leaf for node in nodes if (leaf := topology.leaf_of(node))})
    used = {*nodes, *(zone for node in nodes for zone in topology.path_of(node)),
            *("|".join(pair) for pair in combinations(leaves, 2))}
    reachable = {*nodes, *available}
    slow = []
    for row in link_rows(scores, topology):
        is_slow = row.slowdown >= SLOWDOWN_THRESHOLD and (row.kind != "node" or row.name in reachable)
        if is_slow or row.name == bottleneck_link:
            verdict = "used, the busiest link" if row.name == bottleneck_link else \
                "used" if row.name in used else "left out"
            slow.append(DecisiveScore(row.kind, row.name, row.slowdown, row.score.age, row.score.samples,
                                      row.score.loss, verdict))
    return slow


def format_score_report(decisive: list[DecisiveScore], scores: LinkScores) -> Iterator[str]:
    """Report lines: number and age of all scores, then the decisive ones."""
    ages = [score.age for links in scores.by_kind.values() for score in links.values()]
    counts = ", ".join(f"{len(links)} {name}" for name, links in (
        ("nodes", scores.nodes), ("zones", scores.zones), ("inter-leaf paths", scores.inter_leaf)) if links)
    oldest = f" to {format_age(max(ages))}" if max(ages) != min(ages) else ""
    yield f"scores     of {counts}, {format_age(min(ages))}{oldest} old"
    reported = decisive[:MAX_REPORTED_LINKS]
    width = max((len(link.name) for link in reported), default=0)
    for link in reported:
        loss = f", {link.loss:.2%} loss" if link.loss else ""
        yield (f"  {link.name:{width}}  {link.verdict}: slowdown {link.slowdown:.3g}{loss}, "
               f"{format_age(link.age)} old, samples: {link.samples}")
    if len(decisive) > len(reported):
        yield f"  and {len(decisive) - len(reported)} more"


def format_assumptions(dl: DlOptions, topology: Topology, scores: LinkScores) -> str:
    """Assumptions of predictions: "model 100 MB (default), links 10 Gbit/s (default), uplinks by LinkSpeed"."""
    default = "" if dl.bytes else " (default)"
    traffic = f"traffic of {dl.comm_pattern}" if dl.comm_pattern and not is_comm_pattern(dl.comm_pattern) else \
        f"model {units.format_bytes(dl.model_bytes)}{default}"
    if dl.groups:
        volumes = f"{dl.bytes}{' and the meshes' if dl.mesh else ''}" if "=" in dl.bytes else traffic
        traffic = f"groups {dl.groups}, {volumes}"
    elif dl.mesh:
        volumes = ", ".join(filter(None, [dl.model, dl.bytes])) or f"{DEFAULT_MODEL} (default)"
        traffic = f"mesh {dl.mesh}, {volumes}"
    return f"{traffic}, {link_assumption(topology, scores)}"


def link_assumption(topology: Topology, scores: LinkScores) -> str:
    return f"{unmeasured_link_assumption(topology, scores)}{', or as measured' if scores.link_count else ''}"


def unmeasured_link_assumption(topology: Topology, scores: LinkScores) -> str:
    """Assumption about node links, and about uplinks of zones with a parent."""
    default = " (default)" if scores.default_node_bandwidth == LinkScores.default_node_bandwidth else ""
    text = f"links {units.format_bit_rate(scores.default_node_bandwidth)}{default}"
    if scores.default_rails > 1:
        text += f" on {scores.default_rails} rails"
    if scores.default_leaf_bandwidth:
        text += f", {units.format_bit_rate(scores.default_leaf_bandwidth)} inside a leaf zone"
    has_parent = topology.parent >= 0
    if not has_parent.any():
        return text
    is_declared = np.isfinite(topology.uplink_bandwidth[has_parent])
    uplinks = "/".join(map(units.format_bit_rate, scores.default_zone_bandwidth)) or \
        f"1/{OVERSUBSCRIPTION:g} of their nodes"
    if is_declared.all():
        uplinks = "by LinkSpeed"
    elif is_declared.any():
        uplinks = f"by LinkSpeed or {uplinks}"
    return f"{text}, uplinks {uplinks}"
