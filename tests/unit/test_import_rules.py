"""Who may import whom, and what is imported only when it is needed."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "slurmdl"
#: room -> the rooms that it may import beside itself and the shared modules
ROOMS = {
    "cli": {"doctor", "launch", "placement", "topology", "cluster", "network", "train", "sandbox", "bench",
            "simulate"},
    "doctor": {"launch", "placement", "topology", "cluster", "network"},
    "launch": {"placement", "topology", "cluster", "network"},
    "placement": {"topology", "cluster", "network"},
    "simulate": {"placement", "topology", "cluster", "network"},
    "topology": set(),
    "cluster": {"topology"},
    "network": {"topology"},
    "train": set(),
    "slurm": set(),
}
#: packages that every other one may import
FOUNDATION = {"slurm"}
HEAVY = ("torch", "mpi4py", "networkx", "matplotlib")


def imports(path: Path) -> set[str]:
    """Modules of slurmdl that a file imports, anywhere in it; TYPE_CHECKING blocks count, too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] == "slurmdl"}


def rooms(path: Path) -> set[str]:
    parts = {name.split(".")[1] for name in imports(path) if name.count(".")}
    return {part for part in parts if (PACKAGE / part).is_dir()}


@pytest.mark.parametrize("room", ROOMS)
def test_arrows_point_one_way(room):
    for path in (PACKAGE / room).rglob("*.py"):
        stray = rooms(path) - ROOMS[room] - {room} - FOUNDATION
        assert not stray, f"{path.relative_to(PACKAGE)} imports {', '.join(sorted(stray))}"


def test_training_knows_only_a_few_shared_modules():
    """The graphs of gossip are shared with placement, which models what training sends; a job requeues itself."""
    for path in (PACKAGE / "train").rglob("*.py"):
        shared = {name.split(".")[1] for name in imports(path) if name.count(".")} - {"train"}
        shared = {name for name in shared if (PACKAGE / f"{name}.py").exists()}
        assert shared <= {"plan", "graphs", "errors", "yamlfile", "process", "wholefile", "mpi", "buckets", "output",
                          "units"}, path


def test_shared_modules_stand_on_the_ground():
    """Modules that every room may use import no room, but for the reader of hostlists."""
    for path in PACKAGE.glob("*.py"):
        allowed = {"topology"} if path.name == "request.py" else {"cli"} if path.name == "__main__.py" else set()
        assert rooms(path) <= allowed, path


def test_placement_is_pure():
    """It starts no process, opens no file, has no clock and no random number without a seed."""
    for path in (PACKAGE / "placement").rglob("*.py"):
        tree = ast.parse(path.read_text())
        names = {alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import)
                 for alias in node.names} | {(node.module or "").split(".")[0] for node in ast.walk(tree)
                                             if isinstance(node, ast.ImportFrom)}
        assert not names & {"os", "sys", "io", "subprocess", "socket", "time", "datetime", "random", "pathlib"}, path
        assert "slurmdl.slurm.process" not in imports(path), path
        calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert not calls & {"open", "print", "input"}, path
        assert not {call for call in calls if "random" in call and not call.endswith("default_rng")}, path
        unseeded = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and not node.args + node.keywords
                    and ast.unparse(node.func).endswith("default_rng")]
        assert not unseeded, path


def test_the_package_does_not_import_its_benchmarks():
    for path in PACKAGE.rglob("*.py"):
        modules = {name.split(".")[0] for node in ast.walk(ast.parse(path.read_text()))
                   for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else
                                [node.module or ""] if isinstance(node, ast.ImportFrom) else [])}
        assert "benchmarks" not in modules, path


def test_one_module_starts_query_programs():
    """Launch and its readers reach Slurm through slurmdl.slurm.process alone."""
    for room in ("cli", "doctor", "launch", "simulate", "placement", "topology", "cluster", "network", "slurm"):
        for path in (PACKAGE / room).rglob("*.py"):
            assert "subprocess" not in path.read_text(), path


def loaded(code: str, directory: Path, **environ: str) -> set[str]:
    """Names in sys.modules at the end of a piece of code that runs in a Python of its own."""
    script = f"import sys\nsys.argv = ['slurmdl']\n{code}\nprint('modules', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60,
                          cwd=directory, env={**os.environ, **environ})
    line = next(line for line in done.stdout.splitlines() if line.startswith("modules "))
    return set(line.split())


def submits(*words: str) -> str:
    return f"from slurmdl.cli.main import main\nassert main(['sbatch', '--dl-dry-run', *{words!r}]) == 0"


@pytest.fixture
def slurm(tmp_path) -> dict[str, str]:
    """An environment with an sbatch on PATH and no cluster behind it."""
    (tmp_path / "sbatch").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    return {"PATH": str(tmp_path), "SLURM_CONF": str(tmp_path / "slurm.conf"),
            "XDG_CONFIG_HOME": str(tmp_path / "xdg")}


@pytest.mark.parametrize("code", [
    "import slurmdl", "from slurmdl.cli.main import main\nmain(['--help'])", submits("--dl-node-binding=off", "--wrap=true"),
    submits("--array=1-2", "-N2", "--wrap=true"),
])
def test_where_nothing_is_placed_nothing_heavy_is_imported(code, slurm, tmp_path):
    assert not loaded(code, tmp_path, **slurm) & {*HEAVY, "numpy", "yaml", "argparse", "subprocess"}


def test_a_placed_submission_imports_no_training(slurm, tmp_path):
    topology = (PACKAGE.parent / "topology" / "topology.conf").read_text()
    (tmp_path / "topology.conf").write_text(topology)
    modules = loaded(submits("-N2", "--wrap=true"), tmp_path, **slurm)
    assert "numpy" in modules  # the topology was read
    assert not modules & {*HEAVY, "slurmdl.cluster.pyslurm_backend"}


def test_configuration_reads_yaml_only_where_there_is_a_file(slurm, tmp_path):
    (tmp_path / "xdg" / "slurmdl").mkdir(parents=True)
    (tmp_path / "xdg" / "slurmdl" / "slurmdl.yaml").write_text("options: {bind: off}\n")
    assert "yaml" in loaded(submits("-N2", "--wrap=true"), tmp_path, **slurm)
