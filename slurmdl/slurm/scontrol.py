"""Run `scontrol show`: several reports from one process with one time limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slurmdl.slurm import process


def start_scontrol_show(reports: Sequence[str], with_topology: bool = False) -> Callable[[], process.CommandResult]:
    """Start `scontrol -o -d` and return at once; the returned function waits for the answer.

    The reports are requested on scontrol's standard input. A report that fails does not lose the others.

    Parameters
    ----------
    reports : arguments of `show`, for example "nodes".
    with_topology : also request topoconf (25.05 and newer) and topology, after the others.

    Raises
    ------
    UnavailableError : from the returned function, if scontrol is missing or hangs.
    """
    reports = [*reports, *("topoconf", "topology") * with_topology]
    return process.start_command(["scontrol", "-o", "-d"], stdin="".join(f"show {report}\n" for report in reports))
