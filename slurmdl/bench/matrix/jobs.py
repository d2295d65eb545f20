"""Submits the cells of a matrix as jobs, one after the other, and keeps what became of each in a folder.

What is in the folder stays: a run that was broken off goes on where it stopped.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slurmdl import process, wholefile
from slurmdl.bench.matrix.progress import Progress
from slurmdl.bench.matrix.spec import Cell, Spec
from slurmdl.errors import InputError, UnavailableError, tell
from slurmdl.launch import release, srun
from slurmdl.plan import STRATEGIES

#: seconds from one look at a job to the next, and that Slurm's commands may take
LOOK, LIMIT = 1.0, 60.0
#: how often a job is started that fails: MPI libraries are seen to crash in MPI_Init now and then
STARTS = 3
#: state of a job -> word for what became of its cell
ENDED = {"OUT_OF_MEMORY": "out of memory", "TIMEOUT": "time limit", "DEADLINE": "time limit",
         "CANCELLED": "cancelled", "PREEMPTED": "cancelled", "REFUSED": "refused"}
#: reasons for which a job waits in vain
_NEVER = ("PartitionNodeLimit", "PartitionTimeLimit", "PartitionConfig", "BadConstraints", "ReqNodeNotAvail",
          "AssocMaxNodePerJobLimit", "QOSMaxNodePerJobLimit", "QOSMaxWallDurationPerJobLimit")


#: is told number, state and reason of a job that has not ended
Watch = Callable[[str, str, str], None]


@dataclass(frozen=True)
class Outcome:
    """What became of a cell, once.

    Attributes
    ----------
    status : "done", "missing" (the framework is not installed), or why there are no figures.
    reason : in one line, "" where it is done.
    ranks : what each worker measured; see `program`.
    """

    cell: Cell
    repeat: int
    status: str
    reason: str = ""
    ranks: tuple[dict[str, Any], ...] = ()


def run(spec: Spec, folder: Path, again: bool = False,
        say: Callable[[str], None] = tell) -> None:
    """Run what is not done yet.

    Parameters
    ----------
    again : run what failed, too.
    say : is told how it goes on, line by line.

    Raises
    ------
    InputError : the folder holds results of another spec.
    UnavailableError : Slurm does not answer, or the folder cannot be written.
    """
    begin(spec, folder)
    todo = [*spec.order()]
    found = {(outcome.cell, outcome.repeat): outcome for outcome in outcomes(folder)}
    # one that a job did not find is not asked for again
    missing = {cell.framework: its.reason for (cell, _), its in found.items()
               if its.status == "missing" and not again}
    left = [(number, cell, repeat) for number, (cell, repeat) in enumerate(todo, 1)
            if (cell, repeat) not in found or (again and found[cell, repeat].status != "done")]

    def jobs_from(index: int) -> int:
        return sum(cell.framework not in missing for _, cell, _ in left[index:])

    progress = Progress(len(todo), jobs_from(0), 60.0 * spec.minutes, say)
    for index, (number, cell, repeat) in enumerate(left):
        if cell.framework in missing:
            outcome = Outcome(cell, repeat, "missing", missing[cell.framework])
        else:
            progress.start(number)
            outcome = _one(spec, cell, repeat, folder, progress.job)
        if outcome.status == "missing":
            missing[cell.framework] = outcome.reason
        wholefile.write(str(folder / f"{cell.name}.{repeat}.outcome"), json.dumps(asdict(outcome)))
        progress.end(number, str(cell), outcome.status, outcome.reason, jobs_from(index + 1))


def begin(spec: Spec, folder: Path) -> None:
    """Make the folder, or see that it belongs to this spec."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "spec.json"
        if not file.exists():
            wholefile.write(str(file), json.dumps(spec.to_json(), indent=1))
    except OSError as error:
        raise UnavailableError(f"{folder}: cannot be written ({error.strerror})") from error
    its = read_spec(folder)
    differs = [key for key, value in spec.to_json().items() if its.to_json().get(key) != value]
    if differs:
        raise InputError(f"holds results of another spec (of other {', '.join(differs)}); valid: another folder, or "
                         "the spec as it was", str(folder))


def read_spec(folder: Path) -> Spec:
    """The spec whose results a folder holds; InputError where there are none."""
    file = folder / "spec.json"
    try:
        data: dict[str, Any] = json.loads(file.read_text())
        values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value
                                  for key, value in data.items()}
        return Spec(**values)
    except OSError as error:
        raise InputError(f"no results of `slurmdl bench run` ({error.strerror})", str(file)) from error
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f"is not of this version of slurmdl ({error})", str(file)) from error


def outcomes(folder: Path) -> Iterator[Outcome]:
    """What a folder holds; what cannot be read is taken as not there."""
    for file in sorted(folder.glob("*.outcome")):
        try:
            data = json.loads(file.read_text())
            yield Outcome(**{**data, "cell": Cell(**data["cell"]), "ranks": tuple(data["ranks"])})
        except (OSError, ValueError, TypeError, KeyError):
            continue


