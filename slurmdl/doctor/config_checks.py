"""Checks of slurmdl.yaml and what it refers to: the shared directory, link scores, a Prometheus server."""

from __future__ import annotations

import os
import stat
import tempfile
import time

from slurmdl import config, files
from slurmdl.doctor import Finding, failure, ok, warning
from slurmdl.doctor.site import MISSING_FILE, TOKEN_TEXT, Site, file_checksum
from slurmdl.errors import InputError, SlurmdlError
from slurmdl.links import prometheus
from slurmdl.links.score_sources import SOURCES_TIMEOUT_S, load_scores, newest_age
from slurmdl.slurm.hostlist import fold_hostlist
from slurmdl.text import pluralize


def check_configuration(site: Site) -> Finding:
    paths = [path for path in config.config_paths(site.environ) if os.path.exists(path)]
    site.config  # noqa: B018 - raises its errors
    if os.path.exists(config.SITE_CONFIG_FILE):
        path = os.path.realpath(config.SITE_CONFIG_FILE)
        if reason := files.untrusted_reason(path, os.stat(path), {0}):
            return failure(f"{config.SITE_CONFIG_FILE}: {reason}, and it applies to all users",
                           f"chown root: {config.SITE_CONFIG_FILE}; chmod 644 {config.SITE_CONFIG_FILE}")
    return ok(f"{' and '.join(paths)}: valid" if paths else f"no {config.SITE_CONFIG_FILE}: defaults apply")


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


def check_cluster_backend(site: Site) -> Finding:
    return ok(f"{site.config.cluster_backend}: {pluralize(len(site.cluster.names), 'node')}")


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


def check_node_plan_dir(site: Site) -> Finding:
    path = site.config.plan_dir
    if not path:
        return ok("not set")
    blind = fold_hostlist(node for node, text in site.fact("plan_dir_token").items() if text != TOKEN_TEXT)
    if blind:
        return failure(f"{path}: {blind} do not see files written on this host",
                       f"mount the file system of {path} on {blind}, or set plan_dir to a shared directory")
    return ok(f"{fold_hostlist(site.facts.value)} see files written to {path}")


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
