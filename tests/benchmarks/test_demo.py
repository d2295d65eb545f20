"""The demo's scripts, its table, its picture and its result rows (make demo, make bench-demo)."""

from __future__ import annotations

import shlex
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable

import pytest

from benchmarks.demo import jobs, report
from benchmarks.demo.jobs import CONTROL, LEAF, PLACED, PLAIN, Job, Outcome, Outcomes
from benchmarks.demo.page import format_page
from benchmarks.demo.picture import draw_demo
from slurmdl.dl_options import DlOptions

#: of plain, leaf order, slurmdl and control
GAIN, NO_GAIN = (4.0, 2.0, 1.0, 3.0), (4.0, 1.0, 1.0, 3.0)


def make_outcomes(**changes: tuple[float, float, float, float]) -> Outcomes:
    """Outcomes whose step times meet all targets, but for the changed jobs."""
    seconds = {"mesh": GAIN, "bad_link": (4.0, 4.0, 1.0, 1.0), "ps": GAIN, "allreduce": NO_GAIN,
               "islands": (9.0, 9.0, 0.25, 3.0), **changes}
    outcomes = {}
    for job in jobs.JOBS:
        for variant, value in zip((PLAIN, LEAF, PLACED, CONTROL), seconds[job.key.replace(" ", "_")], strict=True):
            if variant in (*job.variants, CONTROL):
                outcomes[job.key, variant] = Outcome(["n1", "n2"], 2, [value], [value * 1e6], 0.9)
    return outcomes


@pytest.mark.parametrize("job", jobs.JOBS, ids=lambda job: job.key)
@pytest.mark.parametrize("variant", [*jobs.VARIANTS, CONTROL])
def test_scripts_are_valid_shell_and_write_both_files(job: Job, variant: str) -> None:
    script = job.script(variant)
    assert subprocess.run(["sh", "-n"], input=script, text=True, check=False).returncode == 0
    assert job.is_placed(variant) == ("\nslurmdl srun" in script) == ("#DL" in script)
    words = shlex.split(script.splitlines()[-1])
    assert f"{job.file_name(variant)}.json" in words and f"{job.file_name(variant)}.steps" in words


def test_script_has_the_options_of_placement() -> None:
    assert "#DL --dl-strategy=ps\n#DL --dl-ps=2\n" in jobs.PS.script(PLACED)
    job = Job("x", 4, "true", DlOptions(mesh="dp=2,tp=2", bytes="tp=5"), 0, 1)
    assert "#DL --dl-mesh=dp=2,tp=2\n#DL --dl-bytes=tp=5\n" in job.script(PLACED)


LINKS = "link  kind  zone  slowdown  throughput\nn10  node  zoneA  x9.93  100 Mbit/s  93 us\n"


@pytest.mark.parametrize(("function", "args", "expected"), [
    # the warmup is left out, and periods are whole
    (Job("x", 4, "true", DlOptions(), 2, 8, 3).step_seconds, ([99.0, 99.0, 1.0, 1.0, 7.0, 1.0, 1.0, 7.0],), 3.0),
    (Job("x", 4, "true", DlOptions(), 1, 4).step_seconds, ([99.0, 1.0, 1.0, 7.0],), 1.0),
    *((report.describe_gain, (speedup,), text) for speedup, text in (
        (2.0, "2.0 x as fast"), (1.02, "none"), (0.98, "none"), (0.5, "slower: 0.50 x"))),
    *((report.describe_probe, (LINKS, node), text) for node, text in (
        ("n10", "n10: 100 Mbit/s, slowdown x9.93"), ("n1", "n1: not measured"))),
], ids=lambda value: str(value)[:20])
def test_words_and_figures(function: Callable[..., object], args: tuple[object, ...], expected: object) -> None:
    assert function(*args) == expected


def test_table_compares_with_the_better_of_plain_and_leaf_order() -> None:
    lines = {(line.job, line.placement): line for line in report.make_lines(make_outcomes())}
    assert lines["mesh", PLACED].gain == "2.0 x as fast" and lines["mesh", PLACED].share == 0.25
    assert lines["allreduce", PLACED].gain == "none"
    assert lines["islands", PLACED].gain == "4.0 x as fast", "over allreduce in leaf order"
    text = report.format_table(make_outcomes())
    assert max(map(len, text.splitlines())) <= 100 and len(text.splitlines()) == 2 + len(lines)


def test_rows_meet_targets_and_misses_are_seen() -> None:
    rows = report.make_rows(make_outcomes())
    assert all(row.met in (True, None) for row in rows)
    assert sum(row.met is True for row in rows) >= 2 * len(jobs.JOBS), "each job and each control has a target"
    for job in jobs.JOBS:
        key = job.key.replace(" ", "_")
        worse = report.make_rows(make_outcomes(**{key: (4.0, 2.0, 9.0, 0.5)}))
        assert not any(row.met for row in worse if row.metric == f"{job.key}: seconds per step, {PLACED}")
    missed = report.make_rows(make_outcomes(bad_link=(4.0, 4.0, 1.0, 2.0), mesh=(4.0, 2.0, 1.0, 1.0)))
    assert {row.metric for row in missed if row.met is False} == {
        "bad link: seconds per step, control", "mesh: seconds per step, control", "mesh: bytes across zones, control"}


def test_picture_and_page_have_each_line() -> None:
    lines = len(report.make_lines(make_outcomes()))
    root = ElementTree.fromstring(draw_demo(make_outcomes()))
    bars = root.findall("{http://www.w3.org/2000/svg}rect")[1:]
    assert len(bars) == lines and len({bar.get("fill") for bar in bars}) == 2
    page = format_page(make_outcomes(), "heading with <", "closing")
    assert "heading with &lt;" in page and not any(word in page for word in ("<script", "src=", "href="))
    assert page.count("<td>mesh</td>") == 3 and page.count("<tr") == 1 + lines
