"""Checks of the site's setup, in their order, and their execution, each with a timeout.

Those of compute nodes compare the facts that the nodes report (see site.py).
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import slurmdl
from slurmdl import config, dl_options, files
from slurmdl.cluster.snapshot import ClusterSnapshot
from slurmdl.commit import describe_version
from slurmdl.doctor.site import (
    MISSING_FILE,
    TOKEN_TEXT,
    Finding,
    Site,
    TimedResult,
    failure,
    file_checksum,
    ok,
    warning,
)
from slurmdl.errors import InputError, SlurmdlError, internal_error_text
from slurmdl.launch.zone_options import find_zone_features, leaf_zones
from slurmdl.links import prometheus
from slurmdl.links.aggregate import MAX_CLOCK_SKEW_S
from slurmdl.links.score_sources import SOURCES_TIMEOUT_S, load_scores, newest_age
from slurmdl.placement.eligibility import is_in_service
from slurmdl.slurm import process
from slurmdl.slurm.hostlist import fold_hostlist
from slurmdl.slurm.slurm_conf import detect_pmi, topology_file_path
from slurmdl.text import pluralize
from slurmdl.topology import check as topology_check
from slurmdl.topology import load

SLURM_CLIENTS = ("sbatch", "srun", "scontrol", "squeue")
TESTED_RELEASES = ("22.05", "24.11", "26.05")
MAX_CLOCK_OFFSET_S = 2.0  # link scores from more than MAX_CLOCK_SKEW_S in the future are rejected
CHECK_TIMEOUT_S = 30.0
_MAX_SHOWN_DIFFERENCES = 2


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


CHECKS: list[Check] = []
CheckFunction = Callable[[Site], Finding]


def check(name: str, **settings: Any) -> Callable[[CheckFunction], CheckFunction]:
    """Add a function to CHECKS; settings as in Check."""
    def add(run: CheckFunction) -> CheckFunction:
        CHECKS.append(Check(name, run, **settings))
        return run
    return add


@check("commands")
def check_clients(site: Site) -> Finding:
    missing = [name for name in SLURM_CLIENTS if shutil.which(name, path=site.environ.get("PATH")) is None]
    if missing:
        return failure(f"{', '.join(missing)}: not found in PATH",
                       "install Slurm's commands (Debian: slurm-client), or add their directory to PATH")
    return ok(f"slurmdl {describe_version()}, Python {platform.python_version()}; "
              f"{', '.join(SLURM_CLIENTS)} are in PATH")


@check("configuration", fix="correct the line; slurmdl.yaml(5) lists all keys")
def check_configuration(site: Site) -> Finding:
    paths = [path for path in config.config_paths(site.environ) if os.path.exists(path)]
    site.config  # noqa: B018 - raises its errors
    if os.path.exists(config.SITE_CONFIG_FILE):
        path = os.path.realpath(config.SITE_CONFIG_FILE)
        if reason := files.untrusted_reason(path, os.stat(path), {0}):
            return failure(f"{config.SITE_CONFIG_FILE}: {reason}, and it applies to all users",
                           f"chown root: {config.SITE_CONFIG_FILE}; chmod 644 {config.SITE_CONFIG_FILE}")
    return ok(f"{' and '.join(paths)}: valid" if paths else f"no {config.SITE_CONFIG_FILE}: defaults apply")


@check("controller", requires=("commands",),
       fix="start slurmctld and munge, or set SLURM_CONF to the slurm.conf of a running cluster (scontrol ping)")
def check_controller(site: Site) -> Finding:
    return ok(f"{site.slurm_config_values.get('ClusterName', 'the controller')} responds")


@check("clock", requires=("controller",))
def check_controller_clock(site: Site) -> Finding:
    return _compare_clocks({"the controller": _min_clock_offset(
        _controller_time(site.slurm_config_text.value), 1.0, site.slurm_config_text)})


def _compare_clocks(offsets: Mapping[str, float]) -> Finding:
    large = {name: seconds for name, seconds in offsets.items() if abs(seconds) > MAX_CLOCK_OFFSET_S}
    if not large:
        return ok(f"{fold_hostlist(offsets)}: at most {MAX_CLOCK_OFFSET_S:g} s from the clock of this host")
    worst = max(large.values(), key=abs)
    result: Callable[[str, str], Finding] = failure if abs(worst) > MAX_CLOCK_SKEW_S else warning
    direction = "ahead of" if worst > 0 else "behind"
    return result(f"{fold_hostlist(large)}: {abs(worst):.0f} s {direction} the clock of this host",
                  "synchronize all clocks with one time server; chronyc tracking shows the offset of each")


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


@check("release", requires=("controller",), fix="reinstall Slurm's commands")
def check_release(site: Site) -> Finding:
    """Slurm supports commands of another release than the controller's for some releases only (upgrade guide)."""
    client = process.check_output(["scontrol", "--version"], env=site.environ).split()[-1]
    server = site.slurm_config_values["SLURM_VERSION"]
    if release_series(client) != release_series(server):
        return warning(f"commands of Slurm {client} on this host, controller of Slurm {server}",
                       f"install the commands of Slurm {release_series(server)} on this host")
    is_tested = release_series(server) in TESTED_RELEASES
    return ok(f"Slurm {server}" + ("" if is_tested else f"; tested with {', '.join(TESTED_RELEASES)}"))


