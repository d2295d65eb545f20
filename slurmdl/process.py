"""The one module that starts other programs and waits for their answers, bounded in time."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurmdl.errors import UnavailableError

#: seconds that a query of Slurm may take
QUERY_TIMEOUT = 5.0

#: variables that change the output of Slurm's own commands, unset before a query
_FORMAT_VARIABLES = ("SINFO_FORMAT", "SQUEUE_FORMAT", "SLURM_TOPO_LEN", "SLURM_TIME_FORMAT",
                     "SLURM_JSON", "SLURM_YAML", "SLURM_BITSTR_LEN", "SLURM_CLUSTERS",
                     "SCONTROL_FUTURE", "SCONTROL_ALL")


@dataclass(frozen=True)
class Answer:
    """What a query command gave back."""

    command: str
    status: int
    out: str
    err: str

    @property
    def first_error(self) -> str:
        """First line of its stderr, "" where it wrote none."""
        return next((line.strip() for line in self.err.splitlines() if line.strip()), "")


def query(argv: Sequence[str], *, stdin: str = "", timeout: float = QUERY_TIMEOUT,
          env: Mapping[str, str] | None = None) -> str:
    """Run a query command and return its stdout.

    Raises
    ------
    UnavailableError : as `ask`, and where the command fails (its last line of stderr is quoted).
    """
    answer = ask(argv, stdin=stdin, timeout=timeout, env=env)
    if answer.status:
        lines = answer.err.strip().splitlines() or answer.out.splitlines()
        message = lines[-1] if lines else "no message"
        raise UnavailableError(f"{answer.command}: exit status {answer.status}: {message}")
    return answer.out


def ask(argv: Sequence[str], *, stdin: str = "", timeout: float = QUERY_TIMEOUT,
        env: Mapping[str, str] | None = None) -> Answer:
    """Run a query command and return all that it gave, whatever its exit status.

    The command runs in a process group of its own, which is killed when `timeout` seconds are over, so
    that a hanging controller costs no more than that.

    Raises
    ------
    UnavailableError : the program is missing or hangs.
    """
    name = os.path.basename(argv[0])
    clean = {k: v for k, v in (os.environ if env is None else env).items() if k not in _FORMAT_VARIABLES}
    try:
        child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                 env=clean, start_new_session=True)
    except OSError as error:
        raise UnavailableError(f"{name}: {error.strerror or error}") from error
    try:
        out, err = child.communicate(stdin.encode(), timeout=timeout)
    except subprocess.TimeoutExpired as error:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        raise UnavailableError(f"{name}: no answer within {timeout:g} s") from error
    return Answer(name, child.returncode, out.decode(errors="replace"), err.decode(errors="replace"))
