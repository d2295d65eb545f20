"""Programs that replace or are supervised by slurmdl: signals, output, exit status."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest

from slurmdl.errors import UnavailableError
from slurmdl.slurm.process import run_command

#: counts SIGINT; SIGTERM makes it print the count and exit
COUNT = """
import os, signal, sys, time
count = 0
def interrupted(number, frame):
    global count
    count += 1
    os.write(1, b"interrupted\\n")  # print cannot be called while it runs
def terminated(number, frame):
    os.write(1, b"count %d\\n" % count)
    sys.exit(7)
signal.signal(signal.SIGINT, interrupted)
signal.signal(signal.SIGTERM, terminated)
print("ready", flush=True)
while True:
    time.sleep(60)
"""
supervised = pytest.mark.parametrize("failure_message", ["", "lost a node"], ids=["supervised", "with message"])


def supervisor_command(failure_message: str, *argv: str) -> list[str]:
    """A command line that supervises a program."""
    # numpy starts threads, which must not take the signals
    return [sys.executable, "-c", "import os, numpy; from slurmdl.slurm import supervisor; "
            f"supervisor.exec_supervised({['/usr/bin/env', *argv]!r}, os.environ, "
            f"failure_message={failure_message!r})"]


def read_until(file: int, expected: bytes, text: bytes = b"") -> bytes:
    while expected not in text:
        assert select.select([file], [], [], 30)[0], f"{expected!r} missing in {text!r}"
        text += os.read(file, 4096)
    return text


@supervised
def test_terminal_interrupt_reaches_the_program_once(failure_message):
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, supervisor_command(failure_message, sys.executable, "-c", COUNT))
    read_until(terminal, b"ready")
    os.kill(pid, signal.SIGSTOP)  # two pending interrupts would merge into one signal
    os.write(terminal, b"\x03")
    read_until(terminal, b"interrupted")
    os.kill(pid, signal.SIGCONT)
    time.sleep(0.5)
    os.kill(pid, signal.SIGTERM)
    text = read_until(terminal, b"count")
    text = read_until(terminal, b"\n", text.partition(b"count")[2])
    assert text.split() == [b"1"]
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    os.close(terminal)


@supervised
def test_signal_to_the_supervisor_is_forwarded(failure_message):
    child = subprocess.Popen(supervisor_command(failure_message, sys.executable, "-c", COUNT), stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"ready\n"
    child.send_signal(signal.SIGINT)
    assert child.stdout.readline() == b"interrupted\n"
    child.send_signal(signal.SIGTERM)
    assert child.communicate(timeout=120)[0] == b"count 1\n"
    assert child.returncode == 7


@supervised
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGUSR1])
def test_supervisor_ends_by_the_signal_of_the_program(failure_message, number):
    argv = supervisor_command(failure_message, "sh", "-c", f"kill -{int(number)} $$")
    proc = subprocess.run(argv, check=False, timeout=120)
    assert proc.returncode == -number


def test_unfinished_line_is_copied_at_once():
    progress = "printf 'step 1 of 9\\r' >&2; read go; printf 'step 2' >&2; read go"
    child = subprocess.Popen(supervisor_command("lost a node", "sh", "-c", progress), stdin=subprocess.PIPE,
                             stderr=subprocess.PIPE)
    for shown in (b"step 1 of 9\r", b"step 2"):
        assert read_until(child.stderr.fileno(), shown) == shown
        child.stdin.write(b"\n")
        child.stdin.flush()
    child.communicate(timeout=120)
    assert child.returncode == 0


@pytest.mark.parametrize(("stderr", "own_status", "status"), [
    ("lost a node", 0, 76), ("lost a n", 0, 0), ("a lost a node b", 0, 76), ("lost a node", 9, 9)])
def test_failure_message_in_pieces_is_found(stderr, own_status, status):
    slowly = f'for c in $0; do printf %s $c | tr _ " " >&2; sleep 0.01; done; exit {own_status}'
    argv = supervisor_command("lost a node", "sh", "-c", slowly, " ".join(stderr.replace(" ", "_")))
    proc = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)
    message = "slurmdl: env lost a node, and has ended all tasks; its own exit status is 0\n" if status == 76 else ""
    assert (proc.returncode, proc.stdout, proc.stderr) == (status, "", stderr + message)


def test_query_keeps_its_limit_if_a_descendant_outside_its_group_holds_the_pipes(tmp_path):
    os.mkfifo(tmp_path / "alive")
    holder = "exec 3<>alive; echo $$ >pid; exec sleep 20"
    with pytest.raises(UnavailableError, match=r"^sh: no answer within 1 s$"):
        run_command(["sh", "-c", f"setsid sh -c '{holder}' & sleep 20"], timeout=1.0, cwd=str(tmp_path))
    # fails if the holder has ended, since nothing else reads the pipe
    os.close(os.open(tmp_path / "alive", os.O_WRONLY | os.O_NONBLOCK))
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


@pytest.mark.parametrize("call", ["process.exec_program", "supervisor.exec_supervised"])
def test_programs_start_with_default_signal_actions(call):
    """Python ignores SIGPIPE, and started programs inherit ignored signals."""
    grep = ["/bin/grep", "^Sig[BI]", "/proc/self/status"]
    script = "import os; from slurmdl.slurm import process, supervisor; " \
             f"{call}({grep!r}, os.environ)"
    outputs = [subprocess.run(argv, capture_output=True, text=True, check=True, timeout=120).stdout.split()
               for argv in ([sys.executable, "-c", script], grep)]
    # posix_spawn of the C library ignores its internal signals 32 and 33
    masks = [{words[i]: int(words[i + 1], 16) & ~(3 << 31) for i in (0, 2)} for words in outputs]
    assert masks[0] == masks[1]
    assert masks[0].keys() == {"SigBlk:", "SigIgn:"}


def test_debug_log_has_queries_with_duration_size_and_status(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("SLURMDL_DEBUG", "1")
    (tmp_path / "scontrol").write_text("#!/bin/sh\ncat >/dev/null; printf 'mü'; echo broken >&2; exit 3\n")
    (tmp_path / "scontrol").chmod(0o755)
    run_command([str(tmp_path / "scontrol"), "-o"], stdin="show nodes\nshow config\n")
    run_command(["cat", "a b"], stdin="secret", timeout=5)
    with pytest.raises(UnavailableError):
        run_command(["sleep", "60"], timeout=0.1)
    lines = [re.sub(r"\d+ ms", "N ms", line) for line in capsys.readouterr().err.splitlines()]
    assert lines == [
        f"slurmdl: debug: query: {tmp_path}/scontrol -o (show nodes, show config): N ms, 3 bytes, status 3, broken",
        "slurmdl: debug: query: cat 'a b': N ms, 0 bytes, status 1, cat: 'a b': No such file or directory",
        "slurmdl: debug: query: sleep 60: N ms, sleep: no answer within 0.1 s"]
    monkeypatch.delenv("SLURMDL_DEBUG")
    run_command(["true"])
    assert not capsys.readouterr().err
