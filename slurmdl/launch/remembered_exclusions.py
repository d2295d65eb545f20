"""Leave out of a submission the nodes that the user's earlier jobs found to be bad."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from slurmdl.health import exclusions
from slurmdl.launch.submission import Submission
from slurmdl.slurm.hostlist import fold_hostlist
from slurmdl.units import format_coarse_duration

if TYPE_CHECKING:
    from slurmdl.cluster.snapshot import ClusterSnapshot
    from slurmdl.health.exclusions import Exclusion


def leave_out_nodes(job: Submission, active: Mapping[str, Exclusion], cluster: ClusterSnapshot,
                    rejection_reason: Callable[[Submission], str]) -> tuple[Submission, Sequence[str]]:
    """Exclude nodes from a submission; return it, and messages for the user.

    Nodes that the user requires stay, as do those beyond the cap of `limit_exclusions`. If the job could not run
    without the nodes, none is excluded.

    Args:
        active: the newest entry first.
        rejection_reason: why Slurm would reject a submission, or "".
    """
    from slurmdl.placement.eligibility import candidate_partitions, is_in_service

    request = job.request
    partitions = set(candidate_partitions(request, cluster))
    candidates = {node.name: node for node in cluster.nodes
                  if partitions & set(node.partitions) and node.name not in {*request.nodelist, *request.exclude}}
    nodes, beyond_cap = exclusions.limit_exclusions(active, candidates)
    messages = []
    if beyond_cap:
        messages.append(f"{fold_hostlist(beyond_cap)} may be used, though your jobs found it bad: at most "
                        f"{exclusions.MAX_PARTITION_SHARE:.0%} of the partition's nodes are left out")
    if not nodes:
        return job, messages
    restricted = _with_excluded(job, nodes)
    min_nodes = (request.nodes or (1, None))[0]
    remaining = sum(is_in_service(node) for name, node in candidates.items() if name not in nodes)
    reason = f"it needs {min_nodes} nodes, and {remaining} others are in service" if remaining < min_nodes \
        else rejection_reason(restricted)
    if reason:
        return job, [*messages, f"{fold_hostlist(nodes)} may be used, though your jobs found it bad: {reason}"]
    now = time.time()
    shown = "; ".join(f"{node} ({active[node].reason}, {format_coarse_duration(now - active[node].time)} ago)"
                      for node in nodes)
    return restricted, [*messages, f"left out: {shown}; `slurmdl preflight --forget NODES` ends that"]


def _with_excluded(job: Submission, nodes: Sequence[str]) -> Submission:
    exclude = tuple(dict.fromkeys([*job.request.exclude, *nodes]))
    return replace(job, request=replace(job.request, exclude=exclude),
                   extra_options=(f"--exclude={fold_hostlist(exclude)}",))