def _one(spec: Spec, cell: Cell, repeat: int, folder: Path, watch: Watch) -> Outcome:
    """Run a cell as a job, and wait for its end."""
    for start in range(STARTS):
        outcome = _start(spec, cell, repeat, folder, watch)
        if outcome.status != "failed" or start + 1 == STARTS:
            break
    return outcome


def _start(spec: Spec, cell: Cell, repeat: int, folder: Path, watch: Watch) -> Outcome:
    base = folder.resolve() / f"{cell.name}.{repeat}"
    for file in folder.glob(f"{cell.name}.{repeat}.*.json"):
        file.unlink()
    log = base.with_name(f"{base.name}.log")
    work = {"framework": cell.framework, "strategy": cell.strategy, "model": cell.model,
            "data": spec.models[cell.model], "seed": spec.seed + repeat, **{key: getattr(spec, key) for key in (
                "batch", "lr", "compute", "warm_up", "steps", "evaluate_every")}}
    wholefile.write(str(base.with_name(f"{base.name}.work")), json.dumps(work))
    wholefile.write(str(base.with_name(f"{base.name}.sh")), script(spec, cell, str(base)))
    answer = process.ask([*submitter(cell), "--parsable", *spec.sbatch, f"{base}.sh"], timeout=LIMIT)
    # a site's filter may print lines of its own before sbatch's
    numbers = [release.job_number(line.encode(), parsable=True) for line in answer.out.splitlines()]
    number = next(filter(None, numbers), "")
    if answer.status or not number:
        return Outcome(cell, repeat, "refused", answer.first_error or f"exit status {answer.status}")
    try:
        state, reason = _end(number, watch)
    except BaseException:  # what is broken off leaves no job behind
        process.ask(["scancel", number], timeout=LIMIT)
        raise
    if state == "COMPLETED":
        ranks = sorted((json.loads(file.read_text()) for file in folder.glob(f"{cell.name}.{repeat}.*.json")),
                       key=lambda its: int(its.get("rank", 0)))
        if ranks and "missing" in ranks[0]:
            return Outcome(cell, repeat, "missing", ranks[0]["missing"])
        if ranks:
            return Outcome(cell, repeat, "done", ranks=tuple(ranks))
        reason = "no worker has written figures"
    return Outcome(cell, repeat, ENDED.get(state, "failed"), reason or _last_words(log) or state.lower())


def submitter(cell: Cell) -> list[str]:
    """What submits a job script for this placement."""
    if cell.placement == "slurm":
        return ["sbatch"]
    strategy = cell.strategy if cell.strategy in STRATEGIES else "allreduce"
    place = "pack" if cell.placement == "slurmdl" else cell.placement
    return [sys.executable, "-m", "slurmdl", "sbatch", f"--dl-strategy={strategy}", f"--dl-place={place}"]


def script(spec: Spec, cell: Cell, base: str) -> str:
    """The job script of a cell; `base` is the path of its files without their endings."""
    python = shlex.quote(sys.executable)
    mpi = f"--mpi={srun.pmi(os.environ) or 'pmix'}"
    plain, option = ("mpirun", "--launcher=mpirun") if spec.launcher == "mpirun" else (f"srun -K {mpi}", f"-K {mpi}")
    start = plain if cell.placement == "slurm" else f"{python} -m slurmdl srun {option}"
    ours = [f"export SLURMDL_TRAIN_STRATEGY={cell.strategy}"] if cell.framework == "slurmdl" else []
    if cell.strategy == "ps":
        ours.append(f"export SLURMDL_TRAIN_PS={spec.ps}")
    return "\n".join([
        "#!/bin/sh",
        f"#SBATCH -J slurmdl-bench -N {cell.nodes} --ntasks-per-node={spec.tasks_per_node} -t {spec.minutes}",
        f"#SBATCH --no-requeue -o {base}.log", *ours,
        f"exec {start} {python} -m slurmdl.bench.matrix.program {shlex.quote(base)}.work "
        f"{shlex.quote(base)}", ""])


def _end(number: str, watch: Watch) -> tuple[str, str]:
    """Wait for the end of a job, and tell `watch` its state; its last state, and why it can never start, else ""."""
    while True:
        state, _, reason = process.ask(["squeue", "-h", "-j", number, "-o", "%T %r"],
                                       timeout=LIMIT).out.strip().partition(" ")
        if state == "PENDING" and reason.partition(",")[0] in _NEVER:
            process.ask(["scancel", number], timeout=LIMIT)
            return "REFUSED", f"it can never start ({reason})"
        if state not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "STAGE_OUT", "SUSPENDED", "REQUEUED"):
            break
        watch(number, state, reason)
        time.sleep(LOOK)
    told = process.ask(["scontrol", "show", "job", "-o", number], timeout=LIMIT).out
    found = re.search(r"\bJobState=(\S+)", told)
    return (found[1] if found else state or "unknown"), ""


def _last_words(log: Path) -> str:
    """slurmdl's own last line in a log, else the last line of all."""
    try:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    ours = [line for line in lines if line.startswith("slurmdl: ")]
    theirs = [line for line in lines if not line.startswith(("srun: ", "slurmstepd"))]
    return (ours or theirs or lines or [""])[-1][:300]
