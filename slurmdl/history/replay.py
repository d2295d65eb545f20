"""Replay of a job trace on a simulated cluster: what Slurm's and slurmdl's choice of nodes do to all jobs.

The policies run on one trace, or on the generated traces of several seeds in parallel processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from slurmdl.errors import InputError
from slurmdl.history.best_nodes import CommCosts
from slurmdl.history.leaves import Leaves
from slurmdl.history.lublin import generate_lublin_trace
from slurmdl.history.scheduler import Communication, Machine, NodeChoice, Schedule, SchedulerTiming, Simulation
from slurmdl.history.slurm_rules import SlurmRule
from slurmdl.history.traces import JobTrace
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.arrays import BoolArray, FloatArray, IntArray
from slurmdl.text import pluralize
from slurmdl.topology.topology import Topology

#: all jobs by Slurm's rule; all by slurmdl's choice; a share of the users by slurmdl's choice; control: random nodes
POLICIES = ("slurm", "slurmdl", "mixed", "random")
SLOWDOWN_BOUND_S = 10.0  # Feitelson: run times below it count as this long


def random_nodes(rule: SlurmRule, seed: int) -> NodeChoice:
    """Random free nodes whenever Slurm's rule could start the job."""
    generator = np.random.default_rng(seed)

    def choose(free: IntArray, nodes: int) -> IntArray | None:
        if not rule.fits(free, nodes):
            return None
        return np.asarray(generator.multivariate_hypergeometric(free, nodes, method="marginals"))

    return choose


def jobs_with_slurmdl(trace: JobTrace, policy: str, share: float, seed: int) -> BoolArray:
    """Whether slurmdl places each job; shape (jobs,). With `mixed`, users are drawn by the seed."""
    if policy != "mixed":
        return np.full(len(trace), policy == "slurmdl")
    users = int(trace.user.max(initial=0)) + 1
    chosen = np.random.default_rng([seed, 2]).permutation(users)[:round(share * users)]
    return np.isin(trace.user, chosen)


@dataclass(frozen=True, eq=False)
class ReplaySettings:
    """What to simulate.

    Attributes:
        policies: names in POLICIES.
        share: share of the users with slurmdl in the policy `mixed`.
        strategy, model_bytes: communication of the jobs, see CommCosts.
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
        return Machine(CommCosts(leaves, self.scores, [self.strategy], self.model_bytes))


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
    placed: BoolArray
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
    if unused := len(machine.leaves.topology.nodes) - machine.leaves.nodes:
        note = f"{pluralize(unused, 'node')} in no zone not used, as by Slurm"
        trace = replace(trace, notes=(*trace.notes, note))
    return trace


def replay_policies(trace: JobTrace, machine: Machine, settings: ReplaySettings, seed: int,
                    on_progress: Callable[[str, int], None] | None = None) -> Iterator[PolicyOutcome]:
    """Simulate each policy on the same trace; `on_progress` gets the policy and the number of started jobs."""
    bound = settings.communication.bound_jobs(trace, seed)
    for policy in settings.policies:
        placed = jobs_with_slurmdl(trace, policy, settings.share, seed)
        choice = random_nodes(machine.rule, seed) if policy == "random" else machine.rule.choose
        simulation = Simulation(trace, machine, choice, placed, bound, settings.communication, settings.timing)
        progress = (lambda count, policy=policy: on_progress(policy, count)) if on_progress else None
        yield summarize_schedule(simulation.run(progress), trace, machine, policy, seed, placed, bound)


def summarize_schedule(schedule: Schedule, trace: JobTrace, machine: Machine, policy: str, seed: int,
                       placed: BoolArray, bound: BoolArray) -> PolicyOutcome:
    """Compute the metrics of one simulation."""
    wait = schedule.start_s - trace.submit_s
    response = wait + schedule.run_s
    several = trace.nodes > 1
    spread = schedule.zones / machine.leaves.fewest[trace.nodes]
    slowdown = np.maximum(1.0, response / np.maximum(trace.run_s, SLOWDOWN_BOUND_S))
    return PolicyOutcome(policy, seed, wait, slowdown, spread[several], schedule.factor[bound],
                         (schedule.run_s / trace.run_s)[bound], response, placed, schedule.utilization,
                         schedule.useful, schedule.leaf_nodes, schedule.startable_nodes)


def _replay_seed(settings: ReplaySettings, jobs: int, load: float, seed: int) -> list[PolicyOutcome]:
    """Simulate the policies for one seed; runs in a worker process."""
    machine = settings.machine()
    trace = usable_trace(generate_lublin_trace(jobs, machine.leaves.nodes, load, seed), machine)
    return list(replay_policies(trace, machine, settings, seed))


def replay_seeds(settings: ReplaySettings, jobs: int, load: float, seeds: Sequence[int],
                 processes: int = 1) -> Iterator[list[PolicyOutcome]]:
    """Outcomes of a generated trace of each seed, in the order of the seeds; equal for any number of processes."""
    replay_seed = partial(_replay_seed, settings, jobs, load)
    if processes <= 1 or len(seeds) == 1:
        yield from map(replay_seed, seeds)
        return
    import multiprocessing

    with multiprocessing.get_context("spawn").Pool(min(processes, len(seeds))) as pool:
        yield from pool.imap(replay_seed, seeds)


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
