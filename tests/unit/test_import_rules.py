"""Import rules: allowed dependencies between subpackages, and modules that are imported only on demand."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm

PACKAGE = Path(__file__).parents[2] / "slurmdl"
#: subpackage -> subpackages that it may import in addition to itself, FOUNDATION and the shared modules
ALLOWED = {
    "cli": {"doctor", "launch", "placement", "topology", "cluster", "links", "train", "sandbox", "bench",
            "simulate", "health", "history"},
    "history": {"placement", "topology", "cluster", "links"},
    "doctor": {"launch", "placement", "topology", "cluster", "links"},
    "launch": {"placement", "topology", "cluster", "links", "health"},
    "health": {"placement", "topology", "cluster", "links"},
    "placement": {"topology", "cluster", "links"},
    "simulate": {"placement", "topology", "cluster", "links"},
    "topology": set(),
    "cluster": {"topology"},
    "links": {"topology"},
    "train": set(),
    "slurm": set(),
}
#: subpackages that every subpackage may import
FOUNDATION = {"slurm"}
#: shared modules that training may import
TRAIN_SHARED = {"plan", "options", "gossip_graphs", "comm_layout", "errors", "yaml_input", "files", "text", "units"}
HEAVY = ("torch", "mpi4py", "networkx", "matplotlib")


def imports(path: Path) -> set[str]:
    """Modules of slurmdl that a file imports, including TYPE_CHECKING blocks and imports in functions."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in modules if name.split(".")[0] == "slurmdl"}


def imported_packages(path: Path) -> set[str]:
    parts = {name.split(".")[1] for name in imports(path) if name.count(".")}
    return {part for part in parts if (PACKAGE / part).is_dir()}


@pytest.mark.parametrize("package", ALLOWED)
def test_subpackage_imports_only_allowed_subpackages(package):
    for path in (PACKAGE / package).rglob("*.py"):
        stray = imported_packages(path) - ALLOWED[package] - {package} - FOUNDATION
        assert not stray, f"{path.relative_to(PACKAGE)} imports {', '.join(sorted(stray))}"


def test_training_imports_few_shared_modules():
    for path in (PACKAGE / "train").rglob("*.py"):
        shared = {name.split(".")[1] for name in imports(path) if name.count(".")} - {"train"}
        shared = {name for name in shared if (PACKAGE / f"{name}.py").exists()}
        assert shared <= TRAIN_SHARED, path


def test_shared_modules_import_no_subpackage_but_the_foundation():
    for path in PACKAGE.glob("*.py"):
        allowed = {"cli"} if path.name == "__main__.py" else FOUNDATION
        assert imported_packages(path) <= allowed, path


def test_slurm_imports_only_errors_text_and_units():
    for path in (PACKAGE / "slurm").glob("*.py"):
        modules = {name.split(".")[1] for name in imports(path) if name.count(".")}
        assert modules <= {"errors", "text", "units", "slurm"}, path


def test_placement_and_decisions_of_launch_are_pure():
    """No process, file, clock, or unseeded random number."""
    launch = [PACKAGE / "launch" / f"{name}.py" for name in ("binding", "zone_options", "step_command", "step_plan")]
    for path in [*(PACKAGE / "placement").rglob("*.py"), *launch]:
        tree = ast.parse(path.read_text())
        names = {alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import)
                 for alias in node.names} | {(node.module or "").split(".")[0] for node in ast.walk(tree)
                                             if isinstance(node, ast.ImportFrom)}
        assert not names & {"os", "sys", "io", "subprocess", "socket", "time", "datetime", "random", "pathlib"}, path
        assert "slurmdl.slurm.process" not in imports(path), path
        calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert not calls & {"open", "print", "input"}, path
        assert "traffic_file.load_traffic" not in calls, path
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


def test_only_slurm_process_imports_subprocess():
    for package in ("cli", "doctor", "launch", "health", "simulate", "placement", "topology", "cluster", "links",
                    "slurm"):
        for path in (PACKAGE / package).rglob("*.py"):
            assert path == PACKAGE / "slurm/process.py" or "subprocess" not in path.read_text(), path


def loaded_modules(code: str, directory: Path, **environ: str) -> set[str]:
    """Names in sys.modules after `code` ran in a new interpreter."""
    script = f"import sys\nsys.argv = ['slurmdl']\n{code}\nprint('modules', *sys.modules)"
    proc = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60,
                          cwd=directory, env={**os.environ, **environ})
    line = next(line for line in proc.stdout.splitlines() if line.startswith("modules "))
    return set(line.split())


def dry_run(*words: str) -> str:
    """Code of a dry run that decides in its own process."""
    return ("from slurmdl.slurm import process\nsent = []\n"
            "process.run_in_child = lambda function: process.ChildResult(function(sent.append) or sent[-1])\n"
            f"from slurmdl.cli.main import main\nassert main(['sbatch', '--dl-dry-run', *{words!r}]) == 0")


@pytest.fixture
def slurm(tmp_path) -> dict[str, str]:
    """Environment with an sbatch on PATH that reaches no cluster."""
    FakeSlurm(tmp_path).command("sbatch", "exit 1")
    return FakeSlurm(tmp_path).environ | {"PATH": str(tmp_path)}


#: entry points of commands, and the members of a framework adapter
REPEATED_NAMES = {"main", "run", "build_parser", "unavailable_reason", "setup"}


def test_public_function_names_are_unique():
    """Unique names keep imported functions unambiguous without their module names."""
    modules: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                modules.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert {name: paths for name, paths in modules.items() if len(paths) > 1 and name not in REPEATED_NAMES} == {}


@pytest.mark.parametrize("code", [
    "import slurmdl", "from slurmdl.cli.main import main\nmain(['--help'])",
    "from slurmdl.launch import srun",  # the process that starts a step, which another one maps
    dry_run("--dl-node-binding=off", "--wrap=true"),
    dry_run("--array=1-2", "-N2", "--wrap=true"),
])
def test_what_places_nothing_imports_nothing_heavy(code, slurm, tmp_path):
    assert not loaded_modules(code, tmp_path, **slurm) & {*HEAVY, "numpy", "yaml", "argparse", "subprocess",
                                                               "logging"}


def test_submission_with_placement_imports_no_training_package(slurm, tmp_path):
    topology = (PACKAGE.parent / "topology" / "topology.conf").read_text()
    (tmp_path / "topology.conf").write_text(topology)
    modules = loaded_modules(dry_run("-N2", "--wrap=true"), tmp_path, **slurm)
    assert "numpy" in modules  # the topology was read
    assert not modules & {*HEAVY}


def test_configuration_file_is_read_with_yaml(slurm, tmp_path):
    (tmp_path / "config" / "slurmdl").mkdir(parents=True)
    (tmp_path / "config" / "slurmdl" / "slurmdl.yaml").write_text("options: {node-binding: off}\n")
    assert "yaml" in loaded_modules(dry_run("-N2", "--wrap=true"), tmp_path, **slurm)


def test_no_modules_import_each_other_in_a_circle():
    """Imports inside functions and for annotations count, too: a reader follows them."""
    modules = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
               for path in PACKAGE.rglob("*.py")}
    imports: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                imports[name] |= {f"{node.module}.{alias.name}" if f"{node.module}.{alias.name}" in modules
                                  else node.module for alias in node.names}
    # what no circle leads to or from is removed until nothing changes
    left = set(modules)
    while gone := {name for name in left if not imports[name] & left
                   or not any(name in imports[other] for other in left)}:
        left -= gone
    assert not left
