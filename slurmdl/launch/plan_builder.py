"""Build the plan of a step: the rank map, the zones of its nodes and the cost of a byte between zones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from slurmdl.dl_options import DlOptions
from slurmdl.errors import PlacementError
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.iteration_cost import NetworkLinks, network_links
from slurmdl.placement.ranks.rank_orders import best_rank_map
from slurmdl.placement.result import RankMap
from slurmdl.placement.traffic import Traffic
from slurmdl.plan import COMM_PATTERNS, Plan
from slurmdl.slurm.step_layout import StepLayout
from slurmdl.topology.topology import Topology

if TYPE_CHECKING:
    from slurmdl.launch.traffic_file import Matrix

#: maximum number of leaf zones in a plan with zone costs
MAX_ZONES = 64


def build_plan(step_layout: StepLayout, topology: Topology, link_scores: LinkScores, dl: DlOptions,
               traffic_matrices: tuple[Matrix, ...] = ()) -> tuple[Plan, RankMap]:
    """Map the ranks of a step. PlacementError if no task would be left for a worker."""
    if dl.ps >= step_layout.ntasks:
        raise PlacementError(
            f"--dl-ps={dl.ps}: the step has {step_layout.ntasks} tasks, and at least one must be a worker")
    traffic = Traffic.from_options(dl, traffic_matrices)
    rank_map = best_rank_map(step_layout.node_tasks, topology, link_scores, traffic, dl.rank0)
    zones = {node: topology.path_of(node) for node, _ in step_layout.node_tasks}
    costs = compute_zone_costs(network_links(list(zones), topology, link_scores))
    pattern = dl.comm_pattern if dl.comm_pattern in COMM_PATTERNS[dl.strategy] else ""
    return Plan(dl.strategy, rank_map.nodes, rank_map.roles, zones, costs, pattern), rank_map


def compute_zone_costs(network: NetworkLinks) -> dict[str, float]:
    """Seconds per byte over the slowest link between each two leaf zones; training weights its partners by it.

    A measured inter-leaf path counts if it is slower than its links. The node links of a zone count with their
    median, so that one slow node does not represent its zone.

    Returns
    -------
    "leafA|leafB" (names sorted) -> s/byte, "leaf|leaf" within a zone; three significant digits. Empty if there are
    more than MAX_ZONES leaf zones, or a node has none.
    """
    leaves, first_node = np.unique(network.leaf, return_index=True)
    if not len(leaves) or len(leaves) > MAX_ZONES or leaves[0] < 0:
        return {}
    node_capacity = np.array([np.median(network.node_capacity[network.leaf == leaf]) for leaf in leaves])
    path = network.ancestors[first_node]
    uplink = np.append(network.zone_capacity, np.inf)
    shared = (path[:, None, :, None] == path[None, :, None, :]) & (path >= 0)[:, None, :, None]
    # the slowest uplink of each zone's path that is not on the other zone's path
    uplinks = np.where(shared.any(axis=3), np.inf, uplink[path][:, None, :]).min(axis=2)
    slowest = np.minimum(np.minimum(uplinks, uplinks.T), np.minimum(node_capacity[:, None], node_capacity))
    pair_index = np.searchsorted(leaves, network.slow_paths.leaf_pairs)
    for (i, j), capacity in zip(pair_index.tolist(), network.slow_paths.capacity.tolist(), strict=True):
        slowest[i, j] = slowest[j, i] = min(slowest[i, j], capacity)
    names = [network.zones[leaf] for leaf in leaves]
    return {"|".join(sorted((names[i], names[j]))): float(f"{1 / slowest[i, j]:.3g}")
            for i in range(len(names)) for j in range(i, len(names))}
