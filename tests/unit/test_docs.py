"""Documentation against code: tables are complete and correct, links resolve."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmdl import config
from slurmdl.cli.links import DEFAULT_DATABASE, state_dir
from slurmdl.cli.main import COMMANDS, main
from slurmdl.dl_options import OPTIONS, env_variable
from slurmdl.errors import EXIT_STATUS_MEANINGS
from slurmdl.links.score_sources import user_probe_file
from slurmdl.options import options_of
from slurmdl.train.strategy_config import ENV_PREFIX, RunOptions, StrategyConfig
from slurmdl.train.trainer.options import OPTIONS as TRAIN_OPTIONS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
REFERENCE = (ROOT / "docs/reference.md").read_text()
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("spank/*.md")]
#: built, run or installed files; the tests use further variables
CODE = ("slurmdl/**/*.py", "benchmarks/**/*.py", "slurmdl/**/*.sh", "spank/*.[ch]", "spank/core/*", "tools/*",
        "packaging/*", "packaging/systemd/*", "etc/*.lua", "Makefile", ".ci/run")


def code() -> Iterator[str]:
    for pattern in CODE:
        texts = [path.read_text() for path in ROOT.glob(pattern) if path.is_file()]
        assert texts, pattern
        yield from texts


def variables(text: str) -> set[str]:
    """Return the names of slurmdl's environment variables, without C include guards and name prefixes."""
    return {name for name in re.findall(r"\bSLURMDL_[A-Z_]*[A-Z]\b", text)
            if not name.endswith("_H") and name != "SLURMDL_OPT"}


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_reference_has_every_placement_option_and_its_default():
    for option in OPTIONS:
        values = option.kind.values.replace("|", ", ")
        name = f"--dl-{option.name}{'=' + values if values else ''}"
        assert f"| `{name}` | {option.shown_default} | {option.help} |\n" in REFERENCE
        if option.default not in ("", (), False) or option.kind.name == "count":
            assert option.parse(re.split("[:;]", option.shown_default)[0], option.name) == option.default


