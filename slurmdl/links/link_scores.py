"""Link scores: the current state of measured links, and default values for all others."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from slurmdl import records
from slurmdl.errors import InputError
from slurmdl.links.samples import KIND_OF_KEY, MAX_BANDWIDTH, MAX_RTT_S, SOURCES, check_link_name
from slurmdl.records import Valid

FloatArray = npt.NDArray[np.float64]

_MAX_AGE_S = 1e10
Throughput = Annotated[float, Valid(lambda number: 0 < number <= MAX_BANDWIDTH,
                                    f"a number above 0, up to {MAX_BANDWIDTH:g}, or null")]
Seconds = Annotated[float, Valid(lambda number: 0 <= number <= MAX_RTT_S, f"a number from 0 to {MAX_RTT_S:g}")]
Fraction = Annotated[float, Valid(lambda number: 0 <= number <= 1, "a number from 0 to 1")]
Age = Annotated[float, Valid(lambda number: 0 <= number <= _MAX_AGE_S, f"a number from 0 to {_MAX_AGE_S:g}")]
SampleCount = Annotated[int, Valid(lambda number: 1 <= number < 2**53, "an integer from 1")]
Source = Annotated[str, Valid(lambda source: source in ("", *SOURCES), ", ".join(SOURCES))]
Positive = Annotated[float, Valid(lambda number: 0 < number <= MAX_BANDWIDTH, "a number above 0")]
NonNegative = Annotated[float, Valid(lambda number: 0 <= number <= MAX_BANDWIDTH, "a number from 0")]
Rails = Annotated[int, Valid(lambda number: number > 0, "a whole number greater than 0")]


@dataclass(frozen=True)
class LinkScore:
    """State of one link.

    Attributes:
        throughput, rtt, loss, rtt_p99, rdma: as in samples.LinkSample; None or 0 if not measured.
        age: seconds since the newest sample.
        samples: number of samples.
        source: of the newest sample, one of samples.SOURCES ("counters" only if no other exists), "" if unknown.
    """

    throughput: Throughput | None = None
    rtt: Seconds = 0.0
    loss: Fraction = 0.0
    age: Age = 0.0
    samples: SampleCount = 1
    rtt_p99: Seconds = 0.0
    rdma: bool = False
    source: Source = ""


def raise_rejection(reason: str) -> None:
    """Default handler of invalid scores: raise InputError."""
    raise InputError(reason)


@dataclass(frozen=True)
class MetricWeights:
    """Weight of each metric in `capacity.weighted_score`."""

    throughput: NonNegative = 1.0
    rtt: NonNegative = 1.0
    loss: NonNegative = 1.0


@dataclass(frozen=True, eq=False)
class ScoreArrays:
    """Scores of all links of one kind as arrays of shape (links,).

    Attributes:
        index: link name -> array index.
        throughput, rtt: as in LinkScore, NaN if not measured.
        loss, age, rdma: as in LinkScore.
    """

    index: Mapping[str, int]
    throughput: FloatArray
    rtt: FloatArray
    loss: FloatArray
    age: FloatArray
    rdma: npt.NDArray[np.bool_]

    @classmethod
    def from_scores(cls, scores: Mapping[str, LinkScore]) -> ScoreArrays:
        rows = [(math.nan if score.throughput is None else score.throughput, score.rtt or math.nan, score.loss,
                 score.age, score.rdma) for score in scores.values()]
        throughput, rtt, loss, age, rdma = np.array(rows, float).reshape(-1, 5).T
        return cls({name: i for i, name in enumerate(scores)}, throughput, rtt, loss, age, rdma > 0)


@dataclass(frozen=True)
class LinkScores:
    """Scores of node links (node to leaf zone), zone uplinks (zone to parent zone) and inter-leaf paths.

    A link without a score has the `LinkSpeed` of the topology, else the default of its level.

    Attributes:
        nodes, zones: name -> LinkScore.
        inter_leaf: "leafA|leafB", names sorted -> LinkScore of the path between the two leaf zones.
        default_node_bandwidth: bytes/s of a node's link.
        default_leaf_bandwidth: bytes/s of a node to the other nodes of its leaf zone, over a network of its own such
            as NVLink between the nodes of a block; 0 if the node's link carries this traffic, too.
        default_rails: adapters that share a node's link equally; rank i of a node sends over adapter i modulo rails.
        default_zone_bandwidth: bytes/s of a zone's uplink by level (index 0 = leaf); the last entry holds for all
            higher levels. () for half of the sum of the node links below each zone (2:1 oversubscription).
        default_latency: one-way seconds per message at each level crossed.
        time: seconds since the epoch at which the ages were right; 0 for now.
        half_life: seconds after which a score counts half as much as the default of its link; None for no decay.
        tolerance: relative difference below which metrics count as equal, since measurements are that noisy.
        weights: of the weighted cost model; None for the TCP cost model (see capacity).
    """

    nodes: Mapping[str, LinkScore] = field(default_factory=dict)
    zones: Mapping[str, LinkScore] = field(default_factory=dict)
    default_node_bandwidth: Positive = 1.25e9
    default_leaf_bandwidth: NonNegative = 0.0
    default_rails: Rails = 1
    default_zone_bandwidth: tuple[Positive, ...] = ()
    default_latency: NonNegative = 2e-5
    inter_leaf: Mapping[str, LinkScore] = field(default_factory=dict)
    time: NonNegative = 0.0
    half_life: Positive | None = None
    tolerance: NonNegative = 0.0
    weights: MetricWeights | None = None

    @cached_property
    def arrays_by_kind(self) -> dict[str, ScoreArrays]:
        return {kind: ScoreArrays.from_scores(links) for kind, links in self.by_kind.items()}

    @property
    def link_count(self) -> int:
        return sum(map(len, self.by_kind.values()))

    @property
    def by_kind(self) -> dict[str, Mapping[str, LinkScore]]:
        """Kind of link -> the scores of its links by name."""
        return {kind: getattr(self, key) for key, kind in KIND_OF_KEY.items()}

    def map_links(self, convert: Callable[[Mapping[str, LinkScore]], Mapping[str, LinkScore]]) -> LinkScores:
        links: dict[str, Any] = {key: convert(getattr(self, key)) for key in KIND_OF_KEY}
        return replace(self, **links)

    def with_current_ages(self, now: float) -> LinkScores:
        """Add the time since `time`, if it is set, to all ages."""
        elapsed = max(0.0, now - self.time) if self.time else 0.0
        if not elapsed:
            return self
        aged = self.map_links(lambda links: {name: replace(score, age=score.age + elapsed)
                                             for name, score in links.items()})
        return replace(aged, time=now)

    def to_text(self) -> str:
        """JSON text with one link per line and six significant digits; default values are left out."""
        def format_links(links: Mapping[str, LinkScore]) -> str:
            compact = {name: {key: float(f"{value:.6g}") if isinstance(value, float) else value
                              for key, value in vars(score).items()
                              if key == "samples" or value != getattr(LinkScore, key)}
                       for name, score in links.items()}
            return "{\n" + ",\n".join(f"  {json.dumps(name)}: {json.dumps(score)}"
                                      for name, score in compact.items()) + "}"

        without_links = records.to_json(self.map_links(lambda _: {}))
        settings = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in without_links.items()
                    if key not in KIND_OF_KEY]
        links = [f"{json.dumps(key)}: {format_links(getattr(self, key))}" for key in KIND_OF_KEY]
        return "{" + ",\n".join([*settings, *links]) + "}\n"

    @classmethod
    def from_json(cls, data: Any, on_reject: Callable[[str], None] = raise_rejection) -> LinkScores:
        """Inverse of `records.to_json`; every key is optional. InputError if the data is not valid.

        Args:
            on_reject: called with the reason for each invalid score; if it returns, the other scores are kept.
        """
        if isinstance(data, dict):
            data = {key: _valid_links(key, value, on_reject) if key in KIND_OF_KEY else value
                    for key, value in data.items()}
        return records.from_json(cls, data)


def inter_leaf_name(left: str, right: str) -> str:
    """Name of the path between two leaf zones."""
    return "|".join(sorted((left, right)))


def _valid_links(key: str, data: Any, on_reject: Callable[[str], None]) -> Any:
    if not isinstance(data, dict):
        return data
    scores = {}
    for name, score in data.items():
        try:
            check_link_name(name, KIND_OF_KEY[key], f"{key}: ")
            scores[name] = records.from_json(LinkScore, score, name)
        except InputError as error:
            on_reject(str(error))
    return scores
