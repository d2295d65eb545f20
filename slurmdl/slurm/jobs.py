"""Jobs that Slurm knows: the job ID that sbatch prints, a job's nodes and running steps, and job shrinking."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from slurmdl.errors import InputError, UnavailableError
from slurmdl.slurm import hostlist, process

#: sbatch's message; with several clusters it names the cluster
_SUBMITTED_PATTERN = rb"Submitted batch job ([0-9]{1,10})(?: on cluster \S+)?"
_PARSABLE_PATTERN = rb"([0-9]{1,10})(?:;\S+)?"
#: checks for other steps, and seconds between checks
_STEP_CHECKS, _STEP_CHECK_INTERVAL_S = 3, 0.3


@dataclass(frozen=True)
class JobNodes:
    """The nodes of a running job in Slurm's order, and the node of its batch script."""

    nodes: tuple[str, ...]
    batch_host: str

    @classmethod
    def query(cls, job_id: int) -> JobNodes:
        """Query the controller. Raises UnavailableError, or InputError as `from_scontrol`."""
        return cls.from_scontrol(process.check_output(["scontrol", "-o", "show", "job", str(job_id)]))

    @classmethod
    def from_scontrol(cls, job_record: str) -> JobNodes:
        """Parse the output of `scontrol -o show job`; InputError if it names no nodes."""
        fields = dict(re.findall(r"(?:^|\s)(NodeList|BatchHost)=(\S+)", job_record))
        nodes = tuple(hostlist.expand_hostlist(fields.get("NodeList", "").replace("(null)", "")))
        if not nodes:
            raise InputError("scontrol show job: no NodeList in the output")
        return cls(nodes, fields.get("BatchHost", nodes[0]))


def other_steps_run(job_id: int) -> bool:
    """Whether the job has a running step besides the batch step and the like.

    A busy controller lists a step for a moment after its end, so a listed step is checked again.
    """
    for check in range(_STEP_CHECKS):
        time.sleep(_STEP_CHECK_INTERVAL_S if check else 0.0)
        steps = process.check_output(["squeue", "--noheader", "--steps", f"--jobs={job_id}", "--format=%i"]).split()
        if not any(step.rpartition(".")[2].isdigit() for step in steps):
            return False
    return True


def shrink_job_error(job_id: int, nodes: Sequence[str]) -> str:
    """Release all other nodes of a job; return why that failed, or ""."""
    import tempfile

    # scontrol writes scripts into its working directory that set the variables of the resized job
    with tempfile.TemporaryDirectory(prefix="slurmdl-") as directory:
        try:
            result = process.run_command(["scontrol", "update", f"JobId={job_id}", f"NodeList={','.join(nodes)}"],
                                         cwd=directory)
        except UnavailableError as error:
            return str(error)
    return result.first_error or f"exit status {result.returncode}" if result.returncode else ""


def parse_job_id(line: bytes, is_parsable: bool) -> str:
    """Return the job ID in a line of sbatch's stdout, or "" if the line has another source.

    Parameters
    ----------
    is_parsable : sbatch prints the job ID alone (--parsable).
    """
    match = re.fullmatch(_PARSABLE_PATTERN if is_parsable else _SUBMITTED_PATTERN, line)
    return match[1].decode() if match else ""
