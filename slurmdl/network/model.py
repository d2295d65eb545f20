"""What is known of the links now, and what is assumed where nothing is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from slurmdl.errors import InputError


@dataclass(frozen=True)
class LinkScore:
    """The state of one link.

    Attributes
    ----------
    throughput : bytes/s.
    delay : seconds, round trip.
    loss : fraction of packets lost, 0 to 1.
    age : seconds since the newest sample.
    samples : how many samples stand behind it.
    """

    throughput: float
    delay: float = 0.0
    loss: float = 0.0
    age: float = 0.0
    samples: int = 1


@dataclass(frozen=True)
class LinkScores:
    """Scores of the links of nodes (node <-> its leaf) and of zones (zone <-> the zone above).

    A link that is missing here has `LinkSpeed` of the topology, else the default of its level.

    Attributes
    ----------
    nodes, zones : name -> LinkScore; empty where nothing was measured.
    node_default : bytes/s of a node's link.
    zone_default : bytes/s of a zone's uplink, by level (index 0 = leaf); the last entry serves all above. ()
        where nothing is set: half of what the nodes below can send together, a 2:1 oversubscribed tree.
    delay_default : seconds that one message takes at each level crossed.
    """

    nodes: Mapping[str, LinkScore] = field(default_factory=dict)
    zones: Mapping[str, LinkScore] = field(default_factory=dict)
    node_default: float = 1.25e9
    zone_default: tuple[float, ...] = ()
    delay_default: float = 2e-5

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> LinkScores:
        """The inverse of `to_json`; every key may be absent. InputError names what does not fit."""
        try:
            known = {k: v for k, v in data.items() if k not in ("nodes", "zones", "zone_default")}
            scores = cls(nodes={k: LinkScore(**v) for k, v in data.get("nodes", {}).items()},
                         zones={k: LinkScore(**v) for k, v in data.get("zones", {}).items()},
                         zone_default=tuple(data.get("zone_default", cls.zone_default)), **known)
        except (TypeError, AttributeError) as error:
            raise InputError(f"scores JSON: malformed ({type(error).__name__}: {error})") from error
        for kind in (scores.nodes, scores.zones):
            for name, score in kind.items():
                numbers = (score.throughput, score.delay, score.loss, score.age)
                if not all(isinstance(n, (int, float)) for n in numbers) or not (
                        score.throughput > 0 and score.delay >= 0 and 0 <= score.loss <= 1):
                    raise InputError(f"scores JSON: {name}: throughput > 0, delay >= 0 and 0 <= loss <= 1 expected")
        return scores