def test_training_page_has_every_option_and_its_default():
    for option in TRAIN_OPTIONS:
        name = f"--{option.name} {option.kind.values.replace('|', ', ')}".rstrip()
        row = f"| `{name}` | {option.description} | {option.shown_default} |\n"
        assert row in (ROOT / "docs/train.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_placement_options_of_the_pages_exist(page):
    known = {f"--dl-{option.name}" for option in OPTIONS} | {"--dl-rank-map"}
    text = page.read_text().partition("### Not in this release")[0]
    assert set(re.findall(r"--dl-[a-z0-9-]*[a-z0-9]", text)) <= known


def test_reference_has_every_exit_status():
    table = REFERENCE.partition("| exit status | meaning |\n")[2].partition("\n\n")[0]
    assert table.splitlines()[1:] == [f"| {status} | {meaning} |" for status, meaning in EXIT_STATUS_MEANINGS.items()]


def test_readme_has_every_command():
    for command in COMMANDS:
        assert f"| `slurmdl {command}" in README


@pytest.mark.parametrize(("page", "command"), [
    ("train", "train"), ("simulate", "simulate"), ("replay", "replay"), ("admin", "doctor"), ("audit", "audit"),
    *(("links", f"links {command}") for command in ("probe", "counters", "ingest", "show")),
    *(("topology", f"topology {command}") for command in ("show", "check", "diff", "convert", "features", "example")),
])
def test_pages_have_every_option_of_the_command(page, command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help"}
    text = (ROOT / f"docs/{page}.md").read_text()
    assert {option for option in options if not re.search(rf"{option}(?![\w-])", text)} == set()


def test_reference_has_every_variable():
    families = {env_variable(option.field) for option in OPTIONS} | {
        f"{ENV_PREFIX}{option.name.replace('-', '_').upper()}"
        for option in (*options_of(StrategyConfig), *options_of(RunOptions))}
    assert set().union(*map(variables, code())) - families == variables(REFERENCE) - families


def test_reference_has_every_file(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    home = {"HOME": "~"}
    monkeypatch.setenv("HOME", "/home/user")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    state = state_dir().replace("/home/user", "~")
    for path in (*config.config_paths(home), user_probe_file(home, "CLUSTER"),
                 config.DEFAULT_SCORES_FILE, DEFAULT_DATABASE, state):
        assert f"`{path}`" in REFERENCE, path
    paths = re.findall(r"/(?:etc|var/lib|usr/share)/slurmdl[\w./-]*\w", "\n".join(code()))
    assert paths and {path for path in paths if path not in REFERENCE} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_resolve(page):
    for text, target in re.findall(r"\[([^\]]+)\]\(([^)\s]+)\)", page.read_text()):
        path, _, heading = target.partition("#")
        if path.startswith(("http:", "https:")):
            continue
        linked = page.parent / path if path else page
        assert linked.exists(), f"[{text}]({target})"
        if heading:
            assert heading in anchors(linked), f"[{text}]({target})"


def test_readme_has_every_page():
    for page in (ROOT / "docs").glob("*.md"):
        assert f"](docs/{page.name})" in README, page.name


def test_contributing_has_every_package_and_existing_paths():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for parent in (ROOT / "slurmdl", ROOT / "slurmdl/train"):
        table = text.partition(f"| package of `{parent.relative_to(ROOT)}/` | contents |")[2].partition("\n\n")[0]
        packages = {path.parent.name for path in parent.glob("*/__init__.py")}
        first_cells = re.findall(r"^\|([^|]*)\|", table, re.MULTILINE)
        names = {name for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)}
        assert {name for name in names if not name.endswith(".py")} == packages
        assert all((parent / name).exists() for name in names)
    modules = re.findall(r"`([\w./-]+\.py)`", text.partition("| shared module | contents |")[2].partition("\n\n")[0])
    assert modules and [name for name in modules if not (ROOT / "slurmdl" / name).exists()] == []
    paths = re.findall(r"`((?:slurmdl|benchmarks|docs|tests|tools)/[\w./-]*)`", text)
    assert paths and [path for path in paths if not (ROOT / path).exists()] == []


def test_modules_named_in_comments_and_docstrings_exist():
    """`health.verdicts` and `launch/sbatch.py`; a package is not checked if its name is also one of variables."""
    modules = {path.relative_to(ROOT / "slurmdl").with_suffix("").as_posix().removesuffix("/__init__")
               for path in ROOT.glob("slurmdl/**/*.py")}
    packages = {module.partition("/")[0] for module in modules if "/" in module} - {"links", "topology", "sandbox"}
    dotted = re.compile(rf"(?<![\w./])(?:slurmdl\.)?({'|'.join(sorted(packages))})\.([a-z0-9_]+)(?![\w(/])")
    missing = []
    for path in ROOT.glob("slurmdl/**/*.py"):
        source = path.read_text()
        comments = [token.string for token in tokenize.generate_tokens(io.StringIO(source).readline)
                    if token.type == tokenize.COMMENT]
        texts = [text for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Module | ast.ClassDef
                 | ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node))]
        text = "\n".join(comments + texts)
        named = {f"{package}/{name}" for package, name in dotted.findall(text)
                 if name not in ("conf", "yaml", "h", "json", "md", "py")}
        paths = re.findall(r"(?<![\w/.])[a-z_]+/[a-z_/]+\.py\b", text)
        named |= {name[:-3].removeprefix("slurmdl/") for name in paths
                  if name.partition("/")[0] in {*packages, "links", "topology", "sandbox", "slurmdl"}}
        missing += [f"{path.relative_to(ROOT)}: {name}" for name in named - modules]
    assert missing == []


def test_make_targets_of_the_pages_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        named = re.findall(r"(?<![\w-])make ([a-z][a-z-]*)(?=[\s`,)])", "\n".join(
            re.findall(r"`[^`\n]+`|^make .*$", page.read_text(), re.MULTILINE)))
        assert {name for name in named if name not in targets} == set(), page


def test_picture_of_a_mesh_is_drawn_by_place(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    command = "place --topology topology/topology.conf --cluster examples/cluster.json"
    assert command in (ROOT / "docs/mesh.md").read_text()
    options = ["--dl-link-scores=off", "-N6", "--ntasks-per-node=4", "--dl-mesh=dp=2,pp=3,tp=4", "--wrap=:"]
    assert main([*command.split(), *options, f"--svg={tmp_path}/mesh.svg"]) == 0
    assert (tmp_path / "mesh.svg").read_text() == (ROOT / "docs/mesh.svg").read_text()


def test_picture_in_readme_is_drawn_by_place(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    command = "place --topology topology/topology.conf --cluster examples/cluster.json"
    assert command in README
    assert main([*command.split(), "--dl-link-scores=off", f"--svg={tmp_path}/placement.svg", "examples/ps.sh"]) == 0
    assert (tmp_path / "placement.svg").read_text() == (ROOT / "docs/placement.svg").read_text()
