"""Submit the cells of a matrix as jobs, one after the other, and keep the result of each in a directory.

An interrupted run continues where it stopped.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from slurmdl import files, records
from slurmdl.bench.spec import Cell, Spec
from slurmdl.errors import InputError, UnavailableError, print_stderr
from slurmdl.plan import STRATEGIES
from slurmdl.slurm import jobs, process, slurm_conf
from slurmdl.units import format_coarse_duration

POLL_S = 1.0
COMMAND_TIMEOUT_S = 60.0
REPORT_EVERY_S = 30.0  # seconds between two progress lines about the same job
#: state of a job -> status of its cell
ENDED = {"OUT_OF_MEMORY": "out of memory", "TIMEOUT": "time limit", "DEADLINE": "time limit",
         "CANCELLED": "cancelled", "PREEMPTED": "cancelled", "REFUSED": "refused"}
#: pending reasons of jobs that can never start
_NEVER = ("PartitionNodeLimit", "PartitionTimeLimit", "PartitionConfig", "BadConstraints", "ReqNodeNotAvail",
          "AssocMaxNodePerJobLimit", "QOSMaxNodePerJobLimit", "QOSMaxWallDurationPerJobLimit")

#: called with number, state and reason of a job that has not ended
Watch = Callable[[str, str, str], None]


@dataclass(frozen=True)
class CellResult:
    """Result of one repeat of a cell.

    Attributes:
        status: "done", "missing" (the framework is not installed), or the kind of failure.
        reason: one line; "" if the status is "done".
        ranks: measurements of each worker; see `worker`.
    """

    cell: Cell
    repeat: int
    status: str
    reason: str = ""
    ranks: tuple[dict[str, Any], ...] = ()


def run(spec: Spec, folder: Path, retry_failed: bool = False,
        report_progress: Callable[[str], None] = print_stderr) -> None:
    """Run the cells that have no result yet, and those that failed if `retry_failed`.

    Raises InputError for results of another spec, UnavailableError if Slurm or the directory is not available.
    """
    prepare(spec, folder)
    todo = [*spec.order()]
    results = {(result.cell, result.repeat): result for result in cell_results(folder)}
    # a framework that is not installed is not tried again
    missing = {result.cell.framework: result.reason for result in results.values()
               if result.status == "missing" and not retry_failed}
    left = [(number, cell, repeat) for number, (cell, repeat) in enumerate(todo, 1)
            if (cell, repeat) not in results or (retry_failed and results[cell, repeat].status != "done")]

    def jobs_from(index: int) -> int:
        return sum(cell.framework not in missing for _, cell, _ in left[index:])

    progress = Progress(len(todo), jobs_from(0), 60.0 * spec.time_limit_minutes, report_progress)
    for index, (number, cell, repeat) in enumerate(left):
        if cell.framework in missing:
            result = CellResult(cell, repeat, "missing", missing[cell.framework])
        else:
            progress.start(number)
            result = _run_cell(spec, cell, repeat, folder, progress.job)
        if result.status == "missing":
            missing[cell.framework] = result.reason
        files.write_atomic(str(folder / f"{cell.name}.{repeat}.result"), json.dumps(asdict(result)))
        progress.end(number, result, jobs_from(index + 1))


class Progress:
    """Progress lines over the cells of a matrix, run one after the other, with an estimate of the time left.

    Of the `cells` (repeats counted) `to_run` need a job of at most `limit_s`. `report_progress` prints one line.
    """

    def __init__(self, cells: int, to_run: int, limit_s: float, report_progress: Callable[[str], None],
                 now: Callable[[], float] = time.monotonic) -> None:
        self._cells, self._left, self._limit_s = cells, to_run, limit_s
        self._report_progress, self._now = report_progress, now
        self._durations_s: list[float] = []
        self._number, self._start_s, self._reported_s = 0, now(), now()
        report_progress(f"{to_run} of {cells} cells to run, {self._estimate(0.0)}")

    def start(self, number: int) -> None:
        self._number, self._start_s = number, self._now()
        self._reported_s = self._start_s

    def job(self, job: str, state: str, reason: str) -> None:
        """Report the state of the cell's job, at most once every REPORT_EVERY_S seconds."""
        now = self._now()
        if now - self._reported_s < REPORT_EVERY_S:
            return
        self._reported_s = now
        passed_s = now - self._start_s
        why = f" ({reason})" if state == "PENDING" and reason else ""
        self._report_progress(f"{self._number} of {self._cells}: job {job} is {state}{why}, "
                              f"{format_coarse_duration(passed_s)} since its submission; {self._estimate(passed_s)}")

    def end(self, number: int, result: CellResult, left: int) -> None:
        """Report the result of cell `number`; `left` cells still need a job."""
        if number == self._number:
            self._durations_s.append(self._now() - self._start_s)
        self._left = left
        reason = f": {result.reason}" if result.reason else ""
        estimate = f"; {self._estimate(0.0)}" if left else ""
        self._report_progress(f"{number} of {self._cells}: {result.cell}: {result.status}{reason}{estimate}")

    def _estimate(self, passed_s: float) -> str:
        """Estimate the time left from the mean of the cells so far, or from the time limit before the first."""
        if not self._durations_s:
            limit = format_coarse_duration(self._left * self._limit_s)
            return f"at most {limit} left ({format_coarse_duration(self._limit_s)} per job) and the time in the queue"
        left_s = self._left * fmean(self._durations_s) - passed_s
        return f"about {format_coarse_duration(max(0.0, left_s))} left"


