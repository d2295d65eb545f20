"""The sdist and the wheel: built, installed by pip into a new environment, and used without the source tree."""

from __future__ import annotations

import email
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from slurmdl import __version__
from slurmdl.commit import COMMIT_FILE, find_commit

ROOT = Path(__file__).parents[2]
BACKEND = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
COMMIT = "0123456789"


def run(*argv: object, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, argv)), capture_output=True, text=True, check=False, timeout=120, cwd=cwd,
                          env={**os.environ, **environ})


def checked(*argv: object, cwd: Path | None = None, **environ: str) -> str:
    done = run(*argv, cwd=cwd, **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind: str, tree: Path, into: Path) -> None:
    """Build an sdist, a wheel or an editable wheel, without an isolated environment."""
    into.mkdir(exist_ok=True)
    checked(sys.executable, "-c", BACKEND, kind, into, cwd=tree)


def source_files() -> set[str]:
    """The files that a package must have: those that git tracks; elsewhere those of an unpacked sdist."""
    names = checked(ROOT / "tools/build-packages", "files").split("\0")
    return {name for name in names if name and (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unpacked sdist, built from a copy of the source files with a known commit."""
    copy, into = (tmp_path_factory.mktemp(name) for name in ("copy", "sdist"))
    for name in source_files():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    (copy / "slurmdl" / COMMIT_FILE).write_text(f"{COMMIT}\n")
    build("build_sdist", copy, into)
    checked("tar", "-x", "-f", into / f"slurmdl-{__version__}.tar.gz", "-C", into)
    return into / f"slurmdl-{__version__}"


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the sdist."""
    into = tmp_path_factory.mktemp("wheel")
    build("build_wheel", tree, into)
    return into / f"slurmdl-{__version__}-py3-none-any.whl"


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bin` of an environment with the wheel and, by their path, with NumPy and PyYAML of this environment."""
    directory = tmp_path_factory.mktemp("environment")
    checked(sys.executable, "-m", "venv", "--without-pip", directory)
    checked(sys.executable, "-m", "pip", f"--python={directory}/bin/python", "install", "--quiet", "--no-index",
            "--no-deps", "--disable-pip-version-check", "--no-compile", wheel)
    packages, = directory.glob("lib/python*/site-packages")
    # a path in a .pth file: .pth files there, such as that of an editable slurmdl, are not read
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return directory / "bin"


def test_sdist_has_all_source_files(tree):
    files = {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()}
    assert source_files() - files == set()
    assert [name for name in files if name.endswith(".pyc")] == []


def test_wheel_has_all_files_of_the_package_and_no_others(tree, wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {str(path.relative_to(tree)) for path in (tree / "slurmdl").rglob("*")
               if path.is_file() and path.suffix != ".pyc"}
    assert {name for name in names if not name.startswith(f"slurmdl-{__version__}.dist-info/")} == package
    assert {"slurmdl/py.typed", "slurmdl/launch/task.sh"} <= package


def test_metadata_is_complete(wheel):
    text = zipfile.ZipFile(wheel).read(f"slurmdl-{__version__}.dist-info/METADATA").decode()
    metadata = email.message_from_string(text)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Author"] == "The slurmdl developers"
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    urls = dict(line.split(", ", 1) for line in metadata.get_all("Project-URL"))
    assert urls.keys() == {"Homepage", "Documentation", "Repository", "Issues", "Changelog"}
    readme = metadata.get_payload()
    assert f"![zones, nodes, roles and ranks]({urls['Repository']}/raw/main/docs/" in readme
    assert f"]({urls['Repository']}/blob/main/CHANGELOG.md)" in readme and "](docs/" not in readme


def test_installed_wheel_runs_without_the_source_tree(installed, tmp_path):
    for name in ("topology/topology.conf", "examples/cluster.json", "examples/ps.sh"):
        shutil.copy(ROOT / name, tmp_path)
    site = {"HOME": str(tmp_path), "PYTHONPATH": "", "PYTHONSAFEPATH": ""}
    slurmdl = installed / "slurmdl"
    where = checked(installed / "python", "-c", "import slurmdl; print(slurmdl.__file__)", cwd=tmp_path, **site)
    assert Path(where).is_relative_to(installed.parent)
    assert checked(slurmdl, "--version", cwd=tmp_path, **site) == f"slurmdl {__version__} (commit {COMMIT})\n"
    assert "zoneB" in checked(slurmdl, "topology", "show", "topology.conf", cwd=tmp_path, **site)
    placed = checked(slurmdl, "place", "--topology", "topology.conf", "--cluster", "cluster.json", "--json", "ps.sh",
                     cwd=tmp_path, **site)
    assert json.loads(placed)
    assert "--strategy" in checked(installed / "python", "-m", "slurmdl.train", "--help", cwd=tmp_path, **site)
    assert "--nodes" in checked(slurmdl, "doctor", "--help", cwd=tmp_path, **site)
    assert {path.name for path in installed.iterdir()} >= {"slurmdl", "dlsbatch", "dlsrun"}


def git(directory: Path, *argv: str) -> str:
    return checked("git", "-c", "user.name=x", "-c", "user.email=x@x", *argv, cwd=directory).strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    package = tmp_path / "checkout/slurmdl"
    package.mkdir(parents=True)
    (package / "a.py").write_text("")
    git(package.parent, "init", "-q")
    git(package.parent, "add", ".")
    git(package.parent, "commit", "-q", "-m", "x")
    git(package.parent, "tag", "v1")
    return package


def test_wheel_and_editable_installation_of_a_checkout(tmp_path):
    copy = tmp_path / "copy"
    for name in source_files():
        if name.startswith("slurmdl/") or name in ("setup.py", "pyproject.toml", "README.md"):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    git(copy, "init", "-q")
    git(copy, "add", ".")
    git(copy, "commit", "-q", "-m", "x")
    stale = copy / "build/lib/slurmdl/stale.py"
    stale.parent.mkdir(parents=True)
    stale.write_text("")
    for kind in ("build_wheel", "build_editable"):
        build(kind, copy, tmp_path / kind)
    wheel, = (tmp_path / "build_wheel").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(f"slurmdl/{COMMIT_FILE}").decode().strip() == git(copy, "rev-parse", "--short=10", "HEAD")
        assert "slurmdl/stale.py" not in archive.namelist()
    assert not (copy / "slurmdl" / COMMIT_FILE).exists()
    # a path, not a finder: next to a checkout, its folder `topology` would become slurmdl.topology
    editable, = (tmp_path / "build_editable").iterdir()
    with zipfile.ZipFile(editable) as archive:
        path, = (archive.read(name).decode().strip() for name in archive.namelist() if name.endswith(".pth"))
    assert Path(path) == copy


def test_commit_of_a_checkout(checkout, tmp_path, monkeypatch):
    commit = git(checkout, "rev-parse", "--short=10", "HEAD")
    (checkout / COMMIT_FILE).write_text("of an earlier build\n")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "another"))  # as in a hook of another repository
    assert find_commit(checkout) == commit
    monkeypatch.delenv("GIT_DIR")
    git(checkout, "worktree", "add", "-q", str(tmp_path / "tree"))
    assert find_commit(tmp_path / "tree/slurmdl") == commit
    (checkout / "a.py").write_text("pass\n")
    assert find_commit(checkout) == f"{commit}, modified"


def test_commit_of_a_package(checkout, tmp_path):
    """Of its file, not of the repository in which the environment lies; "" without the file."""
    package = checkout.parent / "venv/slurmdl"
    package.mkdir(parents=True)
    assert find_commit(package) == ""
    (package / COMMIT_FILE).write_text("abc\n")
    assert find_commit(package) == "abc"


def test_commit_without_git_or_commits(checkout, tmp_path, monkeypatch):
    empty = tmp_path / "empty/slurmdl"
    empty.mkdir(parents=True)
    git(empty.parent, "init", "-q")
    assert find_commit(empty) == ""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_commit(checkout) == ""


def test_version_without_a_commit(checkout, monkeypatch, capsys):
    from slurmdl import commit
    from slurmdl.cli.main import main
    monkeypatch.setattr(commit, "find_commit", lambda: "")
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"slurmdl {__version__}\n"
