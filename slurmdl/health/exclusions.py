"""What the jobs of a user remember: nodes to leave out for a while, and marks.

Each line of the file of exclusions is one entry, a JSON object; the newest entry of a node counts. Entries expire, so
that a repaired node is used again, and a cap keeps them below a share of the partition, so that a wrong check cannot
exclude the cluster. A mark is an empty file, for what happens once per job start or cluster, or is counted.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from slurmdl import config, files, records
from slurmdl.errors import InputError, UnavailableError
from slurmdl.records import Valid
from slurmdl.slurm.hostlist import fold_hostlist
from slurmdl.slurm.slurm_conf import cluster_name
from slurmdl.text import pluralize
from slurmdl.units import format_coarse_duration

if TYPE_CHECKING:
    from slurmdl.cluster.snapshot import ClusterSnapshot
    from slurmdl.job_request import JobRequest

DEFAULT_LIFETIME_S = 86_400.0
#: share of a partition's nodes that exclusions may take at most; one node is always allowed
MAX_PARTITION_SHARE = 0.1
#: size at which entries that no longer count are dropped from the file, size of what is kept, and of what is read
_COMPACT_BYTES = 256 * 1024
_MAX_KEPT_BYTES, _MAX_READ_BYTES = 4 * 2**20, 8 * 2**20
#: longest reason, so that an entry is written at once
_MAX_REASON_CHARS = 300
_MAX_MARK_AGE_S = 30 * 86_400.0  # older marks are removed


@dataclass(frozen=True)
class Exclusion:
    """One entry.

    Attributes:
        node: name of the node in Slurm.
        reason: why the node is left out, one line.
        time, expires: seconds since the epoch; an entry that expires at its time ends the exclusion of the node.
        cluster: ClusterName of the node's cluster: clusters may share home directories.
        job: ID of the job that found the node, or "".
    """

    node: Annotated[str, Valid(bool, "a node name")]
    reason: str
    time: float
    expires: float
    cluster: str
    job: str = ""


def load_exclusions(path: str) -> tuple[list[Exclusion], str]:
    """All entries of the file in the order of time, and a warning about lines that are not valid, or "".

    A missing file has no entries. A file that cannot be read has none, and the warning says why. If a file is too
    large, its end is read, with the newest entries.
    """
    if not os.path.exists(path):
        return [], ""
    try:
        return _read_entries(path)
    except InputError as error:
        return [], f"{error}; no remembered node is excluded"


def _read_entries(path: str) -> tuple[list[Exclusion], str]:
    lines = files.read_newest_lines(path, _MAX_READ_BYTES)
    entries, invalid_lines = [], []
    for number, line in enumerate(lines, 1):
        try:
            entries.append(records.from_json(Exclusion, json.loads(line)))
        except (ValueError, RecursionError, InputError):
            invalid_lines.append(number)
    warning = ""
    if invalid_lines:
        warning = f"{path}:{invalid_lines[0]}: not an exclusion; expected a JSON object with node, reason, time, " \
                  f"expires and cluster ({len(invalid_lines)} of {pluralize(len(lines), 'line')} ignored)"
    return sorted(entries, key=lambda entry: entry.time), warning


def record_exclusions(reasons: Mapping[str, str], environ: Mapping[str, str], job_id: str = "",
                   lifetime_s: float = DEFAULT_LIFETIME_S) -> None:
    """Add nodes to the user's exclusions; with a lifetime of 0 end their exclusion.

    Raises UnavailableError if Slurm does not answer, or the file cannot be written.

    Args:
        reasons: node -> why it is left out.
        job_id: the job that found the nodes, or "".
    """
    now, cluster = time.time(), cluster_name(environ)
    add_exclusions(config.exclusions_file(environ), [Exclusion(node, reason, now, now + lifetime_s, cluster, job_id)
                                              for node, reason in reasons.items()], now)


def add_exclusions(path: str, entries: Iterable[Exclusion], now: float) -> None:
    """Append entries to the file. Raises UnavailableError if it cannot be written.

    The entries are one write to the end of the file, under a lock: jobs on several nodes may add entries at the same
    time, also where there are no locks.
    """
    lines = [_format_entry(replace(entry, reason=" ".join(entry.reason.split())[:_MAX_REASON_CHARS]))
             for entry in entries]
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with files.locked(path):
            if os.path.exists(path) and os.path.getsize(path) > _COMPACT_BYTES:
                _compact(path, now)
            # a line that a full disk cut off must not swallow the next entry
            separator = "\n" if _ends_within_line(path) else ""
            with open(path, "ab", buffering=0) as file:
                file.write("".join([separator, *lines]).encode())
    except OSError as error:
        raise UnavailableError(f"{path}: the exclusions cannot be written ({error.strerror})") from error


def _format_entry(entry: Exclusion) -> str:
    return f"{json.dumps(records.to_json(entry))}\n"


def _compact(path: str, now: float) -> None:
    """Keep the newest entry of each node that has not expired; leave a file that cannot be read as it is."""
    try:
        entries, _ = _read_entries(path)
    except InputError:
        return
    newest = {(entry.cluster, entry.node): entry for entry in entries}
    kept: list[str] = []
    room = _MAX_KEPT_BYTES
    for entry in sorted(newest.values(), key=lambda entry: -entry.time):
        line = _format_entry(entry)
        room -= len(line)
        if room < 0:
            break
        if entry.expires > now:
            kept.append(line)
    files.write_atomic(path, "".join(reversed(kept)))


def _ends_within_line(path: str) -> bool:
    if not os.path.exists(path) or not os.path.getsize(path):
        return False
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def active_exclusions(entries: Sequence[Exclusion], now: float, cluster: str) -> dict[str, Exclusion]:
    """Node -> its newest entry, for the nodes of a cluster that are excluded now, the newest entry first."""
    newest = {entry.node: entry for entry in entries if entry.cluster == cluster}
    active = sorted((entry for entry in newest.values() if entry.expires > now), key=lambda entry: -entry.time)
    return {entry.node: entry for entry in active}


def load_active_exclusions(environ: Mapping[str, str]) -> tuple[dict[str, Exclusion], str]:
    """Node -> entry of each node that the user's jobs leave out now, and the warning of `load_exclusions`.

    Raises UnavailableError if Slurm does not name its cluster; it is asked only if some entry has not expired.
    """
    entries, warning = load_exclusions(config.exclusions_file(environ))
    now = time.time()
    if not any(entry.expires > now for entry in entries):
        return {}, warning
    return active_exclusions(entries, now, cluster_name(environ)), warning


def limit_exclusions(nodes: Iterable[str], partition_nodes: Collection[str],
                     share: float = MAX_PARTITION_SHARE) -> tuple[list[str], list[str]]:
    """Split nodes into those that may be excluded and those beyond the cap, the first nodes first.

    Nodes outside the partition are in neither list. At most `share` of the partition, and at least one node, may be
    excluded.
    """
    inside = [node for node in nodes if node in partition_nodes]
    limit = max(1, int(share * len(partition_nodes)))
    return inside[:limit], inside[limit:]


def choose_exclusions(request: JobRequest, remembered: Mapping[str, Exclusion], site_reasons: Mapping[str, str],
                      cluster: ClusterSnapshot,
                      rejection_reason: Callable[[Sequence[str]], str]) -> tuple[tuple[str, ...], list[str]]:
    """All nodes that a submission excludes, () if no bad node is among them; and messages for the user.

    Nodes that the user requires stay, as do those beyond the cap of `limit_exclusions`. If the job could not run
    without the nodes, none is excluded.

    Args:
        remembered: exclusions of the user, the newest entry first.
        site_reasons: node -> why it is bad by the site's checks.
        rejection_reason: why Slurm would reject a submission that excludes these nodes, or "".
    """
    from slurmdl.placement.eligibility import candidate_partitions, is_in_service

    partitions = set(candidate_partitions(request, cluster))
    candidates = {node.name: node for node in cluster.nodes
                  if partitions & set(node.partitions) and node.name not in {*request.nodelist, *request.exclude}}
    nodes, beyond_cap = limit_exclusions({**site_reasons, **remembered}, candidates)
    messages = []
    if beyond_cap:
        messages.append(f"{fold_hostlist(beyond_cap)} may be used, though bad: at most {MAX_PARTITION_SHARE:.0%} of "
                        "the partition's nodes are left out")
    if not nodes:
        return (), messages
    excluded = tuple(dict.fromkeys([*request.exclude, *nodes]))
    min_nodes = (request.nodes or (1, None))[0]
    remaining = sum(is_in_service(node) for name, node in candidates.items() if name not in nodes)
    reason = f"it needs {pluralize(min_nodes, 'node')}, and {remaining} others are in service" \
        if remaining < min_nodes else rejection_reason(excluded)
    if reason:
        return (), [*messages, f"{fold_hostlist(nodes)} may be used, though bad: {reason}"]
    shown = "; ".join(
        f"{node} ({site_reasons[node]})" if node in site_reasons else
        f"{node} ({remembered[node].reason}, {format_coarse_duration(time.time() - remembered[node].time)} ago)"
        for node in nodes)
    hint = "" if set(nodes) <= set(site_reasons) else "; `slurmdl preflight --forget NODES` ends that"
    return excluded, [*messages, f"left out: {shown}{hint}"]


def mark_path(kind: str, environ: Mapping[str, str]) -> str:
    """The mark of this kind ("preflight", "requeues") for this start of the job of this process."""
    return os.path.join(config.user_dir(environ, "state"), kind,
                        f"{_job_prefix(environ)}{environ.get('SLURM_RESTART_COUNT', '0')}")


def cluster_mark_path(kind: str, cluster: str, environ: Mapping[str, str]) -> str:
    """The mark of this kind ("zone-features") for a cluster."""
    return os.path.join(config.user_dir(environ, "state"), kind, cluster.replace("/", "_") or "unnamed")


def _job_prefix(environ: Mapping[str, str]) -> str:
    names = (environ.get("SLURM_CLUSTER_NAME", ""), environ.get("SLURM_JOB_ID", ""))
    return "".join(f"{name}-" for name in names).replace("/", "_")


def count_marks(kind: str, environ: Mapping[str, str]) -> int | None:
    """Number of starts of the job of this process with a mark of this kind; None if marks cannot be written."""
    prefix, directory = _job_prefix(environ), os.path.dirname(mark_path(kind, environ))
    try:
        os.makedirs(directory, exist_ok=True)
        names = os.listdir(directory)
    except OSError:
        return None
    return sum(name.startswith(prefix) for name in names) if os.access(directory, os.W_OK) else None


def write_mark(path: str) -> None:
    """Write a mark, and remove old ones of its kind. Raises OSError if it cannot be written."""
    directory = os.path.dirname(path)
    os.makedirs(directory, exist_ok=True)
    with open(path, "w", encoding="utf-8"):
        pass
    for entry in os.scandir(directory):
        with suppress(OSError):  # another process has removed it
            if time.time() - entry.stat().st_mtime > _MAX_MARK_AGE_S:
                os.unlink(entry.path)
