"""Checks of the compute nodes' Slurm, slurmdl, plugin and PMI, by the facts that they report."""

from __future__ import annotations

from collections.abc import Sequence

import slurmdl
from slurmdl.cluster.snapshot import Node
from slurmdl.commit import describe_version
from slurmdl.doctor import Finding, failure, ok, warning
from slurmdl.doctor.site import MISSING_FILE, Site, file_checksum
from slurmdl.doctor.slurm_checks import release_series
from slurmdl.placement.eligibility import is_in_service
from slurmdl.slurm.hostlist import fold_hostlist
from slurmdl.slurm.pmi import detect_pmi


def check_nodes(site: Site) -> Finding:
    reachable = site.reachable_nodes
    unreachable = [site.cluster.node_by_name[node] for node in site.nodes if node not in reachable]
    if silent := [node for node in reachable if node not in site.facts.value]:
        return failure(f"{fold_hostlist(silent)}: no task completed there", "see the log of slurmd on these nodes")
    if not_in_service := [node for node in unreachable if not is_in_service(node)]:
        states = sorted({"+".join(node.state) for node in not_in_service})
        result = warning if reachable else failure
        return result(f"{_fold_names(not_in_service)}: not in service ({', '.join(states)}), skipped",
                      f"see scontrol show node {not_in_service[0].name}")
    if not reachable:
        return warning(f"{_fold_names(unreachable)}: busy, skipped", "repeat when they are free, or with other nodes",
                       blocks_dependents=True)
    return ok(f"tasks run on {fold_hostlist(reachable)}"
              + (f"; {_fold_names(unreachable)}: busy, skipped" if unreachable else ""))


def _fold_names(nodes: Sequence[Node]) -> str:
    return fold_hostlist(node.name for node in nodes)


def check_node_release(site: Site) -> Finding:
    server = site.slurm_config_values["SLURM_VERSION"]
    others = {node: text for node, text in site.fact("srun_version").items()
              if release_series(text.rpartition(" ")[2]) != release_series(server)}
    if others:
        return failure(f"{fold_hostlist(others)}: srun is not of Slurm {release_series(server)} "
                       f"({next(iter(others.values()))})",
                       f"install the commands of Slurm {release_series(server)} there: slurmdl srun runs srun there")
    return ok(f"srun of Slurm {server} on {fold_hostlist(site.facts.value)}")


def check_node_slurmdl(site: Site) -> Finding:
    release, expected = f"slurmdl {slurmdl.__version__}", f"slurmdl {describe_version()}"
    texts = site.fact("slurmdl")
    if others := {node: text for node, text in texts.items() if text.partition(" (")[0] != release}:
        text = next(iter(others.values()))
        return failure(f"{fold_hostlist(others)}: no {release} in PATH ({text or 'no output'})",
                       f"install {release} there: slurmdl srun runs on the first node of a job")
    if others := {node: text for node, text in texts.items() if _build_of(text) != _build_of(expected)}:
        return warning(f"{fold_hostlist(others)}: {next(iter(others.values()))}, but {expected} on this host",
                       "install the same build there: slurmdl srun runs on the first node of a job")
    return ok(f"{expected} on {fold_hostlist(texts)}")


def _build_of(version_line: str) -> str:
    return version_line.replace(", modified", "")


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


def check_node_mpi(site: Site) -> Finding:
    pmi = detect_pmi(site.environ)
    if not pmi:
        return ok("nothing to compare")
    if without := fold_hostlist(node for node, rank in site.fact("pmi").items() if not rank):
        return failure(f"{without}: tasks get no rank from --mpi={pmi}",
                       f"install Slurm with {pmi} on {without}; see the log of slurmd")
    return ok(f"tasks get their ranks from {pmi}")
