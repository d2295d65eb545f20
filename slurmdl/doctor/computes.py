"""What compute nodes have of Slurm, slurmdl, the plugin and the PMI: as they told it themselves."""

from __future__ import annotations

from collections.abc import Sequence

import slurmdl
from slurmdl.cluster.model import Node
from slurmdl.doctor import probe
from slurmdl.doctor.commands import series
from slurmdl.doctor.finding import Finding, failure, ok, warning
from slurmdl.doctor.site import Site
from slurmdl.launch.srun import pmi
from slurmdl.placement.nodes.eligible import serves
from slurmdl.topology.hostlist import fold


def nodes(site: Site) -> Finding:
    reached = site.reached
    away = [site.cluster.node[node] for node in site.nodes if node not in reached]
    silent = [node for node in reached if node not in site.reports.value] if reached else []
    if silent:
        return failure(f"{fold(silent)}: no task came to its end there", "see slurmd's log on these nodes")
    out = [node for node in away if not serves(node)]
    if out:
        states = sorted({"+".join(node.state) for node in out})
        grade = warning if reached else failure
        return grade(f"{_names(out)}: not in service ({', '.join(states)}), not looked at",
                     f"scontrol show node {out[0].name} says why")
    if not reached:
        return warning(f"{_names(away)}: busy, not looked at", "look again when they are free, or at others",
                       last=True)
    return ok(f"tasks run on {fold(reached)}" + (f"; {_names(away)}: busy, not looked at" if away else ""))


def _names(found: Sequence[Node]) -> str:
    return fold(node.name for node in found)


def release(site: Site) -> Finding:
    server = site.settings["SLURM_VERSION"]
    other = {node: text for node, text in site.told("release").items()
             if series(text.rpartition(" ")[2]) != series(server)}
    if other:
        return failure(f"{fold(other)}: srun is not of Slurm {series(server)} ({next(iter(other.values()))})",
                       f"install Slurm's commands of {series(server)} there: slurmdl srun calls srun on a node")
    return ok(f"srun of Slurm {server} on {fold(site.reports.value)}")


def own(site: Site) -> Finding:
    wanted = f"slurmdl {slurmdl.__version__}"
    other = {node: text for node, text in site.told("slurmdl").items() if text != wanted}
    if other:
        said = next(iter(other.values()))
        return failure(f"{fold(other)}: no {wanted} in PATH ({said or 'no answer'})",
                       f"install slurmdl {slurmdl.__version__} there: slurmdl srun runs on a job's first node")
    return ok(f"{wanted} on {fold(site.reports.value)}")


def plugin(site: Site) -> Finding:
    line, told = site.plugin, site.told("plugin")
    if line is None:
        some = [node for node, options in site.told("options").items() if options not in ("", "0")]
        if some:
            return failure(f"{fold(some)}: the plugin is there, and not here",
                           "install slurmdl-spank and its line of plugstack.conf here, too")
        return ok("not installed")
    here = probe.mark(line.path)
    broken = {node: fault for node, fault in site.told("fault").items() if fault}
    other = {node: mark for node, mark in told.items() if mark != here}
    idle = [node for node, options in site.told("options").items() if options in ("", "0")]
    mend = f"install the slurmdl-spank of this host, and its plugstack.conf, on {fold({*other, *idle, *broken})}"
    if other:
        missing = [node for node, mark in other.items() if mark == probe.MISSING]
        text = f"{fold(missing)}: {line.path} is missing" if missing else \
            f"{fold(other)}: {line.path} is not the one of this host"
        return failure(f"{text}; tasks there may lack its variables", mend)
    if broken or idle:
        why = next(iter(broken.values()), "plugstack.conf does not name it")
        return failure(f"{fold(broken or idle)}: the plugin is not loaded ({why})", mend)
    return ok(f"the same on {fold(told)}")


def mpi(site: Site) -> Finding:
    wanted = pmi(site.environ)
    if not wanted:
        return ok("nothing to compare")
    without = [node for node, rank in site.told("pmi").items() if not rank]
    if without:
        return failure(f"{fold(without)}: a task gets no rank by --mpi={wanted}",
                       f"install Slurm with {wanted} on {fold(without)}; slurmd's log says what it lacks")
    return ok(f"tasks get their ranks by {wanted}")
