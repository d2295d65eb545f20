"""The table of checks, and how they are gone through: in order, each bounded in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from slurmdl.doctor import commands, computes, settings, slurms
from slurmdl.doctor.finding import Finding, failure
from slurmdl.doctor.site import Site
from slurmdl.errors import SlurmdlError


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes
    ----------
    name : as the report has it.
    look : gives the finding.
    needs : checks without whose success there is nothing to look at: one fault makes one line.
    mend : what is to be done where `look` raises an error, which says what is wrong.
    nodes : whether it looks at compute nodes.
    """

    name: str
    look: Callable[[Site], Finding]
    needs: tuple[str, ...] = ()
    mend: str = ""
    nodes: bool = False


CHECKS = (
    Check("commands", commands.clients),
    Check("configuration", settings.configuration, (), "mend the line; slurmdl.yaml(5) has every key"),
    Check("controller", commands.controller, ("commands",),
          "start slurmctld and munge, or set SLURM_CONF to the slurm.conf of a cluster that runs (scontrol ping)"),
    Check("clock", commands.controllers_clock, ("controller",)),
    Check("release", commands.release, ("controller",), "reinstall Slurm's commands"),
    Check("cluster_backend", settings.cluster_backend, ("controller", "configuration"),
          "install the PySlurm of the controller's release, or set cluster_backend: auto"),
    Check("topology", slurms.topology, ("controller", "cluster_backend"),
          "mend the file; slurmdl topology check shows all faults"),
    Check("controller's topology", slurms.controllers_topology, ("topology",), "see slurmctld's log"),
    Check("cli_filter", slurms.cli_filter, ("controller",)),
    Check("plugin", slurms.plugin, ("controller", "cli_filter"),
          "make plugstack.conf and what it includes readable for all"),
    Check("MPI", slurms.mpi, ("controller",)),
    Check("plan_dir", settings.plan_dir, ("configuration",)),
    Check("scores", settings.scores, ("configuration",)),
    Check("prometheus", settings.prometheus_server, ("configuration",)),
    Check("nodes", computes.nodes, ("controller", "configuration", "plugin"),
          "see that a job runs there: srun --nodelist=NODE hostname", True),
    Check("nodes' clocks", commands.nodes_clocks, ("nodes", "clock"), nodes=True),
    Check("nodes' release", computes.release, ("nodes",), nodes=True),
    Check("nodes' slurmdl", computes.own, ("nodes",), nodes=True),
    Check("nodes' configuration", settings.nodes_configuration, ("nodes", "configuration"), nodes=True),
    Check("nodes' topology", slurms.nodes_zones, ("nodes", "topology", "controller's topology"), nodes=True),
    Check("nodes' plugin", computes.plugin, ("nodes",), nodes=True),
    Check("nodes' MPI", computes.mpi, ("nodes", "MPI"), nodes=True),
    Check("nodes' plan_dir", settings.nodes_plan_dir, ("nodes", "plan_dir"), nodes=True),
)


#: seconds that one check may take; what it asks of Slurm takes less by itself
EACH = 30.0


def examine(site: Site, limit: float, each: float = EACH,
            checks: Sequence[Check] = CHECKS) -> Iterator[tuple[Check, Finding | str]]:
    """Go through the checks: each with its finding, or with the reason why it was not looked at.

    Parameters
    ----------
    limit, each : seconds for all, and for one; a check that hangs, in a dead file system say, is left behind then.
    """
    deadline = time.monotonic() + limit
    ended: set[str] = set()
    for check in checks:
        if check.nodes and not site.nodes:
            continue
        unmet = [name for name in check.needs if name in ended]
        if unmet:
            ended.add(check.name)
            yield check, f"needs {unmet[0]}"
            continue
        if time.monotonic() > deadline:
            yield check, "no time left"
            continue
        finding = _bounded(check, site, min(each, deadline - time.monotonic()))
        if finding.last:
            ended.add(check.name)
        yield check, finding


def _bounded(check: Check, site: Site, seconds: float) -> Finding:
    found: list[Finding] = []

    def look() -> None:
        try:
            found.append(check.look(site))
        except SlurmdlError as error:
            found.append(failure(str(error), check.mend))
        except Exception as error:
            found.append(failure(f"internal error: {type(error).__name__}: {error}", "report it"))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(max(0.0, seconds))
    return found[0] if found else failure(f"no answer within {seconds:.0f} s",
                                          check.mend or "see whether its file system answers (df)")