def release_series(version: str) -> str:
    """Return e.g. `22.05` for `22.05.8`."""
    return ".".join(version.split(".")[:2])


@check("cluster_backend", requires=("controller", "configuration"),
       fix="install the PySlurm of the controller's release, or set cluster_backend: auto")
def check_cluster_backend(site: Site) -> Finding:
    return ok(f"{site.config.cluster_backend}: {pluralize(len(site.cluster.names), 'node')}")


@check("topology", requires=("controller", "cluster_backend"),
       fix="correct the file; slurmdl topology check reports all errors")
def check_topology(site: Site) -> Finding:
    file = topology_file_path()
    if file is None and not site.slurm_config.has_topology:
        return warning("the cluster has no zones: jobs are submitted unchanged",
                       "write a topology.conf next to slurm.conf, and set TopologyPlugin=topology/tree")
    errors: list[InputError] = []
    sources = load.load_declarations(None, errors.append)
    nodes = [node.name for node in site.cluster.nodes]
    findings = [topology_check.finding_from_error(error) for error in errors]
    findings += [finding for source in sources for finding in topology_check.check_declarations(source, nodes)]
    problems = [finding for finding in topology_check.sort_findings(findings) if finding.severity != "note"]
    if problems:
        further = f"; and {len(problems) - 1} more" if len(problems) > 1 else ""
        result = failure if problems[0].severity == "error" else warning
        return result(f"{problems[0].text}{further}",
                      "correct the file, then scontrol reconfigure; slurmdl topology check reports all")
    zone_count = sum(len(source.zones) for source in sources)
    return ok(f"{file or 'the controller'}: {pluralize(zone_count, 'zone')}, {pluralize(len(nodes), 'node')}")


@check("controller topology", requires=("topology",), fix="see the log of slurmctld")
def check_controller_topology(site: Site) -> Finding:
    file = topology_file_path()
    if file is None:
        return ok("read from the controller")
    if not site.slurm_config.has_topology:
        plugin = site.slurm_config_values.get("TopologyPlugin")
        return warning(f"{file}: not read by the controller, which has TopologyPlugin={plugin}",
                       "set TopologyPlugin=topology/tree (or /block) in slurm.conf")
    if lines := topology_check.diff_sets(site.topologies, load.query_topologies(), (file, "the controller")):
        further = len(lines) - _MAX_SHOWN_DIFFERENCES
        suffix = f"; and {pluralize(further, 'more difference')}" if further > 0 else ""
        return failure("; ".join(lines[:_MAX_SHOWN_DIFFERENCES]) + suffix,
                       f"scontrol reconfigure if {file} is right, else copy the controller's file to this host; "
                       "slurmdl topology diff shows all")
    return ok(f"{file} and the controller agree")


