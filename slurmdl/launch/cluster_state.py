"""The inputs of placement, loaded once: nodes and zones by one query of Slurm, and link scores."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slurmdl.config import Config
from slurmdl.errors import InputError, UnavailableError, debug, warn
from slurmdl.slurm.slurm_conf import topology_file_path

if TYPE_CHECKING:
    from slurmdl.cluster.load import ClusterQuery
    from slurmdl.cluster.snapshot import ClusterSnapshot
    from slurmdl.links.link_scores import LinkScores
    from slurmdl.topology.topology import Topology


@dataclass(frozen=True)
class ClusterState:
    """Nodes, zones and link scores of the cluster at one moment, `age_s` before now."""

    cluster: ClusterSnapshot
    topology: Topology
    scores: LinkScores
    age_s: float = 0.0

    @property
    def age_text(self) -> str:
        """How old the state of the nodes is, or "" if Slurm was queried now."""
        return f"the nodes were read {self.age_s:.0f} s ago" if self.age_s else ""


def start_query(config: Config, max_age_s: float = 0.0) -> ClusterQuery:
    """Start the query of nodes, and of zones if no file has them; see `ClusterQuery`."""
    from slurmdl.cluster.load import ClusterQuery

    return ClusterQuery(config.cluster_backend, topology_file_path() is None, max_age_s)


def load_cluster_state(config: Config, source: str, partitions: Sequence[str] = (),
                       on_warning: Callable[[str], None] = warn, strict: bool = False,
                       query: ClusterQuery | None = None) -> ClusterState:
    """Load the state of the cluster.

    Raises UnavailableError if scontrol (or PySlurm) is missing, hangs or fails, or there is no topology, InputError
    if the topology is malformed.

    Args:
        source, on_warning, strict: see `load_link_scores`.
        partitions: of the job; the first one decides which of several topologies applies.
        query: result of `start_query`; None to start it.
    """
    query = query or start_query(config)
    # while the query runs, import modules and read files
    import slurmdl.cluster.reader
    import slurmdl.placement.place  # noqa: F401
    from slurmdl.topology import load

    topologies = load.load_slurm_topology_file()
    scores = load_link_scores(config, source, on_warning, strict, lambda: query.answer[0].name)
    cluster, output = query.answer
    if topologies is None:
        if not output.has_zones:
            raise UnavailableError("no topology: neither a topology.yaml or topology.conf nor an answer of "
                                   "`scontrol show topology`")
        from slurmdl.topology import scontrol_topology

        topologies = scontrol_topology.read_topologies(output)
    topology = topologies.get(cluster.topology_of(partitions))
    debug("cluster %s: %d nodes%s; %s: %d zones", cluster.name or "without a name", len(cluster.names),
          f", read {query.age_s:.0f} s ago" if query.age_s else "", topology.source,
          len(topology.zones))
    return ClusterState(cluster, topology, scores, query.age_s)


def load_link_scores(config: Config, source: str, on_warning: Callable[[str], None] = warn,
                     strict: bool = False, get_cluster: Callable[[], str] = str) -> LinkScores:
    """Load link scores in at most one second.

    Unusable scores are not an error: without them the topology decides, and a warning says why. Raises InputError if
    requested scores are unusable with `strict`.

    Args:
        source: value of --dl-link-scores.
        on_warning: receives that warning.
        strict: unusable scores are an error.
        get_cluster: see `load_from_sources`.
    """
    from slurmdl.links.score_sources import load_from_sources

    loaded = load_from_sources(config, source, os.environ, get_cluster)
    debug("link scores: %d links%s", loaded.scores.link_count,
          f" ({'; '.join(loaded.warnings)})" if loaded.warnings else "")
    if loaded.warnings and strict:
        raise InputError(loaded.warnings[0])
    if loaded.warnings:
        fallback = "the other scores decide" if loaded.scores.link_count else "the topology alone decides"
        on_warning(f"scores: {'; '.join(loaded.warnings)}; {fallback}")
    return loaded.scores
