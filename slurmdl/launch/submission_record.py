"""SLURMDL_SUBMISSION: passes the --dl-* options of a submission to its job, and marks that nodes are chosen already.

With `--export=NONE` Slurm keeps every variable whose name begins with SLURM; from 23.11 on also with `--export=NIL`,
which older releases take for a list. With a list of names it keeps only names that begin with `SLURM_`, so the list
must name the variable (env.c and sbatch.c of Slurm 22.05 to 25.11).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from slurmdl import records
from slurmdl.dl_options import DlOptions, is_comm_pattern
from slurmdl.errors import InputError

ENV_VARIABLE = "SLURMDL_SUBMISSION"
FORMAT_VERSION = 3

#: the process that submits, in which this module is imported; it decides in a fork
_SUBMITTER_PID = os.getpid()

_OPTION_PREFIX = "SLURMDL_OPT_"
#: prefixes of SLURMDL_* variables that users set
_INPUT_PREFIXES = (_OPTION_PREFIX, "SLURMDL_DEBUG")


@dataclass(frozen=True)
class RequestedSize:
    """The size that the user requested, if the submission requested more nodes; None for a count not given."""

    nodes: int
    tasks: int | None = None
    tasks_per_node: int | None = None


def overallocated_count(nodes: int) -> int:
    """Number of nodes that a submission requests at most for a job of `nodes` nodes."""
    return nodes + -(-nodes // 8)


@dataclass(frozen=True)
class Promise:
    """What the submission predicted for the worst nodes that its binding admits.

    Attributes:
        seconds: predicted time of one iteration.
        ranks: number of ranks.
        zones: the zones with their numbers of nodes, see result.format_zone_counts.
    """

    seconds: float
    ranks: int
    zones: str


@dataclass(frozen=True)
class SubmissionRecord:
    """The record of one submission.

    Attributes:
        options: the --dl-* options after precedence, without the zones.
        submitter_job: SLURM_JOB_ID of the job in which the submission ran, or "".
        pid: process that submitted; sbatch is this process or its descendant.
        host: host of that process, without domain.
        inputs: the SLURMDL_OPT_* variables of the submission; `options` includes them.
        requested_size: the user's size, if the submission requested more nodes (--dl-node-binding=late).
        promise: what was predicted for the nodes that the job was bound to, or None.
    """

    options: DlOptions
    submitter_job: str
    pid: int
    host: str
    inputs: Mapping[str, str] = field(default_factory=dict)
    requested_size: RequestedSize | None = None
    promise: Promise | None = None

    def to_env_value(self) -> str:
        """The value of SLURMDL_SUBMISSION."""
        return json.dumps(records.to_json(self, FORMAT_VERSION), separators=(",", ":"))

    def environ_without_inputs(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The environment without unchanged inputs of the submission.

        An inherited variable must not override the submission's command line; a variable that the script has
        changed does.
        """
        return {name: value for name, value in environ.items() if self.inputs.get(name) != value}


def new_record(options: DlOptions, environ: Mapping[str, str], requested_size: RequestedSize | None = None,
               promise: Promise | None = None) -> SubmissionRecord:
    """The record of a submission by this process."""
    inputs = {name: value for name, value in environ.items() if name.startswith(_OPTION_PREFIX)}
    # steps choose no zones, and a list of zones may exceed the size of a variable
    options = replace(options, zone=())
    if options.comm_pattern and not is_comm_pattern(options.comm_pattern):
        # the job may start in another directory (--chdir)
        options = replace(options, comm_pattern=os.path.abspath(options.comm_pattern))
    return SubmissionRecord(options, environ.get("SLURM_JOB_ID", ""), _SUBMITTER_PID,
                            _short_hostname(os.uname().nodename), inputs, requested_size, promise)


def parse_record(text: str) -> SubmissionRecord:
    """Parse a value of SLURMDL_SUBMISSION. InputError if it is malformed or of another version."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{ENV_VARIABLE} is malformed ({type(error).__name__}: {error})") from error
    return records.from_json(SubmissionRecord, data, ENV_VARIABLE, FORMAT_VERSION)


def read_record(environ: Mapping[str, str]) -> SubmissionRecord | None:
    """The record of this job's submission, or None. InputError if it is malformed.

    A job that plain sbatch submitted inside another job inherits the record of that job. The submitting host,
    which sbatch passes to the job, tells the two apart.
    """
    text = environ.get(ENV_VARIABLE)
    if not text:
        return None
    record = parse_record(text)
    return record if _short_hostname(environ.get("SLURM_SUBMIT_HOST", record.host)) == record.host else None


def is_recursive_call(environ: Mapping[str, str]) -> bool:
    """Whether a submission by slurmdl has started this process through sbatch."""
    try:
        outer = parse_record(environ[ENV_VARIABLE])
    except (KeyError, InputError):
        return False
    # in a job the submitting process has exited, and its process ID may be reused
    here = (environ.get("SLURM_JOB_ID", ""), _short_hostname(os.uname().nodename))
    return (outer.submitter_job, outer.host) == here and outer.pid in _own_pid_and_ancestors()


def _own_pid_and_ancestors() -> Iterator[int]:
    """IDs of this process, its parent, and so on: the submitting process queries sbatch from a fork."""
    pid = os.getpid()
    with suppress(OSError):
        while pid:
            yield pid
            with open(f"/proc/{pid}/stat", "rb") as file:
                pid = int(file.read().rpartition(b")")[2].split()[1])


def _short_hostname(host: str) -> str:
    return host.partition(".")[0]


def environ_without_inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables that slurmdl set for an outer job or step."""
    inherited = {name for name in environ if name.startswith("SLURMDL_") and not name.startswith(_INPUT_PREFIXES)}
    inherited.update(environ.get("SLURMDL_EXPORTED", "").split())  # RANK and the like, if the user set none
    return {name: value for name, value in environ.items() if name not in inherited}
