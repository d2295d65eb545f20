"""What is known of the links now, and what is assumed where nothing is known."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.errors import InputError
from slurmdl.links.samples import MAX_BANDWIDTH, SOURCES, is_link_name, short_repr

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LinkScore:
    """The state of one link.

    Attributes
    ----------
    throughput : bytes/s; None where it was not measured.
    delay : seconds, round trip, median; 0 where it was not measured.
    loss : fraction of packets lost, 0 to 1.
    age : seconds since the newest sample.
    samples : how many samples stand behind it.
    delay_tail : seconds, round trip, 99th percentile; 0 where it was not measured.
    rdma : whether it is of an RDMA fabric, where no TCP answers losses.
    source : where it was measured last, one of samples.SOURCES, "counters" only where nothing else is known; ""
        where that is not said.
    """

    throughput: float | None = None
    rtt: float = 0.0
    loss: float = 0.0
    age: float = 0.0
    samples: int = 1
    rtt_p99: float = 0.0
    rdma: bool = False
    source: str = ""

    @classmethod
    def from_json(cls, name: str, data: Any) -> LinkScore:
        """The score of the link of that name; InputError names what does not fit."""
        if not isinstance(data, dict):
            raise InputError(f"{name}: an object expected, not {type(data).__name__}")
        for key in data:
            if key not in _VALID_RANGES:
                raise InputError(f"{name}: unknown key {key!r}; valid: {', '.join(_VALID_RANGES)}")
        for key, value in data.items():
            valid, fits = _VALID_RANGES[key]
            if not fits(value):
                raise InputError(f"{name}: {key} {short_repr(value)} is not valid; valid: {valid}")
        return cls(**data)


def _range_check(low: float, high: float, above: bool = False) -> Callable[[Any], bool]:
    """Whether a value is a number of the range."""
    def fits(value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            return False
        return not above or value > low

    return fits


#: seconds that no round trip takes, and seconds after which a measurement is history
_MAX_RTT_S, _MAX_AGE_S = 60.0, 1e10

_is_bandwidth = _range_check(0, MAX_BANDWIDTH, above=True)
_RTT_RANGE = f"a number from 0 to {_MAX_RTT_S:g}", _range_check(0, _MAX_RTT_S)
#: key of a score -> what is valid in words, and whether a value is
_VALID_RANGES: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "throughput": (f"a number above 0, up to {MAX_BANDWIDTH:g}, or null", lambda value: value is None or _is_bandwidth(value)),
    "delay": _RTT_RANGE, "delay_tail": _RTT_RANGE,
    "loss": ("a number from 0 to 1", _range_check(0, 1)),
    "age": (f"a number from 0 to {_MAX_AGE_S:g}", _range_check(0, _MAX_AGE_S)),
    "samples": ("a whole number from 1", lambda value: type(value) is int and 1 <= value < 2**53),
    "rdma": ("true, false", lambda value: isinstance(value, bool)),
    "source": (", ".join(SOURCES), lambda value: isinstance(value, str) and value in ("", *SOURCES)),
}


def raise_rejection(reason: str) -> None:
    """What readers do with a score that is not valid where nothing else is wanted: InputError."""
    raise InputError(reason)


@dataclass(frozen=True)
class MetricWeights:
    """How much each figure counts in the weighted sum (see figure.weighted)."""

    throughput: float = 1.0
    rtt: float = 1.0
    loss: float = 1.0


@dataclass(frozen=True, eq=False)
class ScoreArrays:
    """The scores of links of one kind as arrays, each of shape (links,).

    Attributes
    ----------
    index : name of the link -> its place in the arrays.
    throughput : bytes/s, NaN where it was not measured.
    delay : seconds, round trip, NaN where it was not measured.
    loss, age : as in LinkScore.
    rdma : whether no TCP answers its losses.
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
        throughput, delay, loss, age, rdma = np.array(rows, float).reshape(-1, 5).T
        return cls(dict(zip(scores, range(len(scores)), strict=True)), throughput, delay, loss, age, rdma > 0)


