"""What a byte costs between two zones, for the plan: training weighs its partners by it."""

from __future__ import annotations

import numpy as np

from slurmdl.placement.iteration_cost import NetworkLinks

#: most leaf zones whose pairs are told; beyond that the plan has no costs
MAX_ZONES = 64


def compute_zone_costs(network: NetworkLinks) -> dict[str, float]:
    """Seconds per byte over the slowest link of the way between two leaf zones, or over the way itself where that was
    found slower.

    The links of the zones' own nodes count with their median, so that one bad node does not stand for its zone.
    With more than MAX_ZONES leaf zones, and with nodes in none, there are no costs: {}.

    Returns
    -------
    "leafA|leafB" (names sorted) -> s/byte, "leaf|leaf" inside one; three significant digits.
    """
    leaves, first = np.unique(network.leaf, return_index=True)
    if not len(leaves) or len(leaves) > MAX_ZONES or leaves[0] < 0:
        return {}
    inside = np.array([np.median(network.node_capacity[network.leaf == leaf]) for leaf in leaves])
    path = network.ancestors[first]
    uplink = np.append(network.zone_capacity, np.inf)
    shared = (path[:, None, :, None] == path[None, :, None, :]) & (path >= 0)[:, None, :, None]
    # over the uplinks of one zone's path that are not on the other's
    up = np.where(shared.any(axis=3), np.inf, uplink[path][:, None, :]).min(axis=2)
    slowest = np.minimum(np.minimum(up, up.T), np.minimum(inside[:, None], inside))
    row = np.searchsorted(leaves, network.slow_paths.leaf_pairs)
    for (i, j), speed in zip(row.tolist(), network.slow_paths.capacity.tolist(), strict=True):
        slowest[i, j] = slowest[j, i] = min(slowest[i, j], speed)
    names = [network.zones[leaf] for leaf in leaves]
    return {"|".join(sorted((names[i], names[j]))): float(f"{1 / slowest[i, j]:.3g}")
            for i in range(len(names)) for j in range(i, len(names))}
