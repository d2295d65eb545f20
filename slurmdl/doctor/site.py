"""Facts that several checks use, each queried once, with the code that submissions use."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from slurmdl import config
from slurmdl.doctor import node_facts
from slurmdl.errors import UsageError
from slurmdl.slurm import plugstack, process, slurm_conf

if TYPE_CHECKING:
    from slurmdl.cluster.snapshot import ClusterSnapshot
    from slurmdl.slurm.slurm_conf import SlurmConfig
    from slurmdl.topology.topology import TopologySet


@dataclass
class Site:
    """The site as this host and this user see it; `nodes` are the compute nodes to check."""

    nodes: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    @cached_property
    def config(self) -> config.Config:
        return config.load_config()

    @cached_property
    def slurm_config_text(self) -> node_facts.TimedResult[str]:
        """Output of `scontrol show config`, with the times of the query."""
        return node_facts.timed_call(lambda: process.check_output(["scontrol", "show", "config"], env=self.environ))

    @cached_property
    def slurm_config_values(self) -> dict[str, str]:
        return slurm_conf.parse_key_values(self.slurm_config_text.value)

    @cached_property
    def slurm_config(self) -> SlurmConfig:
        from slurmdl.slurm.slurm_conf import SlurmConfig

        return SlurmConfig.from_scontrol(self.slurm_config_text.value)

    @cached_property
    def cluster(self) -> ClusterSnapshot:
        from slurmdl.cluster.load import query_cluster

        return query_cluster(self.config.cluster_backend)[0]

    @cached_property
    def topologies(self) -> TopologySet:
        from slurmdl.topology import load

        return load.load_topologies()

    @cached_property
    def slurm_conf_dir(self) -> str:
        from slurmdl.slurm.slurm_conf import DEFAULT_SLURM_CONF

        return os.path.dirname(self.environ.get("SLURM_CONF") or self.slurm_config_values.get("SLURM_CONF")
                               or DEFAULT_SLURM_CONF)

    @cached_property
    def sbatch_help(self) -> process.CommandResult:
        """Output of `sbatch --help`, which loads all plugins of a submission and submits nothing."""
        return process.run_command(["sbatch", "--help"], env=self.environ)

    @cached_property
    def plugstack_line(self) -> plugstack.PlugstackLine | None:
        """Line of plugstack.conf that names the plugin, or None."""
        path = self.slurm_config_values.get("PlugStackConfig", "(null)")
        file = os.path.join(self.slurm_conf_dir, "plugstack.conf") if path == "(null)" else path
        return plugstack.find_plugin_line(file, self.slurm_config.plugin_dirs)

    @cached_property
    def reachable_nodes(self) -> tuple[str, ...]:
        """The nodes that a task can start on now; UsageError for an unknown node."""
        from slurmdl.placement.eligibility import is_in_service

        unknown = [node for node in self.nodes if node not in self.cluster.node_by_name]
        if unknown:
            raise UsageError(f"{unknown[0]}: the cluster has no such node")
        nodes = [self.cluster.node_by_name[name] for name in self.nodes]
        return tuple(node.name for node in nodes if is_in_service(node) and node.cpus_unallocated)

    @cached_property
    def facts(self) -> node_facts.TimedResult[node_facts.NodeFacts]:
        """Facts of the reachable nodes, with the times of the query."""
        from slurmdl.slurm.pmi import detect_pmi

        pmi = detect_pmi(self.environ)
        mpi = pmi if pmi and self.slurm_config.has_pmi_plugin(pmi) else "none"
        nodes = [self.cluster.node_by_name[node] for node in self.reachable_nodes]
        step = node_facts.FactsStep(node_facts.common_partition(nodes), self.reachable_nodes, mpi,
                                    self.plugstack_line.path if self.plugstack_line else "", self.config.plan_dir)
        return node_facts.timed_call(lambda: node_facts.gather_facts(step, self.environ))

    def fact(self, key: str) -> dict[str, str]:
        """Return one fact by node."""
        return {node: facts.get(key, "") for node, facts in self.facts.value.items()}
