"""The room's entrance: a snapshot from the controller, by the reader that the site chose, or from a file."""

from __future__ import annotations

import json

from slurmdl.cluster import scontrol
from slurmdl.cluster.model import ClusterSnapshot
from slurmdl.errors import InputError


def from_controller(backend: str, with_topology: bool = False) -> tuple[ClusterSnapshot, str]:
    """As `scontrol.fetch`, by the reader that `cluster_backend` of slurmdl.yaml names.

    `auto` is scontrol, also where PySlurm is installed: one call tells everything, zones and generic resources
    included; it is quicker at 8 and at 10,000 nodes (docs/admin.md has the figures); and it serves every release of
    Slurm, where PySlurm must be built for each.

    Raises
    ------
    UnavailableError : that reader is missing, hangs or fails.
    """
    if backend == "pyslurm":
        from slurmdl.cluster import pyslurm

        return pyslurm.fetch(with_topology)
    return scontrol.fetch(with_topology)


def from_file(path: str) -> ClusterSnapshot:
    """The snapshot in a file: JSON as `ClusterSnapshot.to_json` writes it, or text of `scontrol -d` (see `parse`).

    Raises
    ------
    InputError : with the file, if it cannot be read, holds no node, or does not show how many GPUs are used.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        snapshot = ClusterSnapshot.from_json(json.loads(text)) if text.lstrip().startswith("{") else \
            scontrol.parse(text)
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", file=path) from error
    except InputError as error:
        raise InputError(str(error), file=path) from error
    except ValueError as error:
        raise InputError(f"is neither JSON nor text of scontrol ({error})", file=path) from error
    if not snapshot.names:
        raise InputError("holds no node; valid is JSON with nodes, or the text of "
                         "`scontrol -d show nodes` and `show partitions`", file=path)
    if not text.lstrip().startswith("{") and "GresUsed=" not in text and any(kind.gres for kind in snapshot.kinds):
        raise InputError("shows generic resources, but not how many are used; valid is the text of "
                         "`scontrol -d show nodes`, with the option -d", file=path)
    return snapshot
