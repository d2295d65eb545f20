"""slurmdl.yaml, and what it names: the shared directory, the scores, a Prometheus server."""

from __future__ import annotations

import os
import stat
import tempfile
import time

from slurmdl import config, file_trust
from slurmdl.doctor import node_facts
from slurmdl.doctor.finding import Finding, failure, ok, warning
from slurmdl.doctor.site import Site
from slurmdl.errors import InputError, SlurmdlError
from slurmdl.links import prometheus_query, score_files
from slurmdl.links.score_sources import SOURCES_TIMEOUT_S, newest_age
from slurmdl.slurm.hostlist import fold_hostlist
from slurmdl.text import pluralize


def check_configuration(site: Site) -> Finding:
    found = [path for path in config.config_paths(site.environ) if os.path.exists(path)]
    site.config  # noqa: B018 - raises what is wrong with it
    if os.path.exists(config.SITE_CONFIG_FILE):
        where = os.path.realpath(config.SITE_CONFIG_FILE)
        why = file_trust.untrusted_reason(where, os.stat(where), {0})
        if why:
            return failure(f"{config.SITE_CONFIG_FILE}: {why}, and it decides for all users",
                           f"chown root: {config.SITE_CONFIG_FILE}; chmod 644 {config.SITE_CONFIG_FILE}")
    return ok(f"{' and '.join(found)}: valid" if found else f"no {config.SITE_CONFIG_FILE}: defaults hold")


def check_node_configuration(site: Site) -> Finding:
    here = node_facts.file_checksum(config.SITE_CONFIG_FILE)
    others = [node for node, mark in site.fact("site").items() if mark != here]
    if others:
        return failure(f"{fold_hostlist(others)}: {config.SITE_CONFIG_FILE} is not the one here; steps are mapped by it",
                       f"copy {config.SITE_CONFIG_FILE} from here to {fold_hostlist(others)}")
    nodes = fold_hostlist(site.facts.value)
    return ok(f"{config.SITE_CONFIG_FILE} is on none of {nodes}, nor here" if here == node_facts.MISSING_FILE else
              f"{config.SITE_CONFIG_FILE} is the same on {nodes}")


def check_cluster_backend(site: Site) -> Finding:
    backend = site.config.cluster_backend
    return ok(f"{backend}: {pluralize(len(site.cluster.names), 'node')}")


def check_plan_dir(site: Site) -> Finding:
    path = site.config.plan_dir
    if path is None:
        return ok("not set: plans too long for the environment go to .slurmdl, where the job was submitted")
    try:
        with tempfile.TemporaryFile(dir=path):
            mode = os.stat(path).st_mode
    except OSError as error:
        return failure(f"{path}: no file can be written there ({error.strerror})",
                       f"install -d -m 1777 {path}, on a file system that all nodes share")
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        return warning(f"{path}: every user may replace the plans of others (mode {stat.S_IMODE(mode):o})",
                       f"chmod +t {path}")
    return ok(path)


def check_node_plan_dir(site: Site) -> Finding:
    path = site.config.plan_dir
    if path is None:
        return ok("not set")
    blind = [node for node, text in site.fact("shared").items() if text != node_facts.TOKEN_TEXT]
    if blind:
        return failure(f"{path}: {fold_hostlist(blind)} do not see what is written there",
                       f"mount the file system of {path} on {fold_hostlist(blind)}, or set plan_dir to one that all share")
    return ok(f"{fold_hostlist(site.facts.value)} see what is written to {path}")


def check_link_scores(site: Site) -> Finding:
    given = site.config.link_scores
    if given.trusted_owner and not file_trust.resolve_uids(given.trusted_owner):
        return failure(f"link_scores.trusted_owner: no user has the name {given.trusted_owner!r} here, so only scores of root are used",
                       "create this user (slurmdl's packages do: systemd-sysusers), or correct link_scores.trusted_owner in "
                       "slurmdl.yaml")
    if not os.path.exists(given.file):
        if given.file == config.LinkScoresConfig.file:
            return ok(f"none at {given.file}: the topology alone decides")
        return failure(f"{given.file}: there is no such file",
                       "start the collector (systemctl start slurmdl-ingest), or set link_scores.file to what it writes")
    try:
        file_trust.read_trusted_text(given.file, given.trusted_owner)
    except InputError as error:
        return failure(str(error), f"chown {given.trusted_owner or 'root'}: {given.file}; chmod 644 {given.file}; "
                                   "or name its owner as link_scores.trusted_owner, if jobs may be steered by that user")
    try:
        found = score_files.load_scores(given.file, time.time(), given.trusted_owner)
    except InputError as error:
        return failure(str(error), "let the collector write it anew: systemctl restart slurmdl-ingest")
    if not found.link_count:
        return warning(f"{given.file}: holds no score", "see whether nodes send any: journalctl -u slurmdl-ingest")
    age = newest_age(found)
    if age > given.max_age:
        return warning(f"{given.file}: the newest score is {age:.0f} s old (link_scores.max_age: {given.max_age:g})",
                       "see why nothing new comes: systemctl status slurmdl-ingest")
    return ok(f"{given.file}: the newest score is {age:.0f} s old")


def check_prometheus(site: Site) -> Finding:
    given = site.config.link_scores
    if not given.prometheus_url:
        return ok("not set")
    try:
        found = prometheus_query.query_samples(
    given.prometheus_url,
    given.prometheus_queries,
    given.prometheus_node_label,
     time.monotonic() + SOURCES_TIMEOUT_S)
    except SlurmdlError as error:
        return failure(f"{given.prometheus_url}: {error}",
                       "start it, or mend or remove link_scores.prometheus in slurmdl.yaml")
    if not found:
        return failure(f"{given.prometheus_url}: no answer names a node by its label {given.prometheus_node_label!r}",
                       "set link_scores.prometheus.node_label to the label that holds the node's name")
    return ok(f"{given.prometheus_url}: {len(found)} figures")
