"""Start a probe of links as a Slurm step: on the nodes of this job, or as a job of its own."""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from slurmdl.errors import InputError, SlurmdlError, UnavailableError
from slurmdl.links import aggregate
from slurmdl.links.link_scores import LinkScores
from slurmdl.links.probe import tcp_task
from slurmdl.links.probe.link_estimator import estimate_links
from slurmdl.links.probe.measurement import PairMeasurement, ProbeConfig
from slurmdl.links.probe.schedule import PAIRS_PER_ZONE_PAIR, ROUNDS_IN_ZONE, round_robin_schedule
from slurmdl.links.samples import LinkSample
from slurmdl.slurm import hostlist, process
from slurmdl.topology.topology import Topology

#: what carries the probes -> the module of its tasks
TRANSPORTS = {"tcp": "slurmdl.links.probe.tcp_task", "mpi": "slurmdl.links.probe.mpi_task"}
#: seconds that the step of --dl-probe may take to start, beside those that it probes
_START_TIMEOUT_S = 2.0
#: variables of a job that would change the step
_CONFLICTING_VARIABLES = ("SLURM_HOSTFILE", "SLURM_DISTRIBUTION", "SLURM_ARBITRARY_NODELIST", "SLURM_LABELIO", "SLURM_MULTI_PROG",
            "SLURM_STDOUTMODE", "SLURM_STDINMODE", "SLURM_STDERRMODE", "SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK",
            "SLURM_TRES_PER_TASK", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_NODE", "SLURM_MEM_PER_GPU", "SLURM_OVERCOMMIT")


@dataclass(frozen=True)
class ProbeStep:
    """What is to be measured, and how.

    Attributes
    ----------
    nodes : at least two.
    topology : their zones.
    effort : of one pair, which becomes more or less so that all rounds fit in the budget.
    budget : seconds for all rounds.
    start : seconds that the step may take to start.
    transport : one of TRANSPORTS.
    interface : to probe over, "" for that by which the nodes reach each other's names.
    options : further ones for srun.
    source : of the samples.
    inside, between : as `rounds`.
    """

    nodes: tuple[str, ...]
    topology: Topology
    config: ProbeConfig = field(default_factory=ProbeConfig)
    budget_s: float = 30.0
    start_timeout_s: float = 30.0
    transport: str = "tcp"
    interface: str = ""
    srun_args: tuple[str, ...] = ()
    source: str = "probe"
    rounds_in_zone: int = ROUNDS_IN_ZONE
    pairs_per_zone_pair: int = PAIRS_PER_ZONE_PAIR
    seed: int = 0

    def leaf_by_node(self) -> dict[str, str]:
        """Leaf zone of each node that has one."""
        return {node: leaf for node in self.nodes if (leaf := self.topology.leaf_of(node))}

    def schedule(self) -> tcp_task.ProbeSchedule:
        """What the step is told."""
        leaf = self.leaf_by_node()
        number = {name: i for i, name in enumerate(dict.fromkeys(leaf.values()))}
        drawn = list(round_robin_schedule([number.get(leaf.get(node, ""), -1) for node in self.nodes], self.seed,
                            rounds_in_zone=self.rounds_in_zone, pairs_per_zone_pair=self.pairs_per_zone_pair))
        # the tasks need a moment to come, and a pair one more for what it waits for
        effort = self.config.scaled_to(max(0.1, 0.6 * self.budget_s / max(1, len(drawn))))
        return tcp_task.ProbeSchedule(self.nodes, tuple(map(tuple, drawn)), effort, self.budget_s, self.interface)

    def srun_argv(self, in_job: bool) -> list[str]:
        """srun's command line. In a job the step takes no CPU and no memory away from other steps."""
        count = str(len(self.nodes))
        line = ["srun", "--input=0", "--no-kill", "--kill-on-bad-exit=0", "--unbuffered", f"--nodes={count}",
                f"--ntasks={count}", "--ntasks-per-node=1", f"--nodelist={hostlist.fold_hostlist(self.nodes)}"]
        line += ["--overlap", "--mem=0"] if in_job else ["--job-name=slurmdl-probe"]
        line += ["--mpi=none"] if self.transport == "tcp" else []
        return [*line, *self.srun_args, sys.executable, "-m", TRANSPORTS[self.transport]]


def run_probe_step(probe: ProbeStep, environ: Mapping[str, str],
                   on_warning: Callable[[str], None]) -> list[LinkSample]:
    """Run the step and return the samples of the links that it measured.

    Pairs that are known when the step breaks off are kept; why it broke off goes to `say`, as do the step's remarks.

    Raises
    ------
    UnavailableError : srun is missing, or no pair was measured.
    """
    env = {name: value for name, value in environ.items() if name not in _CONFLICTING_VARIABLES}
    env[tcp_task.SECRET_VARIABLE] = secrets.token_hex()
    found: list[PairMeasurement] = []
    output = process.stream_lines(probe.srun_argv("SLURM_JOB_ID" in environ), stdin=json.dumps(probe.schedule().to_json()),
                           timeout=probe.start_timeout_s + probe.budget_s, env=env)
    remarks = []
    try:
        for line in output:
            message = _parse_message(line)
            if message == tcp_task.END_MESSAGE:
                break
            if "note" in message:
                remarks.append(str(message["note"]))
            else:
                found.append(PairMeasurement.from_json(message))
    except (UnavailableError, InputError) as error:
        remarks.append(str(error))
    finally:
        output.close()
    if not found:
        raise UnavailableError(f"probe: no pair of nodes was measured ({remarks[0] if remarks else 'no answer'})")
    for remark in dict.fromkeys(remarks):
        on_warning(f"probe: {remark}")
    return estimate_links(found, probe.leaf_by_node(), time.time(), probe.source)


def _parse_message(line: str) -> dict[str, object]:
    try:
        message = json.loads(line)
    except ValueError as error:
        raise InputError(f"the step wrote {line.strip()[:80]!r}") from error
    if not isinstance(message, dict):
        raise InputError(f"the step wrote {line.strip()[:80]!r}")
    return message


def with_probed_scores(scores: LinkScores, nodes: Sequence[str], topology: Topology, budget_s: float,
              environ: Mapping[str, str], on_warning: Callable[[str], None]) -> LinkScores:
    """The scores with those links measured anew that a probe of a job's own nodes reaches within `seconds`.

    A probe that fails, or does not start in time, leaves the scores as they are, and one line says so.
    """
    if len(nodes) < 2:
        return scores
    probe = ProbeStep(
    tuple(nodes),
    topology,
    budget_s=budget_s,
    start_timeout_s=_START_TIMEOUT_S,
    source="job",
    rounds_in_zone=3,
     pairs_per_zone_pair=1)
    try:
        fresh = aggregate.aggregate_scores(run_probe_step(probe, environ, lambda _: None), time.time()).scores
    except SlurmdlError as error:
        on_warning(f"--dl-probe: {error}; the map is made without")
        return scores
    return replace(scores, nodes={**scores.nodes, **fresh.nodes}, zones={**scores.zones, **fresh.zones},
                   inter_leaf={**scores.inter_leaf, **fresh.inter_leaf}, tolerance=max(scores.tolerance, fresh.tolerance))