@check("zone features", requires=("controller topology",),
       fix="correct the file; slurmdl topology check reports all errors")
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


@check("cli_filter", requires=("controller",))
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


@check("plugin", requires=("controller", "cli_filter"), fix="make plugstack.conf and its includes readable for all")
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


@check("MPI", requires=("controller",))
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


@check("plan_dir", requires=("configuration",))
def check_plan_dir(site: Site) -> Finding:
    path = site.config.plan_dir
    if not path:
        return ok("not set: plans too long for the environment go to .slurmdl in the submission directory")
    try:
        with tempfile.TemporaryFile(dir=path):
            mode = os.stat(path).st_mode
    except OSError as error:
        return failure(f"{path}: not writable ({error.strerror})",
                       f"install -d -m 1777 {path}, on a file system that all nodes share")
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        return warning(f"{path}: every user can replace others' plans (mode {stat.S_IMODE(mode):o})",
                       f"chmod +t {path}")
    return ok(path)


@check("link_scores", requires=("configuration",))
def check_link_scores(site: Site) -> Finding:
    scores_config = site.config.link_scores
    file, owner = scores_config.file, scores_config.trusted_owner
    if owner and not files.resolve_uids(owner):
        return failure(f"link_scores.trusted_owner: user {owner!r} does not exist, so only scores of root are used",
                       "create this user (slurmdl's packages do: systemd-sysusers), or correct "
                       "link_scores.trusted_owner in slurmdl.yaml")
    if not os.path.exists(file):
        if file == config.LinkScoresConfig.file:
            return ok(f"none at {file}: only the topology is used")
        return failure(f"{file}: no such file",
                       "start the collector (systemctl start slurmdl-ingest), or set link_scores.file to its output")
    try:
        files.read_trusted_text(file, owner)
    except InputError as error:
        return failure(str(error), f"chown {owner or 'root'}: {file}; chmod 644 {file}; or set "
                                   "link_scores.trusted_owner to its owner, if that user may influence jobs")
    try:
        scores = load_scores(file, time.time(), scores_config)
    except InputError as error:
        return failure(str(error), "let the collector rewrite it: systemctl restart slurmdl-ingest")
    if not scores.link_count:
        return warning(f"{file}: no link score", "check whether nodes write samples: journalctl -u slurmdl-ingest")
    age = newest_age(scores)
    text = f"{file}: the newest link score is {age:.0f} s old"
    if age > scores_config.max_age:
        return warning(f"{text} (link_scores.max_age: {scores_config.max_age:g})",
                       "find out why no samples arrive: systemctl status slurmdl-ingest")
    return ok(text)


@check("prometheus", requires=("configuration",))
def check_prometheus(site: Site) -> Finding:
    server = site.config.link_scores.prometheus
    if not server.url:
        return ok("not set")
    try:
        samples = prometheus.query_samples(server, time.monotonic() + SOURCES_TIMEOUT_S)
    except SlurmdlError as error:
        return failure(f"{server.url}: {error}",
                       "start it, or correct or remove link_scores.prometheus in slurmdl.yaml")
    if not samples:
        return failure(f"{server.url}: no result has a node name in its label {server.node_label!r}",
                       "set link_scores.prometheus.node_label to the label that holds the node name")
    return ok(f"{server.url}: {pluralize(len(samples), 'sample')}")


@check("bad_nodes", requires=("configuration",))
def check_bad_nodes_file(site: Site) -> Finding:
    path = site.config.bad_nodes.file
    if not path:
        return ok("not set")
    try:
        status = os.stat(path)
    except OSError as error:
        return failure(f"{path}: cannot be read ({error.strerror})",
                       "let the site's health check write it, or correct or remove bad_nodes.file in slurmdl.yaml")
    if reason := files.untrusted_reason(os.path.realpath(path), status, {0, os.geteuid(), status.st_uid}):
        return warning(f"{path}: {reason}; who may write it decides which nodes jobs leave out",
                       f"chmod 644 {path}, in a directory that only the user of the health check may write")
    return ok(path)


