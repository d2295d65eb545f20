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
WAYS = {"overhear": "process.overhear({argv!r}, os.environ, b'lost a node')[0]",
        "attend": "process.attend({argv!r}, os.environ)"}


def attended(way: str, *argv: str) -> list[str]:
    """A command line that runs a program as its child and ends with its status."""
    program = ["/usr/bin/env", *argv]
    return [sys.executable, "-c", f"import os, sys; from slurmdl import process; sys.exit("
            f"{WAYS[way].format(argv=program)})"]


def read_until(file: int, words: bytes, text: bytes = b"") -> bytes:
    while words not in text:
        assert select.select([file], [], [], 30)[0], f"{words!r} does not come: {text!r}"
        text += os.read(file, 4096)
    return text


@pytest.mark.parametrize("way", WAYS)
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


@pytest.mark.parametrize("way", WAYS)
def test_a_signal_that_is_sent_to_it_alone_is_passed_on(way):
    child = subprocess.Popen(attended(way, sys.executable, "-c", COUNT), stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"ready\n"
    child.send_signal(signal.SIGINT)
    assert child.stdout.readline() == b"interrupted\n"
    child.send_signal(signal.SIGTERM)
    assert child.communicate(timeout=30)[0] == b"count 1\n"
    assert child.returncode == 7


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGUSR1])
def test_it_ends_by_the_signal_by_which_the_program_ends(way, number):
    done = subprocess.run(attended(way, "sh", "-c", f"kill -{int(number)} $$"), check=False, timeout=30)
    assert done.returncode == -number


def test_a_line_that_does_not_end_is_handed_through_at_once():
    progress = "printf 'step 1 of 9\\r' >&2; read go; printf 'step 2' >&2; read go"
    child = subprocess.Popen(attended("overhear", "sh", "-c", progress), stdin=subprocess.PIPE,
                             stderr=subprocess.PIPE)
    for shown in (b"step 1 of 9\r", b"step 2"):
        assert read_until(child.stderr.fileno(), shown) == shown
        child.stdin.write(b"\n")
        child.stdin.flush()
    child.communicate(timeout=30)
    assert child.returncode == 0


@pytest.mark.parametrize(("said", "heard"), [("lost a node", True), ("lost a n", False), ("a lost a node b", True)])
def test_words_are_heard_in_whatever_pieces_they_come(said, heard):
    script = f"import os, sys; from slurmdl import process; print(process.overhear(" \
             f"['/bin/sh', '-c', 'for c in $0; do printf %s $c | tr _ \" \" >&2; sleep 0.01; done', " \
             f"{' '.join(said.replace(' ', '_'))!r}], os.environ, b'lost a node'))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=30)
    assert (done.stdout, done.stderr) == (f"(0, {heard})\n", said)


@pytest.mark.parametrize("call", ["process.become", "process.attend"])
def test_programs_start_with_the_signals_that_a_shell_gives_them(call):
    """Python ignores SIGPIPE, and what is ignored stays ignored in the programs that it starts."""
    grep = ["/bin/grep", "^Sig[BI]", "/proc/self/status"]
    script = f"import os; from slurmdl import process; {call}({grep!r}, os.environ)"
    found = [subprocess.run(argv, capture_output=True, text=True, check=True, timeout=30).stdout.split()
             for argv in ([sys.executable, "-c", script], grep)]
    # posix_spawn of the C library ignores its own two signals, 32 and 33
    masks = [{words[0]: int(words[1], 16) & ~(3 << 31), words[2]: int(words[3], 16) & ~(3 << 31)} for words in found]
    assert masks[0] == masks[1]
    assert masks[0].keys() == {"SigBlk:", "SigIgn:"}
