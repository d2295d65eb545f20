"""What compute nodes have of Slurm, slurmdl, the plugin and the PMI: as they told it themselves."""

from __future__ import annotations

from collections.abc import Sequence

import slurmdl
from slurmdl.cluster.snapshot import Node
from slurmdl.doctor import node_facts
from slurmdl.doctor.command_checks import release_series
from slurmdl.doctor.finding import Finding, failure, ok, warning
from slurmdl.doctor.site import Site
from slurmdl.placement.eligibility import is_in_service
from slurmdl.slurm.hostlist import fold_hostlist
from slurmdl.slurm.pmi import detect_pmi


def check_nodes(site: Site) -> Finding:
    reached = site.reachable_nodes
    away = [site.cluster.node_by_name[node] for node in site.nodes if node not in reached]
    silent = [node for node in reached if node not in site.facts.value] if reached else []
    if silent:
        return failure(f"{fold_hostlist(silent)}: no task came to its end there", "see slurmd's log on these nodes")
    out = [node for node in away if not is_in_service(node)]
    if out:
        states = sorted({"+".join(node.state) for node in out})
        grade = warning if reached else failure
        return grade(f"{_fold_names(out)}: not in service ({', '.join(states)}), not looked at",
                     f"scontrol show node {out[0].name} says why")
    if not reached:
        return warning(f"{_fold_names(away)}: busy, not looked at", "look again when they are free, or at others",
                       blocks_dependents=True)
    return ok(f"tasks run on {fold_hostlist(reached)}" + \
              (f"; {_fold_names(away)}: busy, not looked at" if away else ""))


def _fold_names(nodes: Sequence[Node]) -> str:
    return fold_hostlist(node.name for node in nodes)


def check_node_release(site: Site) -> Finding:
    server = site.slurm_config_values["SLURM_VERSION"]
    other = {node: text for node, text in site.fact("release").items()
             if release_series(text.rpartition(" ")[2]) != release_series(server)}
    if other:
        return failure(f"{fold_hostlist(other)}: srun is not of Slurm {release_series(server)} ({next(iter(other.values()))})",
                       f"install Slurm's commands of {release_series(server)} there: slurmdl srun calls srun on a node")
    return ok(f"srun of Slurm {server} on {fold_hostlist(site.facts.value)}")


def check_node_slurmdl(site: Site) -> Finding:
    wanted = f"slurmdl {slurmdl.__version__}"
    other = {node: text for node, text in site.fact("slurmdl").items() if text != wanted}
    if other:
        said = next(iter(other.values()))
        return failure(f"{fold_hostlist(other)}: no {wanted} in PATH ({said or 'no answer'})",
                       f"install slurmdl {slurmdl.__version__} there: slurmdl srun runs on a job's first node")
    return ok(f"{wanted} on {fold_hostlist(site.facts.value)}")


def check_node_plugin(site: Site) -> Finding:
    line, told = site.plugstack_line, site.fact("plugin")
    if line is None:
        some = [node for node, options in site.fact("options").items() if options not in ("", "0")]
        if some:
            return failure(f"{fold_hostlist(some)}: the plugin is there, and not here",
                           "install slurmdl-spank and its line of plugstack.conf here, too")
        return ok("not installed")
    here = node_facts.file_checksum(line.path)
    broken = {node: fault for node, fault in site.fact("fault").items() if fault}
    other = {node: mark for node, mark in told.items() if mark != here}
    idle = [node for node, options in site.fact("options").items() if options in ("", "0")]
    mend = f"install the slurmdl-spank of this host, and its plugstack.conf, on {fold_hostlist({*other, *idle, *broken})}"
    if other:
        missing = [node for node, mark in other.items() if mark == node_facts.MISSING_FILE]
        text = f"{fold_hostlist(missing)}: {line.path} is missing" if missing else \
            f"{fold_hostlist(other)}: {line.path} is not the one of this host"
        return failure(f"{text}; tasks there may lack its variables", mend)
    if broken or idle:
        why = next(iter(broken.values()), "plugstack.conf does not name it")
        return failure(f"{fold_hostlist(broken or idle)}: the plugin is not loaded ({why})", mend)
    return ok(f"the same on {fold_hostlist(told)}")


def check_node_mpi(site: Site) -> Finding:
    wanted = detect_pmi(site.environ)
    if not wanted:
        return ok("nothing to compare")
    without = [node for node, rank in site.fact("pmi").items() if not rank]
    if without:
        return failure(f"{fold_hostlist(without)}: a task gets no rank by --mpi={wanted}",
                       f"install Slurm with {wanted} on {fold_hostlist(without)}; slurmd's log says what it lacks")
    return ok(f"tasks get their ranks by {wanted}")
