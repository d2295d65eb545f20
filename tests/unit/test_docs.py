"""The tables of the documentation say what the code does, and its links lead somewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from slurmdl import config
from slurmdl.cli.links.counters import state_dir
from slurmdl.cli.links.ingest import DEFAULT_DATABASE
from slurmdl.cli.main import COMMANDS, main
from slurmdl.dl_options import OPTIONS
from slurmdl.errors import EXIT_STATUS_MEANINGS
from slurmdl.links.score_sources import user_probe_file
from slurmdl.train.strategy_config import ENV_PREFIX, StrategyConfig

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
REFERENCE = (ROOT / "docs/reference.md").read_text()
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("spank/*.md")]
#: what is built, run or installed; tests have variables of their own
CODE = ("slurmdl/**/*.py", "benchmarks/**/*.py", "slurmdl/**/*.sh", "spank/*.[ch]", "spank/core/*", "tools/*",
        "packaging/*",
        "packaging/systemd/*", "etc/*.lua", "Makefile", ".ci/run")


def code() -> Iterator[str]:
    for pattern in CODE:
        found = [path.read_text() for path in ROOT.glob(pattern) if path.is_file()]
        assert found, pattern
        yield from found


def variables(text: str) -> set[str]:
    """Names of slurmdl's variables; the guards of C's headers are none, nor is what only begins a name."""
    return {name for name in re.findall(r"\bSLURMDL_[A-Z_]*[A-Z]\b", text)
            if not name.endswith("_H") and name != "SLURMDL_OPT"}


def test_every_option_is_in_the_table():
    for option in OPTIONS:
        values = option.values.replace("|", ", ")
        row = f"| `--dl-{option.name}{'=' + values if values else ''}` | {option.help} |"
        assert row in README, row
    assert set(re.findall(r"--dl-[a-z0-9-]+", README)) <= {f"--dl-{option.name}" for option in OPTIONS}


def test_every_exit_status_is_in_the_table():
    table = REFERENCE.partition("| exit status | meaning |\n")[2].partition("\n\n")[0]
    assert table.splitlines()[1:] == [f"| {status} | {meaning} |" for status, meaning in EXIT_STATUS_MEANINGS.items()]


def test_every_command_is_in_the_table():
    for command in COMMANDS:
        assert f"| `slurmdl {command}" in README


def test_every_variable_is_in_the_tables():
    families = {option.env_variable for option in OPTIONS} | {
        f"{ENV_PREFIX}{'ASYNC' if knob.name == 'asynchronous' else knob.name.upper()}" for knob in fields(StrategyConfig)}
    assert set().union(*map(variables, code())) - families == variables(REFERENCE) - families


def test_every_file_is_in_the_table(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    home = {"HOME": "~"}
    monkeypatch.setenv("HOME", "/home/user")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    state = state_dir().replace("/home/user", "~")
    for path in (*config.config_paths(home), user_probe_file(home),
                 config.DEFAULT_SCORES_FILE, DEFAULT_DATABASE, state):
        assert f"`{path}`" in REFERENCE, path
    named = re.findall(r"/(?:etc|var/lib|usr/share)/slurmdl[\w./-]*\w", "\n".join(code()))
    assert named and {path for path in named if path not in REFERENCE} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for text, target in re.findall(r"\[([^\]]+)\]\(([^)\s]+)\)", page.read_text()):
        path, _, heading = target.partition("#")
        if path.startswith(("http:", "https:")):
            continue
        there = page.parent / path if path else page
        assert there.exists(), f"[{text}]({target})"
        if heading:
            heads = re.findall(r"^#+ (.+)$", there.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
            assert heading in anchors, f"[{text}]({target})"


def test_every_page_is_in_the_index():
    for page in (ROOT / "docs").glob("*.md"):
        assert f"](docs/{page.name})" in README, page.name


def test_contributing_names_every_room_and_no_other():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for above in (ROOT / "slurmdl", ROOT / "slurmdl/train"):
        table = text.partition(f"| room of `{above.relative_to(ROOT)}/` | holds |")[2].partition("\n\n")[0]
        rooms = {path.parent.name for path in above.glob("*/__init__.py")}
        firsts = re.findall(r"^\|([^|]*)\|", table, re.MULTILINE)
        named = {name for first in firsts for name in re.findall(r"`([^`]+)`", first)}
        assert {name for name in named if not name.endswith(".py")} == rooms
        assert all((above / name).exists() for name in named)
    paths = re.findall(r"`((?:slurmdl|benchmarks|docs|tests|tools)/[\w./-]*)`", text)
    assert paths and [path for path in paths if not (ROOT / path).exists()] == []


def test_the_picture_in_the_readme_is_what_place_draws(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = "place --topology topology/topology.conf --cluster examples/cluster.json"
    assert words in README
    assert main([*words.split(), "--dl-link-scores=off", f"--svg={tmp_path}/picture.svg", "examples/ps.sh"]) == 0
    assert (tmp_path / "picture.svg").read_text() == (ROOT / "docs/placement.svg").read_text()
