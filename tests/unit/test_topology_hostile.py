"""Hostile files are rejected by a one-line error that names the file, within 10 s of CPU time and 1 GB of memory."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmdl.errors import InputError
from slurmdl.slurm.output import split_output
from slurmdl.topology import scontrol_topology

#: far above the 2 s that the largest file takes, also on a slow machine, and far below an expansion without a limit
SECONDS, MEMORY = 10, 2**30


def rejection(path: Path, *command: str, name: str | None = None) -> str:
    """Return the one-line error of a command on a file; the default is `slurmdl topology show`."""
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))

    argv = [sys.executable, "-m", "slurmdl", *(command or ("topology", "show", str(path)))]
    if os.geteuid() == 0:  # drop root's right to read all files
        argv = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *argv]
    proc = subprocess.run(argv, capture_output=True, text=True, timeout=60, preexec_fn=limit, check=False,
                          stdin=subprocess.DEVNULL, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"})
    assert proc.returncode == 65, f"exit status {proc.returncode}: {proc.stderr[-1000:]}"
    assert len(proc.stderr.splitlines()) == 1, proc.stderr[-1000:]
    assert proc.stderr.startswith("slurmdl: ")
    assert len(proc.stderr) < 1000 + len(str(path))
    assert (name or path.name) in proc.stderr
    return proc.stderr


S1 = "SwitchName=s1 Nodes=n1\n"
WIDE = ",".join(f"n{i}[0-65535]" for i in range(40))


def _laughs() -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    return "\n".join(lines)


@pytest.mark.parametrize(("text", "line", "expected"), [
    ("SwitchName=a Switches=b\nSwitchName=b Switches=a\n", 1, "above itself"),
    (S1 + "SwitchName=t Switches=s1,s9\n", 2, "expected a line SwitchName=s9"),
    (S1 + S1, 2, "declared twice"),
    (S1 + "SwitchName=t Switches=s1 Nodes=n2\n", 2, "both Nodes and Switches"),
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
    ("BlockName=b1 Nodes=n[1-4]\nBlockSizes=4,6\n", 2, "power of two"),
])
def test_conf(tmp_path: Path, text: str, line: int | None, expected: str) -> None:
    path = tmp_path / "topology.conf"
    path.write_text(text)
    message = rejection(path)
    assert expected in message
    if line is not None:
        assert f"topology.conf:{line}:" in message


@pytest.mark.parametrize(("text", "line", "expected"), [
    (_laughs(), 2, "aliases"),
    ("- topology: t\n  tree:\n    switches:\n    - switch: s1\n      nodes: [n1, n2]\n", 5, "not a list or a map"),
    ("- topology: t\n  tree:\n    switches:\n    - switch: s1\n      nodes: {n1: n2}\n", 5, "not a list or a map"),
    ("- topology: t\n  tree:\n    switches:\n    - switch: s1\n      nodes: a[0-65535]b[0-65535]\n", 5, "names"),
    ("- topology: t\n  tree:\n    switches:\n    - switch: s1\n      children: s2\n", 4, "s2"),
    ("- topology: t\n  tree:\n    switches: n[1-4]\n", 3, "list"),
    ("- topology: t\n- topology: t\n  flat: true\n", 1, "exactly one"),
    ("[" * 100_000, 1, "deeper"), ("{a: " * 100_000, 1, "deeper"), ("- " * 100_000, 1, "deeper"),
    ("? " * 100_000, 1, ""), ("- a\n" * 1_000_000, None, "values"), ("&a " * 100_000, 1, ""),
    ("!!python/object/apply:os.system ['true']\n", 1, ""), ("a: b: c\n", 1, "YAML"), ("\t- x", 1, "YAML"),
    ("--- a\n--- b\n", 2, "second document"), ("- topology: t\n  block: {block_sizes: [0]}\n", 2, ""),
    ("%YAML 9.9\n---\n- a\n", 1, ""), ("a" * 4_000_000, 1, ""), ("'" + "\n" * 4_000_000, None, "YAML"),
    ("", None, "declares no topology"), ("- topology: \x1a\n", None, "YAML"),
])
def test_yaml(tmp_path: Path, text: str, line: int | None, expected: str) -> None:
    path = tmp_path / "topology.yaml"
    path.write_text(text)
    message = rejection(path)
    assert expected in message
    if line is not None:
        assert f"topology.yaml:{line}:" in message


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
    assert expected in rejection(path, "bench", "run", str(path))


@pytest.mark.parametrize("text", [
    "[" * 1_000_000, '{"a":' * 1_000_000, "{}", "[]", "null", "3", '"a"', "1e999", "9" * 1_000_000, "NaN", "",
    json.dumps({"topologies": [], "default": "x"}), json.dumps({"topologies": {"a": 1}}),
    json.dumps({"kind": "tree", "zones": ["s"], "parent": [2**40], "level": [0], "uplink_bandwidth": [None],
                "nodes": [], "leaf": []}),
    json.dumps({"kind": "tree", "zones": ["s"], "parent": [0], "level": [0], "uplink_bandwidth": [None],
                "nodes": ["n"], "leaf": [0]}),
    json.dumps({"kind": "tree", "zones": ["a", "b"], "parent": [1, 0], "level": [0, 1],
                "uplink_bandwidth": [None] * 2, "nodes": ["n"], "leaf": [0]}),
    json.dumps({"kind": "tree", "zones": ["a", "a"], "parent": [-1, -1], "level": [0, 0],
                "uplink_bandwidth": [None] * 2, "nodes": ["n"], "leaf": [0]}),
    json.dumps({"kind": "tree", "zones": ["s"], "parent": [-1], "level": [0], "uplink_bandwidth": [None],
                "nodes": ["n", "n"], "leaf": [0, 0]}),
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


def _unreadable(path: Path) -> None:
    path.write_text(S1)
    path.chmod(0)


@pytest.mark.parametrize(("make", "expected"), [
    (_sparse, "too large"), (lambda path: path.write_bytes(b"\0" * 2**20), "NUL"),
    (_unreadable, "Permission denied"), (lambda path: path.mkdir(), ""), (os.mkfifo, "not a regular file"),
    (lambda path: path.symlink_to(path), "cannot be read"),
    (lambda path: path.symlink_to("/dev/zero"), "not a regular file"), (lambda path: None, "No such file"),
    (lambda path: path.write_bytes(b"\xff\xfe" * 1000), "UTF-8"),
], ids=["gigabyte", "zeros", "unreadable", "directory", "pipe", "loop of links", "/dev/zero", "missing", "no text"])
@pytest.mark.parametrize("name", ["topology.conf", "topology.yaml", "topology.json"])
def test_not_a_text_file(tmp_path: Path, make: Callable[[Path], object], expected: str, name: str) -> None:
    make(tmp_path / name)
    assert expected in rejection(tmp_path / name)


@pytest.mark.parametrize("size", ["0", "\u00b2", "9" * 5000])
def test_invalid_block_sizes_of_the_controller(size: str) -> None:
    text = f"BlockName=b1 Nodes=n[1-2] BlockSize={size}\nBlockName=b2 Nodes=n[3-4] BlockSize=2 LinkSpeed={size}\n"
    try:
        assert scontrol_topology.read_topologies(split_output(text)).get().zones[:2] == ("b1", "b2")
    except InputError as error:
        assert "BlockSizes" in str(error)


def test_includes(tmp_path: Path) -> None:
    path = tmp_path / "topology.conf"
    path.write_text("Include a.conf\n")
    (tmp_path / "a.conf").write_text("Include topology.conf\n")
    assert "includes itself" in rejection(path)
    # each file includes the next one twice: a million reads
    for i in range(20):
        (tmp_path / f"i{i}.conf").write_text(f"Include i{i + 1}.conf\nInclude i{i + 1}.conf\n")
    (tmp_path / "i20.conf").write_text("# end\n")
    path.write_text("Include i0.conf\n")
    rejection(path, name="conf")
    path.write_text("Include gigabyte.conf\n")
    _sparse(tmp_path / "gigabyte.conf")
    assert "too large" in rejection(path, name="gigabyte.conf")
