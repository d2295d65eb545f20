"""One job step on the compute nodes, as the ordinary user: each node reports facts about itself."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from slurmdl.cluster.snapshot import Node
from slurmdl.errors import UnavailableError, UsageError
from slurmdl.slurm import process

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


@dataclass(frozen=True)
class FactsStep:
    """A step: partition, nodes, --mpi, path of the plugin ("" for none), and the configured plan_dir."""

    partition: str
    nodes: Sequence[str]
    mpi: str
    plugin: str
    plan_dir: str | None


def timed_call(query: Callable[[], Value]) -> TimedResult[Value]:
    before = time.time()
    value = query()
    return TimedResult(before, value, time.time())


def file_checksum(path: str) -> str:
    """Return the checksum of a file as cksum(1) and node_facts.sh print it, or MISSING_FILE."""
    if not os.access(path, os.R_OK):
        return MISSING_FILE
    return process.check_output(["/bin/sh", "-c", 'exec cksum <"$1"', "sh", path]).strip()


def common_partition(nodes: Sequence[Node]) -> str:
    """Return a partition that contains all nodes; UsageError if there is none."""
    common = set.intersection(*(set(node.partitions) for node in nodes)) if nodes else set()
    if not common:
        raise UsageError("no partition has all of these nodes; expected nodes of one partition")
    return min(common, key=[*nodes[0].partitions].index)


def gather_facts(step: FactsStep, environ: Mapping[str, str]) -> NodeFacts:
    """Run the step and return the nodes' facts.

    Of the user's environment, tasks get PATH only, to find slurmdl. Raises UnavailableError: no node reports within
    STEP_TIMEOUT_S; the last line of srun is the reason.
    """
    with tempfile.TemporaryDirectory(dir=_writable_or_none(step.plan_dir), prefix=".slurmdl-doctor-") as directory:
        token = os.path.join(directory, "token") if step.plan_dir else ""
        if token:
            Path(token).write_text(TOKEN_TEXT)
        count = str(len(step.nodes))
        step_environ = {key: value for key, value in environ.items()
                 if not key.startswith(("SLURM_", "SRUN_", "SLURMDL_", "SALLOC_")) or key == "SLURM_CONF"}
        result = process.run_command(
            ["srun", f"--partition={step.partition}", f"--nodelist={','.join(step.nodes)}", f"--nodes={count}",
             f"--ntasks={count}", "--ntasks-per-node=1", "--time=1", f"--immediate={STEP_WAIT_S}", "--export=PATH",
             "--chdir=/", f"--mpi={step.mpi}", "--job-name=slurmdl-doctor", "/bin/sh", "-c", _SCRIPT.read_text(),
             "sh", step.plugin, token], timeout=STEP_TIMEOUT_S, env=step_environ)
    facts: NodeFacts = {}
    for line in result.stdout.splitlines():
        fields = line.split("\t")
        if len(fields) == 3 and fields[0] in step.nodes:
            facts.setdefault(fields[0], {})[fields[1]] = fields[2].strip()
    if not facts:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        raise UnavailableError(lines[-1] if lines else f"srun: exit status {result.returncode}, no node reported")
    return facts


def _writable_or_none(plan_dir: str | None) -> str | None:
    return plan_dir if plan_dir and os.access(plan_dir, os.W_OK | os.X_OK) else None
