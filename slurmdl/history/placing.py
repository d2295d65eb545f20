"""How the jobs of a replay get their nodes: by Slurm, by slurmdl as a preference, by both, or at random."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from slurmdl.history.leaves import Leaves
from slurmdl.history.preferred_nodes import PreferredNodes
from slurmdl.history.slurm_rules import SlurmRule, slurm_rule
from slurmdl.history.step_cost import StepCost
from slurmdl.history.trace import IntArray, JobTrace
from slurmdl.placement.result import is_good_enough

#: policy -> description
POLICIES = {"slurm": "all jobs by Slurm's rule", "slurmdl": "all jobs by slurmdl's preference",
            "mixed": "a share of the users by slurmdl's preference", "random": "control: random nodes"}


class NodeChoice(Protocol):
    """Chooses the nodes of a job that can start."""

    def choose(self, free: IntArray, nodes: int) -> IntArray | None:
        """Nodes per leaf, shape (leaves,), of the free ones; None if the job cannot start."""


class RandomNodes:
    """Random free nodes whenever Slurm's rule could start the job."""

    def __init__(self, rule: SlurmRule, seed: int) -> None:
        self.rule, self.generator = rule, np.random.default_rng(seed)

    def choose(self, free: IntArray, nodes: int) -> IntArray | None:
        if not self.rule.fits(free, nodes):
            return None
        return np.asarray(self.generator.multivariate_hypergeometric(free, nodes, method="marginals"))


class AutomaticBinding:
    """As `slurmdl sbatch` binds jobs: slurmdl's choice, unless Slurm's own is good enough."""

    def __init__(self, rule: SlurmRule, preferred: PreferredNodes, cost: StepCost) -> None:
        self._rule, self._preferred, self._cost = rule, preferred, cost

    def choose(self, free: IntArray, nodes: int) -> IntArray | None:
        best, own = self._preferred.choose(free, nodes), self._rule.choose(free, nodes)
        if best is None or own is None:
            return best
        return own if is_good_enough(self._cost.sort_key(own), self._cost.sort_key(best)) else best


@dataclass(frozen=True, eq=False)
class Machine:
    """A cluster with its rule and cost model; built once for all policies of a trace."""

    leaves: Leaves
    cost: StepCost

    @cached_property
    def rule(self) -> SlurmRule:
        return slurm_rule(self.leaves)

    @cached_property
    def preferred(self) -> PreferredNodes:
        return PreferredNodes(self.leaves, self.rule, self.cost)

    @cached_property
    def automatic(self) -> AutomaticBinding:
        return AutomaticBinding(self.rule, self.preferred, self.cost)

    @cached_property
    def _ideal_seconds(self) -> dict[int, float]:
        return {}

    def ideal_seconds(self, nodes: int) -> float:
        """Communication time of slurmdl's choice on the empty cluster: the reference of all factors."""
        if nodes not in self._ideal_seconds:
            counts = self.preferred.choose(self.leaves.size, nodes)
            self._ideal_seconds[nodes] = 0.0 if counts is None else self.cost.seconds(counts)
        return self._ideal_seconds[nodes]

    def never_starts(self, trace: JobTrace) -> npt.NDArray[np.bool_]:
        """Whether Slurm's rule rejects a job on the empty cluster; shape (jobs,)."""
        sizes = np.unique(trace.nodes)
        rejected = [size for size in sizes.tolist() if self.rule.choose(self.leaves.size, size) is None]
        return np.isin(trace.nodes, rejected)


@dataclass(frozen=True)
class Communication:
    """Which jobs are bound by communication, and by how much.

    Attributes:
        bound_share: share of the jobs with several nodes, drawn by `seed`.
        comm_share: share of communication in the recorded run time of such a job.
        fixed_run_times: the simulation keeps the recorded run times; the resulting ones are only reported.
    """

    bound_share: float = 0.5
    comm_share: float = 0.3
    fixed_run_times: bool = False

    def bound_jobs(self, trace: JobTrace, seed: int) -> npt.NDArray[np.bool_]:
        draws = np.random.default_rng([seed, 1]).random(len(trace))
        return np.asarray((trace.nodes > 1) & (draws < self.bound_share))

    def resulting_run_s(self, run_s: float, factor: float) -> float:
        return run_s * (1 - self.comm_share + self.comm_share * factor)


def jobs_with_slurmdl(trace: JobTrace, policy: str, share: float, seed: int) -> npt.NDArray[np.bool_]:
    """Whether slurmdl places each job; shape (jobs,). With `mixed`, users are drawn by the seed."""
    if policy != "mixed":
        return np.full(len(trace), policy == "slurmdl")
    users = int(trace.user.max(initial=0)) + 1
    chosen = np.random.default_rng([seed, 2]).permutation(users)[:round(share * users)]
    return np.isin(trace.user, chosen)
