"""measure links, store the samples, show link scores"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slurmdl.cli.main import dispatch
from slurmdl.errors import warn

if TYPE_CHECKING:
    from slurmdl.topology.topology import Topology

#: subcommand (a module of this package) -> its line in the help; only the module that runs is imported, since
#: `counters` runs every minute on every node
COMMANDS = {
    "probe": "measure links by a short job",
    "counters": "sample this node's kernel counters",
    "ingest": "store samples and publish link scores",
    "show": "show link scores as a table, worst links first",
}


def run(argv: list[str]) -> int:
    return dispatch("slurmdl links", COMMANDS, argv, "slurmdl.cli.links")


def load_topology_or_flat(path: str | None, nodes: Sequence[str], consequence: str) -> Topology:
    """The topology; if the cluster's cannot be read, one zone of these nodes, and a warning with the consequence."""
    from slurmdl.topology import load

    if path:
        return load.load_topology(path)
    topology, reason = load.topology_or_flat(nodes)
    if reason:
        warn(f"{reason}; {consequence}")
    return topology