@check("nodes", requires=("controller", "configuration", "plugin"), on_nodes=True,
       fix="check that a job runs there: srun --nodelist=NODE hostname")
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


@check("node clocks", requires=("nodes", "clock"), on_nodes=True)
def check_node_clocks(site: Site) -> Finding:
    return _compare_clocks({node: _min_clock_offset(float(time), 0.0, site.facts)
                           for node, time in site.fact("clock").items()})


@check("node release", requires=("nodes",), on_nodes=True)
def check_node_release(site: Site) -> Finding:
    server = site.slurm_config_values["SLURM_VERSION"]
    others = {node: text for node, text in site.fact("srun_version").items()
              if release_series(text.rpartition(" ")[2]) != release_series(server)}
    if others:
        return failure(f"{fold_hostlist(others)}: srun is not of Slurm {release_series(server)} "
                       f"({next(iter(others.values()))})",
                       f"install the commands of Slurm {release_series(server)} there: slurmdl srun runs srun there")
    return ok(f"srun of Slurm {server} on {fold_hostlist(site.facts.value)}")


@check("node slurmdl", requires=("nodes",), on_nodes=True)
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


@check("node configuration", requires=("nodes", "configuration"), on_nodes=True)
def check_node_configuration(site: Site) -> Finding:
    path = config.SITE_CONFIG_FILE
    expected = file_checksum(path)
    others = fold_hostlist(node for node, checksum in site.fact("config_checksum").items() if checksum != expected)
    if others:
        return failure(f"{others}: {path} differs from this host's; it decides the rank map of steps",
                       f"copy {path} from this host to {others}")
    nodes = fold_hostlist(site.facts.value)
    return ok(f"{path} is missing on {nodes} and on this host" if expected == MISSING_FILE else
              f"{path} is identical on {nodes}")


@check("node topology", requires=("nodes", "topology", "controller topology"), on_nodes=True)
def check_node_zones(site: Site) -> Finding:
    """Compare each node's own zone path, by which its slurmd forwards messages, with the topology."""
    topology = site.topologies.get(site.cluster.topology_of())
    paths = {node: address.split(".")[:-1] for node, address in site.fact("topology_addr").items() if "." in address}
    if wrong := [node for node, path in paths.items() if list(topology.path_of(node)) != path]:
        node, expected = wrong[0], ".".join(topology.path_of(wrong[0])) or "no zone"
        return failure(f"{', '.join(wrong)}: {node} reports zone {'.'.join(paths[node])}; expected {expected}",
                       "give all nodes the same topology.conf, then scontrol reconfigure")
    return ok(f"{pluralize(len(paths), 'node')}: zones as expected")


@check("node plugin", requires=("nodes",), on_nodes=True)
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


@check("node MPI", requires=("nodes", "MPI"), on_nodes=True)
def check_node_mpi(site: Site) -> Finding:
    pmi = detect_pmi(site.environ)
    if not pmi:
        return ok("nothing to compare")
    if without := fold_hostlist(node for node, rank in site.fact("pmi").items() if not rank):
        return failure(f"{without}: tasks get no rank from --mpi={pmi}",
                       f"install Slurm with {pmi} on {without}; see the log of slurmd")
    return ok(f"tasks get their ranks from {pmi}")


@check("node plan_dir", requires=("nodes", "plan_dir"), on_nodes=True)
def check_node_plan_dir(site: Site) -> Finding:
    path = site.config.plan_dir
    if not path:
        return ok("not set")
    blind = fold_hostlist(node for node, text in site.fact("plan_dir_token").items() if text != TOKEN_TEXT)
    if blind:
        return failure(f"{path}: {blind} do not see files written on this host",
                       f"mount the file system of {path} on {blind}, or set plan_dir to a shared directory")
    return ok(f"{fold_hostlist(site.facts.value)} see files written to {path}")


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
