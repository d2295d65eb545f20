"""slurmdl itself, Slurm's commands, the controller and its release, the clocks."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable, Mapping
from datetime import datetime

import slurmdl
from slurmdl.doctor import node_facts
from slurmdl.doctor.finding import Finding, failure, ok, warning
from slurmdl.doctor.site import Site
from slurmdl.errors import InputError
from slurmdl.links.aggregate import MAX_CLOCK_SKEW_S
from slurmdl.slurm import process
from slurmdl.slurm.hostlist import fold_hostlist

#: what submissions and steps call
SLURM_CLIENTS = ("sbatch", "srun", "scontrol", "squeue")
#: releases of Slurm that slurmdl is tested with
TESTED_RELEASES = ("22.05", "24.11", "26.05")
#: seconds that clocks may be apart; scores from further in the future than SKEW are refused
MAX_CLOCK_OFFSET_S = 2.0


def check_clients(site: Site) -> Finding:
    missing = [name for name in SLURM_CLIENTS if shutil.which(name, path=site.environ.get("PATH")) is None]
    if missing:
        return failure(f"{', '.join(missing)}: not found in PATH",
                       "install Slurm's commands (Debian: slurm-client), or put their directory into PATH")
    return ok(
        f"slurmdl {slurmdl.__version__}, Python {platform.python_version()}; {', '.join(SLURM_CLIENTS)} are in PATH")


def check_controller(site: Site) -> Finding:
    return ok(f"{site.slurm_config_values.get('ClusterName', 'the controller')} answers")


def check_release(site: Site) -> Finding:
    """A command of another release than the controller's works for some releases only (Slurm's upgrade guide)."""
    client = process.check_output(["scontrol", "--version"], env=site.environ).split()[-1]
    server = site.slurm_config_values["SLURM_VERSION"]
    if release_series(client) != release_series(server):
        return warning(f"the commands here are of Slurm {client}, the controller is of {server}",
                       f"install Slurm's commands of {release_series(server)} here")
    return ok(f"Slurm {server}" + ("" if release_series(server)
              in TESTED_RELEASES else f"; tested are {', '.join(TESTED_RELEASES)}"))


def check_controller_clock(site: Site) -> Finding:
    return _compare_clocks({"the controller": _min_clock_offset(
        _controller_time(site.slurm_config_text.value), 1.0, site.slurm_config_text)})


def check_node_clocks(site: Site) -> Finding:
    return _compare_clocks({node: _min_clock_offset(float(told), 0.0, site.facts)
                           for node, told in site.fact("clock").items()})


def _compare_clocks(offsets: Mapping[str, float]) -> Finding:
    late = {name: seconds for name, seconds in offsets.items() if abs(seconds) > MAX_CLOCK_OFFSET_S}
    if not late:
        return ok(f"{fold_hostlist(offsets)}: apart from the clock here by no more than {MAX_CLOCK_OFFSET_S:g} s")
    worst = max(late.values(), key=abs)
    grade: Callable[[str, str], Finding] = failure if abs(worst) > MAX_CLOCK_SKEW_S else warning
    return grade(f"{fold_hostlist(late)}: {abs(worst):.0f} s {'ahead of' if worst > 0 else 'behind'} the clock here",
                 "let one time server set all clocks; chronyc tracking shows how far each is")


def release_series(version: str) -> str:
    """`22.05` of `22.05.8`."""
    return ".".join(version.split(".")[:2])


def _controller_time(text: str) -> float:
    """The controller's clock in the first line of `scontrol show config`, a whole second."""
    word = text.partition("\n")[0].rpartition(" ")[2]
    try:
        return datetime.fromisoformat(word).timestamp()
    except ValueError as error:
        raise InputError(f"scontrol show config: no time in its first line, but {word!r}") from error


def _min_clock_offset(remote_time: float, resolution_s: float, timed: node_facts.TimedResult[object]) -> float:
    """Seconds that a clock is ahead, at least: it was read between two moments of the clock here.

    Parameters
    ----------
    coarse : seconds by which it may be later than it told.
    """
    return max(0.0, remote_time - timed.after) + min(0.0, remote_time + resolution_s - timed.before)
