"""All that a placement is made from, looked up once: nodes and zones in one query of Slurm, scores from a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slurmdl.config import Config
from slurmdl.errors import UnavailableError

if TYPE_CHECKING:
    from slurmdl.cluster.model import ClusterSnapshot
    from slurmdl.network.model import LinkScores
    from slurmdl.topology.model import Topology


@dataclass(frozen=True)
class Survey:
    """The cluster at one moment, and what is known or assumed of its links."""

    cluster: ClusterSnapshot
    topology: Topology
    scores: LinkScores


def take(config: Config, scores: str, partitions: Sequence[str] = ()) -> Survey:
    """Look once.

    Parameters
    ----------
    scores : the value of --dl-scores.
    partitions : those that the job names; the first decides which of several topologies holds.

    Raises
    ------
    UnavailableError : scontrol is missing, hangs or fails, or there is no topology.
    InputError : the topology or the scores are malformed.
    """
    from slurmdl.cluster import scontrol
    from slurmdl.topology import read
    from slurmdl.topology import scontrol as zones

    topologies = read.from_files()
    cluster, text = scontrol.fetch(with_topology=topologies is None)
    if topologies is None:
        if not text.strip():
            raise UnavailableError("no topology: neither a topology.yaml or topology.conf nor an answer of "
                                   "`scontrol show topology`")
        topologies = zones.parse_all(text)
    return Survey(cluster, topologies.of(cluster.topology_of(partitions)), link_scores(config, scores))


def link_scores(config: Config, scores: str) -> LinkScores:
    """The scores of a file, or the defaults of the configuration where `scores` is "auto" or "off".

    Raises
    ------
    InputError : the file cannot be read or is malformed.
    """
    from slurmdl.network.model import LinkScores

    if scores not in ("auto", "off"):
        from slurmdl.network import read

        return read.from_file(scores)
    default = LinkScores()
    return LinkScores(node_default=config.node_speed or default.node_default,
                      zone_default=config.zone_speed or default.zone_default,
                      delay_default=config.delay or default.delay_default)
