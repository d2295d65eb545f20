"""What runs in the process of its own that `pyslurm.fetch` starts: the cluster as PySlurm sees it, on stdout.

One record a line in the form of `scontrol -o -d show nodes`, `show partitions`, `show reservations` and `show
config`, with what slurmdl reads of them, so that one parser reads both. It imports nothing else of slurmdl, to start
fast. What goes wrong is the last line on stderr, with exit status 1.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

#: release whose attributes are read below
MIN_RELEASE = (25, 11)

#: key of scontrol -> attribute of PySlurm
_NODE_ATTRIBUTES = {"CPUAlloc": "allocated_cpus", "CPUEfctv": "effective_cpus", "CPUTot": "total_cpus",
         "ActiveFeatures": "active_features", "RealMemory": "real_memory", "AllocMem": "allocated_memory",
         "State": "state", "MemSpecLimit": "memory_reserved_for_system", "Weight": "weight",
         "Partitions": "partitions"}
_PARTITION_ATTRIBUTES = {"Default": "is_default", "OverSubscribe": "oversubscribe", "PriorityTier": "priority_tier",
              "State": "state", "DefMemPerCPU": "default_memory_per_cpu", "DefMemPerNode": "default_memory_per_node"}
_CONFIG_ATTRIBUTES = {"DefMemPerCPU": "default_memory_per_cpu", "DefMemPerNode": "default_memory_per_node",
           "GresTypes": "gres_types"}


def main() -> None:
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="surrogateescape")
    os.dup2(2, 1)  # what libslurm or PySlurm may print is not of the answer
    try:
        import pyslurm
    except ImportError as error:
        sys.exit(f"{error}; valid: the PySlurm of the controller's release for {sys.executable}, or cluster_backend: "
                 "scontrol")
    try:
        config = pyslurm.slurmctld.Config.load()
        if why := version_mismatch_reason(pyslurm.__version__, config.version):
            sys.exit(why)
        answer.writelines(_record_lines(pyslurm, config))
        answer.close()
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}")
    os._exit(0)  # libslurm's own threads and the freeing of each node one by one are not waited for


def version_mismatch_reason(pyslurm_version: str, controller_version: str) -> str:
    """Why a release of PySlurm cannot read from a controller of a release of Slurm, "" where it can.

    PySlurm X.Y is built for Slurm X.Y, whose structures it reads as they are in memory. No command is newer than its
    controller, so where PySlurm and the controller are of one release, the library between them is, too.
    """
    own_release, release = _parse_release(pyslurm_version), _parse_release(controller_version)
    if own_release < MIN_RELEASE:
        return (f"release {pyslurm_version} is not valid; valid: {'.'.join(map(str, MIN_RELEASE))} and newer, or cluster_backend: "
                "scontrol")
    if own_release != release:
        return (f"release {pyslurm_version} does not fit a controller of Slurm {controller_version}; valid: "
                f"{'.'.join(map(str, release))}.*, or cluster_backend: scontrol")
    return ""


def _parse_release(version: str) -> tuple[int, ...]:
    """26.05.5 and 26.5.0 -> (26, 5); () for what is no version."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def _record_lines(pyslurm: Any, config: Any) -> Iterator[str]:
    for node in pyslurm.Nodes.load().values():
        yield f"NodeName={node.name} {_format_pairs(node, _NODE_ATTRIBUTES)}\n"
    for partition in pyslurm.Partitions.load().values():
        yield f"PartitionName={partition.name} {_format_pairs(partition, _PARTITION_ATTRIBUTES)}\n"
    for held in pyslurm.Reservations.load().values():
        yield (f"ReservationName={held.name} Nodes={_format_value(held.nodes)} "
               f"State={'ACTIVE' if held.is_active else 'INACTIVE'}\n")
    for key, attribute in _CONFIG_ATTRIBUTES.items():
        yield f"{key} = {_format_value(getattr(config, attribute))}\n"


def _format_pairs(item: Any, attributes: Mapping[str, str]) -> str:
    return " ".join([f"{key}={_format_value(getattr(item, attribute))}" for key, attribute in attributes.items()])


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return "YES" if value else "NO"
    # PySlurm has None for a number that is 0
    return "" if value is None else ",".join(value) if isinstance(value, list) else str(value)
