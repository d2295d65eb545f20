"""All that a placement is made from, looked up once: nodes and zones in one query of Slurm, and scores."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slurmdl.config import Config
from slurmdl.errors import InputError, UnavailableError, warn

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


def take(config: Config, scores: str, partitions: Sequence[str] = (), say: Callable[[str], None] = warn,
         strict: bool = False) -> Survey:
    """Look once.

    Parameters
    ----------
    scores : the value of --dl-scores.
    partitions : those that the job names; the first decides which of several topologies holds.
    say, strict : see `link_scores`.

    Raises
    ------
    UnavailableError : scontrol, or PySlurm in its place, is missing, hangs or fails, or there is no topology.
    InputError : the topology is malformed.
    """
    from slurmdl.cluster.read import start
    from slurmdl.slurm.conf_files import topology_file_path

    # while the controller answers, import the modules that need the answer and read what does not
    answer = start(config.cluster_backend, with_topology=topology_file_path() is None)

    import slurmdl.cluster.scontrol
    import slurmdl.placement.place  # noqa: F401
    from slurmdl.topology import read
    from slurmdl.topology import scontrol as zones

    topologies = read.from_files()
    links = link_scores(config, scores, say, strict)
    cluster, text = answer()
    if topologies is None:
        if not text.strip():
            raise UnavailableError("no topology: neither a topology.yaml or topology.conf nor an answer of "
                                   "`scontrol show topology`")
        topologies = zones.parse_all(text)
    return Survey(cluster, topologies.of(cluster.topology_of(partitions)), links)


def link_scores(config: Config, scores: str, say: Callable[[str], None] = warn, strict: bool = False) -> LinkScores:
    """What is known of the links, from the sources that --dl-scores names, in at most a second.

    Scores that cannot be used are no fault: without them the topology decides, and one line says why.

    Parameters
    ----------
    scores : the value of --dl-scores.
    say : takes that line.
    strict : scores that cannot be used are an error.

    Raises
    ------
    InputError : strict, and scores that were asked for cannot be used.
    """
    from slurmdl.network.live import live

    found = live(config, scores, os.environ)
    if found.remarks and strict:
        raise InputError(found.remarks[0])
    if found.remarks:
        rest = "the other scores decide" if found.scores.measured else "the topology alone decides"
        say(f"scores: {'; '.join(found.remarks)}; {rest}")
    return found.scores
