"""One step on the compute nodes, started as the ordinary user, in which each node tells what it finds on itself."""

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

#: node -> key -> what it told (probe.sh)
NodeFacts = dict[str, dict[str, str]]
Value = TypeVar("Value", covariant=True)

#: seconds that a step may wait for its nodes, and that all of it may take
STEP_WAIT_S, STEP_TIMEOUT_S = 10, 25.0
TOKEN_TEXT = "slurmdl doctor"
#: what probe.sh says of a file that is not there, or cannot be read
MISSING_FILE = "missing"
_SCRIPT = Path(__file__).with_name("probe.sh")


@dataclass(frozen=True)
class TimedResult(Generic[Value]):
    """What was found out, and the times (seconds since the epoch) before and after."""

    before: float
    value: Value
    after: float


@dataclass(frozen=True)
class FactsStep:
    """A step: its partition, its nodes, its --mpi, the plugin's file ("" for none), and the configured plan_dir."""

    partition: str
    nodes: Sequence[str]
    mpi: str
    plugin: str
    plan_dir: str | None


def timed_call(make: Callable[[], Value]) -> TimedResult[Value]:
    before = time.time()
    value = make()
    return TimedResult(before, value, time.time())


def file_checksum(path: str) -> str:
    """What probe.sh says of a file: its checksum as cksum(1) prints it, or MISSING."""
    if not os.access(path, os.R_OK):
        return MISSING_FILE
    return process.check_output(["/bin/sh", "-c", 'exec cksum <"$1"', "sh", path]).strip()


def common_partition(nodes: Sequence[Node]) -> str:
    """A partition that has all of the nodes. UsageError where there is none."""
    common = set.intersection(*(set(node.partitions) for node in nodes)) if nodes else set()
    if not common:
        raise UsageError("no partition has all of these nodes; look at those of one partition at a time")
    return min(common, key=[*nodes[0].partitions].index)


def gather_facts(step: FactsStep, environ: Mapping[str, str]) -> NodeFacts:
    """Start the step and read what the nodes tell.

    The tasks get nothing of the user's environment but PATH, in which they look for slurmdl.

    Raises
    ------
    UnavailableError : no node tells anything within LIMIT seconds; srun's last line says why.
    """
    with tempfile.TemporaryDirectory(dir=_writable_or_none(step.plan_dir), prefix=".slurmdl-doctor-") as directory:
        token = os.path.join(directory, "token") if step.plan_dir else ""
        if token:
            Path(token).write_text(TOKEN_TEXT)
        count = str(len(step.nodes))
        clean = {key: value for key, value in environ.items()
                 if not key.startswith(("SLURM_", "SRUN_", "SLURMDL_", "SALLOC_")) or key == "SLURM_CONF"}
        answer = process.run_command(
            ["srun", f"--partition={step.partition}", f"--nodelist={','.join(step.nodes)}", f"--nodes={count}",
             f"--ntasks={count}", "--ntasks-per-node=1", "--time=1", f"--immediate={STEP_WAIT_S}", "--export=PATH",
             "--chdir=/", f"--mpi={step.mpi}", "--job-name=slurmdl-doctor", "/bin/sh", "-c", _SCRIPT.read_text(),
             "sh", step.plugin, token], timeout=STEP_TIMEOUT_S, env=clean)
    reports: NodeFacts = {}
    for line in answer.stdout.splitlines():
        words = line.split("\t")
        if len(words) == 3 and words[0] in step.nodes:
            reports.setdefault(words[0], {})[words[1]] = words[2].strip()
    if not reports:
        lines = [line for line in answer.stderr.splitlines() if line.strip()]
        raise UnavailableError(lines[-1] if lines else f"srun: exit status {answer.returncode}, and no node answers")
    return reports


def _writable_or_none(plan_dir: str | None) -> str | None:
    return plan_dir if plan_dir and os.access(plan_dir, os.W_OK | os.X_OK) else None
