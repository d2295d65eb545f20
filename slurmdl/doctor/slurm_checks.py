"""Checks of what Slurm and slurmdl must agree on: topology, plugin, MPI."""

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
from slurmdl.text import pluralize
from slurmdl.topology import check, diff, load

_MAX_SHOWN_DIFFERENCES = 2


def check_topology(site: Site) -> Finding:
    file = topology_file_path()
    if file is None and not site.slurm_config.has_topology:
        return warning("the cluster has no zones: jobs are submitted unchanged",
                       "write a topology.conf next to slurm.conf, and set TopologyPlugin=topology/tree")
    errors: list[InputError] = []
    sources = load.load_sources(None, errors.append)
    nodes = [node.name for node in site.cluster.nodes]
    findings = [check.finding_from_error(error) for error in errors]
    findings += [finding for source in sources for finding in check.check_source(source, nodes)]
    problems = [finding for finding in check.sort_findings(findings) if finding.severity != "note"]
    if problems:
        further = f"; and {len(problems) - 1} more" if len(problems) > 1 else ""
        result = failure if problems[0].severity == "error" else warning
        return result(f"{problems[0].text}{further}",
                      "correct the file, then scontrol reconfigure; slurmdl topology check reports all")
    zone_count = sum(len(source.zones) for source in sources)
    return ok(f"{file or 'the controller'}: {pluralize(zone_count, 'zone')}, {pluralize(len(nodes), 'node')}")


def check_controller_topology(site: Site) -> Finding:
    file = topology_file_path()
    if file is None:
        return ok("read from the controller")
    if not site.slurm_config.has_topology:
        plugin = site.slurm_config_values.get("TopologyPlugin")
        return warning(f"{file}: not read by the controller, which has TopologyPlugin={plugin}",
                       "set TopologyPlugin=topology/tree (or /block) in slurm.conf")
    lines = diff.diff_sets(site.topologies, load.query_topologies(), (file, "the controller"))
    if lines:
        further = len(lines) - _MAX_SHOWN_DIFFERENCES
        suffix = f"; and {pluralize(further, 'more difference')}" if further > 0 else ""
        return failure("; ".join(lines[:_MAX_SHOWN_DIFFERENCES]) + suffix,
                       f"scontrol reconfigure if {file} is right, else copy the controller's file to this host; "
                       "slurmdl topology diff shows all")
    return ok(f"{file} and the controller agree")


def check_node_zones(site: Site) -> Finding:
    """Compare each node's own zone path, by which its slurmd forwards messages, with the topology."""
    topology = site.topologies.get(site.cluster.topology_of())
    paths = {node: address.split(".")[:-1] for node, address in site.fact("topology_addr").items() if "." in address}
    wrong = [node for node, path in paths.items() if list(topology.path_of(node)) != path]
    if wrong:
        node, expected = wrong[0], ".".join(topology.path_of(wrong[0])) or "no zone"
        return failure(f"{', '.join(wrong)}: {node} reports zone {'.'.join(paths[node])}; expected {expected}",
                       "give all nodes the same topology.conf, then scontrol reconfigure")
    return ok(f"{pluralize(len(paths), 'node')}: zones as expected")


def check_plugin(site: Site) -> Finding:
    errors = [line.strip() for line in site.sbatch_help.stderr.split("\n") if line.strip()]
    unreadable = next((line for line in errors if "plugstack" in line and "Failed to open" in line), None)
    if unreadable:
        return failure(unreadable,
                       "make plugstack.conf readable for all (chmod 644): Slurm rejects every submission now")
    line = site.plugstack_line
    if line is None and _filter_calls_slurmdl(site):
        return warning("not installed, but cli_filter.lua calls slurmdl, which needs its options",
                       "install slurmdl-spank, and add it to plugstack.conf")
    if line is None:
        return ok("not installed: slurmdl sbatch and slurmdl srun do not need it")
    plugin_errors = [error.partition(": ")[2] for error in errors if os.path.basename(line.path) in error]
    if plugin_errors:
        release = release_series(site.slurm_config_values["SLURM_VERSION"])
        return failure(f"{line.location}: {plugin_errors[0]}",
                       f"install slurmdl-spank for Slurm {release}, or build it on this host: make -C spank install; "
                       "or remove the line")
    if line.required:
        return failure(f"{line.location}: the plugin is `required`: a node on which it fails is drained",
                       "use `optional`")
    path = os.path.realpath(line.path)
    reason = file_trust.untrusted_reason(path, os.stat(path), {0})
    if reason:
        return failure(f"{line.path}: {reason}, and slurmstepd loads it as root",
                       f"chown root: {line.path}; chmod 755 {line.path}; find out who changed it")
    options = set(re.findall(r"--(dl-[a-z0-9-]+)", site.sbatch_help.stdout)) - {"dl-rank-map"}
    different = options ^ dl_options.SPANK_OPTIONS.keys()
    if different:
        return failure(f"{line.path}: of another slurmdl release: different options "
                       f"{', '.join('--' + name for name in sorted(different))}",
                       "install slurmdl and slurmdl-spank of one release")
    return ok(f"{line.path}, {line.location}")


def check_cli_filter(site: Site) -> Finding:
    if "lua" not in site.slurm_config_values.get("CliFilterPlugins", ""):
        return ok("not set: only slurmdl sbatch chooses nodes")
    error = next((line.strip() for line in site.sbatch_help.stderr.splitlines() if "cli_filter" in line), None)
    if error:
        return failure(error, f"copy slurmdl's cli_filter.lua to {site.slurm_conf_dir}, readable for all, or remove "
                              "lua from CliFilterPlugins: Slurm rejects every submission now")
    return ok("calls slurmdl" if _filter_calls_slurmdl(site) else "the site's own, without slurmdl")


def _filter_calls_slurmdl(site: Site) -> bool:
    file = os.path.join(site.slurm_conf_dir, "cli_filter.lua")
    return "lua" in site.slurm_config_values.get("CliFilterPlugins", "") and "slurmdl" in read_text_limited(file)


def check_mpi(site: Site) -> Finding:
    pmi, mpirun = detect_pmi(site.environ), shutil.which("mpirun", path=site.environ.get("PATH"))
    if not pmi:
        return ok(f"{mpirun}: PMI unknown to slurmdl" if mpirun else "no mpirun in PATH")
    if not site.slurm_config.has_pmi_plugin(pmi):
        directories = ":".join(site.slurm_config.plugin_dirs)
        return failure(f"{mpirun} needs Slurm's mpi_{pmi}.so, not found in {directories}: every task would have a "
                       "world of one rank",
                       f"install Slurm with {pmi}, or put another MPI into PATH (srun --mpi=list)")
    default = site.slurm_config.mpi_default
    note = "" if default.startswith(pmi) else f"; plain srun needs --mpi={pmi}, slurmdl srun sets it"
    return ok(f"{mpirun} uses Slurm's {pmi}{note}")
