"""All that a placement is made from, looked up once: nodes and zones in one query of Slurm, and scores."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slurmdl.config import Config
from slurmdl.errors import InputError, UnavailableError, warn

if TYPE_CHECKING:
    from slurmdl.cluster.snapshot import ClusterSnapshot
    from slurmdl.links.link_scores import LinkScores
    from slurmdl.topology.topology import Topology


@dataclass(frozen=True)
class ClusterState:
    """The cluster at one moment, and what is known or assumed of its links."""

    cluster: ClusterSnapshot
    topology: Topology
    scores: LinkScores


def load_cluster_state(config: Config, source: str, partitions: Sequence[str] = (), on_warning: Callable[[str], None] = warn,
         strict: bool = False) -> ClusterState:
    """Look once.

    Parameters
    ----------
    scores : the value of --dl-link-scores.
    partitions : those that the job names; the first decides which of several topologies holds.
    say, strict : see `link_scores`.

    Raises
    ------
    UnavailableError : scontrol, or PySlurm in its place, is missing, hangs or fails, or there is no topology.
    InputError : the topology is malformed.
    """
    from slurmdl.cluster.load import start_cluster_query
    from slurmdl.slurm.slurm_conf import topology_file_path

    # while the controller answers, import the modules that need the answer and read what does not
    answer = start_cluster_query(config.cluster_backend, with_topology=topology_file_path() is None)

    import slurmdl.cluster.scontrol_parser
    import slurmdl.placement.place  # noqa: F401
    from slurmdl.topology import load
    from slurmdl.topology import scontrol_topology as zones

    topologies = load.load_slurm_topology_file()
    links = load_link_scores(config, source, on_warning, strict)
    cluster, text = answer()
    if topologies is None:
        if not text.strip():
            raise UnavailableError("no topology: neither a topology.yaml or topology.conf nor an answer of "
                                   "`scontrol show topology`")
        topologies = zones.parse_scontrol_topologies(text)
    return ClusterState(cluster, topologies.get(cluster.topology_of(partitions)), links)


def load_link_scores(config: Config, source: str, on_warning: Callable[[
                     str], None] = warn, strict: bool = False) -> LinkScores:
    """What is known of the links, from the sources that --dl-link-scores names, in at most a second.

    Scores that cannot be used are no fault: without them the topology decides, and one line says why.

    Parameters
    ----------
    scores : the value of --dl-link-scores.
    say : takes that line.
    strict : scores that cannot be used are an error.

    Raises
    ------
    InputError : strict, and scores that were asked for cannot be used.
    """
    from slurmdl.links.score_sources import load_from_sources

    found = load_from_sources(config, source, os.environ)
    if found.warnings and strict:
        raise InputError(found.warnings[0])
    if found.warnings:
        rest = "the other scores decide" if found.scores.link_count else "the topology alone decides"
        on_warning(f"scores: {'; '.join(found.warnings)}; {rest}")
    return found.scores
