"""The parent of a program where something is left to do at its end; else a process would become the program.

It is an interpreter of its own, without the threads that libraries start: only where no thread takes a signal can
the main thread learn who sent it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

#: signals that end programs, or tell them something
_FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def exec_supervised(argv: Sequence[str], env: Mapping[str, str], *,
                    remove_file: str = "", failure_message: str = "") -> NoReturn:
    """Become the parent of a program and end as it does; it gets this process's inheritable files.

    The program is in the process group of this process and gets every signal once: those of the terminal (Ctrl-C) go
    to the whole group, and what another process sends to this one is passed on.

    Parameters
    ----------
    argv : the first word is the program's path; the program is told its name only.
    remove : file to remove at the end, "" for none.
    fails : words on the program's stderr with which it has failed although its status is 0, "" for none.

    Raises
    ------
    UnavailableError : the parent cannot be run.
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
    status, failed = 69, False
    # blocked before the start, so that none is lost; the program itself starts with the mask as it was
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED_SIGNALS)
    try:
        source, sink = os.pipe() if failure_message else (-1, -1)
        actions = [(os.POSIX_SPAWN_DUP2, sink, 2)] if failure_message else []
        # Python ignores two signals from its start; other programs start with them as usual
        pid = os.posix_spawn(argv[0], [name, *argv[1:]], os.environ, file_actions=actions, setsigmask=mask,
                             setsigdef=(signal.SIGPIPE, signal.SIGXFSZ))
        ended = threading.Lock()
        threading.Thread(target=_forward_signals, args=(pid, ended), daemon=True).start()
        if failure_message:
            os.close(sink)
            failed = _forward_stderr(source, failure_message.encode())
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        ended.acquire()  # from here on the process number may be another program's
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except OSError as error:
        print(f"slurmdl: {argv[0]}: {error.strerror}", file=sys.stderr)
    finally:
        if remove_file:
            with suppress(OSError):
                os.unlink(remove_file)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if status < 0:
        with suppress(OSError):  # SIGKILL has no other action
            signal.signal(-status, signal.SIG_DFL)
        signal.raise_signal(-status)
    if failed and not status:
        print(
    f"slurmdl: {name} {failure_message}, and has ended all tasks; its own exit status is 0",
     file=sys.stderr)
        return 76
    return status


def _forward_stderr(source_fd: int, message: bytes) -> bool:
    """Hand stderr of the program through as it comes; whether these words were in it."""
    heard, end = False, b""
    while chunk := os.read(source_fd, 65536):
        text = end + chunk
        heard, end = heard or message in text, text[-len(message):]
        with suppress(OSError):  # closed or full: the program itself would go on, too
            while chunk:
                chunk = chunk[os.write(2, chunk):]
    return heard


def _forward_signals(pid: int, exit_lock: threading.Lock) -> NoReturn:
    """Send the signals that other processes send to this one to a child, until `ended` is held: it is reaped then.

    A pidfd would need no lock, but Linux before 5.3 has none (RHEL 8: 4.18).
    """
    while True:
        received = signal.sigwaitinfo(_FORWARDED_SIGNALS)
        if received.si_code <= 0:  # sent by a process; the kernel's own are above 0 (sigaction(2))
            with exit_lock:
                os.kill(pid, received.si_signo)


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
