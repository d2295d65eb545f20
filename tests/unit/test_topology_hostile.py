"""Hostile files are rejected by a one-line error that names the file, within 10 s of CPU time and 1 GB of memory."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmdl.cli.main import main

#: far above the 2 s that the largest file takes, also on a slow machine, and far below an expansion without a limit
SECONDS, MEMORY = 10, 2**30


def rejection(path: Path, *command: str, name: str | None = None) -> str:
    """Return the one-line error of a command on a file, in a fork; the default is `slurmdl topology show`."""
    sys.stdout.flush()
    errors = path.parent / "stderr"
    child = os.fork()
    if not child:
        status = 1
        try:
            os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            sys.stdin, sys.stderr = open(os.devnull), os.fdopen(2, "w")  # noqa: SIM115
            signal.alarm(60)
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY,) * 2)
            status = main([*(command or ("topology", "show")), str(path)])
            sys.stderr.flush()
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    text = errors.read_text()
    assert status == 65, f"exit status {status}: {text[-1000:]}"
    assert len(text.splitlines()) == 1, text[-1000:]
    assert text.startswith("slurmdl: ")
    assert len(text) < 1000 + len(str(path))
    assert (name or path.name) in text
    return text


S1 = "SwitchName=s1 Nodes=n1\n"
WIDE = ",".join(f"n{i}[0-65535]" for i in range(40))


def _laughs() -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    return "\n".join(lines)


CONF = [
    ("SwitchName=s1 Nodes=a[0-65535]b[0-65535]\n", 1, "names"),
    (f"SwitchName=s1 Nodes={WIDE}\n", 1, "names"),
    ("".join(f"SwitchName=s{i} Nodes=n{i}[0-65535]\n" for i in range(100)), None, "names"),
    ("".join(f"SwitchName=s{i} Nodes=n[0-65535]\n" for i in range(1000)), None, "names"),
    (S1 + "SwitchName=t Switches=s[0-65535]\n", 2, "expected a line"),
    ("SwitchName=s1 Nodes=n[1-" + "9" * 1_000_000 + "]\n", 1, "range"),
    ("SwitchName=s1 Nodes=" + "[" * 1_000_000 + "\n", 1, "brackets"),
    ("SwitchName=s1 Nodes=" + "a[1]" * 300_000 + "[\n", 1, "brackets"),
    ("SwitchName=s1 Nodes=" + "a[1-2]" * 64 + "\n", 1, "names"),
    ("SwitchName=s1 LinkSpeed=" + "9" * 1_000_000 + " Nodes=n1\n", 1, "LinkSpeed"),
    ("#" * 2_000_000, None, "declares no zone"),
    ("\\#" * 1_000_000, 1, "KEY=VALUE"),
    ("\\" * 2_000_001, None, ""),
    ("\\\n" * 1_000_000, None, "declares no zone"),
    ("\n" * 4_000_000, None, "declares no zone"),
    ("a\\\n" * 1_000_000, None, "KEY=VALUE"),
    (" " * 2_000_000 + "x", 1, "KEY=VALUE"),
    ("a " * 1_000_000, 1, "KEY=VALUE"),
    ("SwitchName" + " " * 2_000_000, 1, "KEY=VALUE"),
    ('"' * 2_000_000, 1, "KEY=VALUE"),
    ("SwitchName=s1 " + "Nodes=n1 " * 200_000 + "Nodes\n", 1, "KEY=VALUE"),
    ("\x85".join(["SwitchName=s1 Nodes=n1"] * 3) + "\nx\n", 2, "KEY=VALUE"),
    ("".join(f"SwitchName=s{i} Switches=s{i + 1}\n" for i in range(50_000)), 50_000, "expected a line"),
    ("".join(f"SwitchName=s{i} Switches=s{(i + 1) % 50_000}\n" for i in range(50_000)), 1, "above itself"),
    ("BlockName=b1 Nodes=n[1-4]\nBlockSizes=" + "9" * 1_000_000 + "\n", 2, "BlockSizes"),
]
YAML = [
    (_laughs(), 2, "aliases"),
    ("- topology: t\n  tree:\n    switches:\n    - switch: s1\n      nodes: a[0-65535]b[0-65535]\n", 5, "names"),
    ("[" * 100_000, 1, "deeper"), ("{a: " * 100_000, 1, "deeper"), ("- " * 100_000, 1, "deeper"),
    ("? " * 100_000, 1, ""), ("- a\n" * 1_000_000, None, "values"), ("&a " * 100_000, 1, ""),
    ("!!python/object/apply:os.system ['true']\n", 1, ""), ("a: b: c\n", 1, "YAML"), ("\t- x", 1, "YAML"),
    ("%YAML 9.9\n---\n- a\n", 1, ""), ("a" * 4_000_000, 1, ""), ("'" + "\n" * 4_000_000, None, "YAML"),
    ("- topology: \x1a\n", None, "YAML"),
]


@pytest.mark.parametrize(("name", "text", "line", "expected"), [
    *(("topology.conf", *row) for row in CONF), *(("topology.yaml", *row) for row in YAML)])
def test_text(tmp_path: Path, name: str, text: str, line: int | None, expected: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    message = rejection(path)
    assert expected in message
    assert line is None or f"{name}:{line}:" in message


@pytest.mark.parametrize(("text", "expected"), [
    ("a0: &a0 {x: 1, y: 1}\n" + "".join(f"a{i}: &a{i}\n  <<: [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40)),
     ":25: merge keys (<<) insert more than 10000 entries"),
    ("a: &a {" + ", ".join(f"k{i}: 1" for i in range(3000)) + "}\n" +
     "".join(f"b{i}: {{<<: *a}}\n" for i in range(900)),
     ":5: merge keys (<<) insert more than 10000 entries"),
    ("a: &a 1\nb: [" + "*a, " * 15_000 + "]\n", ":2: has more than 1000 aliases"),
    (_laughs().replace("a0:", "nodes:", 1), "unknown key a1"),
    ("models:\n- " + _laughs().replace("\n", "\n- "), "models: [{'a0': [...]}, "),
    ("nodes:\n- " + _laughs().replace("\n", "\n- "), "nodes: {'a0': ['x', "),
])
def test_yaml_with_merge_keys_and_aliases(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    assert expected in rejection(path, "bench", "run")


@pytest.mark.parametrize("text", [
    "[" * 1_000_000, '{"a":' * 1_000_000, "{}", "[]", "null", "3", '"a"', "1e999", "9" * 1_000_000, "NaN", "",
    json.dumps({"kind": "tree", "zones": "s", "parent": [-1], "level": [-7], "uplink_bandwidth": [{}],
                "nodes": "n", "leaf": [0]}),
])
def test_json(tmp_path: Path, text: str) -> None:
    path = tmp_path / "topology.json"
    path.write_text(text)
    rejection(path)


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**30)


@pytest.mark.parametrize(("make", "expected"), [
    (_sparse, "too large"), (lambda path: path.write_bytes(b"\0" * 2**20), "NUL"),
    (lambda path: path.mkdir(), ""), (os.mkfifo, "not a regular file"),
    (lambda path: path.symlink_to(path), "cannot be read"),
    (lambda path: path.symlink_to("/dev/zero"), "not a regular file"), (lambda path: None, "No such file"),
    (lambda path: path.write_bytes(b"\xff\xfe" * 1000), "UTF-8"),
], ids=["gigabyte", "zeros", "directory", "pipe", "loop of links", "/dev/zero", "missing", "no text"])
@pytest.mark.parametrize("name", ["topology.conf", "topology.yaml", "topology.json"])
def test_not_a_text_file(tmp_path: Path, make: Callable[[Path], object], expected: str, name: str) -> None:
    make(tmp_path / name)
    assert expected in rejection(tmp_path / name)


def test_includes(tmp_path: Path) -> None:
    path = tmp_path / "topology.conf"
    path.write_text("Include a.conf\n")
    (tmp_path / "a.conf").write_text("Include topology.conf\n")
    assert "includes itself" in rejection(path)
    path.write_text("Include gigabyte.conf\n")
    _sparse(tmp_path / "gigabyte.conf")
    assert "too large" in rejection(path, name="gigabyte.conf")
