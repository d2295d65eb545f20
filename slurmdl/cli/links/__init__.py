"""measure, store and look at the state of the cluster's links"""

from __future__ import annotations

from importlib import import_module

from slurmdl.errors import UsageError, sort_by_similarity

#: subcommand -> its line in the help; `collect` runs every minute on every node, so nothing else is imported for it
COMMANDS = {
    "probe": "measure links by a short job",
    "collect": "read this node's own counters",
    "serve": "answer probes on this node, and probe others now and then",
    "ingest": "store samples and publish the scores made of them",
    "export": "the scores as Prometheus text",
    "show": "the scores as a table and a heat map, worst links first",
}


def run(argv: list[str]) -> int:
    command = argv[0] if argv else "--help"
    if command in ("--help", "-h"):
        width = max(map(len, COMMANDS))
        lines = [f"  {name:{width}}  {line}" for name, line in COMMANDS.items()]
        print("\n".join(["usage: slurmdl links COMMAND [options]", "", *lines, "",
                         "`slurmdl links COMMAND --help` says more."]))
        return 0
    if command not in COMMANDS:
        valid = ", ".join(sort_by_similarity(command, list(COMMANDS)))
        raise UsageError(f"slurmdl links: unknown command {command!r}; valid: {valid}")
    status: int = import_module(f"slurmdl.cli.links.{command}").run(argv[1:])
    return status


# MERGED: The subcommands of `slurmdl links`, one file each.