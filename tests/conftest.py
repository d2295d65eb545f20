"""Shared by all tests: command-line options, order of test files, and golden files."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from fake_slurm import FakeSlurm

from slurmdl.slurm import process

# no deadline: the run time of an example depends on the load of the machine
hypothesis.settings.register_profile("slurmdl", hypothesis.settings(), deadline=None)
hypothesis.settings.load_profile("slurmdl")

# a shell without job control starts background commands with SIGINT ignored; programs under test would inherit that
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true",
                     help="rewrite the golden files with the current output; review the diff before committing it")
    parser.addoption("--cluster", choices=["sandbox", "compose"], default="sandbox",
                     help="cluster of the cluster tests: namespaces of this machine, or the containers of "
                          "docker-compose.yml")


def pytest_configure(config: pytest.Config) -> None:
    """Set the environment of the programs that tests start, also in jobs of a sandbox.

    They start in half of the time (benchmarks/fast_start), and buffer their output as those of users do.
    """
    for name in ("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"):
        os.environ.pop(name, None)
    starts_workers = bool(getattr(config.option, "numprocesses", None)) and not hasattr(config, "workerinput")
    if os.environ.get("SLURMDL_NIGHTLY") != "1" and not starts_workers:
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [str(Path(__file__).parents[1] / "benchmarks/fast_start"), *filter(None, [os.environ.get("PYTHONPATH")])])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    position = _file_order(items)
    items.sort(key=lambda item: position[item.path])
    if os.environ.get("SLURMDL_NIGHTLY") != "1":
        for item in items:
            if item.get_closest_marker("nightly"):
                item.add_marker(pytest.mark.skip(reason="too slow for CI; SLURMDL_NIGHTLY=1 enables it"))


def _file_order(items: list[pytest.Item]) -> dict[Path, int]:
    """Position of each test file for parallel workers: slow files first.

    Files with clusters, which mostly wait, alternate with files that start MPI ranks, which spin while they wait.
    """
    kinds: dict[str, dict[Path, None]] = {"cluster": {}, "mpi": {}, "unit": {}}
    for item in items:
        names = vars(item.module)  # type: ignore[attr-defined]
        kind = "cluster" if "cluster" in item.path.parts else "mpi" if "mpi" in names or "mpirun" in names else "unit"
        kinds[kind][item.path] = None
    slow = (path for pair in itertools.zip_longest(kinds["cluster"], kinds["mpi"]) for path in pair if path)
    return {path: position for position, path in enumerate([*slow, *kinds["unit"]])}


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with tests/golden/NAME; with --update-golden write it there instead."""
    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        assert path.exists(), f"{path} is missing; pytest --update-golden writes it"
        assert text == path.read_text(encoding="utf-8"), f"{path} differs; pytest --update-golden rewrites it"

    return compare


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """`slurmdl sbatch` and `slurmdl srun` decide in the process of the test, which sees their calls and messages."""
    def run_in_child(function: Callable[[Callable[[Any], None]], None]) -> process.ChildResult:
        sent: list[str] = ["null"]
        try:
            function(lambda value: sent.append(json.dumps(value)))
        except Exception:
            return process.ChildResult(json.loads(sent[-1]), "ended with status 70")
        return process.ChildResult(json.loads(sent[-1]))

    monkeypatch.setattr(process, "run_in_child", run_in_child)


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Scripted commands of Slurm in the working directory; this process has their environment."""
    for name in list(os.environ):
        if name.startswith(("SLURM", "SBATCH")):
            monkeypatch.delenv(name)
    slurm = FakeSlurm(tmp_path)
    for name, value in slurm.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return slurm
