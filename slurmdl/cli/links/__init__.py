"""measure links, store the samples, show link scores"""

from __future__ import annotations

from slurmdl.cli.main import dispatch

#: subcommand (a module of this package) -> its line in the help; only the module that runs is imported, since
#: `counters` runs every minute on every node
COMMANDS = {
    "probe": "measure links by a short job",
    "counters": "sample this node's kernel counters",
    "agent": "answer probes on this node and periodically probe others",
    "ingest": "store samples and publish link scores",
    "export": "export link scores as Prometheus text",
    "show": "show link scores as a table and a heat map, worst links first",
}


def run(argv: list[str]) -> int:
    return dispatch("slurmdl links", COMMANDS, argv, "slurmdl.cli.links")
