"""Parent of a program when something is left to do at its end; otherwise a process becomes the program.

It runs in a fresh interpreter without the threads of libraries: the main thread can learn the sender of a signal only
if no other thread takes the signal.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

_FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def exec_supervised(argv: Sequence[str], env: Mapping[str, str], *,
                    remove_file: str = "", failure_message: str = "") -> NoReturn:
    """Replace this process by the parent of a program, and end as the program does.

    The program inherits inheritable files. It runs in the process group of this process and gets every signal once:
    the terminal's signals (Ctrl-C) reach the whole group, a signal from another process is forwarded. Raises
    UnavailableError if the parent cannot be run.

    Args:
        argv: the path of the program first; the program gets its name only.
        remove_file: file to remove at the end, or "".
        failure_message: text on the program's stderr that means failure despite exit status 0, or "".
    """
    from slurmdl.errors import UnavailableError
    from slurmdl.slurm import process

    process.flush_output()
    try:
        os.execve(sys.executable, [sys.executable, "-IS", __file__, remove_file, failure_message, *argv], dict(env))
    except OSError as error:
        raise UnavailableError(f"{argv[0]}: {error.strerror}") from error


def _main(remove_file: str, failure_message: str, *argv: str) -> int:
    name = os.path.basename(argv[0])
    status, has_failed = 69, False
    # blocked before the start, so that no signal is lost; the program starts with the original mask
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED_SIGNALS)
    try:
        source, sink = os.pipe() if failure_message else (-1, -1)
        actions = [(os.POSIX_SPAWN_DUP2, sink, 2)] if failure_message else []
        # Python ignores two signals; other programs start with the default action
        pid = os.posix_spawn(argv[0], [name, *argv[1:]], os.environ, file_actions=actions, setsigmask=mask,
                             setsigdef=(signal.SIGPIPE, signal.SIGXFSZ))
        exit_lock = threading.Lock()
        threading.Thread(target=_forward_signals, args=(pid, exit_lock), daemon=True).start()
        if failure_message:
            os.close(sink)
            has_failed = _forward_stderr(source, failure_message.encode())
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        exit_lock.acquire()  # afterwards another program may get the process ID
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except OSError as error:
        print(f"slurmdl: {argv[0]}: {error.strerror}", file=sys.stderr)
    finally:
        if remove_file:
            with suppress(OSError):
                os.unlink(remove_file)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if status < 0:
        with suppress(OSError):  # the action of SIGKILL cannot change
            signal.signal(-status, signal.SIG_DFL)
        signal.raise_signal(-status)
    if has_failed and not status:
        print(f"slurmdl: {name} {failure_message}, and has ended all tasks; its own exit status is 0",
              file=sys.stderr)
        return 76
    return status


def _forward_stderr(source_fd: int, message: bytes) -> bool:
    """Copy the program's stderr as it arrives; return whether it contained `message`."""
    has_message, tail = False, b""
    while chunk := os.read(source_fd, 65536):
        text = tail + chunk
        has_message, tail = has_message or message in text, text[-len(message):]
        with suppress(OSError):  # closed or full: the program itself would continue, too
            while chunk:
                chunk = chunk[os.write(2, chunk):]
    return has_message


def _forward_signals(pid: int, exit_lock: threading.Lock) -> NoReturn:
    """Forward signals from other processes to the child, until `exit_lock` is held: the child is reaped then.

    A pidfd would need no lock, but requires Linux 5.3 (RHEL 8: 4.18).
    """
    while True:
        received = signal.sigwaitinfo(_FORWARDED_SIGNALS)
        if received.si_code <= 0:  # sent by a process; the kernel's own are above 0 (sigaction(2))
            with exit_lock:
                os.kill(pid, received.si_signo)


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
