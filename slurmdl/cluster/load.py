"""Load a cluster snapshot: from the controller with the configured backend, or from a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

from slurmdl.errors import InputError, UnavailableError
from slurmdl.slurm import process

if TYPE_CHECKING:
    from slurmdl.cluster.snapshot import ClusterSnapshot


def query_cluster(backend: str, with_topology: bool = False) -> tuple[ClusterSnapshot, str]:
    """Call `start_cluster_query` and wait for its result."""
    return start_cluster_query(backend, with_topology)()


def start_cluster_query(backend: str, with_topology: bool = False) -> Callable[[], tuple[ClusterSnapshot, str]]:
    """Start a query of nodes, partitions, reservations and defaults; do not wait.

    The returned function waits and returns the snapshot and the text of `scontrol show topoconf` and `show topology`
    ("" if not requested or not available). It raises UnavailableError if the backend is missing, hangs, fails or has
    no node.

    scontrol runs while this process imports NumPy, which takes as long: 30 ms less per submission at 10,000 nodes
    (`benchmarks.placement --only sbatch-overhead`). `backend` is `cluster_backend` of slurmdl.yaml; `auto` is
    scontrol even if PySlurm is installed: one call also returns zones and generic resources, it is faster
    (docs/admin.md), and it works with every Slurm release.
    """
    if backend == "pyslurm":
        from slurmdl.cluster import pyslurm_backend

        return lambda: pyslurm_backend.fetch_with_pyslurm(with_topology)
    wait = process.start_scontrol_show(("nodes", "partitions", "reservations", "config"), with_topology)

    def result() -> tuple[ClusterSnapshot, str]:
        from slurmdl.cluster import scontrol_parser

        output = wait()
        snapshot = scontrol_parser.parse_snapshot(output.stdout)
        if not snapshot.names:
            raise UnavailableError(f"scontrol: {output.first_error or 'no node in its output'}")
        return snapshot, scontrol_parser.topology_text(output.stdout) if with_topology else ""

    return result


def load_cluster_file(path: str) -> ClusterSnapshot:
    """Load a snapshot file: JSON of `ClusterSnapshot.to_json`, or output of `scontrol -d` (see `parse_snapshot`).

    Raises InputError with the file if it cannot be read, has no node, or lacks the numbers of used GPUs.
    """
    from slurmdl.cluster import scontrol_parser
    from slurmdl.cluster.snapshot import ClusterSnapshot

    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        is_json = text.lstrip().startswith("{")
        snapshot = ClusterSnapshot.from_json(json.loads(text)) if is_json else scontrol_parser.parse_snapshot(text)
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", file=path) from error
    except InputError as error:
        raise InputError(str(error), file=path) from error
    except ValueError as error:
        raise InputError(f"is neither JSON nor output of scontrol ({error})", file=path) from error
    if not snapshot.names:
        raise InputError("has no node; expected JSON with nodes, or the output of "
                         "`scontrol -d show nodes` and `show partitions`", file=path)
    if not is_json and "GresUsed=" not in text and any(profile.gres for profile in snapshot.profiles):
        raise InputError("lacks the numbers of used generic resources; expected the output of "
                         "`scontrol -d show nodes`, with -d", file=path)
    return snapshot
