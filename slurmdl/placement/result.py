"""Result of a placement: nodes, rank map, predicted cost and reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from slurmdl.slurm.hostlist import fold_hostlist

MAX_NAMED_ZONES = 4  # zones, or groups of zones, in a label
MAX_LABEL_LENGTH = 80  # characters
#: share of time, or of bytes between zones, that other nodes must save to be better than a choice
MIN_GAIN = 0.02
#: Cost.sort_key: time, bytes between zones, bytes between nodes
SortKey = tuple[float, float, float]


def is_good_enough(choice: SortKey, best: SortKey) -> bool:
    """Whether the best choice saves at most MIN_GAIN of the time and of the bytes between zones of a choice.

    Bytes between zones burden the links of other jobs.
    """
    return all(own <= other * (1 + MIN_GAIN) for own, other in zip(choice[:2], best[:2], strict=True))


@dataclass(frozen=True)
class Cost:
    """Predicted cost of one iteration.

    Attributes:
        seconds: time of the busiest link of each phase, summed over the phases.
        inter_node_bytes, inter_zone_bytes: bytes between tasks of different nodes, and of different leaf zones.
        bottleneck_link: name of the link that limits the cost, or "" if nothing is sent.
        inter_zone_bytes_by_level: bytes between zones of each level, leaf zones first: entry k counts the bytes that
            leave the highest zones of level k or below. () if the nodes have no zones.
        intra_node_fraction, intra_zone_fraction: fractions of all bytes inside a node, and inside a leaf zone; 1 if
            nothing is sent.
        leaf_zone_count: number of leaf zones with a rank.
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
    def sort_key(self) -> SortKey:
        """Time, bytes between zones, bytes between nodes, without rounding noise."""
        return (float(f"{self.seconds:.9e}"), float(f"{self.inter_zone_bytes:.9e}"),
                float(f"{self.inter_node_bytes:.9e}"))


def best_cost(costs: Sequence[Cost], tie: float = 0.0) -> int:
    """Index of the best cost: the least, or with a tie of those within this fraction of the fastest the fewest bytes.

    The times of meshes and groups are not predicted that exactly, and bytes between zones burden the links of other
    jobs.
    """
    longest = min(cost.seconds for cost in costs) * (1 + tie)

    def key(i: int) -> tuple[float, ...]:
        if not tie:
            return costs[i].sort_key
        is_tied = costs[i].seconds <= longest
        return (not is_tied, round(costs[i].inter_zone_bytes) if is_tied else 0, *costs[i].sort_key)

    return min(range(len(costs)), key=key)


@dataclass(frozen=True)
class RankMap:
    """Order of the tasks on given nodes.

    Attributes:
        nodes, roles: node and role (see plan.Plan) of each rank.
        order: name of the best order, e.g. "depth-first"; see rank_orders.best_rank_map.
        order_costs: predicted cost of every evaluated order, including the best one.
        any_rank0_cost: predicted cost of the best order with rank 0 on any node; None if unknown.
    """

    nodes: tuple[str, ...]
    roles: tuple[str, ...]
    cost: Cost
    order: str = ""
    order_costs: Mapping[str, Cost] = field(default_factory=dict)
    any_rank0_cost: Cost | None = None

    @property
    def rank0_slowdown(self) -> float:
        """Additional time per iteration because rank 0 stays on the first node, as a fraction."""
        if self.any_rank0_cost is None or self.any_rank0_cost.sort_key[0] >= self.cost.sort_key[0]:
            return 0.0
        return self.cost.seconds / self.any_rank0_cost.seconds - 1 if self.any_rank0_cost.seconds else float("inf")


@dataclass(frozen=True)
class ConsideredChoice:
    """Choice of nodes that was considered, labelled by its zones, e.g. "leafA" or "leafA x3 + leafB x1".

    `outcome` is "chosen", or why the choice lost; `cost` is None if the choice was not evaluated.
    """

    label: str
    outcome: str
    cost: Cost | None = None


@dataclass(frozen=True)
class Placement:
    """Placement of one job.

    Attributes:
        nodes: chosen nodes in snapshot order; () if none.
        rank_map: rank map on exactly these nodes; None without nodes.
        zone_paths: zone path of each chosen node, root first.
        nodes_per_zone: number of chosen nodes in each leaf zone.
        free_now: every chosen node can start its tasks now, or once it has booted.
        considered: considered choices, the chosen one first.
        reason: sentence with the reason for the choice, or for none.
        lower_bound: lower bound in seconds for all placements of the job on the eligible nodes; None if unknown.
        lower_bound_reason: constraint that gives the bound, or "".
        boots: too few nodes are up, so some of the chosen ones boot first.
    """

    nodes: tuple[str, ...] = ()
    rank_map: RankMap | None = None
    zone_paths: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    nodes_per_zone: Mapping[str, int] = field(default_factory=dict)
    free_now: bool = False
    considered: tuple[ConsideredChoice, ...] = ()
    reason: str = ""
    lower_bound: float | None = None
    lower_bound_reason: str = ""
    boots: bool = False

    @property
    def optimality_gap(self) -> float | None:
        """Upper bound on the additional time over an optimal placement, as a fraction; None without a bound."""
        if self.lower_bound is None or self.rank_map is None or (not self.lower_bound and self.rank_map.cost.seconds):
            return None
        return max(0.0, self.rank_map.cost.seconds / self.lower_bound - 1) if self.lower_bound else 0.0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "optimality_gap": self.optimality_gap}


def format_zone_counts(counts_by_zone: Mapping[str, int]) -> str:
    """`leafA x3 + leafB x1`, largest count first.

    Many zones are folded by count (`z[0-7] x9 + z[8-30] x8`), or if that is too long, counted (`54 zones x4-13`).
    """
    counts = sorted(counts_by_zone.items(), key=lambda entry: -entry[1])
    most, fewest = counts[0][1], counts[-1][1]
    summary = f"{len(counts)} zones x{fewest}-{most}" if fewest < most else f"{len(counts)} zones x{most}"
    if len(counts) > MAX_NAMED_ZONES:
        zones_by_count: dict[int, list[str]] = {}
        for zone, count in counts:
            zones_by_count.setdefault(count, []).append(zone)
        if len(zones_by_count) > MAX_NAMED_ZONES:
            return summary
        counts = [(fold_hostlist(zones), count) for count, zones in zones_by_count.items()]
    label = " + ".join(f"{zone} x{count}" for zone, count in counts)
    return label if len(label) <= MAX_LABEL_LENGTH or len(counts_by_zone) <= MAX_NAMED_ZONES else summary
