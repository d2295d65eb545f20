"""Worker process of `load`: print the cluster as PySlurm reads it.

One record per line in the form of `scontrol -o -d show nodes`, `partitions`, `reservations` and `config`, so that one
parser reads both. It imports nothing else of slurmdl, for a fast start. An error is the last line on stderr, with
exit status 1.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

MIN_RELEASE = (25, 11)  # first release with the attributes below

#: key of scontrol -> attribute of PySlurm
_NODE_ATTRIBUTES = {"CPUAlloc": "allocated_cpus", "CPUEfctv": "effective_cpus", "CPUTot": "total_cpus",
                    "ActiveFeatures": "active_features", "RealMemory": "real_memory", "AllocMem": "allocated_memory",
                    "State": "state", "MemSpecLimit": "memory_reserved_for_system", "Weight": "weight",
                    "Partitions": "partitions"}
_PARTITION_ATTRIBUTES = {"Default": "is_default", "OverSubscribe": "oversubscribe", "PriorityTier": "priority_tier",
                         "State": "state", "DefMemPerCPU": "default_memory_per_cpu",
                         "DefMemPerNode": "default_memory_per_node"}
_CONFIG_ATTRIBUTES = {"DefMemPerCPU": "default_memory_per_cpu", "DefMemPerNode": "default_memory_per_node",
                      "GresTypes": "gres_types", "ClusterName": "cluster_name"}


def main() -> None:
    output = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="surrogateescape")
    os.dup2(2, 1)  # messages of libslurm and PySlurm go to stderr
    try:
        import pyslurm
    except ImportError as error:
        _fail(f"{error}; expected the PySlurm of the controller's release for {sys.executable}, or "
              "cluster_backend: scontrol")
    try:
        config = pyslurm.slurmctld.Config.load()
        if reason := version_mismatch_reason(pyslurm.__version__, config.version):
            _fail(reason)
        output.writelines(_record_lines(pyslurm, config))
        output.close()
    except Exception as error:
        _fail(f"{type(error).__name__}: {error}")
    os._exit(0)  # do not wait for libslurm's threads and the freeing of each node


def _fail(message: str) -> NoReturn:
    """Exit with `message` as the last line on stderr, after what is buffered in stdout."""
    sys.stdout.flush()
    print(message, file=sys.stderr, flush=True)
    os._exit(1)


def version_mismatch_reason(pyslurm_version: str, controller_version: str) -> str:
    """Return why this PySlurm cannot read from a controller of that Slurm release, or "".

    PySlurm X.Y reads the memory structures of Slurm X.Y. No command is newer than its controller: if PySlurm and the
    controller are of one release, libslurm is, too.
    """
    own_release, release = _parse_release(pyslurm_version), _parse_release(controller_version)
    if own_release < MIN_RELEASE:
        return (f"release {pyslurm_version}: too old; expected {'.'.join(map(str, MIN_RELEASE))} or newer, or "
                "cluster_backend: scontrol")
    if own_release != release:
        return (f"release {pyslurm_version} does not fit a controller of Slurm {controller_version}; expected "
                f"{'.'.join(map(str, release))}.*, or cluster_backend: scontrol")
    return ""


def _parse_release(version: str) -> tuple[int, ...]:
    """Parse 26.05.5 or 26.5.0 -> (26, 5); () if the text is not a version."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def _record_lines(pyslurm: Any, config: Any) -> Iterator[str]:
    for node in pyslurm.Nodes.load().values():
        yield f"NodeName={node.name} {_format_pairs(node, _NODE_ATTRIBUTES)}\n"
    for partition in pyslurm.Partitions.load().values():
        yield f"PartitionName={partition.name} {_format_pairs(partition, _PARTITION_ATTRIBUTES)}\n"
    for reservation in pyslurm.Reservations.load().values():
        yield (f"ReservationName={reservation.name} Nodes={_format_value(reservation.nodes)} "
               f"State={'ACTIVE' if reservation.is_active else 'INACTIVE'}\n")
    for key, attribute in _CONFIG_ATTRIBUTES.items():
        yield f"{key} = {_format_value(getattr(config, attribute))}\n"


def _format_pairs(item: Any, attributes: Mapping[str, str]) -> str:
    return " ".join([f"{key}={_format_value(getattr(item, attribute))}" for key, attribute in attributes.items()])


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return "YES" if value else "NO"
    # PySlurm returns None for 0
    return "" if value is None else ",".join(value) if isinstance(value, list) else str(value)


if __name__ == "__main__":
    main()
