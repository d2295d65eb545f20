"""What a job does about bad, slow and lost nodes: its states, and the rules by which it changes them. Pure.

`slurmdl srun` applies the rules before a step starts. Those of a running step are applied where its ranks are known:
slow ranks in train/slow_rank_actions.py, lost ranks in train/library/failure_recovery.py and shutdown.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class JobState(Enum):
    """States of a job; the values are the words of the documentation."""

    PREFLIGHT = "preflight"
    RUN = "run"
    SLOW = "slow"
    LOST = "lost"
    EXCLUDED = "excluded"
    REQUEUED = "requeued"
    GIVEN_UP = "given up"


@dataclass(frozen=True)
class Facts:
    """What is known at the end of a state; the defaults are those of a job without any problem.

    Attributes:
        has_bad_nodes: the preflight has found some.
        has_spare_nodes: the good nodes are as many as the user requested, with that of the batch script.
        can_requeue: Slurm will requeue the job without its bad nodes, and --dl-max-requeues allows it.
        has_slow_rank, has_lost_rank: seen while the program runs.
        others_continue: the other ranks can go on without the lost one.
        on_bad_nodes, on_slow: the options of these names.
    """

    has_bad_nodes: bool = False
    has_spare_nodes: bool = False
    can_requeue: bool = False
    has_slow_rank: bool = False
    has_lost_rank: bool = False
    others_continue: bool = False
    on_bad_nodes: str = "stop"
    on_slow: str = "warn"


@dataclass(frozen=True)
class Transition:
    """A change of the state; of several the first one applies whose condition holds."""

    state: JobState
    condition: str
    holds: Callable[[Facts], bool]
    next: JobState


TRANSITIONS = (
    Transition(JobState.PREFLIGHT, "all nodes are good, or not checked", lambda facts: not facts.has_bad_nodes,
               JobState.RUN),
    Transition(JobState.PREFLIGHT, "spare nodes replace the bad ones", lambda facts: facts.has_spare_nodes,
               JobState.EXCLUDED),
    Transition(JobState.PREFLIGHT, "the job can be requeued", lambda facts: facts.can_requeue, JobState.REQUEUED),
    Transition(JobState.PREFLIGHT, "`--dl-on-bad-nodes=run`", lambda facts: facts.on_bad_nodes == "run",
               JobState.RUN),
    Transition(JobState.PREFLIGHT, "otherwise", lambda facts: True, JobState.GIVEN_UP),
    Transition(JobState.RUN, "a rank is lost", lambda facts: facts.has_lost_rank, JobState.LOST),
    Transition(JobState.RUN, "a rank is slow in several windows", lambda facts: facts.has_slow_rank, JobState.SLOW),
    Transition(JobState.SLOW, "`--dl-on-slow=exclude`, and the job can be requeued",
               lambda facts: facts.on_slow == "exclude" and facts.can_requeue, JobState.REQUEUED),
    Transition(JobState.SLOW, "otherwise, with a warning", lambda facts: True, JobState.RUN),
    Transition(JobState.LOST, "the other ranks can continue", lambda facts: facts.others_continue, JobState.EXCLUDED),
    Transition(JobState.LOST, "the job can be requeued", lambda facts: facts.can_requeue, JobState.REQUEUED),
    Transition(JobState.LOST, "otherwise", lambda facts: True, JobState.GIVEN_UP),
    Transition(JobState.EXCLUDED, "the rest of the nodes is enough", lambda facts: True, JobState.RUN),
    Transition(JobState.REQUEUED, "Slurm starts the job again", lambda facts: True, JobState.PREFLIGHT),
)


def next_state(state: JobState, facts: Facts) -> JobState:
    """The state that follows; the same one if no transition applies."""
    return next((transition.next for transition in TRANSITIONS
                 if transition.state is state and transition.holds(facts)), state)