def prepare(spec: Spec, folder: Path) -> None:
    """Create the directory, or check that it belongs to this spec."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "spec.json"
        if not file.exists():
            files.write_atomic(str(file), json.dumps(records.to_json(spec), indent=1))
    except OSError as error:
        raise UnavailableError(f"{folder}: cannot be written ({error.strerror})") from error
    existing = vars(read_spec(folder))
    if different := [key for key, value in vars(spec).items() if existing[key] != value]:
        raise InputError(f"results of another spec (different {', '.join(different)}); use another directory, or "
                         "the original spec", str(folder))


def read_spec(folder: Path) -> Spec:
    """Read the spec of a results directory; InputError if there is none."""
    file = folder / "spec.json"
    try:
        return records.from_json(Spec, json.loads(file.read_text()), str(file))
    except OSError as error:
        raise InputError(f"no results of `slurmdl bench run` ({error.strerror})", str(file)) from error
    except ValueError as error:
        raise InputError(f"is not JSON ({error})", str(file)) from error


def cell_results(folder: Path) -> Iterator[CellResult]:
    """Yield the results in a directory; unreadable files are ignored."""
    for file in sorted(folder.glob("*.result")):
        try:
            data = json.loads(file.read_text())
            yield CellResult(**{**data, "cell": Cell(**data["cell"]), "ranks": tuple(data["ranks"])})
        except (OSError, ValueError, TypeError, KeyError):
            continue


def _run_cell(spec: Spec, cell: Cell, repeat: int, folder: Path, watch: Watch) -> CellResult:
    base = folder.resolve() / f"{cell.name}.{repeat}"
    for file in folder.glob(f"{cell.name}.{repeat}.*.json"):
        file.unlink()
    log = base.with_name(f"{base.name}.log")
    work = {"framework": cell.framework, "strategy": cell.strategy, "model": cell.model,
            "data": spec.models[cell.model], "seed": spec.seed + repeat, **{key: getattr(spec, key) for key in (
                "batch_size", "lr", "emulate_compute", "warmup_steps", "steps", "evaluate_every")}}
    files.write_atomic(str(base.with_name(f"{base.name}.work")), json.dumps(work))
    files.write_atomic(str(base.with_name(f"{base.name}.sh")), script(spec, cell, str(base)))
    answer = process.run_command([*submit_command(cell), "--parsable", f"--output={_filename_pattern(str(log))}",
                                  *spec.sbatch, f"{base}.sh"], timeout=COMMAND_TIMEOUT_S)
    # a site's cli_filter may print lines before sbatch's own
    numbers = [jobs.parse_job_id(line.encode(), is_parsable=True) for line in answer.stdout.splitlines()]
    number = next(filter(None, numbers), "")
    if answer.returncode or not number:
        return CellResult(cell, repeat, "refused", answer.first_error or f"exit status {answer.returncode}")
    try:
        state, reason = _wait_for_end(number, watch)
    except BaseException:  # also KeyboardInterrupt: leave no job behind
        process.run_command(["scancel", number], timeout=COMMAND_TIMEOUT_S)
        raise
    if state == "COMPLETED":
        ranks = sorted((json.loads(file.read_text()) for file in folder.glob(f"{cell.name}.{repeat}.*.json")),
                       key=lambda rank: int(rank.get("rank", 0)))
        if ranks and "missing" in ranks[0]:
            return CellResult(cell, repeat, "missing", ranks[0]["missing"])
        if ranks:
            return CellResult(cell, repeat, "done", ranks=tuple(ranks))
        reason = "no worker has written results"
    return CellResult(cell, repeat, ENDED.get(state, "failed"), reason or _last_log_line(log) or state.lower())


def submit_command(cell: Cell) -> list[str]:
    """Return the command that submits a job script with this placement."""
    if cell.placement == "slurm":
        return ["sbatch"]
    strategy = cell.strategy if cell.strategy in STRATEGIES else "allreduce"
    return process.module_argv("slurmdl", "sbatch", f"--dl-strategy={strategy}")


def script(spec: Spec, cell: Cell, base: str) -> str:
    """Return the job script of a cell; `base` is the path of its files without suffix."""
    mpi = f"--mpi={slurm_conf.detect_pmi(os.environ) or 'pmix'}"
    plain, option = ("mpirun", "--step-starter=mpirun") if spec.step_starter == "mpirun" else \
        (f"srun -K {mpi}", f"-K {mpi}")
    launch = plain if cell.placement == "slurm" else f"{shlex.join(process.module_argv('slurmdl', 'srun'))} {option}"
    exports = [f"export SLURMDL_TRAIN_STRATEGY={cell.strategy}"] if cell.framework == "slurmdl" else []
    if cell.strategy == "ps":
        exports.append(f"export SLURMDL_TRAIN_PS={spec.ps}")
    return "\n".join([
        "#!/bin/sh",
        f"#SBATCH -J slurmdl-bench -N {cell.nodes} --ntasks-per-node={spec.tasks_per_node}",
        f"#SBATCH -t {spec.time_limit_minutes} --no-requeue", *exports,
        f"exec {launch} {shlex.join(process.module_argv('slurmdl.bench.worker', f'{base}.work', base))}", ""])


def _filename_pattern(path: str) -> str:
    """Return the value of --output that Slurm expands to `path`: with a backslash in it, % has no meaning."""
    return path.replace("\\", "\\\\") if "\\" in path else path.replace("%", "%%")


def _wait_for_end(number: str, watch: Watch) -> tuple[str, str]:
    """Wait for the end of a job; return its last state, and why it can never start or ""."""
    while True:
        state, reason = next(iter(jobs.query_states(number, timeout=COMMAND_TIMEOUT_S)), ("", ""))
        if state == "PENDING" and reason.partition(",")[0] in _NEVER:
            process.run_command(["scancel", number], timeout=COMMAND_TIMEOUT_S)
            return "REFUSED", f"it can never start ({reason})"
        if state not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "STAGE_OUT", "SUSPENDED", "REQUEUED"):
            return state or "unknown", ""
        watch(number, state, reason)
        time.sleep(POLL_S)


def _last_log_line(log: Path) -> str:
    """Return the last line of slurmdl in a log, else the last line."""
    try:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    slurmdl_lines = [line for line in lines if line.startswith("slurmdl: ")]
    program_lines = [line for line in lines if not line.startswith(("srun: ", "slurmstepd"))]
    return (slurmdl_lines or program_lines or lines or [""])[-1][:300]