@dataclass(frozen=True)
class LinkScores:
    """Scores of the links of nodes (node <-> its leaf), of zones (zone <-> the zone above), and of the ways between
    pairs of leaf zones.

    A link that is missing here has `LinkSpeed` of the topology, else the default of its level.

    Attributes
    ----------
    nodes, zones : name -> LinkScore; empty where nothing was measured.
    trunks : "leafA|leafB", the names sorted -> LinkScore of the way from one leaf zone to the other.
    node_default : bytes/s of a node's link.
    zone_default : bytes/s of a zone's uplink, by level (index 0 = leaf); the last entry serves all above. ()
        where nothing is set: half of what the nodes below can send together, a 2:1 oversubscribed tree.
    delay_default : seconds that one message takes at each level crossed.
    time : seconds since the epoch when the ages were right; 0 where they are right now.
    half_life : seconds after which a score counts half as much as the default of its link; None for no decay.
    margin : fraction; links whose figures differ by less count as equal, since they are that noisy. 0 for the exact
        figures.
    weights : of the weighted sum; None where the figures count by what they do to a transfer (see capacity).
    """

    nodes: Mapping[str, LinkScore] = field(default_factory=dict)
    zones: Mapping[str, LinkScore] = field(default_factory=dict)
    default_node_bandwidth: float = 1.25e9
    default_zone_bandwidth: tuple[float, ...] = ()
    default_latency: float = 2e-5
    inter_leaf: Mapping[str, LinkScore] = field(default_factory=dict)
    time: float = 0.0
    half_life: float | None = None
    tolerance: float = 0.0
    weights: MetricWeights | None = None

    @cached_property
    def node_table(self) -> ScoreArrays:
        return ScoreArrays.from_scores(self.nodes)

    @cached_property
    def zone_table(self) -> ScoreArrays:
        return ScoreArrays.from_scores(self.zones)

    @cached_property
    def inter_leaf_table(self) -> ScoreArrays:
        return ScoreArrays.from_scores(self.inter_leaf)

    @property
    def link_count(self) -> int:
        """Number of links with a score."""
        return len(self.nodes) + len(self.zones) + len(self.inter_leaf)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self) -> str:
        """The scores as a file of JSON, a link on a line, to six digits; what a score does not say is left out."""
        def block(links: Mapping[str, LinkScore]) -> str:
            said = {name: {key: float(f"{value:.6g}") if isinstance(value, float) else value
                           for key, value in vars(score).items()
                           if key == "samples" or value != getattr(LinkScore, key)} for name, score in links.items()}
            return "{\n" + ",\n".join(f"  {json.dumps(name)}: {json.dumps(said[name])}" for name in said) + "}"

        links = {"nodes": self.nodes, "zones": self.zones, "trunks": self.inter_leaf}
        rest = {key: value for key, value in self.to_json().items() if key not in links}
        return "{" + ",\n".join([f"{json.dumps(key)}: {json.dumps(value)}" for key, value in rest.items()]
                                + [f"{json.dumps(key)}: {block(each)}" for key, each in links.items()]) + "}\n"

    @classmethod
    def from_json(cls, data: Any, on_reject: Callable[[str], None] = raise_rejection) -> LinkScores:
        """The inverse of `to_json`; every key may be absent. InputError names what does not fit.

        Parameters
        ----------
        refuse : called with what is wrong with the score of a link; where it returns, the rest is kept.
        """
        if not isinstance(data, dict):
            raise InputError(f"an object expected, not {type(data).__name__}")
        known = {entry.name for entry in fields(cls)}
        for key in data:
            if key not in known:
                raise InputError(f"unknown key {key!r}; valid: {', '.join(sorted(known))}")
        found: dict[str, Any] = {key: _parse_links(key, data[key], on_reject) for key in ("nodes", "zones", "trunks")
                                 if key in data}
        for key in ("node_default", "delay_default", "time", "half_life", "margin"):
            if key in data:
                found[key] = _parse_number(key, data[key], allow_zero=key in ("delay_default", "time", "margin"),
                                     allow_none=key == "half_life")
        if "zone_default" in data:
            if not isinstance(data["zone_default"], (list, tuple)):
                raise InputError("zone_default: a list expected")
            found["zone_default"] = tuple(_parse_number("zone_default", each) for each in data["zone_default"])
        if data.get("weights") is not None:
            found["weights"] = _parse_weights(data["weights"])
        return cls(**found)


def inter_leaf_name(left: str, right: str) -> str:
    """Name of the way between two leaf zones."""
    return "|".join(sorted((left, right)))


def _parse_links(key: str, data: Any, on_reject: Callable[[str], None]) -> dict[str, LinkScore]:
    if not isinstance(data, dict):
        raise InputError(f"{key}: an object expected, not {type(data).__name__}")
    found = {}
    for name, score in data.items():
        try:
            if not is_link_name(name, key[:-1]):
                raise InputError(f"{key}: {short_repr(name)} is not valid; valid: a {key[:-1]}'s name"
                                 + (", as A|B in sorted order" if key == "trunks" else ""))
            found[name] = LinkScore.from_json(name, score)
        except InputError as error:
            on_reject(str(error))
    return found


def _parse_number(key: str, value: Any, allow_zero: bool = False, allow_none: bool = False) -> float | None:
    if allow_none and value is None:
        return None
    if not _range_check(0, MAX_BANDWIDTH, above=not allow_zero)(value):
        raise InputError(f"{key} {short_repr(value)} is not valid; valid: a number "
                         f"{'from' if allow_zero else 'above'} 0")
    return float(value)


def _parse_weights(data: Any) -> MetricWeights:
    try:
        weights = MetricWeights(**data)
    except TypeError as error:
        raise InputError(f"weights: {error}") from error
    for key, value in asdict(weights).items():
        _parse_number(f"weights.{key}", value, allow_zero=True)
    return weights
