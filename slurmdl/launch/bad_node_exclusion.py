"""Leave bad nodes out of a submission: those that the user's jobs found, and those of the site's health checks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from slurmdl.health import exclusions
from slurmdl.launch.submission import Submission
from slurmdl.slurm.hostlist import fold_hostlist
from slurmdl.text import pluralize
from slurmdl.units import format_coarse_duration

if TYPE_CHECKING:
    from slurmdl.cluster.snapshot import ClusterSnapshot
    from slurmdl.health.exclusions import Exclusion


def leave_out_nodes(job: Submission, remembered: Mapping[str, Exclusion], site_reasons: Mapping[str, str],
                    cluster: ClusterSnapshot,
                    rejection_reason: Callable[[Submission], str]) -> tuple[Submission, Sequence[str]]:
    """Exclude nodes from a submission; return it, and messages for the user.

    Nodes that the user requires stay, as do those beyond the cap of `limit_exclusions`. If the job could not run
    without the nodes, none is excluded.

    Args:
        remembered: exclusions of the user, the newest entry first.
        site_reasons: node -> verdict of the site.
        rejection_reason: why Slurm would reject a submission, or "".
    """
    from slurmdl.placement.eligibility import candidate_partitions, is_in_service

    request = job.request
    partitions = set(candidate_partitions(request, cluster))
    candidates = {node.name: node for node in cluster.nodes
                  if partitions & set(node.partitions) and node.name not in {*request.nodelist, *request.exclude}}
    nodes, beyond_cap = exclusions.limit_exclusions({**site_reasons, **remembered}, candidates)
    messages = []
    if beyond_cap:
        messages.append(f"{fold_hostlist(beyond_cap)} may be used, though bad: at most "
                        f"{exclusions.MAX_PARTITION_SHARE:.0%} of the partition's nodes are left out")
    if not nodes:
        return job, messages
    restricted = _with_excluded(job, nodes)
    min_nodes = (request.nodes or (1, None))[0]
    remaining = sum(is_in_service(node) for name, node in candidates.items() if name not in nodes)
    reason = f"it needs {pluralize(min_nodes, 'node')}, and {remaining} others are in service" \
        if remaining < min_nodes else rejection_reason(restricted)
    if reason:
        return job, [*messages, f"{fold_hostlist(nodes)} may be used, though bad: {reason}"]
    shown = "; ".join(f"{node} ({site_reasons[node]})" if node in site_reasons else _remembered_text(remembered[node])
                      for node in nodes)
    hint = "" if set(nodes) <= set(site_reasons) else "; `slurmdl preflight --forget NODES` ends that"
    return restricted, [*messages, f"left out: {shown}{hint}"]


def _remembered_text(entry: Exclusion) -> str:
    return f"{entry.node} ({entry.reason}, {format_coarse_duration(time.time() - entry.time)} ago)"


def _with_excluded(job: Submission, nodes: Sequence[str]) -> Submission:
    exclude = tuple(dict.fromkeys([*job.request.exclude, *nodes]))
    return replace(job, request=replace(job.request, exclude=exclude),
                   extra_options=(f"--exclude={fold_hostlist(exclude)}",))
