"""`slurmdl links`: measure, store and show the state of the cluster's links; one module per subcommand."""

from __future__ import annotations

from slurmdl.cli.main import dispatch

#: subcommand -> its line in the help; `counters` runs every minute on every node, so its siblings are not imported
COMMANDS = {
    "probe": "measure links with a short job",
    "counters": "read this node's network counters",
    "agent": "answer probes on this node and probe other nodes periodically",
    "ingest": "store samples and publish link scores",
    "export": "export link scores as Prometheus text",
    "show": "show link scores as a table and a heat map, worst links first",
}


def run(argv: list[str]) -> int:
    return dispatch("slurmdl links", COMMANDS, argv, "slurmdl.cli.links")
