"""What the checks look at, each thing looked up once and by the code that submissions go through."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from slurmdl import config, process
from slurmdl.doctor import plugstack, probe
from slurmdl.errors import UsageError

if TYPE_CHECKING:
    from slurmdl.cluster.model import ClusterSnapshot
    from slurmdl.launch.srun import Controller
    from slurmdl.topology.topologies import Topologies


@dataclass
class Site:
    """The site as this host and its user see it.

    Attributes
    ----------
    nodes : names of the compute nodes that are looked at, too.
    environ : of the user.
    """

    nodes: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    @cached_property
    def config(self) -> config.Config:
        return config.load()

    @cached_property
    def answer(self) -> probe.Timed[str]:
        """The controller's configuration, and between which moments it was asked for."""
        return probe.timed(lambda: process.query(["scontrol", "show", "config"], env=self.environ))

    @cached_property
    def settings(self) -> dict[str, str]:
        """The same by its keys."""
        return process.pairs(self.answer.value)

    @cached_property
    def controller(self) -> Controller:
        from slurmdl.launch.srun import Controller

        return Controller.parse(self.answer.value)

    @cached_property
    def cluster(self) -> ClusterSnapshot:
        from slurmdl.cluster.read import from_controller

        return from_controller(self.config.cluster_backend)[0]

    @cached_property
    def topologies(self) -> Topologies:
        from slurmdl.topology import read

        return read.read_all()

    @cached_property
    def slurm_directory(self) -> str:
        """Where Slurm's configuration is on this host."""
        from slurmdl.slurm.conf_files import DEFAULT_SLURM_CONF

        return os.path.dirname(self.environ.get("SLURM_CONF") or self.settings.get("SLURM_CONF")
                               or DEFAULT_SLURM_CONF)

    @cached_property
    def help(self) -> process.Answer:
        """Of sbatch: to write it, all that a submission loads is loaded, and nothing is submitted."""
        return process.ask(["sbatch", "--help"], env=self.environ)

    @cached_property
    def plugin(self) -> plugstack.Line | None:
        """The line of plugstack.conf that names the plugin, None where there is none."""
        named = self.settings.get("PlugStackConfig", "(null)")
        file = os.path.join(self.slurm_directory, "plugstack.conf") if named == "(null)" else named
        return plugstack.find(file, self.controller.plugins)

    @cached_property
    def reached(self) -> tuple[str, ...]:
        """Those of `nodes` that a task can start on now. UsageError for one that the cluster does not have."""
        from slurmdl.placement.nodes.eligible import serves

        strangers = [node for node in self.nodes if node not in self.cluster.node]
        if strangers:
            raise UsageError(f"{strangers[0]}: the cluster has no such node")
        found = [self.cluster.node[node] for node in self.nodes]
        return tuple(node.name for node in found if serves(node) and node.cpus_free)

    @cached_property
    def reports(self) -> probe.Timed[probe.Reports]:
        """What each of the nodes that are reached told, and between which moments."""
        from slurmdl.launch.srun import pmi

        wanted = pmi(self.environ)
        mpi = wanted if wanted and self.controller.has_pmi(wanted) else "none"
        asked = probe.Asked(probe.together([self.cluster.node[node] for node in self.reached]), self.reached, mpi,
                            self.plugin.path if self.plugin else "", self.config.plan_dir)
        return probe.timed(lambda: probe.ask(asked, self.environ))

    def told(self, key: str) -> dict[str, str]:
        """What each node said of one thing."""
        return {node: facts.get(key, "") for node, facts in self.reports.value.items()}
