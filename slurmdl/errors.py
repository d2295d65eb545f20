"""Exceptions, their exit statuses, and messages on stderr, with SLURMDL_DEBUG=1 also a debug log.

Exit statuses of 64 and up (after sysexits.h) are used if no sbatch or srun ran; otherwise its status is returned.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from slurmdl.text import print_escaped, truncate, truncate_middle

if TYPE_CHECKING:
    import logging

#: lengths of an InputError's message, of the line of a file that it quotes, and of a line on stderr
_MAX_MESSAGE_CHARS, _MAX_QUOTED_CHARS, _MAX_LINE_CHARS = 600, 120, 4000


class SlurmdlError(Exception):
    """Base of all errors reported to users. The message is one line: culprit, problem, expected values."""

    exit_status = 70


class UsageError(SlurmdlError):
    """An invalid option or value, or a command called outside its context."""

    exit_status = 64


class InputError(SlurmdlError):
    """A malformed input file. `line` counts from 1, `text` is the line's content."""

    exit_status = 65

    def __init__(self, message: str, file: str | None = None, line: int | None = None,
                 text: str | None = None) -> None:
        location = (file or "") + (f":{line}" if line is not None else "")
        quoted = f": {truncate(' '.join(text.split()), _MAX_QUOTED_CHARS)!r}" if text is not None else ""
        # messages of libraries may have several lines; a quoted value may be the whole file
        message = truncate_middle(" ".join(message.splitlines()), _MAX_MESSAGE_CHARS)
        super().__init__(f"{location}{quoted}: {message}" if location else message)
        self.file, self.line, self.text = file, line, text


#: gets an error after which reading can continue: raises or collects it
OnError = Callable[[InputError], None]


def raise_error(error: InputError) -> None:
    raise error


class UnavailableError(SlurmdlError):
    """Slurm, an MPI or a package is missing, does not answer in time, or refuses."""

    exit_status = 69


class PlacementError(SlurmdlError):
    """No placement satisfies the request (an error only with --dl-strict)."""

    exit_status = 75


class SandboxError(SlurmdlError):
    """The sandbox cannot be started, entered or stopped."""

    exit_status = 71


class TrainError(SlurmdlError):
    """The training run cannot start or continue."""

    exit_status = 76


class InvalidRunError(TrainError):
    """An impossible training run. Every rank raises the same error, so only rank 0 prints it."""


class InvalidOptionsError(InvalidRunError):
    """Options of a training run that are invalid for its ranks, or in combination."""

    exit_status = UsageError.exit_status


class Preempted(SlurmdlError):
    """A training run stopped on request, after a checkpoint of all ranks; `job_ending`: Slurm soon ends the job."""

    exit_status = 77

    def __init__(self, message: str, job_ending: bool = False) -> None:
        super().__init__(message)
        self.job_ending = job_ending


class BadNodesError(SlurmdlError):
    """A job has bad nodes, and can neither replace them nor be requeued without them."""

    exit_status = 78


#: exit status -> meaning; printed in the documentation
EXIT_STATUS_MEANINGS = {
    64: "wrong usage: unknown option, invalid value, or command called outside its context",
    65: "malformed input file",
    69: "a dependency is missing or does not answer (Slurm, MPI, a package)",
    70: "internal error (SLURMDL_DEBUG=1 shows the traceback)",
    71: "the sandbox failed",
    75: "no placement satisfies the request (--dl-strict)",
    76: "training cannot start or continue",
    77: "training stopped on request after a checkpoint; the same command resumes from it",
    78: "the job has bad nodes, and can neither replace them nor be requeued without them",
    130: "interrupted from the keyboard",
    141: "the reader of the output closed it",
}


def sort_by_similarity(word: str, valid: Sequence[str]) -> list[str]:
    """`valid` with the entries most similar to `word` first."""
    import difflib

    near = difflib.get_close_matches(word, valid, n=len(valid), cutoff=0.5)
    return near + [entry for entry in valid if entry not in near]


def print_stderr(text: str) -> None:
    """Print on stderr; do nothing if it is closed or cannot be written."""
    if sys.stderr is None:  # closed (2>&-): print would write to stdout, which scripts parse
        return
    try:
        print_escaped(text, sys.stderr)
    except (OSError, ValueError):
        # its buffer keeps the text: at exit Python would try again, and fail with status 120
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def warn(message: str) -> None:
    """Print one line on stderr with the prefix "slurmdl: ". stdout is left to Slurm."""
    print_stderr(truncate_middle(f"slurmdl: {' '.join(message.split())}", _MAX_LINE_CHARS))


def is_debug_on() -> bool:
    """Whether SLURMDL_DEBUG=1 requests tracebacks and the debug log."""
    return os.environ.get("SLURMDL_DEBUG") == "1"


def debug(message: str, *args: object) -> None:
    """Write one line on stderr with the prefix "slurmdl: debug: " through the logger `slurmdl`, if the log is on.

    `logging` is imported only then: that takes longer than most of slurmdl's modules.
    """
    if is_debug_on():
        _debug_logger().debug(message, *args)


@functools.cache
def _debug_logger() -> logging.Logger:
    import logging

    class StderrHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            print_stderr(truncate_middle(f"slurmdl: debug: {' '.join(record.getMessage().split())}", _MAX_LINE_CHARS))

    logger = logging.getLogger("slurmdl")
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    logger.addHandler(StderrHandler())
    return logger


def print_traceback(error: BaseException) -> None:
    """Print the traceback of an error on stderr, if SLURMDL_DEBUG=1."""
    if is_debug_on():
        import traceback

        traceback.print_exception(error)


def internal_error_text(error: BaseException) -> str:
    """Text of an exception that is not a SlurmdlError."""
    if isinstance(error, ImportError) and error.__cause__:
        error = error.__cause__  # NumPy puts a page of advice before it
    return f"internal error: {type(error).__name__}{f': {error}' if str(error) else ''}"


def report_error(error: BaseException) -> int:
    """Print `error` as one line on stderr, after the traceback with SLURMDL_DEBUG=1; return its exit status."""
    print_traceback(error)
    if isinstance(error, SlurmdlError):
        warn(str(error))
        return error.exit_status
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, BrokenPipeError):
        return 141
    warn(f"{internal_error_text(error)} (SLURMDL_DEBUG=1 shows the traceback)")
    return 70
