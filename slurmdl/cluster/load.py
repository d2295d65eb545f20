"""Load a cluster snapshot: from the controller with the configured backend, or from a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

from slurmdl.errors import InputError, UnavailableError, warn
from slurmdl.slurm import process

if TYPE_CHECKING:
    from slurmdl.cluster.snapshot import ClusterSnapshot
    from slurmdl.slurm.output import SlurmOutput


def query_cluster(backend: str, with_topology: bool = False) -> tuple[ClusterSnapshot, SlurmOutput]:
    """Call `start_cluster_query` and wait for its result."""
    return start_cluster_query(backend, with_topology)()


def start_cluster_query(
        backend: str, with_topology: bool = False) -> Callable[[], tuple[ClusterSnapshot, SlurmOutput]]:
    """Start a query of nodes, partitions, reservations and defaults; do not wait.

    The returned function waits and returns the snapshot and the output of scontrol, which has the zones if they are
    requested and available. It raises UnavailableError if the backend is missing, hangs, fails or has no node.

    scontrol runs while this process imports NumPy, which takes as long: 30 ms less per submission at 10,000 nodes
    (`benchmarks.placement --only sbatch-overhead`). `backend` is `cluster_backend` of slurmdl.yaml; `auto` is
    scontrol even if PySlurm is installed: one call also returns zones and generic resources, it is faster
    (docs/admin.md), and it works with every Slurm release.
    """
    if backend == "pyslurm":
        from slurmdl.cluster import pyslurm_backend

        return lambda: pyslurm_backend.fetch_with_pyslurm(with_topology)
    wait = process.start_scontrol_show(("nodes", "partitions", "reservations", "config"), with_topology)

    def result() -> tuple[ClusterSnapshot, SlurmOutput]:
        from slurmdl.cluster.scontrol_parser import read_cluster
        from slurmdl.slurm.output import split_output

        answer = wait()
        output = split_output(answer.stdout)
        snapshot = read_cluster(output)
        if not snapshot.names:
            raise UnavailableError(f"scontrol: {answer.first_error or 'no node in its output'}")
        return snapshot, output

    return result


def load_cluster_file(path: str, on_warning: Callable[[str], None] = warn) -> ClusterSnapshot:
    """Load a snapshot file: JSON of `ClusterSnapshot.to_json`, or saved text of scontrol and sinfo.

    `on_warning` gets what is skipped or assumed (`read_cluster`). Raises InputError with the file if it cannot
    be read, or has no node.
    """
    from slurmdl.cluster.scontrol_parser import read_cluster
    from slurmdl.cluster.snapshot import ClusterSnapshot
    from slurmdl.files import read_limited
    from slurmdl.slurm.output import MAX_SAVED_BYTES, Problems, decode_saved_text, split_output

    try:
        with open(path, "rb") as file:  # possibly a pipe: `--cluster <(scontrol -d show nodes)`
            text = decode_saved_text(read_limited(file, path, MAX_SAVED_BYTES), path, on_warning)
        if text.lstrip().startswith("{"):
            snapshot = ClusterSnapshot.from_json(json.loads(text))
        else:
            output = split_output(text, path)
            problems = Problems(output)
            snapshot = read_cluster(output, problems, on_warning)
            if snapshot.names:
                problems.report(on_warning)
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", file=path) from error
    except InputError as error:
        raise InputError(str(error), file=path) if error.file is None else error from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"is not JSON ({error})", file=path) from error
    if not snapshot.names:
        raise InputError("has no node; expected JSON with nodes, the text of `scontrol -d show nodes` and `show "
                         "partitions` (also with -o), or a table of sinfo with NODELIST and STATE", file=path)
    return snapshot
