"""Findings of checks, and facts that several checks use, each queried once, with the code that submissions use.

The compute nodes report facts about themselves in one job step, as the ordinary user (node_facts.sh).
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Generic, Literal, TypeVar

from slurmdl import config
from slurmdl.cluster.load import query_cluster
from slurmdl.cluster.snapshot import ClusterSnapshot
from slurmdl.errors import UnavailableError, UsageError
from slurmdl.placement.eligibility import is_in_service
from slurmdl.slurm import process, slurm_conf
from slurmdl.slurm.slurm_conf import DEFAULT_SLURM_CONF, SlurmConfig, detect_pmi, parse_key_values
from slurmdl.topology.load import load_topologies
from slurmdl.topology.topology import TopologySet

Severity = Literal["OK", "warn", "fail"]
#: exit status by the worst severity (Monitoring Plugins Development Guidelines)
SEVERITY_EXIT_STATUS: dict[Severity, int] = {"OK": 0, "warn": 1, "fail": 2}


@dataclass(frozen=True)
class Finding:
    """One line of the report: culprit and problem, and a suggested fix ("" if none is needed).

    It is a "fail" if slurmdl, or a configured part of it, does not work; a "warn" if it may soon fail or works less
    well than it could. `blocks_dependents`: checks that require this one are skipped; True for failures.
    """

    severity: Severity
    text: str
    fix: str = ""
    blocks_dependents: bool = False


def ok(text: str) -> Finding:
    return Finding("OK", text)


def warning(text: str, fix: str, blocks_dependents: bool = False) -> Finding:
    return Finding("warn", text, fix, blocks_dependents)


def failure(text: str, fix: str) -> Finding:
    return Finding("fail", text, fix, True)


#: node -> key -> value (node_facts.sh)
NodeFacts = dict[str, dict[str, str]]
Value = TypeVar("Value", covariant=True)

STEP_WAIT_S, STEP_TIMEOUT_S = 10, 25.0  # for its allocation, in total
TOKEN_TEXT = "slurmdl doctor"
MISSING_FILE = "missing"  # checksum of a missing or unreadable file in node_facts.sh
_SCRIPT = Path(__file__).with_name("node_facts.sh")


@dataclass(frozen=True)
class TimedResult(Generic[Value]):
    """A value, and the times (seconds since the epoch) before and after its query."""

    before: float
    value: Value
    after: float


def timed_call(query: Callable[[], Value]) -> TimedResult[Value]:
    before = time.time()
    value = query()
    return TimedResult(before, value, time.time())


@dataclass
class Site:
    """The site as this host and this user see it; `nodes` are the compute nodes to check."""

    nodes: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    @cached_property
    def config(self) -> config.Config:
        return config.load_config()

    @cached_property
    def slurm_config_text(self) -> TimedResult[str]:
        """Output of `scontrol show config`, with the times of the query."""
        return timed_call(lambda: process.check_output(["scontrol", "show", "config"], env=self.environ))

    @cached_property
    def slurm_config_values(self) -> dict[str, str]:
        return parse_key_values(self.slurm_config_text.value)

    @cached_property
    def slurm_config(self) -> SlurmConfig:
        return SlurmConfig.from_scontrol(self.slurm_config_text.value)

    @cached_property
    def cluster(self) -> ClusterSnapshot:
        return query_cluster(self.config.cluster_backend)[0]

    @cached_property
    def topologies(self) -> TopologySet:
        return load_topologies()

    @cached_property
    def slurm_conf_dir(self) -> str:
        return os.path.dirname(self.environ.get("SLURM_CONF") or self.slurm_config_values.get("SLURM_CONF")
                               or DEFAULT_SLURM_CONF)

    @cached_property
    def sbatch_help(self) -> process.CommandResult:
        """Output of `sbatch --help`, which loads all plugins of a submission and submits nothing."""
        return process.run_command(["sbatch", "--help"], env=self.environ)

    @cached_property
    def plugstack_line(self) -> slurm_conf.PlugstackLine | None:
        """Line of plugstack.conf that names the plugin, or None."""
        path = self.slurm_config_values.get("PlugStackConfig", "(null)")
        file = os.path.join(self.slurm_conf_dir, "plugstack.conf") if path == "(null)" else path
        return slurm_conf.find_plugin_line(file, self.slurm_config.plugin_dirs)

    @cached_property
    def reachable_nodes(self) -> tuple[str, ...]:
        """The nodes that a task can start on now; UsageError for an unknown node."""
        if unknown := [node for node in self.nodes if node not in self.cluster.node_by_name]:
            raise UsageError(f"{unknown[0]}: the cluster has no such node")
        nodes = [self.cluster.node_by_name[name] for name in self.nodes]
        return tuple(node.name for node in nodes if is_in_service(node) and node.cpus_unallocated)

    @cached_property
    def facts(self) -> TimedResult[NodeFacts]:
        """Facts of the reachable nodes, with the times of the query."""
        return timed_call(self._gather_facts)

    def _gather_facts(self) -> NodeFacts:
        """Run a step with one task per reachable node and return the nodes' facts.

        Of the user's environment, tasks get PATH only, to find slurmdl. Raises UnavailableError if no node reports
        within STEP_TIMEOUT_S; the last line of srun is the reason.
        """
        pmi, plan_dir, nodes = detect_pmi(self.environ), self.config.plan_dir, self.reachable_nodes
        mpi = pmi if pmi and self.slurm_config.has_pmi_plugin(pmi) else "none"
        plugin = self.plugstack_line.path if self.plugstack_line else ""
        token_dir = plan_dir if plan_dir and os.access(plan_dir, os.W_OK | os.X_OK) else None
        with tempfile.TemporaryDirectory(dir=token_dir, prefix=".slurmdl-doctor-") as directory:
            token = os.path.join(directory, "token") if plan_dir else ""
            if token:
                Path(token).write_text(TOKEN_TEXT)
            environ = {key: value for key, value in self.environ.items()
                       if not key.startswith(("SLURM_", "SRUN_", "SLURMDL_", "SALLOC_")) or key == "SLURM_CONF"}
            result = process.run_command(
                ["srun", f"--partition={self._common_partition()}", f"--nodelist={','.join(nodes)}",
                 f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1", "--time=1",
                 f"--immediate={STEP_WAIT_S}", "--export=PATH", "--chdir=/", f"--mpi={mpi}",
                 "--job-name=slurmdl-doctor", "/bin/sh", "-c", _SCRIPT.read_text(), "sh", plugin, token],
                timeout=STEP_TIMEOUT_S, env=environ)
        facts: NodeFacts = {}
        for line in result.stdout.splitlines():
            fields = line.split("\t")
            if len(fields) == 3 and fields[0] in nodes:
                facts.setdefault(fields[0], {})[fields[1]] = fields[2].strip()
        if not facts:
            lines = [line for line in result.stderr.splitlines() if line.strip()]
            raise UnavailableError(lines[-1] if lines else f"srun: exit status {result.returncode}, no node reported")
        return facts

    def _common_partition(self) -> str:
        """Return a partition that contains all reachable nodes; UsageError if there is none."""
        nodes = [self.cluster.node_by_name[node] for node in self.reachable_nodes]
        common = set.intersection(*(set(node.partitions) for node in nodes)) if nodes else set()
        if not common:
            raise UsageError("no partition has all of these nodes; expected nodes of one partition")
        return min(common, key=[*nodes[0].partitions].index)

    def fact(self, key: str) -> dict[str, str]:
        return {node: facts.get(key, "") for node, facts in self.facts.value.items()}


def file_checksum(path: str) -> str:
    """Return the checksum of a file as cksum(1) and node_facts.sh print it, or MISSING_FILE."""
    if not os.access(path, os.R_OK):
        return MISSING_FILE
    return process.check_output(["/bin/sh", "-c", 'exec cksum <"$1"', "sh", path]).strip()
