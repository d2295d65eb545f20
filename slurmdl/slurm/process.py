"""Run other programs: queries with a time limit, pass-through, and replacement of this process.

No other module imports `subprocess`; here it is imported only when a child process is needed.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from slurmdl.errors import UnavailableError, debug, is_debug_on, report_error
from slurmdl.text import truncate

if TYPE_CHECKING:
    import subprocess

T = TypeVar("T")

#: time limit of a query
QUERY_TIMEOUT_S = 5.0

#: Python ignores these signals from its start; other programs need the default action
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
#: maximum length of a line that `run_passthrough` hands to its callback
_MAX_LINE_BYTES = 4096
#: maximum length of a command in the debug log
_MAX_SHOWN_CHARS = 1000

#: variables that change the output of Slurm's commands, unset for queries; so are all of squeue, which filter jobs
_FORMAT_VARIABLES = ("SINFO_FORMAT", "SLURM_TOPO_LEN", "SLURM_TIME_FORMAT", "SLURM_JSON", "SLURM_YAML",
                     "SLURM_BITSTR_LEN", "SLURM_CLUSTERS", "SCONTROL_FUTURE", "SCONTROL_ALL")


def module_argv(module: str, *arguments: str) -> list[str]:
    """Command line that runs a module, e.g. "slurmdl" or "slurmdl.health.node_checks"; see __main__.py."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return [sys.executable, os.path.join(package, "__main__.py"), module, *arguments]


@dataclass(frozen=True)
class CommandResult:
    """Exit status and output of a command; `command` is its name in messages."""

    command: str
    returncode: int
    stdout: str
    stderr: str

    @property
    def first_error(self) -> str:
        """First non-empty line of stderr, or ""."""
        return next((line.strip() for line in self.stderr.splitlines() if line.strip()), "")

    def checked_stdout(self) -> str:
        """The output; UnavailableError if the exit status is not 0."""
        if self.returncode:
            lines = self.stderr.strip().splitlines() or self.stdout.splitlines() or ["no message"]
            raise UnavailableError(f"{self.command}: exit status {self.returncode}: {lines[-1]}")
        return self.stdout


def check_output(argv: Sequence[str], *, stdin: str = "", timeout: float = QUERY_TIMEOUT_S,
                 env: Mapping[str, str] | None = None) -> str:
    """Run a query and return its stdout. UnavailableError as `run_command`, and if the exit status is not 0."""
    return run_command(argv, stdin=stdin, timeout=timeout, env=env).checked_stdout()


def run_command(argv: Sequence[str], *, stdin: str = "", timeout: float = QUERY_TIMEOUT_S,
                env: Mapping[str, str] | None = None, cwd: str | None = None, name: str = "") -> CommandResult:
    """Run a query and return its result, whatever the exit status.

    The command runs in its own process group, which is killed after `timeout` seconds. Raises UnavailableError if the
    program is missing or exceeds the time limit. `name` is the name of the command in errors, "" for the program's
    name.
    """
    started, name = time.monotonic(), name or os.path.basename(argv[0])
    try:
        result = _run_command(argv, stdin, timeout, os.environ if env is None else env, cwd, name)
    except UnavailableError as error:
        _log_query(argv, stdin, started, str(error))
        raise
    _log_query(argv, stdin, started, result)
    return result


def _log_query(argv: Sequence[str], stdin: str, started: float, outcome: CommandResult | str) -> None:
    """Log a query with what scontrol reads from its standard input; others may read the user's script there."""
    if not is_debug_on():
        return
    reports = f" ({', '.join(stdin.splitlines())})" if stdin and os.path.basename(argv[0]) == "scontrol" else ""
    if not isinstance(outcome, str):
        outcome = f"{len(outcome.stdout.encode())} bytes, status {outcome.returncode}" + \
                  (f", {outcome.first_error}" if outcome.first_error else "")
    _log_command("query", argv, f"{reports}: {(time.monotonic() - started) * 1000:.0f} ms, {outcome}")


def _log_command(action: str, argv: Sequence[str], more: str = "") -> None:
    if is_debug_on():
        import shlex

        debug("%s: %s%s", action, truncate(shlex.join(argv), _MAX_SHOWN_CHARS), more)


