"""Islands: allreduce inside each zone or node at every step, and another strategy between these islands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from slurmdl.comm_layout import shard_pieces
from slurmdl.errors import TrainError
from slurmdl.plan import group_ranks
from slurmdl.train.mixing.collectives import Ring, bruck_allgather, ring_allgather
from slurmdl.train.strategies.allreduce import Allreduce
from slurmdl.train.strategies.gossip import Gossip
from slurmdl.train.strategies.local_sgd import LocalSGD
from slurmdl.train.strategies.strategy import StrategyContext, TriggeredStrategy
from slurmdl.train.tags import Tag
from slurmdl.train.triggers import CommCost

#: strategy -> factory of the exchanges between islands
OUTER_STRATEGIES: dict[str, Callable[[StrategyContext], TriggeredStrategy]] = {
    "local-sgd": LocalSGD, "gossip": Gossip, "adaptive-gossip": Gossip}


class Islands(TriggeredStrategy):
    """Allreduce of gradients inside each island, which keeps its models equal, and exchanges of models between them.

    In an exchange each rank mixes a shard of its island's model with the holders of the same elements in the other
    islands; then the ranks of an island gather its shards. So the traffic between islands is spread over all ranks.
    One leader per island would send as many bytes between islands, over the links of a single node, and would have to
    send the result to all ranks of its island. Islands of different sizes split the model into pieces with one holder
    per island; an island weighs as much as its ranks together.

    The trigger evaluates the whole model, which makes all ranks of an island decide equally. Bytes of a budget are
    those that an island sends to others.

    Attributes:
        replica_groups: the islands, each in rank order.
    """

    state_fields: tuple[str, ...] = ("_outer",)

    def __init__(self, ctx: StrategyContext) -> None:
        config, rank, size = ctx.config, ctx.p2p.rank, ctx.parameters.size
        islands = group_ranks(ctx.workers, ctx.zones if config.inside == "zone" else ctx.nodes)
        largest = max(map(len, islands))
        if size < largest:
            raise TrainError(f"--inside {config.inside}: {size} parameters cannot be split over the {largest} ranks "
                             f"of an island; expected at least {largest} parameters, or no --inside")
        self._island = next(island for island in islands if rank in island)
        self._inner = Allreduce(replace(ctx, workers=tuple(self._island), config=replace(
            config, strategy="allreduce", comm_pattern="ring", compression="none")))
        self.overlaps_backward = self._inner.overlaps_backward
        # when to exchange is decided here
        outer_config = replace(config, trigger="period", drift_threshold=None, comm_budget=None)

        def island_weights() -> tuple[float, ...]:
            weights = tuple(sum(ctx.relative_weights_of(island)) for island in islands)
            return weights if len(set(weights)) > 1 else ()

        pieces = [(piece, holders) for piece, holders in shard_pieces(size, islands) if rank in holders]
        self._pieces = {piece.start: piece for piece, _ in pieces}
        #: start of each piece that this rank holds -> its exchanges with the other holders
        self._outer = {
            piece.start: OUTER_STRATEGIES[config.strategy or ""](replace(
                ctx, workers=tuple(holders), parameters=ctx.parameters[piece], sizes=(piece.stop - piece.start,),
                config=outer_config, model_weights=island_weights)) for piece, holders in pieces}
        super().__init__(ctx, _island_cost(ctx, self._island, [outer.cost for outer in self._outer.values()]))
        self.replica_groups = islands
        self._ring = Ring(rank, self._island, ctx.parameters)

    def on_gradients_ready(self, start: int) -> None:
        self._inner.on_gradients_ready(start)

    def before_optimizer_step(self, step: int, skip_update: bool = False) -> None:
        self._inner.before_optimizer_step(step, skip_update)

    def exchange(self) -> bool:
        exchanged = False
        for outer in self._outer.values():
            outer.exchange_index = self.exchange_index
            exchanged = outer.exchange()  # equal for all pieces
        if exchanged:
            p2p = self._ctx.p2p
            self._ctx.comm_thread.call(lambda: p2p.run_to_completion(
                ring_allgather(p2p, [self._ring], np.float32, Tag.STEP)))
        return exchanged

    def decide(self, urgency: float) -> bool:
        decided = False
        for outer in self._outer.values():
            outer.exchange_index = self.exchange_index
            decided = outer.decide(urgency)  # equal for all pieces; all their holders take part
        return decided

    def resume_from_average(self, states: Sequence[Mapping[str, Any]], step: int) -> None:
        super().resume_from_average(states, step)
        saved = {start: state for rank_state in states for start, state in rank_state["_outer"].items()}
        for start, outer in self._outer.items():
            outer.resume_from_average([state_of_piece(saved, self._pieces[start])], step)

    def close(self) -> None:
        self._inner.close()


def _island_cost(ctx: StrategyContext, island: Sequence[int], costs: Sequence[CommCost]) -> CommCost:
    """Cost of all ranks of an island together, from the costs of the pieces that this rank holds. Collective."""
    def total(costs: Iterable[float]) -> float:
        return float(ctx.comm_thread.call(lambda: bruck_allgather(ctx.p2p, island, sum(costs))).sum())

    return CommCost(*(total(getattr(cost, entry.name) for cost in costs) for entry in fields(CommCost)))


def state_of_piece(saved: Mapping[int, Mapping[str, Any]], piece: slice) -> dict[str, Any]:
    """State of a piece, from the states of pieces, by their starts, that cover the model."""
    import torch

    return {name: torch.cat([saved[start][name] for start in sorted(saved)])[piece]
            if isinstance(value, torch.Tensor) else value for name, value in saved[0].items()}
