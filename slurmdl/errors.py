"""The exception tree, and the one table that turns an exception into a message and an exit status.

Statuses of 64 and up (after sysexits.h) are ours and are used only where no sbatch or srun ran;
where one ran, its own status is returned.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from slurmdl.text import print_escaped

#: characters of a message about a file; what goes beyond is cut out of its middle
_MAX_MESSAGE_CHARS = 600
#: characters of a line on stderr, likewise
_MAX_LINE_CHARS = 4000


class SlurmdlError(Exception):
    """Base of all errors that a user may see. The text is one line: culprit first, then what is valid."""

    exit_status = 70


class UsageError(SlurmdlError):
    """A wrong option, value or place to call a command from."""

    exit_status = 64


class InputError(SlurmdlError):
    """A file that does not hold what it should.

    Parameters
    ----------
    message : what is wrong, and what is valid.
    file, line, text : where it stands; `line` counts from 1.
    """

    exit_status = 65

    def __init__(self, message: str, file: str | None = None, line: int | None = None,
                 text: str | None = None) -> None:
        where = "".join([file or "", f":{line}" if line is not None else ""])
        what = f": {_one_line(text)!r}" if text is not None else ""
        message = " ".join(message.splitlines())  # a library's own words may have several
        message = _truncate_middle(message, _MAX_MESSAGE_CHARS)  # a quoted word may be the whole file
        super().__init__(f"{where}{what}: {message}" if where else message)
        self.file, self.line, self.text = file, line, text


class UnavailableError(SlurmdlError):
    """Something that is needed is not there, does not answer in time, or refuses: Slurm, an MPI, a package."""

    exit_status = 69


class PlacementError(SlurmdlError):
    """No placement fulfils the request (an error only with --dl-strict)."""

    exit_status = 75


class SandboxError(SlurmdlError):
    """The sandbox could not be brought up, entered or taken down."""

    exit_status = 71


class TrainError(SlurmdlError):
    """The training run cannot start or cannot go on."""

    exit_status = 76


class InvalidRunError(TrainError):
    """A training run that cannot be; found by every rank alike, so that the first alone reports it."""


class InvalidOptionsError(InvalidRunError):
    """A training run whose options are not valid for its ranks, or not valid together."""

    exit_status = UsageError.exit_status


class Preempted(SlurmdlError):
    """A training run that was told to stop, after a checkpoint of all ranks.

    Parameters
    ----------
    ends : whether Slurm is about to end the job that it ran in.
    """

    exit_status = 77

    def __init__(self, message: str, job_ending: bool = False) -> None:
        super().__init__(message)
        self.job_ending = job_ending


#: exit status -> meaning; the documentation prints this table
EXIT_STATUS_MEANINGS = {
    64: "wrong usage: unknown option or value, or a command called outside its place",
    65: "malformed input file",
    69: "something needed is missing or does not answer (Slurm, MPI, a package)",
    70: "internal error (SLURMDL_DEBUG=1 shows the traceback)",
    71: "the sandbox failed",
    75: "no placement fulfils the request (--dl-strict)",
    76: "training cannot start or go on",
    77: "training was told to stop, and has left a checkpoint from which the same command goes on",
    130: "interrupted from the keyboard",
    141: "whoever reads the output has gone",
}


def sort_by_similarity(word: str, valid: Sequence[str]) -> list[str]:
    """`valid` with the entries that look most like `word` at the head."""
    import difflib

    near = difflib.get_close_matches(word, valid, n=len(valid), cutoff=0.5)
    return near + [other for other in valid if other not in near]


def _one_line(text: str, max_chars: int = 120) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= max_chars else flat[: max_chars - 3] + "..."


def _truncate_middle(text: str, max_chars: int) -> str:
    """A text without its middle where it is too long: what is valid stands at the end."""
    return text if len(text) <= max_chars else f"{text[:max_chars // 2]}...{text[-max_chars // 2:]}"


def print_stderr(text: str) -> None:
    """Text on stderr. Where it cannot be written (closed, a full disk, a pipe that nobody reads) nothing is said."""
    if sys.stderr is not None:  # closed (2>&-): print would take stdout, which scripts evaluate
        with suppress(OSError, ValueError):
            print_escaped(text, sys.stderr)


def warn(message: str) -> None:
    """One line on stderr that begins with the project's name. stdout belongs to Slurm."""
    print_stderr(_truncate_middle(f"slurmdl: {' '.join(message.split())}", _MAX_LINE_CHARS))


def report_error(error: BaseException) -> int:
    """Print `error` as one line on stderr and return the exit status for it.

    With SLURMDL_DEBUG=1 the traceback is printed before the line.
    """
    if os.environ.get("SLURMDL_DEBUG") == "1":
        import traceback

        traceback.print_exception(error)
    if isinstance(error, SlurmdlError):
        warn(str(error))
        return error.exit_status
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, BrokenPipeError):
        return 141
    warn(f"internal error: {type(error).__name__}: {error} (SLURMDL_DEBUG=1 shows where)")
    return 70
