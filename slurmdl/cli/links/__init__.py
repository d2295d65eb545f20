"""measure links, store the samples, show link scores"""

from __future__ import annotations

from importlib import import_module

from slurmdl.errors import UsageError, sort_by_similarity

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
    command = argv[0] if argv else "--help"
    if command in ("--help", "-h"):
        width = max(map(len, COMMANDS))
        lines = [f"  {name:{width}}  {line}" for name, line in COMMANDS.items()]
        print("\n".join(["usage: slurmdl links COMMAND [options]", "", *lines, "",
                         "`slurmdl links COMMAND --help` describes the options."]))
        return 0
    if command not in COMMANDS:
        valid = ", ".join(sort_by_similarity(command, list(COMMANDS)))
        raise UsageError(f"slurmdl links: unknown command {command!r}; expected {valid}")
    status: int = import_module(f"slurmdl.cli.links.{command}").run(argv[1:])
    return status
