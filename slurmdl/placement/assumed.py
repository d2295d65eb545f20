"""What predictions rest on: the bytes that are sent, and the links that were not measured."""

from __future__ import annotations

import numpy as np

from slurmdl import units
from slurmdl.dl_options import DlOptions, is_comm_pattern
from slurmdl.network.capacity import OVERSUBSCRIPTION
from slurmdl.network.model import LinkScores
from slurmdl.topology.model import Topology


def format_assumptions(dl: DlOptions, topology: Topology, scores: LinkScores) -> str:
    """The assumptions in a few words: "model 100 MB (default), links 10 Gbit/s (default), uplinks by LinkSpeed"."""
    return f"{traffic_assumption(dl)}, {link_assumption(topology, scores)}"


def traffic_assumption(dl: DlOptions) -> str:
    if dl.comm_pattern and not is_comm_pattern(dl.comm_pattern):
        return f"traffic of {dl.comm_pattern}"
    return f"model {units.format_bytes(dl.model_bytes)}{' (default)' if dl.model_bytes == DlOptions.model_bytes else ''}"


def link_assumption(topology: Topology, scores: LinkScores) -> str:
    return f"{unmeasured_link_assumption(topology, scores)}{', or as measured' if scores.link_count else ''}"


def unmeasured_link_assumption(topology: Topology, scores: LinkScores) -> str:
    """What is assumed of the links of nodes, and of the uplinks of zones that have a zone above them."""
    default = " (default)" if scores.default_node_bandwidth == LinkScores.default_node_bandwidth else ""
    said = f"links {units.format_bit_rate(scores.default_node_bandwidth)}{default}"
    below = topology.parent >= 0
    if below.any():
        known = np.isfinite(topology.uplink_bandwidth[below])
        other = "/".join(map(units.format_bit_rate, scores.default_zone_bandwidth)
                         ) or f"1/{OVERSUBSCRIPTION:g} of their nodes"
        said += f", uplinks {'by LinkSpeed' if known.all() else f'by LinkSpeed or {other}' if known.any() else other}"
    return said
