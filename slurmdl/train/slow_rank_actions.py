"""What a run does about slow ranks: it warns, and if asked (--dl-on-slow=exclude) requeues the job without the node.

`slurmdl srun` passes the option on to the tasks of a step by a variable. The requeue itself is that of the command
`slurmdl requeue`, in a process of its own: it counts the requeues, refuses if too few other nodes are left, and
remembers the node for later jobs.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any

from slurmdl.errors import GaveUpError, UnavailableError, warn
from slurmdl.train.report.slow_ranks import SlowRank, SlowRankDetector

#: set to "exclude" in the tasks of a step with --dl-on-slow=exclude
ON_SLOW_VARIABLE = "SLURMDL_ON_SLOW"
#: time limit of `slurmdl requeue`, which queries a controller that may be under load
_REQUEUE_TIMEOUT_S = 60.0


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
    Raises UnavailableError with the reason if it is not possible, GaveUpError if the limit of requeues forbids it.
    """
    from slurmdl.slurm import jobs, process  # imported only when needed
    from slurmdl.slurm.run_module import module_argv

    # with the ID of the job, it returns
    argv = module_argv("slurmdl", "requeue", "--exclude", ",".join(reasons), "--reason",
                       "; ".join(reasons.values()), *["--dry-run"] * dry_run, *["--this-job-only"] * this_job_only,
                       jobs.own_job_id(os.environ))
    result = process.run_command(argv, timeout=_REQUEUE_TIMEOUT_S, name="slurmdl requeue")
    # Slurm terminates the processes of a requeued job, this one among them
    if result.returncode not in (0, -signal.SIGTERM):
        lines = result.stderr.strip().splitlines() or [f"slurmdl requeue: exit status {result.returncode}"]
        error = GaveUpError if result.returncode == GaveUpError.exit_status else UnavailableError
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
    """Warn that the run goes on with slow nodes, and why."""
    warn(f"train: not requeued without {', '.join(nodes)}, and the run continues: {error}")
