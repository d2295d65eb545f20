"""Checks of slurmdl itself, Slurm's commands, the controller and its release, and clocks."""

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

SLURM_CLIENTS = ("sbatch", "srun", "scontrol", "squeue")
TESTED_RELEASES = ("22.05", "24.11", "26.05")
#: link scores from more than MAX_CLOCK_SKEW_S in the future are rejected
MAX_CLOCK_OFFSET_S = 2.0


def check_clients(site: Site) -> Finding:
    missing = [name for name in SLURM_CLIENTS if shutil.which(name, path=site.environ.get("PATH")) is None]
    if missing:
        return failure(f"{', '.join(missing)}: not found in PATH",
                       "install Slurm's commands (Debian: slurm-client), or add their directory to PATH")
    return ok(f"slurmdl {slurmdl.__version__}, Python {platform.python_version()}; "
              f"{', '.join(SLURM_CLIENTS)} are in PATH")


def check_controller(site: Site) -> Finding:
    return ok(f"{site.slurm_config_values.get('ClusterName', 'the controller')} responds")


def check_release(site: Site) -> Finding:
    """Slurm supports commands of another release than the controller's for some releases only (upgrade guide)."""
    client = process.check_output(["scontrol", "--version"], env=site.environ).split()[-1]
    server = site.slurm_config_values["SLURM_VERSION"]
    if release_series(client) != release_series(server):
        return warning(f"commands of Slurm {client} on this host, controller of Slurm {server}",
                       f"install the commands of Slurm {release_series(server)} on this host")
    is_tested = release_series(server) in TESTED_RELEASES
    return ok(f"Slurm {server}" + ("" if is_tested else f"; tested with {', '.join(TESTED_RELEASES)}"))


def check_controller_clock(site: Site) -> Finding:
    return _compare_clocks({"the controller": _min_clock_offset(
        _controller_time(site.slurm_config_text.value), 1.0, site.slurm_config_text)})


def check_node_clocks(site: Site) -> Finding:
    return _compare_clocks({node: _min_clock_offset(float(time), 0.0, site.facts)
                           for node, time in site.fact("clock").items()})


def _compare_clocks(offsets: Mapping[str, float]) -> Finding:
    large = {name: seconds for name, seconds in offsets.items() if abs(seconds) > MAX_CLOCK_OFFSET_S}
    if not large:
        return ok(f"{fold_hostlist(offsets)}: at most {MAX_CLOCK_OFFSET_S:g} s from the clock of this host")
    worst = max(large.values(), key=abs)
    result: Callable[[str, str], Finding] = failure if abs(worst) > MAX_CLOCK_SKEW_S else warning
    direction = "ahead of" if worst > 0 else "behind"
    return result(f"{fold_hostlist(large)}: {abs(worst):.0f} s {direction} the clock of this host",
                  "synchronize all clocks with one time server; chronyc tracking shows the offset of each")


def release_series(version: str) -> str:
    """Return e.g. `22.05` for `22.05.8`."""
    return ".".join(version.split(".")[:2])


def _controller_time(text: str) -> float:
    """Parse the controller's time, in whole seconds, in the first line of `scontrol show config`."""
    timestamp = text.partition("\n")[0].rpartition(" ")[2]
    try:
        return datetime.fromisoformat(timestamp).timestamp()
    except ValueError as error:
        raise InputError(f"scontrol show config: no time in the first line, but {timestamp!r}") from error


def _min_clock_offset(remote_time: float, resolution_s: float, timed: node_facts.TimedResult[object]) -> float:
    """Return the minimum offset in seconds of a remote clock that was read during `timed`.

    It may be up to `resolution_s` later than it read.
    """
    return max(0.0, remote_time - timed.after) + min(0.0, remote_time + resolution_s - timed.before)
