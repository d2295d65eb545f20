"""The table of checks, and how they are gone through: in order, each bounded in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from slurmdl.doctor import command_checks, compute_node_checks, config_checks, slurm_checks
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
    run: Callable[[Site], Finding]
    requires: tuple[str, ...] = ()
    fix: str = ""
    on_nodes: bool = False


CHECKS = (
    Check("commands", command_checks.check_clients),
    Check("configuration", config_checks.check_configuration, (), "mend the line; slurmdl.yaml(5) has every key"),
    Check("controller", command_checks.check_controller, ("commands",),
          "start slurmctld and munge, or set SLURM_CONF to the slurm.conf of a cluster that runs (scontrol ping)"),
    Check("clock", command_checks.check_controller_clock, ("controller",)),
    Check("release", command_checks.check_release, ("controller",), "reinstall Slurm's commands"),
    Check("cluster_backend", config_checks.check_cluster_backend, ("controller", "configuration"),
          "install the PySlurm of the controller's release, or set cluster_backend: auto"),
    Check("topology", slurm_checks.check_topology, ("controller", "cluster_backend"),
          "mend the file; slurmdl topology check shows all faults"),
    Check("controller's topology", slurm_checks.check_controller_topology, ("topology",), "see slurmctld's log"),
    Check("cli_filter", slurm_checks.check_cli_filter, ("controller",)),
    Check("plugin", slurm_checks.check_plugin, ("controller", "cli_filter"),
          "make plugstack.conf and what it includes readable for all"),
    Check("MPI", slurm_checks.check_mpi, ("controller",)),
    Check("plan_dir", config_checks.check_plan_dir, ("configuration",)),
    Check("scores", config_checks.check_link_scores, ("configuration",)),
    Check("prometheus", config_checks.check_prometheus, ("configuration",)),
    Check("nodes", compute_node_checks.check_nodes, ("controller", "configuration", "plugin"),
          "see that a job runs there: srun --nodelist=NODE hostname", True),
    Check("nodes' clocks", command_checks.check_node_clocks, ("nodes", "clock"), on_nodes=True),
    Check("nodes' release", compute_node_checks.check_node_release, ("nodes",), on_nodes=True),
    Check("nodes' slurmdl", compute_node_checks.check_node_slurmdl, ("nodes",), on_nodes=True),
    Check("nodes' configuration", config_checks.check_node_configuration, ("nodes", "configuration"), on_nodes=True),
    Check("nodes' topology", slurm_checks.check_node_zones, ("nodes", "topology", "controller's topology"), on_nodes=True),
    Check("nodes' plugin", compute_node_checks.check_node_plugin, ("nodes",), on_nodes=True),
    Check("nodes' MPI", compute_node_checks.check_node_mpi, ("nodes", "MPI"), on_nodes=True),
    Check("nodes' plan_dir", config_checks.check_node_plan_dir, ("nodes", "plan_dir"), on_nodes=True),
)


#: seconds that one check may take; what it asks of Slurm takes less by itself
CHECK_TIMEOUT_S = 30.0


def run_checks(site: Site, timeout_s: float, check_timeout_s: float = CHECK_TIMEOUT_S,
            checks: Sequence[Check] = CHECKS) -> Iterator[tuple[Check, Finding | str]]:
    """Go through the checks: each with its finding, or with the reason why it was not looked at.

    Parameters
    ----------
    limit, each : seconds for all, and for one; a check that hangs, in a dead file system say, is left behind then.
    """
    deadline = time.monotonic() + timeout_s
    ended: set[str] = set()
    for check in checks:
        if check.on_nodes and not site.nodes:
            continue
        unmet = [name for name in check.requires if name in ended]
        if unmet:
            ended.add(check.name)
            yield check, f"needs {unmet[0]}"
            continue
        if time.monotonic() > deadline:
            yield check, "no time left"
            continue
        finding = _run_with_timeout(check, site, min(check_timeout_s, deadline - time.monotonic()))
        if finding.blocks_dependents:
            ended.add(check.name)
        yield check, finding


def _run_with_timeout(check: Check, site: Site, timeout_s: float) -> Finding:
    found: list[Finding] = []

    def look() -> None:
        try:
            found.append(check.run(site))
        except SlurmdlError as error:
            found.append(failure(str(error), check.fix))
        except Exception as error:
            found.append(failure(f"internal error: {type(error).__name__}: {error}", "report it"))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(max(0.0, timeout_s))
    return found[0] if found else failure(f"no answer within {timeout_s:.0f} s",
                                          check.fix or "see whether its file system answers (df)")
