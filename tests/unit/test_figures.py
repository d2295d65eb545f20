"""Every figure of the documentation is a row of results/*.json, or its page says what it is (tests/figures.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
from figures import find_errors

from benchmarks import results
from benchmarks.results import ResultsFile, make_row

ROOT = Path(__file__).parents[2]
#: made of the files
UNCHECKED = {"results.md"}
PAGES = [page for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))) if page.name not in UNCHECKED]

ROWS = (make_row("a: time", [0.5601], "s", baseline=1.617), make_row("b: time", [0.6], "s", baseline=1.5),
        make_row("a: bytes", [40.2], "MB"), make_row("found", [1.0], "share"), make_row("loss", [1.845], "nats"))
FILES = {"part": ResultsFile("part", ROWS, {}, {}, "")}


@pytest.fixture(scope="module")
def files() -> dict[str, ResultsFile]:
    return {path.stem: results.read(path) for path in ROOT.glob("results/*.json")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_figures_of_the_pages_have_sources(page: Path, files: dict[str, ResultsFile]) -> None:
    assert list(find_errors(page.read_text(), files, ROOT)) == []


@pytest.mark.parametrize(("text", "sources"), [
    ("It takes 0.56 s.", "0.56 s = part: a: time"),
    ("It takes 560 ms,\nthen less.", "560 ms = part: a: time"),
    ("It takes 0.56 to 0.60 s.", "0.56 to 0.60 s = part: *: time"),
    ("It takes 1.6 s.", "1.6 s = largest baseline of part: *: time"),
    ("2.9 times as fast", "2.9 times = speedup of part: a: time"),
    ("65 % less time", "65 % = saving of part: a: time"),
    ("0.35 times", "0.35 times = ratio of part: a: time"),
    ("40 MB, found 10 of 10", "40 MB = part: a: bytes\n10 of 10 = part: found"),
    ("| a | MB | ms |\n| --- | --- | --- |\n| 1 | 40 | 560 |", "40 (MB) = part: a: bytes\n560 (ms) = part: a: time"),
    ("| file | nats |\n| --- | --- |\n| 1 | 1.85 |", "1.85 = part: loss"),
    ("0.56 s at 50 Mbit/s", "0.56 s = part: a: time\nsettings: 50 Mbit/s"),
    ("0.56 s with Slurm 22.05", "0.56 s = part: a: time\nsettings: 22.05"),
    ("12 % (Qiao et al.)", "published: 12 %"),
    ("at most 7 s", "measured once, make pyslurm: 7 s"),
    ("at most 7 s", "tested by tests/figures.py: 7 s"),
])
def test_correct_sources(text: str, sources: str) -> None:
    assert list(find_errors(f"{text}\n\n<!-- figures\n{sources}\n-->\n", FILES, ROOT)) == []


@pytest.mark.parametrize(("text", "sources", "error"), [
    ("It takes 0.57 s.", "0.57 s = part: a: time", "1: 0.57 s: the file has 0.5601 s"),
    ("It takes 0.5 s.", "0.5 s = part: a: time", "0.5 s: the file has 0.5601"),
    ("It takes 0.56 s.", "0.6 s = part: b: time", "0.6 s is not in the text"),
    ("It takes 10.56 s.", "0.56 s = part: a: time", "0.56 s is not in the text"),
    ("0.56 to 0.58 s", "0.56 to 0.58 s = part: *: time", "the file has 0.5601, 0.6 s"),
    ("0.56 s", "0.56 s = part: *: time", "the file has 0.5601, 0.6 s"),
    ("0.56 MB", "0.56 MB = part: a: time", "the file has 0.5601 s"),
    ("| a | ms |\n| --- | --- |\n| 1 | 600 |", "600 (ms) = part: a: time", "the file has 0.5601 s"),
    ("9 of 10 found", "9 of 10 = part: found", "the file has 1 share"),
    ("0.56 s", "0.56 s = part: c: time", "no row 'c: time'"),
    ("0.56 s", "0.56 s = other: a: time", "'other: a: time'; expected"),
    ("40 MB", "40 MB = baseline of part: a: bytes", "baseline of a row without a baseline"),
    ("0.56 s, then 0.58 s", "0.56 s = part: a: time", "0.58 s has no source"),
    ("0.56 s, a factor of 1.4", "0.56 s = part: a: time", "1.4 has no source"),
    ("| file | s |\n| --- | --- |\n| 1 | 3 |", "", "3 has no source"),
    ("`7 s` and 8 s", "", "8 s has no source"),
    ("7 s", "guessed: 7 s", "'guessed'; expected"),
    ("7 s", "tested by tests/missing.py: 7 s", "tests/missing.py does not exist"),
])
def test_wrong_sources(text: str, sources: str, error: str) -> None:
    errors = list(find_errors(f"{text}\n\n<!-- figures\n{sources}\n-->\n", FILES, ROOT))
    assert any(error in line for line in errors), errors


@pytest.mark.parametrize("text", [
    "no figure: 22.05, 8 nodes, [a](7 s), `7 s`, dp=7B", "```\n7 s\n```", "| a |\n| --- |\n| 64 |"])
def test_other_numbers_need_no_source(text: str) -> None:
    assert list(find_errors(text, FILES, ROOT)) == []


def test_kind_covers_only_its_block() -> None:
    page = "at most 5 s\n\n<!-- figures: settings -->\n\nIt takes 7 s.\n"
    assert list(find_errors(page, FILES, ROOT)) == ["5: 7 s has no source"]


def test_code_is_checked_if_it_has_sources() -> None:
    page = "```\na 0.57\n```\n\n<!-- figures\n0.57 = part: a: time\n-->\n"
    assert list(find_errors(page, FILES, ROOT)) == ["1: 0.57: the file has 0.5601 s"]
