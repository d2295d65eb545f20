"""Islands: allreduce inside each zone or node at every step, and another strategy between these islands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import numpy as np

from slurmdl.comm_layout import shard_pieces, split_offsets
from slurmdl.errors import TrainError
from slurmdl.plan import group_ranks
from slurmdl.train.collectives import Ring, bruck_allgather, ring_allgather
from slurmdl.train.strategies.allreduce import make_allreduce
from slurmdl.train.strategies.gossip import Gossip
from slurmdl.train.strategies.local_sgd import LocalSGD
from slurmdl.train.strategies.strategy import StrategyContext, TriggeredStrategy
from slurmdl.train.transports.transport import Tag
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

    survives_rank_failure = True
    state_fields: tuple[str, ...] = ("_outer",)

    def __init__(self, ctx: StrategyContext) -> None:
        config, rank, size = ctx.config, ctx.p2p.rank, ctx.parameters.size
        islands = group_ranks(ctx.workers, ctx.zones if config.islands == "zone" else ctx.nodes)
        minimum = max(map(len, islands)) * config.fragments
        if size < minimum:
            raise TrainError(f"--islands {config.islands}: {size} parameters cannot be split over the ranks of an "
                             f"island and {config.fragments} fragments; expected at least {minimum}, or no --islands")
        self._island = next(island for island in islands if rank in island)
        self._inner = make_allreduce(replace(ctx, workers=tuple(self._island), config=replace(
            config, strategy="allreduce", comm_pattern="ring", compression="none")))
        self.overlaps_backward = self._inner.overlaps_backward
        # when to exchange is decided here
        outer_config = replace(config, strategy="gossip" if config.strategy == "adaptive-gossip" else config.strategy,
                               fragments=1)

        def island_weights() -> tuple[float, ...]:
            weights = tuple(sum(ctx.relative_weights_of(island)) for island in islands)
            return weights if len(set(weights)) > 1 else ()

        #: start of each piece that this rank holds -> the piece, and its exchanges with the other holders
        self._pieces: dict[int, slice] = {}
        self._outer: dict[int, TriggeredStrategy] = {}
        #: of each fragment of the model: starts of its pieces, and the ring that gathers it in the island
        self._fragments: list[tuple[list[int], Ring]] = []
        for begin, end in pairwise(split_offsets(size, config.fragments)):
            pieces = [(index, slice(begin + piece.start, begin + piece.stop), holders) for index, (piece, holders) in
                      enumerate(shard_pieces(end - begin, islands)) if rank in holders]
            for index, piece, holders in pieces:
                self._pieces[piece.start] = piece
                self._outer[piece.start] = OUTER_STRATEGIES[config.strategy or ""](replace(
                    ctx, workers=tuple(holders), parameters=ctx.parameters[piece], sizes=(piece.stop - piece.start,),
                    config=outer_config, model_weights=island_weights))
                self._outer[piece.start].overlap_tag = Tag.FIRST_OVERLAPPED + index
            self._fragments.append(([piece.start for _, piece, _ in pieces],
                                    Ring(rank, self._island, ctx.parameters[begin:end])))
        super().__init__(ctx, _island_cost(ctx, self._island, [outer.cost for outer in self._outer.values()]))
        self.replica_groups = islands

    def on_gradients_ready(self, start: int) -> bool:
        return self._inner.on_gradients_ready(start)

    def finish_gradients(self, step: int, skip_update: bool = False) -> None:
        self._inner.finish_gradients(step, skip_update)

    def start_exchange(self) -> None:
        for outer in self._current_pieces():
            outer.start_exchange()

    def _current_pieces(self) -> Iterator[TriggeredStrategy]:
        """Exchanges of the pieces of the current fragment."""
        starts, _ = self._fragments[self.exchange_index % len(self._fragments)]
        for start in starts:
            self._outer[start].exchange_index = self.exchange_index
            yield self._outer[start]

    def exchange(self) -> bool:
        exchanged = False
        for outer in self._current_pieces():
            exchanged = outer.exchange()  # equal for all pieces
        if exchanged:
            p2p, (_, ring) = self._ctx.p2p, self._fragments[self.exchange_index % len(self._fragments)]
            self._ctx.comm_thread.call(lambda: p2p.run_to_completion(
                ring_allgather(p2p, [ring], np.float32, Tag.STEP)))
        return exchanged

    def decide(self, drift_ratio: float) -> bool:
        decided = False
        for outer in self._current_pieces():
            decided = outer.decide(drift_ratio)  # equal for all pieces; all their holders take part
        return decided

    def resume_from_average(self, states: Sequence[Mapping[str, Any]], step: int) -> None:
        super().resume_from_average(states, step)
        saved = {start: state for rank_state in states for start, state in rank_state["_outer"].items()}
        for start, outer in self._outer.items():
            outer.resume_from_average([state_of_piece(saved, self._pieces[start])], step)

    def drain(self, checkpoint_number: int) -> None:
        super().drain(checkpoint_number)
        for outer in self._outer.values():
            outer.drain(checkpoint_number)

    def finish(self) -> None:
        super().finish()
        for outer in self._outer.values():
            outer.finish()

    def close(self) -> None:
        self._inner.close()


def _island_cost(ctx: StrategyContext, island: Sequence[int], costs: Sequence[CommCost]) -> CommCost:
    """Cost of all ranks of an island together, from the costs of the pieces that this rank holds. Collective."""
    def total(costs: Iterable[float]) -> float:
        return float(ctx.comm_thread.call(lambda: bruck_allgather(ctx.control_p2p, island, sum(costs))).sum())

    return CommCost(*(total(getattr(cost, entry.name) for cost in costs) for entry in fields(CommCost)))


def state_of_piece(saved: Mapping[int, Mapping[str, Any]], piece: slice) -> dict[str, Any]:
    """State of a piece, from the states of pieces, by their starts, that cover the model.

    Of tensors, those that all pieces have; an exchange in flight may be that of some pieces only.
    """
    import torch

    states = [saved[start] for start in sorted(saved)]
    tensors = {name for name, value in states[0].items() if isinstance(value, torch.Tensor)}
    whole = {name: [state[name] for state in states] for name in tensors if all(
        isinstance(state[name], torch.Tensor) for state in states)}
    others = {name: value for name, value in states[0].items() if name not in tensors}
    return {**others, **{name: torch.cat(parts)[piece] for name, parts in whole.items()}}
