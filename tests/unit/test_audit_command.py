"""The command `slurmdl audit`: reports as text, JSON, CSV and HTML, sacct, and errors."""

from __future__ import annotations

import csv
import gzip
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from slurmdl.cli.main import main

HOSTILE = "<script>alert(1)</script>&\"'\x1b[31m"
RECORDS = """\
JobID|User|Partition|State|Submit|Start|End|Timelimit|NNodes|NCPUS|NodeList
1|ada|main|COMPLETED|1714521600|1714521600|1714525200|UNLIMITED|2|8|a1,b1
2|bob|main|FAILED|1714530000|1714530000|1714533600|UNLIMITED|2|8|a[1-2]
3|{user}|main|COMPLETED|1714540000|1714540000|1714547200|UNLIMITED|3|8|a[1-2],b2
4|ada|main|COMPLETED|1714550000|1714550000|1714550001|UNLIMITED|8|8|a[1-4],b[1-4]
5|truncated
"""
TOPOLOGY = "SwitchName=leafA Nodes=a[1-4]\nSwitchName=leafB Nodes=b[1-4]\nSwitchName=root Switches=leafA,leafB\n"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture
def files(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    (tmp_path / "topology.conf").write_text(TOPOLOGY)
    (tmp_path / "jobs.txt").write_text(RECORDS.format(user="eve"))
    (tmp_path / "slurmdl").mkdir()
    (tmp_path / "slurmdl/slurmdl.yaml").write_text("link_defaults: {zone_bandwidth: 1.25e8, latency: 1.0e-9}\n")
    return tmp_path


def run_audit(*options: str) -> int:
    return main(["audit", "jobs.txt", "--topology", "topology.conf", *options])


def test_text(files, capsys):
    assert run_audit() == 0
    out = capsys.readouterr().out
    # in a ring, jobs 1 and 3 lose 9/10 of 30% of 2 and 6 node-hours
    assert out.startswith(
        "Better nodes and rank order would have saved 2.2 (21.6%) with allreduce, or 2.2 (21.6%) with gossip, of "
        "10.0 node-hours on several nodes. This is a prediction: 30% of the run time is assumed to be communication, "
        "and nodes that no job held to be free.\n")
    assert re.search(r"^jobs on several nodes +4 with 10\.0 node-hours \(and 0 on one node\)$", out, re.MULTILINE)
    assert re.search(r"^in several leaf zones +3 \(75%\)$", out, re.MULTILINE)
    assert re.search(r"^fewer zones were possible +2 \(50%\)$", out, re.MULTILINE)
    # three nodes in a ring cross each uplink of 1 Gbit/s once, instead of links of 10 Gbit/s
    assert re.search(r"^  3 +eve +main +3 +2 +1 +x10\.00 +6\.0 +1\.6$", out, re.MULTILINE)
    assert "skipped: 1 record with fewer fields than the header: not used; the first is line 6: '5|truncated'" in out
    assert "assumed: 30% of the run time was communication" in out and "uplinks 1 Gbit/s" in out


def test_json_and_csv_agree(files, capsys):
    assert run_audit("--json", "--csv", "jobs.csv", "--strategy=gossip") == 0
    report = json.loads(capsys.readouterr().out)
    with open("jobs.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["job_id"] for row in rows] == ["3", "1", "2", "4"]
    assert report["total"]["jobs"] == 4 and report["strategies"] == ["gossip"]
    worst = report["worst_jobs"][0]
    assert float(rows[0]["gossip_factor"]) == pytest.approx(worst["factor"]["gossip"], rel=1e-5)
    lost = sum(float(row["gossip_lost_node_hours"]) for row in rows)
    assert lost == pytest.approx(report["total"]["strategies"]["gossip"]["lost_node_hours"], rel=1e-5)
    assert sum(group["jobs"] for group in report["users"]) == 4
    assert report["problems"] == [{"kind": "fewer fields than the header", "effect": "not used", "count": 1,
                                   "line": 6, "example": "5|truncated"}]


@pytest.mark.parametrize("is_compressed", [False, True])
def test_records_from_stdin(files, monkeypatch, capsys, is_compressed):
    if is_compressed:
        (files / "jobs.txt").write_bytes(gzip.compress((files / "jobs.txt").read_bytes()))
    with open("jobs.txt") as file:
        monkeypatch.setattr("sys.stdin", file)
        assert main(["audit", "-", "--topology", "topology.conf", "--user", "bob", "--json"]) == 0
    assert [group["name"] for group in json.loads(capsys.readouterr().out)["users"]] == ["bob"]


def test_sacct_is_run_with_epoch_seconds_and_english_words(files, monkeypatch, capsys):
    stub = files / "sacct"
    stub.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\" > arguments\nenv > environment\ncat jobs.txt\n")
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{files}:/usr/bin:/bin")
    monkeypatch.setenv("TZ", "UTC")
    for name, value in (("SLURM_TIME_FORMAT", "relative"), ("SACCT_FORMAT", "jobid"), ("LC_ALL", "de_DE.UTF-8"),
                        ("SLURM_CLUSTERS", "other"), ("LC_TIME", "de_DE.UTF-8")):
        monkeypatch.setenv(name, value)
    options = ["--topology", "topology.conf", "--json", "--since", "2024-05-01T02:00", "--until", "2024-05-02"]
    assert main(["audit", *options]) == 0
    assert json.loads(capsys.readouterr().out)["total"]["jobs"] == 3  # job 1 started before
    environment = dict(line.split("=", 1) for line in (files / "environment").read_text().splitlines() if "=" in line)
    assert (environment["SLURM_TIME_FORMAT"], environment["LC_ALL"]) == ("%s", "C")
    assert not environment.keys() & {"SACCT_FORMAT", "SLURM_CLUSTERS", "LC_TIME"}
    assert environment["SLURM_CONF"] == str(files / "slurm.conf")
    words = (files / "arguments").read_text().split("\n")[:-1]
    assert words[:7] == ["-a", "-X", "-P", "-D", "-S2024-05-01T02:00:00", "-E2024-05-02T00:00:00", "-o"]


@pytest.mark.parametrize(("options", "status", "message"), [
    (["missing.txt"], 65, "slurmdl: missing.txt: cannot be read (No such file or directory)"),
    (["topology.conf"], 65, "no header of sacct; expected the output of `sacct -a -X -P"),
    (["jobs.txt", "--since", "soon"], 64, "--since soon: expected a time such as"),
    (["jobs.txt", "--since", "2024-05-02", "--until", "2024-05-01"], 64, "expected a time before --until 2024-05-01"),
    (["jobs.txt", "--comm-share", "1"], 64, "--comm-share 1: expected 0 to 0.95"),
    (["jobs.txt", "--comm-share", "nan"], 64, "--comm-share nan: expected 0 to 0.95"),
    (["jobs.txt", "--strategy", "ps"], 64, "--strategy ps: expected allreduce or gossip"),
    (["jobs.txt", "--html", "no/such/file"], 64, "--html=no/such/file: cannot be written"),
    ([], 69, "sacct: "),
    (["empty"], 65, "slurmdl: empty: is empty; expected the output of `sacct -a -X -P"),
    (["header"], 65, "slurmdl: header: no usable record: none follows the header"),
    (["truncated.gz"], 65, "slurmdl: truncated.gz: is damaged (Compressed file ended before the end"),
    (["binary"], 65, "slurmdl: binary: is not text; expected the output of `sacct -P` or `sacct --json`"),
    (["other.json"], 65, "slurmdl: other.json:1: JSON without jobs; expected the output of `sacct --json`"),
    (["-"], 64, "slurmdl: -: standard input is closed"),
])
def test_errors_are_one_line(files, monkeypatch, capsys, options, status, message):
    monkeypatch.setenv("PATH", str(files))
    monkeypatch.setattr("sys.stdin", None)
    for name, content in (("empty", b""), ("header", b"JobID|Start|End|NodeList\r\n"), ("other.json", b'{"a": [1]}'),
                          ("truncated.gz", gzip.compress(RECORDS.encode())[:-9]), ("binary", bytes(range(256)) * 40)):
        (files / name).write_bytes(content)
    assert main(["audit", "--topology", "topology.conf", *options]) == status
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("slurmdl: ") and message in lines[0]


def test_no_job_on_several_nodes(files, capsys):
    (files / "jobs.txt").write_text(RECORDS.splitlines()[0] + "\n1|ada|main|COMPLETED|1|2|9||1|1|a1\n")
    assert run_audit("--html", "report.html") == 0
    out = capsys.readouterr().out
    assert out.startswith("Nothing to gain: no job ran on several nodes.\n")
    assert "jobs on several nodes     0 with 0.0 node-hours (and 1 on one node)" in out
    assert "<figure" not in (files / "report.html").read_text()


def test_lines_of_windows(files, capsys):
    lines = ["JobID|Start|End|NodeList", "1|1714521600|1714525200|a[1-2]", "2|1714521600|1714525200|b1"]
    (files / "jobs.txt").write_bytes("".join(f"{line}\r\n" for line in lines).encode())
    assert run_audit("--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["records"], report["total"]["jobs"], report["one_node_jobs"]) == (2, 1, 1)
    assert report["problems"] == []


def test_first_sentence_of_jobs_on_the_best_nodes(files, capsys):
    (files / "jobs.txt").write_text("\n".join(RECORDS.splitlines()[:3]).replace("a1,b1", "a[1-2]"))
    assert run_audit("--strategy=gossip", "--comm-share=0.1", "--html", "report.html") == 0
    sentence = ("Better nodes and rank order would have saved 0.0 (0.0%) with gossip, of 4.0 node-hours on several "
                "nodes. This is a prediction: 10% of the run time is assumed to be communication, and nodes that no "
                "job held to be free.")
    assert capsys.readouterr().out.startswith(f"{sentence}\n")
    assert f"<p><strong>{sentence}</strong></p>" in (files / "report.html").read_text()


class _Elements(HTMLParser):
    """Names of the elements, their attributes, and the text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data):
        self.text += data


def write_hostile_report(files: Path) -> str:
    records = RECORDS.format(user=HOSTILE).replace("|main|", "|</title><img src=x onerror=alert(2)>|")
    (files / "jobs.txt").write_text(records)
    assert run_audit("--html", "report.html") == 0
    return (files / "report.html").read_text()


def test_names_are_no_formulas_of_spreadsheets(files):
    (files / "jobs.txt").write_text(RECORDS.format(user="=HYPERLINK(1)"))
    assert run_audit("--csv", "jobs.csv") == 0
    with open("jobs.csv") as file:
        assert {row["job_id"]: row["user"] for row in csv.DictReader(file)}["3"] == "'=HYPERLINK(1)"


def test_html_escapes_names_and_loads_nothing(files, capsys):
    elements = _Elements(write_hostile_report(files))
    assert not elements.names & {"script", "img", "link", "iframe", "object", "base", "form"}
    assert not {name for name in elements.attributes if name.startswith("on")} and "src" not in elements.attributes
    assert "<script>alert(1)</script>&\"'\\x1b[31m" in elements.text and "</title><img src=x" in elements.text
    assert "\x1b" not in elements.text + capsys.readouterr().out
    assert {"table", "figure"} <= elements.names


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
@pytest.mark.parametrize("width", [390, 1280])
def test_report_in_a_browser_fits_its_width(files, width):
    """Rendered in a frame of this width by a page that reads its layout."""
    html = write_hostile_report(files)
    # the page below may read the frame only without the policy
    (files / "report.html").write_text(html.replace("Content-Security-Policy", "X-No-Policy"))
    (files / "frame.html").write_text(f"""\
<iframe src="report.html" width="{width}" height="900" style="border:0"></iframe><pre></pre><script>
onload = () => {{
  const page = document.querySelector("iframe").contentDocument;
  const charts = [...page.querySelectorAll("figure")].map(chart => Math.round(chart.getBoundingClientRect().width));
  const text = [...page.querySelectorAll("figure span")].map(text => text.getBoundingClientRect().height);
  document.querySelector("pre").textContent = JSON.stringify({{width: page.documentElement.clientWidth,
    content: page.documentElement.scrollWidth, charts, text: Math.min(...text),
    foreign: page.querySelectorAll("script, img").length}});
}};
</script>""")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--dump-dom",
               "--virtual-time-budget=5000", f"--user-data-dir={files}/profile"]
    page = subprocess.run([str(CHROMIUM), *options, f"file://{files}/frame.html"], capture_output=True, text=True,
                          timeout=60, check=True).stdout
    layout = json.loads(re.search(r"<pre>(.*?)</pre>", page).group(1))
    assert width - 20 <= layout["width"] <= width and layout["content"] <= layout["width"]
    assert len(layout["charts"]) == 4 and all(250 < chart <= width for chart in layout["charts"])
    assert layout["text"] >= 9 and layout["foreign"] == 0  # pixels; elements from names of the records
