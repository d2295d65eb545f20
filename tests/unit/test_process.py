"""Programs that slurmdl becomes, or attends to: their signals, their output as it comes, their exit status."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest

#: tells how often it is interrupted, once nothing more can be under way: SIGTERM ends it
COUNT = """
import signal, sys, time
count = 0
def interrupted(number, frame):
    global count
    count += 1
    print("interrupted", flush=True)
def told(number, frame):
    print("count", count, flush=True)
    sys.exit(7)
signal.signal(signal.SIGINT, interrupted)
signal.signal(signal.SIGTERM, told)
print("ready", flush=True)
while True:
    time.sleep(60)
"""
WAYS = {"attended": "", "overheard": "lost a node"}


def attended(fails: str, *argv: str) -> list[str]:
    """A command line that becomes the parent of a program."""
    # the placement's arrays bring threads, which must not take the signals
    return [sys.executable, "-c", "import os, numpy; from slurmdl.launch import supervisor; "
            f"supervisor.exec_supervised({['/usr/bin/env', *argv]!r}, os.environ, failure_message={fails!r})"]


def read_until(file: int, words: bytes, text: bytes = b"") -> bytes:
    while words not in text:
        assert select.select([file], [], [], 30)[0], f"{words!r} does not come: {text!r}"
        text += os.read(file, 4096)
    return text


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_an_interrupt_from_the_terminal_reaches_the_program_once(way):
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, attended(way, sys.executable, "-c", COUNT))
    read_until(terminal, b"ready")
    os.kill(pid, signal.SIGSTOP)  # two interrupts at a time would count as one
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


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_signal_that_is_sent_to_it_alone_is_passed_on(way):
    child = subprocess.Popen(attended(way, sys.executable, "-c", COUNT), stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"ready\n"
    child.send_signal(signal.SIGINT)
    assert child.stdout.readline() == b"interrupted\n"
    child.send_signal(signal.SIGTERM)
    assert child.communicate(timeout=30)[0] == b"count 1\n"
    assert child.returncode == 7


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGUSR1])
def test_it_ends_by_the_signal_by_which_the_program_ends(way, number):
    done = subprocess.run(attended(way, "sh", "-c", f"kill -{int(number)} $$"), check=False, timeout=30)
    assert done.returncode == -number


def test_a_line_that_does_not_end_is_handed_through_at_once():
    progress = "printf 'step 1 of 9\\r' >&2; read go; printf 'step 2' >&2; read go"
    child = subprocess.Popen(attended("lost a node", "sh", "-c", progress), stdin=subprocess.PIPE,
                             stderr=subprocess.PIPE)
    for shown in (b"step 1 of 9\r", b"step 2"):
        assert read_until(child.stderr.fileno(), shown) == shown
        child.stdin.write(b"\n")
        child.stdin.flush()
    child.communicate(timeout=30)
    assert child.returncode == 0


@pytest.mark.parametrize(("said", "status"), [("lost a node", 76), ("lost a n", 0), ("a lost a node b", 76)])
def test_words_are_heard_in_whatever_pieces_they_come(said, status):
    slowly = 'for c in $0; do printf %s $c | tr _ " " >&2; sleep 0.01; done'
    argv = attended("lost a node", "sh", "-c", slowly, " ".join(said.replace(" ", "_")))
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=30)
    told = "slurmdl: env lost a node, and has ended all tasks; its own exit status is 0\n" if status else ""
    assert (done.returncode, done.stdout, done.stderr) == (status, "", said + told)


def test_a_failed_program_keeps_its_own_status():
    done = subprocess.run(attended("lost a node", "sh", "-c", "echo lost a node >&2; exit 9"), capture_output=True,
                          text=True, check=False, timeout=30)
    assert (done.returncode, done.stderr) == (9, "lost a node\n")


@pytest.mark.parametrize("call", ["process.exec_program", "supervisor.exec_supervised"])
def test_programs_start_with_the_signals_that_a_shell_gives_them(call):
    """Python ignores SIGPIPE, and what is ignored stays ignored in the programs that it starts."""
    grep = ["/bin/grep", "^Sig[BI]", "/proc/self/status"]
    script = f"import os; from slurmdl.launch import supervisor; from slurmdl.slurm import process; {call}({grep!r}, os.environ)"
    found = [subprocess.run(argv, capture_output=True, text=True, check=True, timeout=30).stdout.split()
             for argv in ([sys.executable, "-c", script], grep)]
    # posix_spawn of the C library ignores its own two signals, 32 and 33
    masks = [{words[0]: int(words[1], 16) & ~(3 << 31), words[2]: int(words[3], 16) & ~(3 << 31)} for words in found]
    assert masks[0] == masks[1]
    assert masks[0].keys() == {"SigBlk:", "SigIgn:"}
