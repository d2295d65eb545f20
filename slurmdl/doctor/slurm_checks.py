"""Checks of slurmdl, Slurm's commands, controller and nodes, clocks, topology, plugin and MPI.

Those of compute nodes compare the facts that the nodes report (see site.py).
"""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Callable, Mapping
from datetime import datetime

import slurmdl
from slurmdl import dl_options, files
from slurmdl.cluster.snapshot import ClusterSnapshot
from slurmdl.commit import describe_version
from slurmdl.doctor import Finding, failure, ok, warning
from slurmdl.doctor.site import MISSING_FILE, Site, TimedResult, file_checksum
from slurmdl.errors import InputError
from slurmdl.launch.zone_options import find_zone_features, leaf_zones
from slurmdl.links.aggregate import MAX_CLOCK_SKEW_S
from slurmdl.placement.eligibility import is_in_service
from slurmdl.slurm import process
from slurmdl.slurm.hostlist import fold_hostlist
from slurmdl.slurm.slurm_conf import detect_pmi, topology_file_path
from slurmdl.text import pluralize
from slurmdl.topology import check, load

SLURM_CLIENTS = ("sbatch", "srun", "scontrol", "squeue")
TESTED_RELEASES = ("22.05", "24.11", "26.05")
MAX_CLOCK_OFFSET_S = 2.0  # link scores from more than MAX_CLOCK_SKEW_S in the future are rejected
_MAX_SHOWN_DIFFERENCES = 2


def check_clients(site: Site) -> Finding:
    missing = [name for name in SLURM_CLIENTS if shutil.which(name, path=site.environ.get("PATH")) is None]
    if missing:
        return failure(f"{', '.join(missing)}: not found in PATH",
                       "install Slurm's commands (Debian: slurm-client), or add their directory to PATH")
    return ok(f"slurmdl {describe_version()}, Python {platform.python_version()}; "
              f"{', '.join(SLURM_CLIENTS)} are in PATH")


def check_node_slurmdl(site: Site) -> Finding:
    release, expected = f"slurmdl {slurmdl.__version__}", f"slurmdl {describe_version()}"
    build, texts = expected.replace(", modified", ""), site.fact("slurmdl")
    if others := {node: text for node, text in texts.items() if text.partition(" (")[0] != release}:
        text = next(iter(others.values()))
        return failure(f"{fold_hostlist(others)}: no {release} in PATH ({text or 'no output'})",
                       f"install {release} there: slurmdl srun runs on the first node of a job")
    if others := {node: text for node, text in texts.items() if text.replace(", modified", "") != build}:
        return warning(f"{fold_hostlist(others)}: {next(iter(others.values()))}, but {expected} on this host",
                       "install the same build there: slurmdl srun runs on the first node of a job")
    return ok(f"{expected} on {fold_hostlist(texts)}")


def check_controller(site: Site) -> Finding:
    return ok(f"{site.slurm_config_values.get('ClusterName', 'the controller')} responds")


def check_nodes(site: Site) -> Finding:
    reachable = site.reachable_nodes
    unreachable = [site.cluster.node_by_name[node] for node in site.nodes if node not in reachable]
    if silent := [node for node in reachable if node not in site.facts.value]:
        return failure(f"{fold_hostlist(silent)}: no task completed there", "see the log of slurmd on these nodes")
    if not_in_service := [node for node in unreachable if not is_in_service(node)]:
        states = sorted({"+".join(node.state) for node in not_in_service})
        result = warning if reachable else failure
        names = fold_hostlist(node.name for node in not_in_service)
        return result(f"{names}: not in service ({', '.join(states)}), skipped",
                      f"see scontrol show node {not_in_service[0].name}")
    busy = fold_hostlist(node.name for node in unreachable)
    if not reachable:
        return warning(f"{busy}: busy, skipped", "repeat when they are free, or with other nodes",
                       blocks_dependents=True)
    return ok(f"tasks run on {fold_hostlist(reachable)}"
              + (f"; {busy}: busy, skipped" if unreachable else ""))


def check_release(site: Site) -> Finding:
    """Slurm supports commands of another release than the controller's for some releases only (upgrade guide)."""
    client = process.check_output(["scontrol", "--version"], env=site.environ).split()[-1]
    server = site.slurm_config_values["SLURM_VERSION"]
    if release_series(client) != release_series(server):
        return warning(f"commands of Slurm {client} on this host, controller of Slurm {server}",
                       f"install the commands of Slurm {release_series(server)} on this host")
    is_tested = release_series(server) in TESTED_RELEASES
    return ok(f"Slurm {server}" + ("" if is_tested else f"; tested with {', '.join(TESTED_RELEASES)}"))


def check_node_release(site: Site) -> Finding:
    server = site.slurm_config_values["SLURM_VERSION"]
    others = {node: text for node, text in site.fact("srun_version").items()
              if release_series(text.rpartition(" ")[2]) != release_series(server)}
    if others:
        return failure(f"{fold_hostlist(others)}: srun is not of Slurm {release_series(server)} "
                       f"({next(iter(others.values()))})",
                       f"install the commands of Slurm {release_series(server)} there: slurmdl srun runs srun there")
    return ok(f"srun of Slurm {server} on {fold_hostlist(site.facts.value)}")


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