def _run_command(argv: Sequence[str], stdin: str, timeout: float, env: Mapping[str, str], cwd: str | None,
                 name: str) -> CommandResult:
    import subprocess

    clean_env = {k: v for k, v in env.items()
                 if k not in _FORMAT_VARIABLES and not k.startswith("SQUEUE_")}
    try:
        child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                 env=clean_env, start_new_session=True, cwd=cwd)
    except OSError as error:
        raise UnavailableError(f"{name}: {error.strerror or error}") from error
    try:
        out, err = child.communicate(stdin.encode(), timeout=timeout)
    except subprocess.TimeoutExpired as error:
        os.killpg(child.pid, signal.SIGKILL)
        # a descendant that has left the group may hold the pipes: do not wait for their end
        for pipe in (child.stdin, child.stdout, child.stderr):
            if pipe:
                with suppress(OSError):
                    pipe.close()
        child.wait()
        raise UnavailableError(f"{name}: no answer within {timeout:g} s") from error
    return CommandResult(name, child.returncode, out.decode(errors="replace"), err.decode(errors="replace"))


def start_scontrol_show(reports: Sequence[str], with_topology: bool = False) -> Callable[[], CommandResult]:
    """Start `scontrol -o -d` as `start_command`.

    The reports are requested on scontrol's standard input. A report that fails does not lose the others.

    Args:
        reports: arguments of `show`, for example "nodes".
        with_topology: also request topoconf (25.05 and newer) and topology, after the others.
    """
    reports = [*reports, *("topoconf", "topology") * with_topology]
    return start_command(["scontrol", "-o", "-d"], "".join(f"show {report}\n" for report in reports))


def start_command(argv: Sequence[str], stdin: str = "",
                  timeout: float = QUERY_TIMEOUT_S) -> Callable[[], CommandResult]:
    """Start a query and return at once; the returned function waits for the result, or raises as `run_command`."""
    return start_thread(lambda: run_command(argv, stdin=stdin, timeout=timeout))


def start_thread(function: Callable[[], T]) -> Callable[..., T]:
    """Run a function in a thread; the returned function waits for its result, or raises its error.

    The argument of the returned function is its time limit in s, by default none; it raises TimeoutError after it.
    """
    import threading

    values: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            values.append(function())
        except Exception as error:
            errors.append(error)

    # a daemon thread: if this process fails meanwhile, it ends without waiting
    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result(timeout_s: float | None = None) -> T:
        thread.join(timeout_s)
        if errors:
            raise errors[0]
        if not values:
            raise TimeoutError
        return values[0]

    return result


@dataclass(frozen=True)
class ChildResult:
    """What `run_in_child` got from its function.

    Attributes:
        sent: the last value that the function sent, or None.
        failure: how its process ended if the function did not return, for example "ended by signal 9"; else "".
    """

    sent: Any
    failure: str = ""


def run_in_child(function: Callable[[Callable[[Any], None]], None]) -> ChildResult:
    """Run a function in a fork of this process, which survives whatever ends the fork.

    The function gets another function, which sends a value of JSON to this process. A signal that ends programs ends
    both processes. Call it before threads start and before large libraries are imported: a fork is then cheap, and
    this process small.
    """
    import fcntl

    # not 0 to 2, which may be closed: libraries write messages there
    pipe = os.pipe()
    receiver, sender = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 3) for end in pipe)
    for end in pipe:
        os.close(end)
    flush_output()
    try:
        child = os.fork()
    except OSError as error:
        os.close(receiver)
        os.close(sender)
        return ChildResult(None, f"cannot start: {error.strerror}")
    if not child:
        os.close(receiver)
        _call_and_exit(function, sender)
    os.close(sender)

    def stop(number: int, _: object) -> None:
        os.kill(child, number)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, stop)
    try:
        with open(receiver, "rb") as stream:
            text = stream.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except KeyboardInterrupt:
        with suppress(OSError):
            os.kill(child, signal.SIGINT)
            os.waitpid(child, 0)
        raise
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
    import json

    lines = text.split(b"\n")[:-1]
    failure = f"ended by signal {-status}" if status < 0 else f"ended with status {status}" if status else ""
    return ChildResult(json.loads(lines[-1]) if lines else None, failure)


def _call_and_exit(function: Callable[[Callable[[Any], None]], None], sender: int) -> NoReturn:
    """Call the function of `run_in_child`, and end this process without the exit handlers of the other one."""
    import json

    # only for libraries in this process, not in os.environ: jobs inherit that. Each thread of OpenBLAS takes memory,
    # and OpenBLAS ends the process if it gets none.
    os.putenv("OPENBLAS_NUM_THREADS", "1")
    status = 70
    try:
        function(lambda value: _write_all(sender, json.dumps(value).encode() + b"\n"))
        status = 0
    except BaseException as error:
        status = report_error(error)
    finally:
        flush_output()
        os._exit(status)


