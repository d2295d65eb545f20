"""Terminal escapes in names, options, scripts and messages: they are shown, never sent to the terminal."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slurmdl.cli.main import main
from slurmdl.errors import InputError
from slurmdl.text import escape_nonprintable
from slurmdl.topology import load

PACKAGE = Path(__file__).parents[2] / "slurmdl"
#: color, window title, one-character CSI, delete, right-to-left text, carriage return
BAD = "\x1b[31m\x1b]0;x\x07\x9b1m\x7f\u202e\u2066\rroot#"
#: a name that topology.conf accepts: terminal reset, one-character CSI, delete, right-to-left text
ZONE = "zoneA\x1bc\x9b1m\x7f\u202e"
#: calls of print, except in bench/ and train/, that do not escape their text: fixed texts, and output for programs
RAW = {
    # an interpreter without imports of slurmdl; it names the program that was found on PATH
    ("slurm/supervisor.py", "f'slurmdl: {argv[0]}: {error.strerror}'"),
    ("slurm/supervisor.py",
     "f'slurmdl: {name} {failure_message}, and has ended all tasks; its own exit status is 0'"),
    ("cli/main.py", "'\\n'.join(['usage: slurmdl COMMAND [options]', '', *lines, '', '`slurmdl COMMAND --help` "
                    "lists its options.'])"),
    ("cli/place.py", "HELP"),
    ("launch/srun.py", 'f"{SRUN_HELP}\\n{dl_options.help_text()}\\nsrun\'s own options: srun --help"'),
    ("cli/links.py", "format_sample_lines(samples)"),
    ("cli/topology.py", "text"), ("cli/topology.py", "write.format_topology(TopologySet.single(topology), None, "
                                                     "options.format)"),
    ("cli/topology.py", "'# for the NodeName lines of slurm.conf; each node may be on one such line only'"),
    ("launch/sbatch.py", "f'usage: slurmdl sbatch [--dl-*] [sbatch options] script [args]\\n\\n"
                         "{dl_options.help_text()}'"),
    ("launch/srun.py", "outcome.output"),  # a rank map for another launcher
    ("text.py", "'\\n'.join(map(escape_nonprintable, text.split('\\n')))"),
}


def control_characters(text: str) -> set[str]:
    """Non-printable characters of a text, except newlines."""
    return {c for c in text if not c.isprintable()} - {"\n"}


def slurmdl(*args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "slurmdl", *args], capture_output=True, text=True, check=False,
                          timeout=60, env={**os.environ, **environ}, stdin=subprocess.DEVNULL)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("SLURM_CONF", "SLURM_JOB_ID", "SLURMDL_SUBMISSION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sbatch").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "sbatch").chmod(0o755)
    Path("zones.conf").write_text(f"SwitchName={ZONE} Nodes=n[1-4]\nSwitchName=zoneB Nodes=n[5-8]\n"
                                  f"SwitchName=core Switches={ZONE},zoneB\n", newline="")
    Path("twice.conf").write_text(f"SwitchName=zoneB Nodes=n[1-8]\nSwitchName={ZONE} Nodes=n1\n", newline="")
    nodes = [{"name": f"n{i}", "state": ["IDLE"], "features": [BAD], "partitions": [BAD], "cpus": 2,
              "cpus_unallocated": 2, "memory": 4000, "memory_unallocated": 4000} for i in range(1, 9)]
    Path("nodes.json").write_text(json.dumps({"nodes": nodes, "partitions": [{"name": BAD, "default": True}]}))
    Path("scores.json").write_text(json.dumps({"time": time.time(), "zones": {
        ZONE: {"throughput": 1e6, "age": 1.0, "samples": 3}}, "nodes": {
        "n1": {"throughput": 1e6, "age": 1.0, "samples": 3}}}))
    Path(f"job{BAD}.sh").write_text(f"#!/bin/sh\n#SBATCH -J {ZONE}\n#DL --dl-{ZONE}=1\ntrue\n", newline="")


@pytest.mark.parametrize("text", ["zoneA", "Zürich", "日本", "a b"])
def test_printable_text_is_unchanged(text: str) -> None:
    assert escape_nonprintable(text) == text


def test_control_characters_are_escaped() -> None:
    assert escape_nonprintable("a\x1b[1m\x9b\x7f\u202e\n") == r"a\x1b[1m\x9b\x7f\u202e\n"
    assert not control_characters(escape_nonprintable("".join(map(chr, range(0x3000)))))


PLACED = ["--topology=zones.conf", "--cluster=nodes.json", "--link-scores=scores.json"]


@pytest.mark.parametrize("words", [
    ["place", *PLACED, "-N6"], ["place", *PLACED, "-N2", "-p", BAD, f"job{BAD}.sh"],
    ["place", *PLACED, "-N2", f"--dl-zone={BAD}"], ["place", *PLACED, f"--dl-strategy={BAD}"],
    ["place", f"--topology={BAD}", "--cluster=nodes.json", "-N2"], ["place", "--cluster", f"none{BAD}", "-N2"],
    ["topology", "show", "zones.conf"], ["topology", "show", "--all", "zones.conf"],
    ["topology", "check", "twice.conf", "--offline"], ["topology", "check", f"none{BAD}"],
    ["topology", "diff", "zones.conf", "twice.conf"], ["topology", "show", "zones.conf", f"--name={BAD}"],
    ["topology", "features", "zones.conf", "--cluster=nodes.json"],
    ["topology", "features", "zones.conf", "--cluster=nodes.json", "--scontrol"],
    ["links", "show", "--link-scores=scores.json", "--topology=zones.conf"],
    ["links", "show", f"--link-scores={BAD}"],
    ["links", BAD], [BAD], ["doctor", f"--nodes={BAD}"], ["simulate", "-N2", f"--topology={BAD}"],
    ["sbatch", "--dl-dry-run", "-N2", f"job{BAD}.sh"], ["sbatch", "--dl-dry-run", "-N2", f"--wrap=echo {BAD}"],
    ["sbatch", "--dl-dry-run", f"--job-name={BAD}", "--wrap=true"], ["sbatch", f"--dl-zone={BAD}", "--wrap=true"],
    ["sbatch", "--dl-dry-run", "--dl-explain", "-N2", f"--comment={BAD}", "--wrap=true"],
    ["srun", "--dl-dry-run", f"--dl-{BAD}", "true"], ["srun", f"--dl-strategy={BAD}", "true"],
], ids=lambda words: " ".join(words).translate({ord(c): "?" for c in control_characters(BAD)}))
def test_no_escape_reaches_the_terminal(words: list[str]) -> None:
    proc = slurmdl(*words)
    assert proc.stdout + proc.stderr
    assert not control_characters(proc.stdout + proc.stderr)
    assert r"\x1b" in proc.stdout + proc.stderr


def test_zone_names_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "show", "zones.conf"]) == 0
    assert r"zoneA\x1bc\x9b1m\x7f\u202e  4 nodes" in capsys.readouterr().out


def test_dry_run_of_a_step_is_escaped(tmp_path: Path) -> None:
    """Node names come from Slurm's environment."""
    proc = slurmdl("srun", "--dl-dry-run", "--dl-explain", "true", BAD, SLURM_JOB_ID="1", SLURM_NTASKS="2",
                   SLURM_JOB_NODELIST=f"n1,n{BAD}", SLURM_TASKS_PER_NODE="1(x2)", SLURM_CONF=f"{tmp_path}/none")
    assert proc.stdout + proc.stderr
    assert not control_characters(proc.stdout + proc.stderr)