def _min_clock_offset(remote_time: float, resolution_s: float, timed: TimedResult[object]) -> float:
    """Return the minimum offset in seconds of a remote clock that was read during `timed`.

    It may be up to `resolution_s` later than it read.
    """
    return max(0.0, remote_time - timed.after) + min(0.0, remote_time + resolution_s - timed.before)


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
    if lines := check.diff_sets(site.topologies, load.query_topologies(), (file, "the controller")):
        further = len(lines) - _MAX_SHOWN_DIFFERENCES
        suffix = f"; and {pluralize(further, 'more difference')}" if further > 0 else ""
        return failure("; ".join(lines[:_MAX_SHOWN_DIFFERENCES]) + suffix,
                       f"scontrol reconfigure if {file} is right, else copy the controller's file to this host; "
                       "slurmdl topology diff shows all")
    return ok(f"{file} and the controller agree")


def check_zone_features(site: Site) -> Finding:
    """Without a feature of its zone, a node can be bound only for jobs that cannot be requeued."""
    topology = site.topologies.get(site.cluster.topology_of())
    zones, placed = sorted(leaf_zones(topology)), set(topology.nodes)
    if len(zones) < 2:
        return ok("not needed without several zones")
    # check_topology reports nodes in no zone
    cluster = ClusterSnapshot.from_nodes(node for node in site.cluster.nodes if node.name in placed)
    missing = [zone for zone, feature in zip(zones, find_zone_features(cluster, topology, zones), strict=True)
               if not feature]
    if not missing:
        return ok(f"each of {len(zones)} zones has a feature")
    return warning(f"{fold_hostlist(missing)}: no feature of exactly the nodes of the zone, so slurmdl sbatch "
                   "chooses no nodes for jobs that may be requeued (Slurm's default)",
                   "write the NodeName lines that slurmdl topology features prints into slurm.conf, then scontrol "
                   "reconfigure")


def check_node_zones(site: Site) -> Finding:
    """Compare each node's own zone path, by which its slurmd forwards messages, with the topology."""
    topology = site.topologies.get(site.cluster.topology_of())
    paths = {node: address.split(".")[:-1] for node, address in site.fact("topology_addr").items() if "." in address}
    if wrong := [node for node, path in paths.items() if list(topology.path_of(node)) != path]:
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
    if reason := files.untrusted_reason(path, os.stat(path), {0}):
        return failure(f"{line.path}: {reason}, and slurmstepd loads it as root",
                       f"chown root: {line.path}; chmod 755 {line.path}; find out who changed it")
    options = set(re.findall(r"--(dl-[a-z0-9-]+)", site.sbatch_help.stdout)) - {"dl-rank-map"}
    if different := options ^ dl_options.SPANK_OPTIONS.keys():
        return failure(f"{line.path}: of another slurmdl release: different options "
                       f"{', '.join('--' + name for name in sorted(different))}",
                       "install slurmdl and slurmdl-spank of one release")
    return ok(f"{line.path}, {line.location}")


def check_node_plugin(site: Site) -> Finding:
    line, checksums = site.plugstack_line, site.fact("plugin_checksum")
    loaded = {node: options not in ("", "0") for node, options in site.fact("spank_options").items()}
    if line is None:
        if extra := [node for node, is_loaded in loaded.items() if is_loaded]:
            return failure(f"{fold_hostlist(extra)}: the plugin is installed, but not on this host",
                           "install slurmdl-spank and its line of plugstack.conf on this host, too")
        return ok("not installed")
    expected = file_checksum(line.path)
    errors = {node: error for node, error in site.fact("srun_error").items() if error}
    others = {node: checksum for node, checksum in checksums.items() if checksum != expected}
    not_loaded = [node for node, is_loaded in loaded.items() if not is_loaded]
    fix = ("install the slurmdl-spank of this host, and its plugstack.conf, on "
           f"{fold_hostlist({*others, *not_loaded, *errors})}")
    if others:
        missing = [node for node, checksum in others.items() if checksum == MISSING_FILE]
        text = f"{fold_hostlist(missing)}: {line.path} is missing" if missing else \
            f"{fold_hostlist(others)}: {line.path} differs from this host's"
        return failure(f"{text}; tasks there may lack its variables", fix)
    if errors or not_loaded:
        reason = next(iter(errors.values()), "not in plugstack.conf")
        return failure(f"{fold_hostlist(errors or not_loaded)}: the plugin is not loaded ({reason})", fix)
    return ok(f"identical on {fold_hostlist(checksums)}")


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
    plugins = site.slurm_config_values.get("CliFilterPlugins", "")
    return "lua" in plugins and "slurmdl" in files.read_text_limited(file)


def check_mpi(site: Site) -> Finding:
    pmi, mpirun = detect_pmi(site.environ), shutil.which("mpirun", path=site.environ.get("PATH"))
    if not pmi:
        return ok(f"{mpirun}: PMI unknown to slurmdl" if mpirun else "no mpirun in PATH")
    if not site.slurm_config.has_pmi_plugin(pmi):
        directories = ":".join(site.slurm_config.plugin_dirs)
        return failure(f"{mpirun} needs Slurm's mpi_{pmi}.so, not found in {directories}: every task would have a "
                       "world of one rank",
                       f"install Slurm with {pmi}, or put another MPI into PATH (srun --mpi=list)")
    is_default = site.slurm_config.mpi_default.startswith(pmi)
    note = "" if is_default else f"; plain srun needs --mpi={pmi}, slurmdl srun sets it"
    return ok(f"{mpirun} uses Slurm's {pmi}{note}")


def check_node_mpi(site: Site) -> Finding:
    pmi = detect_pmi(site.environ)
    if not pmi:
        return ok("nothing to compare")
    if without := fold_hostlist(node for node, rank in site.fact("pmi").items() if not rank):
        return failure(f"{without}: tasks get no rank from --mpi={pmi}",
                       f"install Slurm with {pmi} on {without}; see the log of slurmd")
    return ok(f"tasks get their ranks from {pmi}")
