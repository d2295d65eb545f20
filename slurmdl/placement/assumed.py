"""What predictions rest on: the bytes that are sent, and the links that were not measured."""

from __future__ import annotations

import numpy as np

from slurmdl import units
from slurmdl.dl_options import DlOptions, is_pattern
from slurmdl.network.capacity import OVERSUBSCRIPTION
from slurmdl.network.model import LinkScores
from slurmdl.topology.model import Topology


def text(dl: DlOptions, topology: Topology, scores: LinkScores) -> str:
    """The assumptions in a few words: "model 100 MB (default), links 10 Gbit/s (default), uplinks by LinkSpeed"."""
    return f"{sent(dl)}, {links(topology, scores)}"


def sent(dl: DlOptions) -> str:
    if dl.traffic and not is_pattern(dl.traffic):
        return f"traffic of {dl.traffic}"
    return f"model {units.size(dl.model_bytes)}{' (default)' if dl.model_bytes == DlOptions.model_bytes else ''}"


def links(topology: Topology, scores: LinkScores) -> str:
    return f"{unmeasured(topology, scores)}{', or as measured' if scores.measured else ''}"


def unmeasured(topology: Topology, scores: LinkScores) -> str:
    """What is assumed of the links of nodes, and of the uplinks of zones that have a zone above them."""
    default = " (default)" if scores.node_default == LinkScores.node_default else ""
    said = f"links {units.rate(scores.node_default)}{default}"
    below = topology.parent >= 0
    if below.any():
        known = np.isfinite(topology.speed[below])
        other = "/".join(map(units.rate, scores.zone_default)) or f"1/{OVERSUBSCRIPTION:g} of their nodes"
        said += f", uplinks {'by LinkSpeed' if known.all() else f'by LinkSpeed or {other}' if known.any() else other}"
    return said
