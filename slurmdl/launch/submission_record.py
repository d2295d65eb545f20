"""SLURMDL_SUBMISSION: how a submission tells the job what was asked for, and that a choice was made already.

Slurm keeps every variable whose name begins with SLURM under `--export=NONE`, and from 23.11 on under
`--export=NIL`, which older releases take for a list; under a list of names it keeps only those that begin with
`SLURM_`, so there our name is added (env.c and sbatch.c of Slurm 22.05 to 25.11).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from slurmdl.dl_options import DlOptions, is_comm_pattern
from slurmdl.errors import InputError

ENV_VARIABLE = "SLURMDL_SUBMISSION"
FORMAT_VERSION = 1

_OPTION_PREFIX = "SLURMDL_OPT_"
#: what is the user's own among the variables that begin with SLURMDL_
_INPUT_PREFIXES = (_OPTION_PREFIX, "SLURMDL_DEBUG")


@dataclass(frozen=True)
class RequestedSize:
    """What the user asked for, where the submission asked for more nodes: counts, None where not given."""

    nodes: int
    tasks: int | None = None
    tasks_per_node: int | None = None


@dataclass(frozen=True)
class SubmissionRecord:
    """What one submission decided.

    Attributes
    ----------
    dl : the --dl-* options after precedence, without the zones.
    submitter : SLURM_JOB_ID of the job that the submission ran in, "" where it ran in none.
    pid : process that submitted; sbatch has the same or is its child.
    host : where it ran, without domain.
    inputs : the SLURMDL_OPT_* variables of the submission, which `dl` holds already.
    asked : what was asked for, where the submission asked for more nodes (--dl-node-binding=late).
    """

    options: DlOptions
    submitter_job: str
    pid: int
    host: str
    inputs: Mapping[str, str] = field(default_factory=dict)
    requested_size: RequestedSize | None = None

    def to_env_value(self) -> str:
        """The value of SLURMDL_SUBMISSION."""
        late = {"asked": asdict(self.requested_size)} if self.requested_size else {}
        return json.dumps({"version": FORMAT_VERSION, "submitter": self.submitter_job, "pid": self.pid,
                           "host": self.host, "inputs": dict(self.inputs), "dl": self.options.to_json(), **late},
                          separators=(",", ":"))

    def environ_without_inputs(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The environment without the inputs that the submission saw: what the job inherited must not win over
        the submission's own command line once more, what its script has set since does."""
        return {name: value for name, value in environ.items() if self.inputs.get(name) != value}


def new_record(dl: DlOptions, environ: Mapping[str, str],
               requested_size: RequestedSize | None = None) -> SubmissionRecord:
    """The mark of a submission by this process."""
    inputs = {name: value for name, value in environ.items() if name.startswith(_OPTION_PREFIX)}
    dl = replace(dl, zone=())  # steps choose no zones, and a list of them may be longer than a variable can be
    if dl.comm_pattern and not is_comm_pattern(dl.comm_pattern):
        # the job may start in another directory (--chdir)
        dl = replace(dl, comm_pattern=os.path.abspath(dl.comm_pattern))
    return SubmissionRecord(dl, environ.get("SLURM_JOB_ID", ""), os.getpid(),
                            _short_hostname(os.uname().nodename), inputs, requested_size)


def parse_record(text: str) -> SubmissionRecord:
    """The mark behind a value of SLURMDL_SUBMISSION. InputError where it is malformed or of another version."""
    try:
        data = json.loads(text)
        if data["version"] != FORMAT_VERSION:
            raise InputError(f"{ENV_VARIABLE}: version {data['version']!r} is not {FORMAT_VERSION}")
        return SubmissionRecord(DlOptions.from_json(data["dl"]), str(data["submitter"]), int(data["pid"]), str(data["host"]),
                    dict(data["inputs"]), RequestedSize(**data["asked"]) if "asked" in data else None)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise InputError(f"{ENV_VARIABLE} is malformed ({type(error).__name__}: {error})") from error


def read_record(environ: Mapping[str, str]) -> SubmissionRecord | None:
    """The mark of the submission of this job, None where it has none. InputError where it is malformed.

    A job that was submitted by plain sbatch from inside of another finds the mark of that one; it is told by
    the host that submitted, which sbatch gives to the job.
    """
    text = environ.get(ENV_VARIABLE)
    if not text:
        return None
    mark = parse_record(text)
    return mark if _short_hostname(environ.get("SLURM_SUBMIT_HOST", mark.host)) == mark.host else None


def is_recursive_call(environ: Mapping[str, str]) -> bool:
    """Whether this process was started, through sbatch, by a submission of ours."""
    try:
        outer = parse_record(environ[ENV_VARIABLE])
    except (KeyError, InputError):
        return False
    # inside of a job the process that submitted it is gone, and its number may be anyone's
    return (outer.submitter_job, outer.host) == (environ.get("SLURM_JOB_ID", ""), _short_hostname(os.uname().nodename)) \
        and outer.pid in (os.getpid(), os.getppid())


def _short_hostname(host: str) -> str:
    return host.partition(".")[0]


def environ_without_inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what an outer job or step was given by slurmdl: a submission decides anew."""
    inherited = {name for name in environ if name.startswith("SLURMDL_") and not name.startswith(_INPUT_PREFIXES)}
    inherited.update(environ.get("SLURMDL_EXPORTED", "").split())  # RANK and its like, where the task had none before
    return {name: value for name, value in environ.items() if name not in inherited}
