"""slurmdl.yaml, and what it names: the shared directory, the scores, a Prometheus server."""

from __future__ import annotations

import os
import stat
import tempfile
import time

from slurmdl import config
from slurmdl.doctor import probe
from slurmdl.doctor.finding import Finding, failure, ok, warning
from slurmdl.doctor.site import Site
from slurmdl.errors import InputError, SlurmdlError
from slurmdl.network import prometheus, read, trust
from slurmdl.network.live import LIMIT, newest
from slurmdl.topology.hostlist import fold
from slurmdl.topology.tree import count


def configuration(site: Site) -> Finding:
    found = [path for path in config.files(site.environ) if os.path.exists(path)]
    site.config  # noqa: B018 - raises what is wrong with it
    if os.path.exists(config.SITE_FILE):
        where = os.path.realpath(config.SITE_FILE)
        why = trust.doubt(where, os.stat(where), {0})
        if why:
            return failure(f"{config.SITE_FILE}: {why}, and it decides for all users",
                           f"chown root: {config.SITE_FILE}; chmod 644 {config.SITE_FILE}")
    return ok(f"{' and '.join(found)}: valid" if found else f"no {config.SITE_FILE}: defaults hold")


def nodes_configuration(site: Site) -> Finding:
    here = probe.mark(config.SITE_FILE)
    others = [node for node, mark in site.told("site").items() if mark != here]
    if others:
        return failure(f"{fold(others)}: {config.SITE_FILE} is not the one here; steps are mapped by it",
                       f"copy {config.SITE_FILE} from here to {fold(others)}")
    nodes = fold(site.reports.value)
    return ok(f"{config.SITE_FILE} is on none of {nodes}, nor here" if here == probe.MISSING else
              f"{config.SITE_FILE} is the same on {nodes}")


def cluster_backend(site: Site) -> Finding:
    backend = site.config.cluster_backend
    return ok(f"{backend}: {count(len(site.cluster.names), 'node')}")


def plan_dir(site: Site) -> Finding:
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


def nodes_plan_dir(site: Site) -> Finding:
    path = site.config.plan_dir
    if path is None:
        return ok("not set")
    blind = [node for node, text in site.told("shared").items() if text != probe.TOKEN]
    if blind:
        return failure(f"{path}: {fold(blind)} do not see what is written there",
                       f"mount the file system of {path} on {fold(blind)}, or set plan_dir to one that all share")
    return ok(f"{fold(site.reports.value)} see what is written to {path}")


def scores(site: Site) -> Finding:
    given = site.config.scores
    if given.owner and not trust.numbers(given.owner):
        return failure(f"scores.owner: no user has the name {given.owner!r} here, so only scores of root are used",
                       "create this user (slurmdl's packages do: systemd-sysusers), or correct scores.owner in "
                       "slurmdl.yaml")
    if not os.path.exists(given.file):
        if given.file == config.Scores.file:
            return ok(f"none at {given.file}: the topology alone decides")
        return failure(f"{given.file}: there is no such file",
                       "start the collector (systemctl start slurmdl-ingest), or set scores.file to what it writes")
    try:
        trust.trusted_text(given.file, given.owner)
    except InputError as error:
        return failure(str(error), f"chown {given.owner or 'root'}: {given.file}; chmod 644 {given.file}; "
                                   "or name its owner as scores.owner, if jobs may be steered by that user")
    try:
        found = read.from_file(given.file, time.time(), given.owner)
    except InputError as error:
        return failure(str(error), "let the collector write it anew: systemctl restart slurmdl-ingest")
    if not found.measured:
        return warning(f"{given.file}: holds no score", "see whether nodes send any: journalctl -u slurmdl-ingest")
    age = newest(found)
    if age > given.max_age:
        return warning(f"{given.file}: the newest score is {age:.0f} s old (scores.max_age: {given.max_age:g})",
                       "see why nothing new comes: systemctl status slurmdl-ingest")
    return ok(f"{given.file}: the newest score is {age:.0f} s old")


def prometheus_server(site: Site) -> Finding:
    given = site.config.scores
    if not given.url:
        return ok("not set")
    try:
        found = prometheus.samples(given.url, given.queries, given.label, time.monotonic() + LIMIT)
    except SlurmdlError as error:
        return failure(f"{given.url}: {error}", "start it, or mend or remove scores.prometheus in slurmdl.yaml")
    if not found:
        return failure(f"{given.url}: no answer names a node by its label {given.label!r}",
                       "set scores.prometheus.label to the label that holds the node's name")
    return ok(f"{given.url}: {len(found)} figures")
