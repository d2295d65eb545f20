"""The policies of a replay on one trace, or on the generated traces of several seeds in parallel processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.errors import InputError
from slurmdl.history.leaves import Leaves
from slurmdl.history.lublin import generate_lublin_trace
from slurmdl.history.placing import Communication, Machine, RandomNodes, jobs_with_slurmdl
from slurmdl.history.scheduler import Schedule, SchedulerTiming, Simulation
from slurmdl.history.step_cost import StepCost
from slurmdl.history.trace import FloatArray, JobTrace
from slurmdl.links.link_scores import LinkScores
from slurmdl.text import pluralize
from slurmdl.topology.topology import Topology

SLOWDOWN_BOUND_S = 10.0  # Feitelson: run times below it count as this long


@dataclass(frozen=True, eq=False)
class ReplaySettings:
    """What to simulate.

    Attributes:
        policies: names in placing.POLICIES.
        share: share of the users with slurmdl in the policy `mixed`.
        strategy, model_bytes: communication of the jobs, see StepCost.
        scores: default link scores.
    """

    topology: Topology
    policies: tuple[str, ...]
    share: float = 0.5
    strategy: str = "allreduce"
    model_bytes: float = 100e6
    scores: LinkScores = field(default_factory=LinkScores)
    communication: Communication = field(default_factory=Communication)
    timing: SchedulerTiming = field(default_factory=SchedulerTiming)

    def machine(self) -> Machine:
        leaves = Leaves.from_topology(self.topology)
        return Machine(leaves, StepCost(leaves, self.strategy, self.model_bytes, self.scores))


@dataclass(frozen=True, eq=False)
class GeneratedTraces:
    """Traces of the Lublin-Feitelson generator, one per seed."""

    jobs: int
    load: float

    def trace(self, nodes: int, seed: int) -> JobTrace:
        return generate_lublin_trace(self.jobs, nodes, self.load, seed)


@dataclass(frozen=True, eq=False)
class PolicyOutcome:
    """Outcome of one policy with one seed. Arrays of shape (jobs,) unless noted.

    Attributes:
        slowdown: waiting and resulting run time over the recorded run time, both times at least SLOWDOWN_BOUND_S.
        spread: leaf zones over the fewest possible on the empty cluster; of jobs with several nodes.
        factor, run_ratio: predicted communication time over that of the reference, and resulting over recorded run
            time; of jobs bound by communication.
        placed: whether slurmdl placed the job.
        utilization, useful, leaf_nodes, startable_nodes: as in Schedule.
    """

    policy: str
    seed: int
    wait_s: FloatArray
    slowdown: FloatArray
    spread: FloatArray
    factor: FloatArray
    run_ratio: FloatArray
    response_s: FloatArray
    placed: npt.NDArray[np.bool_]
    utilization: float
    useful: float
    leaf_nodes: float
    startable_nodes: float


def usable_trace(trace: JobTrace, machine: Machine) -> JobTrace:
    """The trace without jobs that can never start on this cluster; the reasons are in its notes."""
    trace = trace.without_jobs_above(machine.leaves.nodes)
    rejected = machine.never_starts(trace)
    if rejected.any():
        note = (f"{pluralize(int(rejected.sum()), 'job')} skipped: Slurm's node selection does not start them even "
                "on the empty cluster")
        if rejected.all():
            raise InputError(f"no usable job: {note}", trace.source)
        trace = replace(trace.selected(~rejected), notes=(*trace.notes, note))
    if machine.leaves.note():
        trace = replace(trace, notes=(*trace.notes, machine.leaves.note()))
    return trace


def replay_policies(trace: JobTrace, machine: Machine, settings: ReplaySettings, seed: int,
                    on_progress: Callable[[str, int], None] | None = None) -> Iterator[PolicyOutcome]:
    """Simulate each policy on the same trace; `on_progress` gets the policy and the number of started jobs."""
    bound = settings.communication.bound_jobs(trace, seed)
    for policy in settings.policies:
        placed = jobs_with_slurmdl(trace, policy, settings.share, seed)
        choice = RandomNodes(machine.rule, seed) if policy == "random" else machine.rule
        simulation = Simulation(trace, machine, choice, placed, bound, settings.communication, settings.timing)
        progress = (lambda count, policy=policy: on_progress(policy, count)) if on_progress else None
        yield summarize_schedule(simulation.run(progress), trace, machine, policy, seed, placed, bound)


def summarize_schedule(schedule: Schedule, trace: JobTrace, machine: Machine, policy: str, seed: int,
                       placed: npt.NDArray[np.bool_], bound: npt.NDArray[np.bool_]) -> PolicyOutcome:
    """Compute the metrics of one simulation."""
    wait = schedule.start_s - trace.submit_s
    response = wait + schedule.run_s
    several = trace.nodes > 1
    spread = schedule.zones / machine.leaves.fewest[trace.nodes]
    slowdown = np.maximum(1.0, response / np.maximum(trace.run_s, SLOWDOWN_BOUND_S))
    return PolicyOutcome(policy, seed, wait, slowdown, spread[several], schedule.factor[bound],
                         (schedule.run_s / trace.run_s)[bound], response, placed, schedule.utilization,
                         schedule.useful, schedule.leaf_nodes, schedule.startable_nodes)


def _replay_seed(work: tuple[ReplaySettings, GeneratedTraces, int]) -> list[PolicyOutcome]:
    """Simulate the policies for one seed; runs in a worker process."""
    settings, traces, seed = work
    machine = settings.machine()
    trace = usable_trace(traces.trace(machine.leaves.nodes, seed), machine)
    return list(replay_policies(trace, machine, settings, seed))


def replay_seeds(settings: ReplaySettings, traces: GeneratedTraces, seeds: Sequence[int],
                 processes: int = 1) -> Iterator[list[PolicyOutcome]]:
    """Outcomes of each seed, in the order of the seeds; equal for any number of processes."""
    work = [(settings, traces, seed) for seed in seeds]
    if processes <= 1 or len(seeds) == 1:
        yield from map(_replay_seed, work)
        return
    import multiprocessing

    with multiprocessing.get_context("spawn").Pool(min(processes, len(seeds))) as pool:
        yield from pool.imap(_replay_seed, work)


def pool_outcomes(outcomes: Sequence[PolicyOutcome]) -> PolicyOutcome:
    """One outcome of several seeds: distributions over all jobs, means of the shares."""
    first = outcomes[0]
    if len(outcomes) == 1:
        return first
    arrays: dict[str, Any] = {name: np.concatenate([getattr(outcome, name) for outcome in outcomes])
                              for name in ("wait_s", "slowdown", "spread", "factor", "run_ratio", "response_s",
                                           "placed")}
    shares: dict[str, Any] = {name: float(np.mean([getattr(outcome, name) for outcome in outcomes]))
              for name in ("utilization", "useful", "leaf_nodes", "startable_nodes")}
    return PolicyOutcome(first.policy, first.seed, **arrays, **shares)
