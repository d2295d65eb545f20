"""Reader of a snapshot that was written to a file."""

from __future__ import annotations

import json

from slurmdl.cluster import scontrol
from slurmdl.cluster.model import ClusterSnapshot
from slurmdl.errors import InputError


def from_file(path: str) -> ClusterSnapshot:
    """The snapshot in a file: JSON as `ClusterSnapshot.to_json` writes it, or the text of `scontrol -o -d`.

    Raises
    ------
    InputError : with the file, where it cannot be read or holds no node.
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
                         "`scontrol -o -d show nodes` and `show partitions`", file=path)
    return snapshot
