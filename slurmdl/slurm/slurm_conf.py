"""Paths of the configuration files that Slurm's commands read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from slurmdl.errors import (
    InputError,
)
from slurmdl.slurm import process

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


def parse_key_values(text: str) -> dict[str, str]:
    """Key -> value of the lines `KEY = VALUE`, as `scontrol show config` has them."""
    return {key.strip(): value.strip() for key, equals, value in
            (line.partition("=") for line in text.splitlines()) if equals}


@dataclass(frozen=True)
class SlurmConfig:
    """What the controller's configuration says that decides how srun behaves.

    Attributes
    ----------
    version : (major, minor), e.g. (22, 5).
    packs : tasks fill a node before the next one (CR_Pack_Nodes).
    mpi : MpiDefault.
    plugins : directories of Slurm's plugins.
    zones : whether its topology plugin has zones.
    """

    version: tuple[int, int]
    pack_nodes: bool
    mpi_default: str
    plugin_dirs: tuple[str, ...]
    has_topology: bool

    @classmethod
    def query(cls) -> SlurmConfig:
        """From the controller itself.

        Raises
        ------
        UnavailableError : it does not answer.
        InputError : as `parse`.
        """
        return cls.from_scontrol(process.check_output(["scontrol", "show", "config"]))

    @classmethod
    def from_scontrol(cls, text: str) -> SlurmConfig:
        """From the output of `scontrol show config`; InputError where that has no version."""
        keys = process.parse_key_values(text)
        numbers = keys.get("SLURM_VERSION", "").split(".")
        if len(numbers) < 2 or not (numbers[0].isdigit() and numbers[1].isdigit()):
            raise InputError("scontrol show config: no SLURM_VERSION in its answer")
        return cls((int(numbers[0]), int(numbers[1])), "PACK_NODES" in keys.get("SelectTypeParameters", "").upper(),
                   keys.get("MpiDefault", ""), tuple(keys.get("PluginDir", "").split(":")),
                   keys.get("TopologyPlugin", "") not in ("topology/none", "topology/default", "topology/flat"))

    def has_pmi_plugin(self, name: str) -> bool:
        """Whether Slurm has the plugin of a PMI here, as mpi_pmix.so."""
        return any(os.path.exists(f"{folder}/mpi_{name}.so") for folder in self.plugin_dirs)

    def srun_cpus_per_task(self, environ: Mapping[str, str]) -> int | None:
        """What srun takes from the environment: SRUN_CPUS_PER_TASK up to 23.02, SLURM_CPUS_PER_TASK since 23.11."""
        name = "SLURM_CPUS_PER_TASK" if self.version >= (23, 11) else "SRUN_CPUS_PER_TASK"
        value = environ.get(name, "")
        return int(value) if value.isdigit() and int(value) else None
