"""Which ranks compute slowly, by the compute times of all ranks over windows of steps; and what a run does about it.

The rule is that of bad nodes in a preflight (health/faults.py, which training must not import): the ratio to the
median of the ranks, and the distance from it in median absolute deviations (MAD). The first keeps small differences
between good nodes from counting, the second the noise of a busy cluster; with fewer than four ranks a MAD means
nothing. Each value is the median of a window of steps, and several windows in a row must agree, so a pause of some
steps (a garbage collection, a checkpoint, an evaluation) is no alarm.

Not for ranks whose batches differ in size by design (--load-balance): a fast node gets more samples until all compute
equally long, or takes more steps. There the step time is no measure of the node, and the load balance deals with slow
nodes already, so the callers do nothing.

The run warns, and if asked (--dl-on-slow=exclude) requeues the job without the node. `slurmdl srun` passes the option
on to the tasks of a step by a variable. The requeue itself is that of the command `slurmdl requeue`, in a process of
its own: it counts the requeues, refuses if too few other nodes are left, and remembers the node for later
jobs.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from statistics import median_low
from typing import Any

from slurmdl.errors import BadNodesError, UnavailableError, warn
from slurmdl.units import format_duration

#: steps of a window; all ranks end it at the same step number
WINDOW_STEPS = 20
#: windows in a row that must agree, and seconds that the rank must compute in them: in short windows the scheduling
#: of a busy node makes a rank slow by chance
CONFIRMING_WINDOWS, CONFIRMING_S = 3, 3.0
#: lowest ratio of a slow rank's compute time to the median, and seconds that it is longer at least: the noise of an
#: operating system
MIN_FACTOR, MIN_EXCESS_S = 1.3, 0.001
#: distance of a slow rank from the median in standard deviations, if there are this many ranks
_DEVIATIONS, _MIN_RANKS_FOR_MAD = 5.0, 4
#: 1 standard deviation of normal noise in MADs
_MAD_TO_DEVIATION = 1.4826
#: set to "exclude" in the tasks of a step with --dl-on-slow=exclude
ON_SLOW_VARIABLE = "SLURMDL_ON_SLOW"
#: time limit of `slurmdl requeue`, which queries a controller that may be under load
_REQUEUE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class SlowRank:
    """A rank that computes slowly.

    Attributes:
        since: first step of the first slow window.
        seconds, median_seconds: compute time per step in the last window, of this rank and of the median rank, in s.
    """

    rank: int
    since: int
    seconds: float
    median_seconds: float

    @property
    def factor(self) -> float:
        """Compute time as a multiple of the median."""
        return self.seconds / self.median_seconds

    def describe(self, node: str) -> str:
        """E.g. `rank 3 on n4 computes 1.9 times as long as the median rank, since step 140 (0.38 s, 0.20 s)`."""
        return f"rank {self.rank} on {node} computes {self.factor:.1f} times as long as the median rank, since " \
               f"step {self.since} ({format_duration(self.seconds)}, {format_duration(self.median_seconds)})"


@dataclass
class _Suspect:
    """A rank that was slow in some windows in a row: their first step, number, and seconds of its computation."""

    since: int
    windows: int = 0
    seconds: float = 0.0
    is_reported: bool = False


class SlowRankDetector:
    """Finds slow ranks in the compute times of successive windows."""

    def __init__(self) -> None:
        self._suspects: dict[int, _Suspect] = {}

    def add_window(self, seconds: Mapping[int, float], first_step: int) -> list[SlowRank]:
        """Judge a window; return the ranks that it confirms as slow, each once until a window without it.

        The slowest is first.

        Args:
            seconds: rank -> its compute time per step, the median of the window, in s. A rank without a value neither
                becomes slow nor recovers.
            first_step: of the window.
        """
        # the lower of two medians: also one of two ranks, or two of four, can be slow
        center = median_low(seconds.values()) if len(seconds) > 1 else 0.0
        slow = _slow_ranks(seconds, center)
        for rank in seconds:
            if rank not in slow:
                self._suspects.pop(rank, None)
        findings = []
        for rank in slow:
            suspect = self._suspects.setdefault(rank, _Suspect(first_step))
            suspect.windows += 1
            suspect.seconds += WINDOW_STEPS * seconds[rank]
            if suspect.windows >= CONFIRMING_WINDOWS and suspect.seconds >= CONFIRMING_S and not suspect.is_reported:
                suspect.is_reported = True
                findings.append(SlowRank(rank, suspect.since, seconds[rank], center))
        return sorted(findings, key=lambda finding: -finding.seconds)


def _slow_ranks(seconds: Mapping[int, float], center: float) -> list[int]:
    """Ranks far above a positive median."""
    if center <= 0:
        return []
    deviation = _MAD_TO_DEVIATION * median_low(abs(value - center) for value in seconds.values())
    margin = _DEVIATIONS * deviation if len(seconds) >= _MIN_RANKS_FOR_MAD else 0.0
    limit = max(MIN_FACTOR * center, center + MIN_EXCESS_S, center + margin)
    return [rank for rank, value in seconds.items() if value > limit]


class SlowRankReporter:
    """Finds slow ranks and warns of them.

    Args:
        nodes: rank -> its node.

    Attributes:
        found: rank, node, step since when it is slow, and factor of each finding.
        nodes_to_exclude: node -> reason of the first finding, if nodes of slow ranks are to be excluded. Later
            findings are only reported: the requeue is under way, or was refused.
    """

    def __init__(self, nodes: Mapping[int, str], environ: Mapping[str, str] = os.environ) -> None:
        self._nodes, self._detector = nodes, SlowRankDetector()
        self._excludes = environ.get(ON_SLOW_VARIABLE) == "exclude"
        self.found: list[dict[str, Any]] = []
        self.nodes_to_exclude: dict[str, str] = {}

    def add_window(self, seconds: Mapping[int, float], first_step: int) -> bool:
        """Judge a window as SlowRankDetector; return whether nodes are to be excluded because of it."""
        findings = self._detector.add_window(seconds, first_step)
        for finding in findings:
            node = self._nodes[finding.rank]
            warn(f"train: {finding.describe(node)}")
            self.found.append({"rank": finding.rank, "node": node, "since_step": finding.since,
                               "factor": round(finding.factor, 3)})
        if not findings or not self._excludes or self.nodes_to_exclude:
            return False
        self.nodes_to_exclude = {self._nodes[finding.rank]: _reason(finding) for finding in reversed(findings)}
        return True


def _reason(finding: SlowRank) -> str:
    return f"rank {finding.rank} computed {finding.factor:.1f} times as long as the median rank"


def requeue_without_nodes(reasons: Mapping[str, str], dry_run: bool = False, this_job_only: bool = False) -> str:
    """Requeue the job of this process without nodes (node -> reason); return what was done.

    With `dry_run` only check whether that is possible, with `this_job_only` do not remember the nodes for later jobs.
    Raises UnavailableError with the reason if it is not possible, BadNodesError if the limit of requeues forbids it.
    """
    from slurmdl.slurm import jobs, process  # imported only when needed

    # with the ID of the job, it returns
    argv = process.module_argv("slurmdl", "requeue", "--exclude", ",".join(reasons), "--reason",
                       "; ".join(reasons.values()), *["--dry-run"] * dry_run, *["--this-job-only"] * this_job_only,
                       jobs.own_job_id(os.environ))
    result = process.run_command(argv, timeout=_REQUEUE_TIMEOUT_S, name="slurmdl requeue")
    # Slurm terminates the processes of a requeued job, this one among them
    if result.returncode not in (0, -signal.SIGTERM):
        lines = result.stderr.strip().splitlines() or [f"slurmdl requeue: exit status {result.returncode}"]
        error = BadNodesError if result.returncode == BadNodesError.exit_status else UnavailableError
        raise error(lines[-1].removeprefix("slurmdl: "))
    return result.stdout.strip()


def start_requeue(reasons: Mapping[str, str], dry_run: bool = False) -> Future[str]:
    """Start `requeue_without_nodes` in a thread, so that the training does not wait for the controller."""
    future: Future[str] = Future()

    def run() -> None:
        try:
            future.set_result(requeue_without_nodes(reasons, dry_run))
        except Exception as error:
            future.set_exception(error)

    # a daemon thread: the training may end meanwhile
    threading.Thread(target=run, name="slurmdl-requeue", daemon=True).start()
    return future


def warn_of_refusal(nodes: Iterable[str], error: object) -> None:
    """Warn that the run continues with slow nodes, and why."""
    warn(f"train: not requeued without {', '.join(nodes)}, and the run continues: {error}")
