"""Marks: empty files in the user's state directory, for what happens once per job start or cluster, or is counted."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress

from slurmdl import config

#: age in seconds at which a mark is removed
_MAX_AGE_S = 30 * 86_400.0


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
            if time.time() - entry.stat().st_mtime > _MAX_AGE_S:
                os.unlink(entry.path)
