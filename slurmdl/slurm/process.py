"""The one module that starts other programs and waits for their answers, bounded in time.

Where this process only becomes another, `subprocess` is not needed, and not imported.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from slurmdl.errors import UnavailableError

if TYPE_CHECKING:
    import subprocess

#: seconds that a query of Slurm may take
QUERY_TIMEOUT_S = 5.0

#: Python ignores these from its start; other programs start with them as usual
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
#: bytes of a line of a program's stdout that is listened to
_MAX_LINE_BYTES = 4096

#: variables that change the output of Slurm's own commands, unset before a query
_FORMAT_VARIABLES = ("SINFO_FORMAT", "SQUEUE_FORMAT", "SLURM_TOPO_LEN", "SLURM_TIME_FORMAT",
                     "SLURM_JSON", "SLURM_YAML", "SLURM_BITSTR_LEN", "SLURM_CLUSTERS",
                     "SCONTROL_FUTURE", "SCONTROL_ALL")


@dataclass(frozen=True)
class CommandResult:
    """What a query command gave back."""

    command: str
    returncode: int
    stdout: str
    stderr: str

    @property
    def first_error(self) -> str:
        """First line of its stderr, "" where it wrote none."""
        return next((line.strip() for line in self.stderr.splitlines() if line.strip()), "")


def check_output(argv: Sequence[str], *, stdin: str = "", timeout: float = QUERY_TIMEOUT_S,
          env: Mapping[str, str] | None = None) -> str:
    """Run a query command and return its stdout.

    Raises
    ------
    UnavailableError : as `ask`, and where the command fails (its last line of stderr is quoted).
    """
    answer = run_command(argv, stdin=stdin, timeout=timeout, env=env)
    if answer.returncode:
        lines = answer.stderr.strip().splitlines() or answer.stdout.splitlines()
        message = lines[-1] if lines else "no message"
        raise UnavailableError(f"{answer.command}: exit status {answer.returncode}: {message}")
    return answer.stdout


def run_command(argv: Sequence[str], *, stdin: str = "", timeout: float = QUERY_TIMEOUT_S,
        env: Mapping[str, str] | None = None, cwd: str | None = None, name: str = "") -> CommandResult:
    """Run a query command and return all that it gave, whatever its exit status.

    The command runs in a process group of its own, which is killed when `timeout` seconds are over, so
    that a hanging controller costs no more than that.

    Parameters
    ----------
    directory : where it runs, None for the current one.
    name : what errors call it, "" for the program's name.

    Raises
    ------
    UnavailableError : the program is missing or hangs.
    """
    import subprocess

    name = name or os.path.basename(argv[0])
    clean = {k: v for k, v in (os.environ if env is None else env).items() if k not in _FORMAT_VARIABLES}
    try:
        child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                 env=clean, start_new_session=True, cwd=cwd)
    except OSError as error:
        raise UnavailableError(f"{name}: {error.strerror or error}") from error
    try:
        out, err = child.communicate(stdin.encode(), timeout=timeout)
    except subprocess.TimeoutExpired as error:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        raise UnavailableError(f"{name}: no answer within {timeout:g} s") from error
    return CommandResult(name, child.returncode, out.decode(errors="replace"), err.decode(errors="replace"))


def start_command(argv: Sequence[str], *, stdin: str = "") -> Callable[[], CommandResult]:
    """Start a query command and return at once, so that this process can work while the command runs.

    Returns
    -------
    a function that waits for the command; it returns and raises as `ask` does.
    """
    import threading

    answers: list[CommandResult] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            answers.append(run_command(argv, stdin=stdin))
        except Exception as error:
            errors.append(error)

    # a daemon: a process that fails meanwhile ends without waiting for the command
    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result() -> CommandResult:
        thread.join()
        if errors:
            raise errors[0]
        return answers[0]

    return result




def stream_lines(argv: Sequence[str], *, stdin: str, timeout: float,
          env: Mapping[str, str]) -> Generator[str, None, None]:
    """Run a program and yield the lines of its stdout as they come, until it ends or nobody wants more.

    It runs in a process group of its own. One that still runs a second after the last line that was wanted, or when
    the time is over, is ended.

    Raises
    ------
    UnavailableError : the program is missing, fails (its last line of stderr is quoted), or goes on for longer than
        `timeout` seconds.
    """
    import queue
    import subprocess
    import tempfile
    import threading

    name, end = os.path.basename(argv[0]), time.monotonic() + timeout
    with tempfile.TemporaryFile() as said:
        try:
            child = subprocess.Popen(argv, stdin=_memfd_containing(stdin.encode()), stdout=subprocess.PIPE, stderr=said,
                                     env=dict(env), start_new_session=True)
        except OSError as error:
            raise UnavailableError(f"{name}: {error.strerror or error}") from error
        found: queue.Queue[bytes | None] = queue.Queue()

        def read() -> None:
            for line in child.stdout or ():
                found.put(line)
            found.put(None)

        threading.Thread(target=read, daemon=True).start()
        try:
            while True:
                try:
                    line = found.get(timeout=max(0.0, end - time.monotonic()))
                except queue.Empty:
                    raise UnavailableError(f"{name}: not done within {timeout:g} s") from None
                if line is None:
                    break
                yield line.decode(errors="replace")
        finally:
            _terminate(child, min(1.0, max(0.0, end - time.monotonic())))
        if child.returncode:
            said.seek(0)
            text = said.read().decode(errors="replace").strip().splitlines() or ["no message"]
            raise UnavailableError(f"{name}: exit status {child.returncode}: {text[-1]}")


def _terminate(child: subprocess.Popen[bytes], grace_s: float) -> None:
    """Wait so many seconds for a program to end, then make it end: srun ends its tasks when it is told to."""
    import subprocess

    for number in (0, signal.SIGTERM, signal.SIGKILL):
        if number:
            os.killpg(child.pid, number)
        try:
            child.wait(grace_s or 0.5)
            return
        except subprocess.TimeoutExpired:
            continue


def run_detached_after(argv: Sequence[str], delay_s: float) -> None:
    """Start a command after so many seconds, whatever becomes of this process and its terminal until then."""
    import subprocess

    subprocess.Popen(["/bin/sh", "-c", 'sleep "$0"; exec "$@"', str(delay_s), *argv], cwd="/", start_new_session=True,
                     stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def exec_program(argv: Sequence[str], env: Mapping[str, str], stdin: bytes | None = None) -> NoReturn:
    """Replace this process by a program, so that signals, terminal and exit status are its own.

    Parameters
    ----------
    argv : the first word is the program's path; the program is told its name only, as a shell would tell it.
    stdin : what it reads on its standard input; None leaves that as it is.

    Raises
    ------
    UnavailableError : the program cannot be run.
    """
    if stdin is not None:
        os.dup2(_memfd_containing(stdin), 0)
    flush_output()
    for number in _IGNORED_BY_PYTHON:
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execve(argv[0], [os.path.basename(argv[0]), *argv[1:]], dict(env))
    except OSError as error:
        for number in _IGNORED_BY_PYTHON:
            signal.signal(number, signal.SIG_IGN)
        raise UnavailableError(f"{argv[0]}: {error.strerror}") from error


def run_passthrough(argv: Sequence[str], env: Mapping[str, str], stdin: bytes | None,
          on_line: Callable[[bytes], bool]) -> int:
    """Run a program to its end, hand its stdout through byte for byte, and return its exit status.

    Signals that end programs are passed on to it. `hears` is called with each line that has been handed through,
    while the program goes on, until it returns True. Of a long line it gets the beginning.

    Raises
    ------
    UnavailableError : the program cannot be run.
    """
    import subprocess

    child = _popen_forwarding_signals(
    argv,
    env,
    stdin=None if stdin is None else _memfd_containing(stdin),
     stdout=subprocess.PIPE)
    assert child.stdout is not None
    rest, heard = b"", False
    while chunk := os.read(child.stdout.fileno(), 65536):
        with suppress(OSError):  # closed or full: the program itself would go on, too
            _write_all(1, chunk)
        if not heard:
            *lines, rest = (rest + chunk).split(b"\n")
            heard = any(on_line(line[:_MAX_LINE_BYTES]) for line in lines)
            rest = rest[:_MAX_LINE_BYTES]
    return _wait_for_exit(child)


def _popen_forwarding_signals(argv: Sequence[str], env: Mapping[str, str], **streams: Any) -> subprocess.Popen[bytes]:
    """A program that gets the signals that this process gets."""
    import subprocess

    try:
        child = subprocess.Popen([os.path.basename(argv[0]), *argv[1:]], executable=argv[0], env=dict(env), **streams)
    except OSError as error:
        raise UnavailableError(f"{argv[0]}: {error.strerror}") from error
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda received, _: child.send_signal(received))
    return child


def _wait_for_exit(child: subprocess.Popen[bytes]) -> int:
    """The exit status of a program when it has ended; this process ends by the signal by which it did."""
    status = child.wait()
    if status < 0:
        if -status != signal.SIGKILL:  # which has no other action
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def _memfd_containing(data: bytes) -> int:
    """A file descriptor from which `data` can be read."""
    fd = os.memfd_create("stdin")
    _write_all(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data):]


def flush_output() -> None:
    """Write out what was said. What cannot be written (closed, a full disk) keeps no program from its start."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            if stream is not None:
                stream.flush()
