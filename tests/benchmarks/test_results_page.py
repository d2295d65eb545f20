"""docs/results.md: complete, short, and equal to what the files of results give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import results, results_page
from benchmarks.headlines import BENCHMARKS, Headline
from benchmarks.results import Row, make_row
from slurmdl.errors import InputError

ROOT = Path(__file__).parents[2]
ROWS = [make_row("first: time", [1.0, 3.0, 2.0], "s", baseline=4.0, target="below 4", met=True),
        make_row("50 Mbit/s: bytes", [2.0], "x", baseline=1, target="at most 1", met=False),
        make_row("100 Mbit/s: bytes", [3.0], "x", baseline=1, target="at most 1", met=False),
        make_row("1 Gbit/s: bytes", [0.5], "x", baseline=1, target="at most 1", met=True),
        make_row("no target", [1.0], "")]


def write(directory: Path, name: str, rows: list[Row]) -> None:
    results.write(str(directory / f"{name}.json"), rows, seed=3, versions={"numpy": "2"},
                  command=f"python -m benchmarks.some --only {name} --results results/{name}.json")


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two files of results of a benchmark `some`."""
    monkeypatch.setattr(results_page, "BENCHMARKS", {"some": ("bench-some", (
        Headline("part", "How long?", "first: *", "measured on {cores} cores"),
        Headline("other", "How many?", "no target", "simulated")))})
    write(tmp_path, "part", ROWS)
    write(tmp_path, "other", ROWS[-1:])
    return tmp_path


def test_page_matches_result_files_and_is_short() -> None:
    page = (ROOT / "docs/results.md").read_text()
    assert page == results_page.to_markdown(ROOT / "results"), "update with `make results`"
    assert page.count("\n") <= 200


def test_targets_of_the_makefile_run_their_modules() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for module, (target, _) in BENCHMARKS.items():
        recipe = makefile.partition(f"\n{target}:")[2].partition("\n\n")[0]
        assert f"python -m benchmarks.{module} " in recipe, target


def test_page_has_headlines_and_first_the_missed_targets(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cores = results.read(directory / "part.json").machine["cores"]
    capsys.readouterr()
    results_page.main([str(directory)])
    page = capsys.readouterr().out
    assert page.index("\n## Missed targets\n") < page.index("\n## some\n")
    assert (f"- [part](#some), 2 of 3: **3 times** in `100 Mbit/s: bytes`; target at most 1. Measured on {cores} "
            "cores.\n") in page
    assert (f"- **How long?** 2 s (1 to 3), baseline 4 s in `first: time`. Target below 4: met. Measured on {cores} "
            "cores. [part](../results/part.json), met 2 of 4: `--only part`") in page
    assert "- **How many?** 1 in `no target`. Simulated. [other](../results/other.json), met 0 of 0" in page
    assert "Met 2 of 4 targets." in page
    assert "\nMet 2 of 4. `make bench-some`" in page


@pytest.mark.parametrize(("values", "target", "worst"), [
    ((0.7, 0.9), "at least 1", "0.7"), ((1.1, 1.3), "below 1", "1.3"), ((0.5, 1.3), "within 10%", "0.5"),
    ((0.5, 1.3), "the smaller of two", "0.5")])
def test_missed_rows_of_a_kind_have_the_worst_value(directory: Path, values: tuple[float, float], target: str,
                                                    worst: str) -> None:
    write(directory, "part", [*ROWS, *(make_row(f"case {value}: rate", [value], "", baseline=1, target=target,
                                                met=False) for value in values)])
    assert f", 2 of 2: **{worst}** in `case {worst}: rate`; target {target}." in results_page.to_markdown(directory)


def test_each_file_needs_a_headline_and_each_headline_its_row(directory: Path) -> None:
    write(directory, "new", ROWS)
    with pytest.raises(InputError, match=r"new\.json: expected an entry in benchmarks/headlines\.py"):
        results_page.to_markdown(directory)
    (directory / "new.json").unlink()
    write(directory, "part", ROWS[1:])
    with pytest.raises(InputError, match=r"part\.json: no row 'first: \*'"):
        results_page.to_markdown(directory)
    write(directory, "part", [*ROWS, make_row("first: again", [1.0], "s")])
    with pytest.raises(InputError, match=r"part\.json: 'first: \*' selects 2 rows"):
        results_page.to_markdown(directory)
    (directory / "part.json").unlink()
    with pytest.raises(InputError, match=r"part\.json: missing"):
        results_page.to_markdown(directory)


def test_each_row_is_on_a_line_of_its_own(directory: Path) -> None:
    lines = (directory / "part.json").read_text().splitlines()
    assert [json.loads(line.rstrip(","))["metric"] for line in lines[2:2 + len(ROWS)]] == [row.metric for row in ROWS]


def test_damaged_file_is_named(directory: Path) -> None:
    (directory / "part.json").write_text(json.dumps({"rows": 3}))
    with pytest.raises(InputError, match=r"part\.json: no benchmark results"):
        results_page.to_markdown(directory)
