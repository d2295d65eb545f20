"""The program `slurmdl`: import and run the module of one command."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module

from slurmdl.errors import UsageError, report_error, sort_by_similarity

#: command -> its line in `slurmdl --help`; a table, so that the help imports nothing
COMMANDS = {
    "sbatch": "place a job and submit it with sbatch (also installed as dlsbatch)",
    "srun": "inside a job: run a program with its ranks placed (also installed as dlsrun)",
    "env": "in a job: print the planned ranks as shell variables, for launchers that you start yourself",
    "verify": "as the program of a step: check that every rank runs on its planned node",
    "preflight": "in a job: check its nodes and links before the program starts",
    "requeue": "requeue a job without bad nodes",
    "place": "show the nodes and ranks that a job would get, and the reasons",
    "links": "measure, store and show the state of the cluster's links",
    "topology": "show and check the zones of the cluster",
    "train": "the built-in trainer, an MPI program",
    "bench": "compare frameworks, strategies, models and placements in jobs on your own cluster",
    "simulate": "predict step times of placements on clusters of any size with SimGrid",
    "audit": "show how past jobs lay in the topology, and what better nodes would have gained",
    "replay": "replay a job trace with nodes chosen by Slurm, by slurmdl and by both",
    "doctor": "check the site's setup and suggest fixes",
    "sandbox": "a real Slurm cluster on this machine",
}

#: command -> module and function, if not slurmdl.cli.COMMAND and run
_ENTRY_POINTS = {
    "sbatch": ("slurmdl.launch.sbatch", "run_sbatch"), "train": ("slurmdl.train.__main__", "main"),
    "srun": ("slurmdl.launch.srun", "run_srun"), "env": ("slurmdl.cli.step", "env"),
    "verify": ("slurmdl.cli.step", "verify"),
    "preflight": ("slurmdl.cli.health", "preflight"), "requeue": ("slurmdl.cli.health", "requeue"),
    "audit": ("slurmdl.cli.history", "audit"), "replay": ("slurmdl.cli.history", "replay"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command line (without the program's name) and return its exit status.

    None is that of this process, which then ends.
    """
    args = sys.argv[1:] if argv is None else argv
    if argv is None and args[:1] in (["sbatch"], ["srun"]):
        gc.disable()  # they start a program soon, and collections take 7 % of their time until then
    _restore_lc_ctype()
    try:
        if args[:1] in (["--version"], ["-V"]):
            from slurmdl.commit import describe_version
            from slurmdl.text import print_escaped

            print_escaped(f"slurmdl {describe_version()}")
            return 0
        return _run_command(args)
    except (Exception, KeyboardInterrupt) as error:
        return report_error(error)


def _restore_lc_ctype() -> None:
    """Set LC_CTYPE as this process got it: in the C locale Python sets it (PEP 538), and jobs would inherit that."""
    if "LC_CTYPE" not in os.environ:
        return
    with suppress(OSError), open("/proc/self/environ", "rb") as file:
        values = [entry.partition(b"=")[2] for entry in file.read().split(b"\0") if entry.startswith(b"LC_CTYPE=")]
        if values:
            os.environb[b"LC_CTYPE"] = values[0]
        else:
            del os.environ["LC_CTYPE"]


def dlsbatch() -> int:
    """The program `dlsbatch`: short for `slurmdl sbatch`."""
    sys.argv.insert(1, "sbatch")
    return main()


def dlsrun() -> int:
    """The program `dlsrun`: short for `slurmdl srun`."""
    sys.argv.insert(1, "srun")
    return main()


def _run_command(args: list[str]) -> int:
    """Run the command `args[0]`, or print the list of the commands; return the exit status."""
    command = args[0] if args else "--help"
    if command in ("--help", "-h", "help"):
        width = max(map(len, COMMANDS))
        lines = [f"  {name:{width}}  {line}" for name, line in COMMANDS.items()]
        print("\n".join(["usage: slurmdl COMMAND [options]", "", *lines, "",
                         "`slurmdl COMMAND --help` lists its options."]))
        return 0
    if command not in COMMANDS:
        similar = ", ".join(sort_by_similarity(command, list(COMMANDS)))
        raise UsageError(f"slurmdl {command}: unknown command; expected {similar}")
    return entry_point(command)(args[1:])


def entry_point(command: str) -> Callable[[list[str]], int]:
    """The function of a command: it gets the arguments, and returns the exit status."""
    module, function = _ENTRY_POINTS.get(command, (f"slurmdl.cli.{command}", "run"))
    found: Callable[[list[str]], int] = getattr(import_module(module), function)
    return found
