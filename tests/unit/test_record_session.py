"""tools/record-session: a real command in a pseudo-terminal, its cast, and the drawing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

TOOL = Path(__file__).parents[2] / "tools/record-session"
SVG = "{http://www.w3.org/2000/svg}"
#: a progress line that is replaced twice, a table with a bar and a color
COMMAND = r"""printf 'one & <two>\n'; printf 'waiting 1'; sleep 0.6; printf '\r\033[Kwaiting 2'; sleep 0.6
printf '\r\033[K'; printf 'job    s/step  ███\n\033[1;32mfast\033[0m\n'; [ -t 1 ] && stty size"""


def record(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, TOOL, folder / "a.cast", folder / "a.svg", *command], timeout=30,
                          capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


def test_lines_of_a_command_are_recorded_and_drawn(tmp_path: Path) -> None:
    assert record(tmp_path, "sh", "-c", COMMAND).returncode == 0
    header, *events = map(json.loads, (tmp_path / "a.cast").read_text().splitlines())
    assert (header["version"], header["width"], header["height"]) == (2, 104, 40)
    assert all(kind == "o" for _, kind, _ in events) and "one & <two>" in "".join(text for *_, text in events)
    assert [begin for begin, *_ in events] == sorted(begin for begin, *_ in events) and events[-1][0] >= 1.2
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    texts = {text.text: text for text in root.iter(f"{SVG}text")}
    assert {"one & <two>", "waiting 1", "waiting 2", "job", "s/step", "fast", "40 104"} <= texts.keys()
    assert texts["fast"].get("font-weight") == "bold" and texts["fast"].get("fill") == "#86efac"
    # columns are kept without blanks
    assert float(texts["s/step"].get("x", "")) - float(texts["job"].get("x", "")) > 6 * 7
    hidden = {text.text for group in root.iter(f"{SVG}g") if group.get("visibility") == "hidden"
              for text in group.iter(f"{SVG}text")}
    assert hidden == {"waiting 1", "waiting 2"}, "without animation only the last screen is visible"


def test_a_recording_is_drawn_again(tmp_path: Path) -> None:
    record(tmp_path, "seq", "60")
    first = (tmp_path / "a.svg").read_text()
    assert "animateTransform" in first, "more lines than rows scroll"
    (tmp_path / "a.svg").unlink()
    assert record(tmp_path).returncode == 0 and (tmp_path / "a.svg").read_text() == first


def test_a_failed_command_is_not_drawn(tmp_path: Path) -> None:
    assert record(tmp_path, "sh", "-c", "echo no; exit 3").returncode == 3
    assert not (tmp_path / "a.svg").exists()