def test_doctor_findings_are_escaped() -> None:
    Path("config/slurmdl").mkdir(parents=True)
    Path("config/slurmdl/slurmdl.yaml").write_text(json.dumps({f"plan{BAD}": 1}))
    proc = slurmdl("doctor", PATH="/nowhere")
    assert r"unknown key plan\x1b[31m" in proc.stdout
    assert not control_characters(proc.stdout + proc.stderr)


@pytest.mark.parametrize(("name", "text"), [
    ("zones.yaml", json.dumps([{"topology": "t", "cluster_default": True, "tree": {"switches": [
        {"switch": "a\nslurmdl: all is well", "nodes": "n[1-2]"}]}}])),
    ("zones.json", json.dumps({"name": "t", "kind": "tree", "zones": ["a\nb"], "parent": [-1], "level": [0],
                               "uplink_bandwidth": [None], "nodes": ["n1"], "leaf": [0]})),
])
def test_name_with_line_break_raises_input_error(name: str, text: str) -> None:
    Path(name).write_text(text)
    with pytest.raises(InputError, match="line break"):
        load.load_topology(name)


def test_unescaped_prints_are_listed() -> None:
    """All other output goes through `print_escaped`, `warn` or JSON in ASCII."""
    calls = set()
    for path in PACKAGE.rglob("*.py"):
        name = str(path.relative_to(PACKAGE))
        if name.startswith(("bench/", "train/", "cluster/pyslurm_worker")):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
                argument = ast.unparse(node.args[0])
                if not argument.startswith("json.dumps("):
                    calls.add((name, argument))
    assert calls == RAW
