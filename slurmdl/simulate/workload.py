"""Training workload of a simulation: message sizes, periods and partners as in `slurmdl.train`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from slurmdl import comm_layout
from slurmdl.comm_layout import COMPRESSION_NAMES, FORWARD_SHARE
from slurmdl.errors import UsageError
from slurmdl.gossip_graphs import GRAPHS, Graph
from slurmdl.placement.traffic import Traffic
from slurmdl.plan import COMM_PATTERNS, ISLAND_STRATEGIES, default_pattern

STRATEGIES = ("allreduce", "gossip", "adaptive-gossip", "ps")  # strategies that can be simulated without islands
SAMPLED_EXCHANGES = 8  # exchanges that are simulated if partners are random


@dataclass(frozen=True)
class TrainingWorkload:
    """One training run.

    Attributes:
        strategy: one of STRATEGIES, or with islands of plan.ISLAND_STRATEGIES.
        parameters: elements of the model.
        ps: number of parameter servers, the first ranks; 0 unless the strategy is `ps`.
        comm_pattern: one of plan.COMM_PATTERNS[strategy], "" for the default.
        compute_seconds: computation of a step on each worker.
        overlap: whether allreduce of gradients overlaps the backward pass.
        period: steps per exchange of gossip, or between islands.
        compression: one of comm_layout.COMPRESSION_NAMES; of messages between islands.
        seed: of random partners.
        inside: "zone" if leaf zones are islands: allreduce in each, and the strategy between them; else "".
    """

    strategy: str
    parameters: int
    ps: int = 0
    comm_pattern: str = ""
    compute_seconds: float = 0.0
    overlap: bool = True
    period: int = 1
    compression: str = "none"
    seed: int = 0
    inside: str = ""

    @property
    def effective_pattern(self) -> str:
        """`comm_pattern`, or the default; inside one zone hierarchical is a ring."""
        return self.comm_pattern or default_pattern(self.strategy, multiple_zones=True)

    @property
    def is_gossip(self) -> bool:
        return self.strategy in ("gossip", "adaptive-gossip")

    @property
    def is_periodic(self) -> bool:
        """Whether exchanges are made once in a period."""
        return self.is_gossip or self.inside != ""

    @property
    def placement_traffic(self) -> Traffic:
        """Traffic model for the placement."""
        size = 4 * self.parameters if self.inside else self.wire_bytes(self.parameters)
        return Traffic(self.strategy, size, self.ps, self.comm_pattern, inside=self.inside)

    def check_supported(self, ranks: int) -> None:
        """Raise UsageError, which names the option and the valid values, if `ranks` ranks cannot be simulated."""
        strategy, pattern = self.strategy, self.effective_pattern
        strategies = ISLAND_STRATEGIES if self.inside else STRATEGIES
        if self.inside not in ("", "zone"):
            raise UsageError(f"--inside {self.inside}: not supported; expected zone")
        if strategy not in strategies:
            raise UsageError(f"--strategy {strategy}: not supported{' with --inside' * bool(self.inside)}; expected "
                             f"{', '.join(strategies)}")
        patterns = COMM_PATTERNS[strategy]
        if pattern not in patterns:
            raise UsageError(f"--comm-pattern {pattern}: not supported with {strategy}; "
                             f"expected {', '.join(patterns)}")
        if strategy == "ps" and not 0 < self.ps < ranks:
            raise UsageError(f"--ps {self.ps}: expected 1 to {ranks - 1} parameter servers for {ranks} ranks"
                             if ranks > 1 else "--strategy ps: expected at least 2 ranks, a server and a worker")
        if strategy != "ps" and self.ps:
            raise UsageError(f"--ps {self.ps}: {strategy} has no parameter servers; use --strategy ps")
        if not self.is_periodic and self.period != 1:
            raise UsageError(f"--period {self.period}: {strategy} exchanges in every step; use gossip or "
                             "adaptive-gossip")
        supported: Sequence[str] = COMPRESSION_NAMES[:1] if strategy == "ps" else COMPRESSION_NAMES[:2]
        if self.is_periodic and pattern not in ("random-matching", "hierarchical"):
            supported = COMPRESSION_NAMES
        if self.compression not in supported:
            raise UsageError(f"--compression {self.compression}: not supported for {strategy} with {pattern}; "
                             f"expected {', '.join(supported)}")

    def wire_bytes(self, elements: int) -> int:
        """Bytes of a message of `elements`."""
        return comm_layout.packed_bytes(self.compression, elements)

    def gradient_buckets(self) -> list[tuple[int, int, float]]:
        """Buckets of allreduce in their order: first element, number of elements, ready time in s after step start.

        The backward pass takes equal time for all parameters and starts with the last ones.
        """
        size, buckets = self.parameters, []
        for start, end in reversed([*pairwise([*comm_layout.bucket_starts(size), size])]):
            ready = FORWARD_SHARE + (1 - FORWARD_SHARE) * (size - start) / size if self.overlap else 1.0
            buckets.append((start, end - start, ready * self.compute_seconds))
        return buckets

    def shard_bytes(self) -> list[int]:
        """Bytes of each server's shard."""
        return [self.wire_bytes(shard.stop - shard.start)
                for shard in comm_layout.split_by_speed(self.parameters, [1.0] * self.ps)]

    def make_graph(self, zones: Sequence[str]) -> Graph:
        """Gossip graph; entry i of `zones` is the leaf zone of rank or island i."""
        return GRAPHS[self.effective_pattern](zones, self.seed)

    def cycle_length(self, zones: Sequence[str]) -> int:
        """Exchanges until the messages repeat, or a sample size if they do not."""
        partners = [*dict.fromkeys(zones)] if self.inside else zones
        return (self.make_graph(partners).period or SAMPLED_EXCHANGES) if self.is_gossip else 1