def stream_lines(argv: Sequence[str], *, stdin: str, timeout: float,
                 env: Mapping[str, str]) -> Generator[str, None, None]:
    """Run a program and yield the lines of its stdout as they arrive, until it ends or the generator is closed.

    It runs in its own process group. It is terminated after the time limit, or one second after the generator closes.
    Raises UnavailableError if the program is missing, fails (the last line of stderr is quoted) or exceeds the time
    limit.
    """
    import queue
    import subprocess
    import tempfile
    import threading

    _log_command("run", argv)
    name, deadline = os.path.basename(argv[0]), time.monotonic() + timeout
    with tempfile.TemporaryFile() as stderr:
        try:
            child = subprocess.Popen(argv, stdin=_memfd_containing(stdin.encode()), stdout=subprocess.PIPE,
                                     stderr=stderr, env=dict(env), start_new_session=True)
        except OSError as error:
            raise UnavailableError(f"{name}: {error.strerror or error}") from error
        lines: queue.Queue[bytes | None] = queue.Queue()

        def read() -> None:
            for line in child.stdout or ():
                lines.put(line)
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()
        try:
            while True:
                try:
                    line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
                except queue.Empty:
                    raise UnavailableError(f"{name}: not done within {timeout:g} s") from None
                if line is None:
                    break
                yield line.decode(errors="replace")
        finally:
            _terminate(child, min(1.0, max(0.0, deadline - time.monotonic())))
        stderr.seek(0)
        CommandResult(name, child.returncode, "", stderr.read().decode(errors="replace")).checked_stdout()


def _terminate(child: subprocess.Popen[bytes], grace_s: float) -> None:
    """Wait `grace_s` seconds, then send SIGTERM (srun then ends its tasks), then SIGKILL."""
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
    """Start a command after a delay, even if this process and its terminal are gone by then."""
    import subprocess

    _log_command(f"in {delay_s:g} s", argv)
    subprocess.Popen(["/bin/sh", "-c", 'sleep "$0"; exec "$@"', str(delay_s), *argv], cwd="/", start_new_session=True,
                     stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def exec_program(argv: Sequence[str], env: Mapping[str, str], stdin: bytes | None = None, *,
                 restore_signals: bool = True) -> NoReturn:
    """Replace this process by a program, which then owns the signals, the terminal and the exit status.

    Raises UnavailableError if the program cannot be run.

    Args:
        argv: the path of the program first; the program gets its name only, as from a shell.
        stdin: content of standard input; None leaves standard input unchanged.
        restore_signals: False lets the program ignore SIGPIPE and SIGXFSZ, as Python does.
    """
    _log_command("exec", argv)
    restored = _IGNORED_BY_PYTHON if restore_signals else ()
    if stdin is not None:
        os.dup2(_memfd_containing(stdin), 0)
    flush_output()
    for number in restored:
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execve(argv[0], [os.path.basename(argv[0]), *argv[1:]], dict(env))
    except OSError as error:
        for number in restored:
            signal.signal(number, signal.SIG_IGN)
        raise UnavailableError(f"{argv[0]}: {error.strerror}") from error


def run_passthrough(argv: Sequence[str], env: Mapping[str, str], stdin: bytes | None,
                    on_line: Callable[[bytes], bool]) -> int:
    """Run a program to its end, copy its stdout unchanged, and return its exit status.

    The program ignores SIGPIPE and SIGXFSZ, as this process does.
    If a signal ended the program, this process ends by the same signal.
    Signals that end programs are forwarded. `on_line` gets each copied line while the program runs, long lines
    truncated, until it returns True. Raises UnavailableError if the program cannot be run.
    """
    import subprocess

    _log_command("run", argv)
    try:
        child = subprocess.Popen([os.path.basename(argv[0]), *argv[1:]], executable=argv[0], env=dict(env),
                                 stdin=None if stdin is None else _memfd_containing(stdin), stdout=subprocess.PIPE,
                                 restore_signals=False)
    except OSError as error:
        raise UnavailableError(f"{argv[0]}: {error.strerror}") from error
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda received, _: child.send_signal(received))
    assert child.stdout is not None
    partial_line, is_done = b"", False
    while chunk := os.read(child.stdout.fileno(), 65536):
        with suppress(OSError):  # closed or full: the program itself would continue, too
            _write_all(1, chunk)
        if not is_done:
            *lines, partial_line = (partial_line + chunk).split(b"\n")
            is_done = any(on_line(line[:_MAX_LINE_BYTES]) for line in lines)
            partial_line = partial_line[:_MAX_LINE_BYTES]
    status = child.wait()
    if status < 0:
        if -status != signal.SIGKILL:  # its action cannot change
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
    """Flush stdout and stderr; a stream that cannot be written (closed, full disk) does not matter."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            if stream is not None:
                stream.flush()
