"""The table of checks, and their execution: in order, each with a timeout."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from slurmdl.doctor import Finding, config_checks, failure, slurm_checks
from slurmdl.doctor.site import Site
from slurmdl.errors import SlurmdlError, internal_error_text


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        requires: checks that must succeed first, so that one fault makes one line.
        fix: suggested fix if `run` raises an error.
        on_nodes: whether it examines compute nodes.
    """

    name: str
    run: Callable[[Site], Finding]
    requires: tuple[str, ...] = ()
    fix: str = ""
    on_nodes: bool = False


CHECKS = (
    Check("commands", slurm_checks.check_clients),
    Check("configuration", config_checks.check_configuration, (), "correct the line; slurmdl.yaml(5) lists all keys"),
    Check("controller", slurm_checks.check_controller, ("commands",),
          "start slurmctld and munge, or set SLURM_CONF to the slurm.conf of a running cluster (scontrol ping)"),
    Check("clock", slurm_checks.check_controller_clock, ("controller",)),
    Check("release", slurm_checks.check_release, ("controller",), "reinstall Slurm's commands"),
    Check("cluster_backend", config_checks.check_cluster_backend, ("controller", "configuration"),
          "install the PySlurm of the controller's release, or set cluster_backend: auto"),
    Check("topology", slurm_checks.check_topology, ("controller", "cluster_backend"),
          "correct the file; slurmdl topology check reports all errors"),
    Check("controller topology", slurm_checks.check_controller_topology, ("topology",), "see the log of slurmctld"),
    Check("zone features", slurm_checks.check_zone_features, ("controller topology",),
          "correct the file; slurmdl topology check reports all errors"),
    Check("cli_filter", slurm_checks.check_cli_filter, ("controller",)),
    Check("plugin", slurm_checks.check_plugin, ("controller", "cli_filter"),
          "make plugstack.conf and its includes readable for all"),
    Check("MPI", slurm_checks.check_mpi, ("controller",)),
    Check("plan_dir", config_checks.check_plan_dir, ("configuration",)),
    Check("link_scores", config_checks.check_link_scores, ("configuration",)),
    Check("prometheus", config_checks.check_prometheus, ("configuration",)),
    Check("bad_nodes", config_checks.check_bad_nodes_file, ("configuration",)),
    Check("nodes", slurm_checks.check_nodes, ("controller", "configuration", "plugin"),
          "check that a job runs there: srun --nodelist=NODE hostname", True),
    Check("node clocks", slurm_checks.check_node_clocks, ("nodes", "clock"), on_nodes=True),
    Check("node release", slurm_checks.check_node_release, ("nodes",), on_nodes=True),
    Check("node slurmdl", slurm_checks.check_node_slurmdl, ("nodes",), on_nodes=True),
    Check("node configuration", config_checks.check_node_configuration, ("nodes", "configuration"), on_nodes=True),
    Check("node topology", slurm_checks.check_node_zones, ("nodes", "topology", "controller topology"),
          on_nodes=True),
    Check("node plugin", slurm_checks.check_node_plugin, ("nodes",), on_nodes=True),
    Check("node MPI", slurm_checks.check_node_mpi, ("nodes", "MPI"), on_nodes=True),
    Check("node plan_dir", config_checks.check_node_plan_dir, ("nodes", "plan_dir"), on_nodes=True),
)
CHECK_TIMEOUT_S = 30.0


def run_checks(site: Site, timeout_s: float, check_timeout_s: float = CHECK_TIMEOUT_S,
               checks: Sequence[Check] = CHECKS) -> Iterator[tuple[Check, Finding | str]]:
    """Run the checks; yield each with its finding, or with the reason why it was skipped.

    A check that exceeds `check_timeout_s`, e.g. in a dead file system, is abandoned; `timeout_s` limits all checks.
    """
    deadline = time.monotonic() + timeout_s
    blocking: set[str] = set()
    for check in checks:
        if check.on_nodes and not site.nodes:
            continue
        if blockers := [name for name in check.requires if name in blocking]:
            blocking.add(check.name)
            yield check, f"requires {blockers[0]}"
            continue
        if time.monotonic() > deadline:
            yield check, "no time left"
            continue
        finding = _run_with_timeout(check, site, min(check_timeout_s, deadline - time.monotonic()))
        if finding.blocks_dependents:
            blocking.add(check.name)
        yield check, finding


def _run_with_timeout(check: Check, site: Site, timeout_s: float) -> Finding:
    findings: list[Finding] = []

    def run() -> None:
        try:
            findings.append(check.run(site))
        except SlurmdlError as error:
            findings.append(failure(str(error), check.fix))
        except Exception as error:
            findings.append(failure(internal_error_text(error), "report this bug"))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(max(0.0, timeout_s))
    return findings[0] if findings else failure(f"no result within {timeout_s:.0f} s",
                                                check.fix or "check whether the file system responds (df)")
