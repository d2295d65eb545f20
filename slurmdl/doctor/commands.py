"""slurmdl itself, Slurm's commands, the controller and its release, the clocks."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable, Mapping
from datetime import datetime

import slurmdl
from slurmdl import process
from slurmdl.doctor import probe
from slurmdl.doctor.finding import Finding, failure, ok, warning
from slurmdl.doctor.site import Site
from slurmdl.errors import InputError
from slurmdl.network.hygiene import SKEW
from slurmdl.topology.hostlist import fold

#: what submissions and steps call
CLIENTS = ("sbatch", "srun", "scontrol", "squeue")
#: releases of Slurm that slurmdl is tested with
TESTED = ("22.05", "24.11", "26.05")
#: seconds that clocks may be apart; scores from further in the future than SKEW are refused
APART = 2.0


def clients(site: Site) -> Finding:
    missing = [name for name in CLIENTS if shutil.which(name, path=site.environ.get("PATH")) is None]
    if missing:
        return failure(f"{', '.join(missing)}: not found in PATH",
                       "install Slurm's commands (Debian: slurm-client), or put their directory into PATH")
    return ok(f"slurmdl {slurmdl.__version__}, Python {platform.python_version()}; {', '.join(CLIENTS)} are in PATH")


def controller(site: Site) -> Finding:
    return ok(f"{site.settings.get('ClusterName', 'the controller')} answers")


def release(site: Site) -> Finding:
    """A command of another release than the controller's works for some releases only (Slurm's upgrade guide)."""
    client = process.query(["scontrol", "--version"], env=site.environ).split()[-1]
    server = site.settings["SLURM_VERSION"]
    if series(client) != series(server):
        return warning(f"the commands here are of Slurm {client}, the controller is of {server}",
                       f"install Slurm's commands of {series(server)} here")
    return ok(f"Slurm {server}" + ("" if series(server) in TESTED else f"; tested are {', '.join(TESTED)}"))


def controllers_clock(site: Site) -> Finding:
    return _clocks({"the controller": _apart(_as_of(site.answer.value), 1.0, site.answer)})


def nodes_clocks(site: Site) -> Finding:
    return _clocks({node: _apart(float(told), 0.0, site.reports) for node, told in site.told("clock").items()})


def _clocks(apart: Mapping[str, float]) -> Finding:
    late = {name: seconds for name, seconds in apart.items() if abs(seconds) > APART}
    if not late:
        return ok(f"{fold(apart)}: apart from the clock here by no more than {APART:g} s")
    worst = max(late.values(), key=abs)
    grade: Callable[[str, str], Finding] = failure if abs(worst) > SKEW else warning
    return grade(f"{fold(late)}: {abs(worst):.0f} s {'ahead of' if worst > 0 else 'behind'} the clock here",
                 "let one time server set all clocks; chronyc tracking shows how far each is")


def series(version: str) -> str:
    """`22.05` of `22.05.8`."""
    return ".".join(version.split(".")[:2])


def _as_of(text: str) -> float:
    """The controller's clock in the first line of `scontrol show config`, a whole second."""
    word = text.partition("\n")[0].rpartition(" ")[2]
    try:
        return datetime.fromisoformat(word).timestamp()
    except ValueError as error:
        raise InputError(f"scontrol show config: no time in its first line, but {word!r}") from error


def _apart(told: float, coarse: float, asked: probe.Timed[object]) -> float:
    """Seconds that a clock is ahead, at least: it was read between two moments of the clock here.

    Parameters
    ----------
    coarse : seconds by which it may be later than it told.
    """
    return max(0.0, told - asked.after) + min(0.0, told + coarse - asked.before)
