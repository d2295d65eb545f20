"""What is trained, as far as its messages depend on it: sizes, periods and partners, as `slurmdl.train` has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from slurmdl.comm_layout import bucket_starts
from slurmdl.errors import UsageError
from slurmdl.gossip_graphs import GRAPHS, GossipGroup, Graph
from slurmdl.placement.traffic import Traffic
from slurmdl.plan import COMM_PATTERNS, default_pattern

#: strategies that can be simulated
STRATEGIES = ("allreduce", "gossip", "adaptive-gossip", "ps")
#: bytes of an element of fp32, and of one as compressors send it: blocks of 256 share a scale of two bytes
FLOAT32_BYTES = 4
PACKED_ELEMENT_BYTES = {"none": 4.0, "fp16": 2.0, "int8": 1 + 2 / 256, "int4": 1 / 2 + 2 / 256, "sign": 1 / 8 + 2 / 256,
              "topk": 3 * 26 / 256}
#: elements that are dealt out to servers at a time
SHARD_BLOCK = 1 << 20
#: share of the forward pass in a step's computation
FORWARD_SHARE = 1 / 3
#: exchanges that are simulated where partners are drawn
SAMPLED_EXCHANGES = 8


@dataclass(frozen=True)
class TrainingWorkload:
    """One training run.

    Attributes
    ----------
    strategy : one of STRATEGIES.
    parameters : elements of the model.
    ps : with strategy `ps` the ranks below it are the parameter servers, else 0.
    traffic : one of plan.PATTERNS[strategy], "" for what the trainer does where nobody asks for one.
    compute : seconds of a step's computation on each worker.
    overlap : allreduce sends the gradients that are there while the others are computed.
    period : steps from one exchange of gossip to the next.
    compress : one of COMPRESSED.
    seed : of partners that are drawn.
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

    @property
    def effective_pattern(self) -> str:
        # inside one zone hierarchical is a ring
        return self.comm_pattern or default_pattern(self.strategy, multiple_zones=True)

    @property
    def is_gossip(self) -> bool:
        return self.strategy in ("gossip", "adaptive-gossip")

    @property
    def placement_traffic(self) -> Traffic:
        """What placement takes it for."""
        return Traffic(self.strategy, self.wire_bytes(self.parameters), self.ps, self.comm_pattern)

    def check_supported(self, ranks: int) -> None:
        """Whether so many ranks can train so.

        Raises
        ------
        UsageError : they cannot; the text names the option and what is valid.
        """
        strategy, pattern = self.strategy, self.effective_pattern
        if strategy not in STRATEGIES:
            raise UsageError(f"--strategy {strategy}: is not simulated; valid: {', '.join(STRATEGIES)}")
        valid = [name for name in COMM_PATTERNS[strategy] if name != "links"]
        if pattern not in valid:
            raise UsageError(f"--traffic {pattern}: is not simulated with {strategy}; valid: {', '.join(valid)}")
        if strategy == "ps" and not 0 < self.ps < ranks:
            raise UsageError(f"--ps {self.ps}: {ranks} ranks can hold 1 to {ranks - 1} parameter servers"
                             if ranks > 1 else "--strategy ps: a server needs a worker beside it: 2 ranks at least")
        if strategy != "ps" and self.ps:
            raise UsageError(f"--ps {self.ps}: {strategy} has no parameter servers; valid: --strategy ps")
        if not self.is_gossip and self.period != 1:
            raise UsageError(f"--period {self.period}: {strategy} exchanges in every step; "
                             "valid with gossip and adaptive-gossip")
        whole = ["none", "fp16"]
        fitting = {"ps": ["none"], "allreduce": whole}.get(
            strategy, whole if pattern == "random" else [*PACKED_ELEMENT_BYTES])
        if self.compression not in fitting:
            raise UsageError(f"--compress {self.compression}: is not for {strategy} with {pattern}; "
                             f"valid: {', '.join(fitting)}")

    def wire_bytes(self, elements: float) -> float:
        """Of a message of so many elements."""
        return elements * PACKED_ELEMENT_BYTES[self.compression]

    def gradient_buckets(self) -> list[tuple[int, int, float]]:
        """What allreduce sums at a time, in its order: the first element, how many, and seconds after the begin of a
        step when all their gradients are there. The last parameters come first, and the backward pass treats all
        alike.
        """
        size, found = self.parameters, []
        for start, end in reversed([*pairwise([*bucket_starts(size), size])]):
            passed = FORWARD_SHARE + (1 - FORWARD_SHARE) * (size - start) / size if self.overlap else 1.0
            found.append((start, end - start, passed * self.compute_seconds))
        return found

    def shard_sizes(self) -> list[int]:
        """Elements that each server holds: whole blocks where each server has one."""
        size = self.parameters
        edges = [size * server // self.ps for server in range(self.ps + 1)]
        if size >= self.ps * SHARD_BLOCK:
            edges = [*(round(edge / SHARD_BLOCK) * SHARD_BLOCK for edge in edges[:-1]), size]
        return [end - begin for begin, end in pairwise(edges)]

    def make_graph(self, zones: Sequence[str]) -> Graph:
        """Who gossips with whom; entry i of `zones` is the leaf zone of rank i."""
        return GRAPHS[self.effective_pattern](GossipGroup(zones, self.seed))

    def cycle_length(self, zones: Sequence[str]) -> int:
        """Exchanges after which the messages begin again, or so many that their mean says enough."""
        return (self.make_graph(zones).period or SAMPLED_EXCHANGES) if self.is_gossip else 1
