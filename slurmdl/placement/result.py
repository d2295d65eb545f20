"""What placement answers: the nodes, the rank of every task, what it costs, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from slurmdl.slurm.hostlist import fold_hostlist


@dataclass(frozen=True)
class Cost:
    """Predicted cost of one iteration.

    Attributes
    ----------
    seconds : summed over the phases, the most loaded link of each.
    inter_node_bytes : all phases; messages between tasks of one node are not among them.
    inter_zone_bytes : all phases; messages between ranks of different leaf zones.
    busiest : name of the link that bounds the cost, "" where nothing is sent.
    bytes_across_levels : the same for the zones of each level, leaf zones first: entry k counts what leaves the
        highest zones of level k or below. () where the nodes have no zones.
    aggregation_nodes, aggregation_zones : aggregation degree: shares of all bytes (with parameter servers those
        between servers and workers) that stay inside a node, and inside a leaf zone; 1 where nothing is sent.
    zones_used : number of leaf zones with a rank.
    """

    seconds: float
    inter_node_bytes: float
    inter_zone_bytes: float
    bottleneck_link: str = ""
    inter_zone_bytes_by_level: tuple[float, ...] = ()
    intra_node_fraction: float = 1.0
    intra_zone_fraction: float = 1.0
    leaf_zone_count: int = 0

    @property
    def sort_key(self) -> tuple[float, float, float]:
        """Sort key, free of rounding noise: time first, then bytes across zones, then across nodes."""
        return (float(f"{self.seconds:.9e}"), float(f"{self.inter_zone_bytes:.9e}"),
                float(f"{self.inter_node_bytes:.9e}"))


@dataclass(frozen=True)
class RankMap:
    """The order of the tasks over given slots.

    Attributes
    ----------
    nodes : entry i is the node of rank i.
    roles : entry i is the role of rank i, one of plan.ROLES.
    cost : predicted cost of one iteration in this order.
    order : name of the order that won, e.g. "depth-first"; see ranks.rankmap.rank_map.
    compared : order -> predicted cost, of every order that was compared, the winner included.
    anywhere : predicted cost of the best order with rank 0 on any node; None where it is not known.
    """

    nodes: tuple[str, ...]
    roles: tuple[str, ...]
    cost: Cost
    order: str = ""
    order_costs: Mapping[str, Cost] = field(default_factory=dict)
    any_rank0_cost: Cost | None = None

    @property
    def rank0_slowdown(self) -> float:
        """How much longer an iteration takes because rank 0 stays on the first node, as a fraction; 0 for no more."""
        if self.any_rank0_cost is None or self.any_rank0_cost.sort_key[0] >= self.cost.sort_key[0]:
            return 0.0
        return self.cost.seconds / self.any_rank0_cost.seconds - 1 if self.any_rank0_cost.seconds else float("inf")


@dataclass(frozen=True)
class Candidate:
    """One choice of nodes that was considered.

    Attributes
    ----------
    label : the zone or zones, e.g. "leafA" or "leafA x3 + leafB x1".
    verdict : "chosen", or why it lost.
    cost : None where it was refused before it was scored.
    """

    label: str
    verdict: str
    cost: Cost | None = None


@dataclass(frozen=True)
class Placement:
    """The answer for one job.

    Attributes
    ----------
    nodes : the chosen nodes, in Slurm's order (sorted as the snapshot lists them); () where none were chosen.
    map : the rank map that the job would get on exactly these nodes; None where none were chosen.
    zones : node -> zone path, root first, for the chosen nodes.
    zones_used : leaf zones of the chosen nodes -> number of nodes.
    free_now : every chosen node can start its tasks now.
    candidates : what was considered, the chosen one first.
    reason : one sentence: why this choice, or why none.
    bound : seconds that no placement of the job on the eligible nodes can undercut, None where none is known.
    bound_basis : what the bound rests on, "" where there is none.
    """

    nodes: tuple[str, ...] = ()
    rank_map: RankMap | None = None
    zone_paths: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    nodes_per_zone: Mapping[str, int] = field(default_factory=dict)
    free_now: bool = False
    candidates: tuple[Candidate, ...] = ()
    reason: str = ""
    lower_bound: float | None = None
    lower_bound_reason: str = ""

    @property
    def optimality_gap(self) -> float | None:
        """How much longer than the bound the placement takes at most, as a fraction; None without a bound."""
        if self.lower_bound is None or self.rank_map is None or (not self.lower_bound and self.rank_map.cost.seconds):
            return None
        return max(0.0, self.rank_map.cost.seconds / self.lower_bound - 1) if self.lower_bound else 0.0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "gap": self.optimality_gap}


# MERGED: How zones with their counts are written.

#: most zones that are named one by one
MAX_NAMED_ZONES = 4
#: longest text that names zones
MAX_LABEL_LENGTH = 80


def format_zone_counts(counts_by_zone: Mapping[str, int]) -> str:
    """`leafA x3 + leafB x1`, most first.

    Many zones are folded by their counts (`z[0-7] x9 + z[8-30] x8`); where that is still long they are counted
    (`54 zones x4-13`).
    """
    counts = sorted(counts_by_zone.items(), key=lambda entry: -entry[1])
    most, least = counts[0][1], counts[-1][1]
    many = f"{len(counts_by_zone)} zones x{least}-{most}" if least < most else f"{len(counts_by_zone)} zones x{most}"
    if len(counts) > MAX_NAMED_ZONES:
        alike: dict[int, list[str]] = {}
        for zone, count in counts:
            alike.setdefault(count, []).append(zone)
        if len(alike) > MAX_NAMED_ZONES:
            return many
        counts = [(fold_hostlist(names), count) for count, names in alike.items()]
    text = " + ".join(f"{zone} x{count}" for zone, count in counts)
    return text if len(text) <= MAX_LABEL_LENGTH or len(counts_by_zone) <= MAX_NAMED_ZONES else many
