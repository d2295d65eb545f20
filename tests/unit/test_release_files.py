"""Files around a release: one version in all of them, and the same checks on GitHub and before a commit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from slurmdl import __version__

ROOT = Path(__file__).parents[2]
#: file -> where it states the version
VERSIONS = {
    "CITATION.cff": r"^version: (.*)", "packaging/deb/changelog": r"\Aslurmdl \((.*)\)",
    "packaging/rpm/slurmdl.spec": r"(?s)^Version: +(\S+)$.*^%changelog\n\*[^\n]* - \1-1\n",
    "CHANGELOG.md": r"^## \[(\d.*)\] - \d{4}-\d\d-\d\d$",
}
LINT = re.search(r"^lint:.*\n((?:\t.*\n)*)", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", VERSIONS)
def test_versions_agree(name):
    found = re.search(VERSIONS[name], (ROOT / name).read_text(), re.MULTILINE)
    assert found and found[1] == __version__


def test_github_runs_the_checks_of_ci():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    job, = workflow["jobs"].values()
    assert job["container"]["image"] == "debian:12" and "--privileged" in job["container"]["options"]
    assert [step for step in job["steps"] if step.get("run") == ".ci/run"]


def test_pre_commit_runs_the_programs_of_lint():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    entries = [hook["entry"] for repo in config["repos"] for hook in repo["hooks"]]
    programs = {entry.split()[0].removeprefix(".venv/bin/") for entry in entries}
    assert LINT and programs == set(re.findall(r"\$\(BIN\)/([\w-]+)", LINT[1]))


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_issue_forms(name):
    """The keys that GitHub requires; a form without them is not offered."""
    loaded = yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{name}.yml").read_text())
    assert loaded["name"] and loaded["description"]
    fields = [each for each in loaded["body"] if each["type"] != "markdown"]
    assert all(each["attributes"]["label"] for each in fields)
    ids = [each["id"] for each in fields]
    assert len(ids) == len(set(ids))
    assert name != "bug" or "doctor" in ids
