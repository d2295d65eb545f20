"""What Slurm and slurmdl must agree on: the zones, the plugin, the MPI."""

from __future__ import annotations

import os
import re
import shutil

from slurmdl import dl_options, file_trust
from slurmdl.doctor.command_checks import release_series
from slurmdl.doctor.finding import Finding, failure, ok, warning
from slurmdl.doctor.site import Site
from slurmdl.errors import InputError
from slurmdl.files import read_text_limited
from slurmdl.slurm.pmi import detect_pmi
from slurmdl.slurm.slurm_conf import topology_file_path
from slurmdl.topology import check, diff, load
from slurmdl.text import pluralize

_MAX_SHOWN_DIFFERENCES = 2


def check_topology(site: Site) -> Finding:
    file = topology_file_path()
    if file is None and not site.slurm_config.has_topology:
        return warning("the cluster has no zones: jobs are submitted as they are written",
                       "write a topology.conf beside slurm.conf, and set TopologyPlugin=topology/tree")
    faults: list[InputError] = []
    contents = load.load_sources(None, faults.append)
    nodes = [node.name for node in site.cluster.nodes]
    found = [check.finding_from_error(error) for error in faults] + \
                                      [each for one in contents for each in check.check_source(one, nodes)]
    bad = [each for each in check.sort_findings(found) if each.severity != "note"]
    if bad:
        more = f"; and {len(bad) - 1} more" if len(bad) > 1 else ""
        grade = failure if bad[0].severity == "error" else warning
        return grade(f"{bad[0].text}{more}", "mend the file, then scontrol reconfigure; "
                                             "slurmdl topology check shows all")
    zones = sum(len(one.zones) for one in contents)
    return ok(f"{file or 'the controller'}: {pluralize(zones, 'zone')}, {pluralize(len(nodes), 'node')}")


def check_controller_topology(site: Site) -> Finding:
    file = topology_file_path()
    if file is None:
        return ok("read from the controller")
    if not site.slurm_config.has_topology:
        return warning(f"{file}: the controller has TopologyPlugin={site.slurm_config_values.get('TopologyPlugin')}, and does "
                       "not read it", "set TopologyPlugin=topology/tree (or /block) in slurm.conf")
    lines = diff.diff_sets(site.topologies, load.query_topologies(), (file, "the controller"))
    if lines:
        more = f"; and {pluralize(len(lines) - _MAX_SHOWN_DIFFERENCES, 'more difference')}" if len(
            lines) > _MAX_SHOWN_DIFFERENCES else ""
        return failure("; ".join(lines[:_MAX_SHOWN_DIFFERENCES]) + more, f"scontrol reconfigure, where {file} is right, else "
                       "copy the controller's file here; slurmdl topology diff shows all")
    return ok(f"{file} and the controller agree")


def check_node_zones(site: Site) -> Finding:
    """A node's own view of the tree, by which its slurmd forwards messages, and tasks know their zone."""
    known = site.topologies.get(site.cluster.topology_of())
    told = {node: address.split(".") for node, address in site.fact("zone").items() if "." in address}
    apart = {node: ".".join(address[:-1]) for node, address in told.items()
             if list(known.path_of(node)) != address[:-1]}
    if apart:
        node, address = next(iter(apart.items()))
        return failure(f"{', '.join(apart)}: {node} counts itself to {address}, here it is in "
                       f"{'.'.join(known.path_of(node)) or 'no zone'}",
                       "give all nodes the same topology.conf, then scontrol reconfigure")
    return ok(f"{pluralize(len(told), 'node')} see themselves where they are expected")


def check_plugin(site: Site) -> Finding:
    errors = [line.strip() for line in site.sbatch_help.stderr.split("\n") if line.strip()]
    broken = next((line for line in errors if "plugstack" in line and "Failed to open" in line), None)
    if broken:
        return failure(broken, "make plugstack.conf readable for all (chmod 644): Slurm refuses every submission now")
    line = site.plugstack_line
    if line is None and _filter_calls_slurmdl(site):
        return warning("not installed, but cli_filter.lua asks slurmdl for nodes, by options that it would give",
                       "install slurmdl-spank, and name it in plugstack.conf")
    if line is None:
        return ok("not installed: slurmdl sbatch and slurmdl srun need none")
    own = [error.partition(": ")[2] for error in errors if os.path.basename(line.path) in error]
    if own:
        release = release_series(site.slurm_config_values["SLURM_VERSION"])
        return failure(f"{line.location}: {own[0]}", f"install slurmdl-spank for Slurm {release}, or build it here: "
                                                  "make -C spank install; or take the line away")
    if line.required:
        return failure(f"{line.location}: the plugin is `required`: a node on which it fails is drained",
                       "write `optional` there")
    where = os.path.realpath(line.path)
    why = file_trust.untrusted_reason(where, os.stat(where), {0})
    if why:
        return failure(f"{line.path}: {why}, and slurmstepd loads it as root",
                       f"chown root: {line.path}; chmod 755 {line.path}; look who changed it")
    offered = set(re.findall(r"--(dl-[a-z0-9-]+)", site.sbatch_help.stdout)) - {"dl-rank-map"}
    other = offered ^ dl_options.SPANK_OPTIONS.keys()
    if other:
        return failure(f"{line.path}: is of another release of slurmdl ("
                       f"{', '.join('--' + name for name in sorted(other))} is known to one of the two only)",
                       "install slurmdl and slurmdl-spank of one release")
    return ok(f"{line.path}, {line.location}")


def check_cli_filter(site: Site) -> Finding:
    if "lua" not in site.slurm_config_values.get("CliFilterPlugins", ""):
        return ok("not set: nodes are chosen for slurmdl sbatch only")
    broken = next((line.strip() for line in site.sbatch_help.stderr.splitlines() if "cli_filter" in line), None)
    if broken:
        return failure(broken, f"put slurmdl's cli_filter.lua into {site.slurm_conf_dir}, readable for all, or take "
                               "lua out of CliFilterPlugins: Slurm refuses every submission now")
    return ok("asks slurmdl for nodes" if _filter_calls_slurmdl(site) else "the site's own, without slurmdl")


def _filter_calls_slurmdl(site: Site) -> bool:
    """Whether the commands' filter asks slurmdl for nodes."""
    file = os.path.join(site.slurm_conf_dir, "cli_filter.lua")
    return "lua" in site.slurm_config_values.get("CliFilterPlugins", "") and "slurmdl" in read_text_limited(file)


def check_mpi(site: Site) -> Finding:
    wanted, mpirun = detect_pmi(site.environ), shutil.which("mpirun", path=site.environ.get("PATH"))
    if not wanted:
        return ok(f"{mpirun}: not an MPI whose PMI is known here" if mpirun else "no mpirun in PATH")
    if not site.slurm_config.has_pmi_plugin(wanted):
        where = ":".join(site.slurm_config.plugin_dirs)
        return failure(f"{mpirun} needs Slurm's mpi_{wanted}.so, which is not in {where}: every task "
                       "would be a world of its own",
                       f"install Slurm with {wanted}, or put an MPI into PATH that fits (srun --mpi=list)")
    default = site.slurm_config.mpi_default
    note = "" if default.startswith(wanted) else f"; a plain srun needs --mpi={wanted}, slurmdl srun sets it"
    return ok(f"{mpirun} and Slurm meet by {wanted}{note}")
