"""Programs that slurmdl starts for itself import nothing from the current directory, where others may write."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from slurmdl.bench import submit
from slurmdl.bench.spec import Cell, Spec
from slurmdl.cluster import load
from slurmdl.errors import SlurmdlError
from slurmdl.health import preflight
from slurmdl.links.probe.probe_step import ProbeStep, run_probe_step
from slurmdl.slurm.process import module_argv
from slurmdl.topology.topology import Topology
from slurmdl.train import slow_ranks

PACKAGE = Path(__file__).parents[2] / "slurmdl"
#: what a helper of slurmdl imports, among it the first import of `python -m`
IMPORTED = ("slurmdl", "runpy", "json", "numpy", "yaml", "socket", "tempfile", "subprocess", "selectors", "mpi4py",
            "pyslurm", "torch")


@pytest.fixture(params=["", ":", "/nonexistent:", "."], ids=["unset", "empty", "ends empty", "relative"])
def hostile_directory(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with modules of another user, and commands of Slurm that run their program here."""
    directory, commands = tmp_path / "theirs", tmp_path / "bin"
    directory.mkdir()
    commands.mkdir()
    for name in IMPORTED:
        (directory / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write({name + ' '!r})\n")
    for name in ("srun", "sbatch"):
        command = commands / name
        command.write_text('#!/bin/sh\nwhile :; do case $1 in -*) shift ;; *) break ;; esac; done\nexec "$@"\n')
        command.chmod(0o755)
    monkeypatch.chdir(directory)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setenv("PYTHONPATH", request.param)
    return tmp_path


def run_checks() -> str:
    return str(preflight.run_node_checks(["n1"], ["clock"], os.environ, 60.0)["n1"].values["clock"])


def run_probe() -> str:
    notes: list[str] = []
    try:
        run_probe_step(ProbeStep(("n1", "n2"), Topology.flat(("n1", "n2")), budget_s=1.0), os.environ, notes.append)
    except SlurmdlError as error:
        notes.append(str(error))
    return " ".join(notes)


def run_requeue() -> str:
    with pytest.raises(SlurmdlError) as error:
        slow_ranks.requeue_without_nodes({"n1": "slow"})
    return str(error.value)


def run_pyslurm() -> str:
    with pytest.raises(SlurmdlError) as error:
        load._fetch_with_pyslurm()
    return str(error.value)


def run_bench_job() -> str:
    text = "".join(submit.script(Spec(), Cell("ddp", "ddp", "cnn", 2, placement), "/nonexistent").replace("exec ", "")
                   for placement in ("slurm", "slurmdl"))
    return subprocess.run(["sh", "-c", text], capture_output=True, text=True, check=False, timeout=60).stderr


def run_bench_submission() -> str:
    argv = [*submit.submit_command(Cell("ddp", "ddp", "cnn", 2, "slurmdl")), "--no-such-option"]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60).stderr


@pytest.mark.parametrize("run, words", [
    (run_checks, "time"),
    (run_probe, "probe: no pair of nodes was measured"),
    (run_requeue, "requeue"),
    (run_pyslurm, "PySlurm: No module named 'pyslurm'"),
    (run_bench_job, "/nonexistent.work"),
    (run_bench_submission, "slurmdl: ")])
def test_no_module_of_the_current_directory_runs(hostile_directory: Path, run: Callable[[], str], words: str) -> None:
    assert words in run()
    assert not (hostile_directory / "imported").exists(), (hostile_directory / "imported").read_text()


@pytest.mark.parametrize(("pythonpath", "argv", "expected"), [
    ("", module_argv("slurmdl.topology.topology"), False),
    ("{0}", module_argv("slurmdl.topology.topology"), True),  # `export PYTHONPATH=$PWD` is the user's own choice
    ("", [sys.executable, "-m", "slurmdl.topology.topology"], True)])  # otherwise the test above could not fail
def test_modules_of_the_current_directory(tmp_path: Path, pythonpath: str, argv: list[str], expected: bool) -> None:
    (tmp_path / "numpy.py").write_text("open('imported', 'w')\n")
    env = {**os.environ, "PYTHONPATH": pythonpath.format(tmp_path)}
    subprocess.run(argv, cwd=tmp_path, env=env, check=False, capture_output=True, timeout=60)
    assert (tmp_path / "imported").exists() == expected


def test_every_start_of_python_is_safe() -> None:
    """In lists: Python with -I, or a module by module_argv; in shell texts: no `python -m`."""
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, (ast.List, ast.Tuple)):
                words = [ast.unparse(item) for item in node.elts]
                for word, following in pairwise([*words, ""]):
                    if word == "sys.executable" and path.name != "process.py":
                        assert following.startswith("'-I"), f"{path}:{node.lineno}: {word}, {following}"
            elif isinstance(node, ast.JoinedStr):
                text = ast.unparse(node)
                assert " -m slurmdl" not in text, f"{path}:{node.lineno}: {text}"
    for script in (*PACKAGE.rglob("*.sh"), *(PACKAGE.parent / "etc").rglob("*")):
        assert not script.is_file() or "python -m" not in script.read_text(), script
