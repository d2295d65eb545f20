"""Paths of the configuration files that Slurm's commands read."""

from __future__ import annotations

import os

DEFAULT_SLURM_CONF = "/etc/slurm/slurm.conf"


def slurm_conf_path() -> str:
    """The slurm.conf of this process: $SLURM_CONF or the default (sbatch(1))."""
    return os.environ.get("SLURM_CONF") or DEFAULT_SLURM_CONF


def topology_file_path(slurm_conf: str | None = None) -> str | None:
    """The topology file next to slurm.conf, or None. A topology.yaml hides topology.conf, as in Slurm (25.05)."""
    directory = os.path.dirname(slurm_conf or slurm_conf_path())
    for name in ("topology.yaml", "topology.conf"):
        path = os.path.join(directory, name)
        if os.path.exists(path):
            return path
    return None
