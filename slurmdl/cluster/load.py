"""Read a snapshot of the cluster: from the controller, with the backend that the site chose, or from a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

from slurmdl.errors import InputError, UnavailableError
from slurmdl.slurm.scontrol import start_scontrol_show

if TYPE_CHECKING:
    from slurmdl.cluster.snapshot import ClusterSnapshot


def query_cluster(backend: str, with_topology: bool = False) -> tuple[ClusterSnapshot, str]:
    """As `start`, waiting for the answer."""
    return start_cluster_query(backend, with_topology)()


def start_cluster_query(backend: str, with_topology: bool = False) -> Callable[[], tuple[ClusterSnapshot, str]]:
    """Query nodes, partitions, reservations and defaults; return at once.

    scontrol runs while this process imports NumPy, which takes as long: at 10,000 nodes a submission is 30 ms shorter
    (`benchmarks.placement --only sbatch-overhead`). `auto` is scontrol also when PySlurm is installed: one call gives
    zones and generic resources as well, it is quicker at 8 and at 10,000 nodes (docs/admin.md has the figures), and
    it works with every release of Slurm, while PySlurm must be built for each.

    Parameters
    ----------
    backend : `cluster_backend` of slurmdl.yaml.
    with_topology : also query the zones.

    Returns
    -------
    a function that waits for the answer. It returns the snapshot and the text of `scontrol show topoconf` and
    `show topology` ("" if not requested or not available). It raises UnavailableError if the backend is missing,
    hangs, fails or lists no node.
    """
    if backend == "pyslurm":
        from slurmdl.cluster import pyslurm_backend

        return lambda: pyslurm_backend.fetch_with_pyslurm(with_topology)
    wait = start_scontrol_show(("nodes", "partitions", "reservations", "config"), with_topology)

    def result() -> tuple[ClusterSnapshot, str]:
        from slurmdl.cluster import scontrol_parser

        answer = wait()
        snapshot = scontrol_parser.parse_snapshot(answer.stdout)
        if not snapshot.names:
            raise UnavailableError(f"scontrol: {answer.first_error or 'gives no node'}")
        return snapshot, scontrol_parser.topology_text(answer.stdout) if with_topology else ""

    return result


def load_cluster_file(path: str) -> ClusterSnapshot:
    """The snapshot in a file: JSON as `ClusterSnapshot.to_json` writes it, or text of `scontrol -d` (see `parse`).

    Raises
    ------
    InputError : with the file, if it cannot be read, holds no node, or does not show how many GPUs are used.
    """
    from slurmdl.cluster import scontrol_parser
    from slurmdl.cluster.snapshot import ClusterSnapshot

    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        snapshot = ClusterSnapshot.from_json(json.loads(text)) if text.lstrip().startswith("{") else \
            scontrol_parser.parse_snapshot(text)
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", file=path) from error
    except InputError as error:
        raise InputError(str(error), file=path) from error
    except ValueError as error:
        raise InputError(f"is neither JSON nor text of scontrol ({error})", file=path) from error
    if not snapshot.names:
        raise InputError("holds no node; valid is JSON with nodes, or the text of "
                         "`scontrol -d show nodes` and `show partitions`", file=path)
    if not text.lstrip().startswith("{") and "GresUsed=" not in text and any(kind.gres for kind in snapshot.profiles):
        raise InputError("shows generic resources, but not how many are used; valid is the text of "
                         "`scontrol -d show nodes`, with the option -d", file=path)
    return snapshot
