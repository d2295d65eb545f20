"""Description of a run for its summary."""

from __future__ import annotations

from typing import Any

from slurmdl.train.library.context import RunContext
from slurmdl.train.library.failure_recovery import FailureRecovery
from slurmdl.train.mixing.weighted_graph import GRAPHS, GossipGroup, spectral_gap
from slurmdl.train.strategies.shared_memory_gossip import node_leaders


def summary_header(ctx: RunContext, recovery: FailureRecovery, seed: int) -> dict[str, Any]:
    """Strategy, ranks and failures of a run.

    `spectral_gap` is that of the gossip graph (between nodes with shared memory), None for other strategies;
    `ps_locality` see Strategy.
    """
    world, workers = ctx.world, ctx.world.ranks_with_role("worker")
    rank_map = [{"rank": rank, "node": node, "zone": zone, "role": role} for rank, (node, zone, role) in enumerate(
        zip(world.nodes, world.zones, world.roles, strict=True))]
    gap = None
    if world.comm_pattern in GRAPHS:
        members = node_leaders(workers, world.nodes, world.zones) if world.config.shared_memory else workers
        group = GossipGroup([world.zones[rank] for rank in members], seed, world.costs)
        gap = spectral_gap(world.comm_pattern, group)
    return {"strategy": world.strategy, "comm_pattern": world.comm_pattern, "spectral_gap": gap,
            "world_size": len(world.nodes), "num_workers": len(workers),
            "num_servers": len(world.nodes) - len(workers), "num_nodes": len(set(world.nodes)),
            "num_zones": len(set(world.zones) - {""}), "rank_map": rank_map,
            "parameters": ctx.replica.parameters.size, "ps_locality": recovery.strategy.ps_locality, "seed": seed,
            "failed_ranks": recovery.failed_ranks}
