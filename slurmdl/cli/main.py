"""The program `slurmdl`: finds the command that was named and imports only that."""

from __future__ import annotations

import sys

from slurmdl import __version__
from slurmdl.errors import UsageError, report_error, sort_by_similarity

#: command -> its line in `slurmdl --help`; a table, so that the help imports nothing
COMMANDS = {
    "sbatch": "place a job and submit it with sbatch (also installed as dlsbatch)",
    "srun": "inside a job: run a program with its ranks placed",
    "place": "show which nodes and ranks a job would get, and why",
    "score": "measure, store and look at the state of links",
    "topology": "show and check the zones of the cluster",
    "train": "the built-in trainer, an MPI program",
    "bench": "compare frameworks, strategies, models and placements in jobs on your own cluster",
    "simulate": "predict step times of placements on clusters of any size, by SimGrid",
    "doctor": "what of the site's set-up works, what does not, and the mend",
    "sandbox": "a real Slurm cluster on this machine",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command line (without the program's name) and return its exit status."""
    words = sys.argv[1:] if argv is None else argv
    try:
        return _dispatch(words)
    except (Exception, KeyboardInterrupt) as error:
        return report_error(error)


def dlsbatch() -> int:
    """The program `dlsbatch`: `slurmdl sbatch` under a name of its own."""
    return main(["sbatch", *sys.argv[1:]])


def _dispatch(args: list[str]) -> int:
    command = args[0] if args else "--help"
    if command in ("--help", "-h", "help"):
        print(_usage_text())
        return 0
    if command in ("--version", "-V"):
        print(f"slurmdl {__version__}")
        return 0
    if command not in COMMANDS:
        raise UsageError(
            f"unknown command {command!r}; valid: {', '.join(sort_by_similarity(command, list(COMMANDS)))}")
    from importlib import import_module

    status: int = import_module(f"slurmdl.cli.{command}").run(args[1:])
    return status


def _usage_text() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {line}" for name, line in COMMANDS.items()]
    return "\n".join(["usage: slurmdl COMMAND [options]", "", *lines, "",
                      "`slurmdl COMMAND --help` says more; `slurmdl --version` prints the version."])
