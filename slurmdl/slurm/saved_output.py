"""Saved output of `scontrol show` and sinfo: records, tables and YAML of one text, whatever their order.

The text may hold several outputs, prompts, messages, indentation, CRLF line ends, and a last record that is cut off.
Live output has stricter readers, which take neither.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from slurmdl.errors import InputError
from slurmdl.slurm.sinfo_table import STATE_COLUMN, SinfoTable, cut_tables
from slurmdl.slurm.topoconf_text import PROMPT_PATTERN, TOPOCONF_BEGIN, find_topoconf

RECORD_KEYS = ("NodeName", "PartitionName", "ReservationName", "SwitchName", "BlockName", "AggregatedBlock",
               "RingName", "TorusName")
MAX_SAVED_BYTES = 256 * 2**20  # 100,000 nodes have about 90 MB
_MAX_RECORD_CHARS = 2**16  # of a record whose fields have no indentation; bounds the time for a file of KEY=VALUE
_MAX_WARNINGS = 5  # lines of one file that are reported one by one

_CONTINUATION = "\n   "  # between the parts of a record; a blank with -o
_KEYS = "|".join(RECORD_KEYS)
_FIRST_RECORD = re.compile(rf"^([ \t]*)(?:{_KEYS})=", re.MULTILINE)
_INDENTED_RECORD = re.compile(rf"^[ \t]+(?=(?:{_KEYS})=)", re.MULTILINE)
#: the beginning of a line that is no row of a table: a record, a prompt, a comment, a date or a message
_OTHER_LINE = re.compile(
    rf"\s*(?:{_KEYS})=|scontrol:|#|\.\.\.$|{PROMPT_PATTERN}|(?:scontrol|sinfo)(?:\s|$)|No \w+ in the system"
    r"|[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d( \w+)? \d{4}\s*$")
#: lines of `show config`, whose values are read by the caller
_CONFIG_LINE = re.compile(r"[\w/()\[\] ]+ = |[\w/ ]+:$|Configuration data as of |Slurmctld\(")
_FIELD = re.compile(r"\s*\w+=")
_YAML_HEADER = re.compile(r"%YAML|---")


@dataclass(frozen=True)
class SavedOutput:
    """The parts of a saved text.

    Attributes:
        records: one line per record, by its first key.
        record_lines: index of each of these lines in the text with joined records; `line_number` converts it.
        config: text of the lines of `show config`, in order.
        tables: tables of sinfo.
        yaml: text of `show topoconf`, with empty lines before it so that line numbers agree; "" for none.
        unknown: index and text of the lines that are none of these.
        text: the text without tables and YAML.
    """

    records: dict[str, list[str]]
    record_lines: dict[str, list[int]]
    config: tuple[str, ...]
    tables: tuple[SinfoTable, ...]
    yaml: str
    unknown: tuple[tuple[int, str], ...]
    text: str = field(repr=False)

    @cached_property
    def _first_lines(self) -> list[int]:
        return [number for number, line in enumerate(self.text.split("\n"), 1)
                if number == 1 or not line.startswith(_CONTINUATION[1:])]

    def line_number(self, index: int) -> int:
        return self._first_lines[index]

    def drop_incomplete_record(self, key: str, last_field: str) -> tuple[int, str] | None:
        """Remove and return the last record of a key if it is cut off: it lacks a field that the first one has."""
        records = self.records[key]
        if len(records) < 2 or f" {last_field}" not in records[0] or f" {last_field}" in records[-1]:
            return None
        return self.record_lines[key].pop(), records.pop()


class LineProblems:
    """Lines of one file that are not understood, reported as warnings in the order of the file."""

    def __init__(self, file: str) -> None:
        self.file = file
        self._problems: list[tuple[int, str, str]] = []

    def add(self, line: int, text: str, message: str) -> None:
        """Note that the line is skipped because of a problem."""
        self._problems.append((line, text, message))

    def report(self, on_warning: Callable[[str], None]) -> None:
        """Report the first lines one by one, and how many more there are."""
        problems = sorted(self._problems)
        for line, text, message in problems[:_MAX_WARNINGS]:
            on_warning(f"{InputError(message, self.file, line, text)}; skipped")
        more = len(problems) - _MAX_WARNINGS
        if more > 0:
            on_warning(f"{self.file}: {more:,} more line{'s' * (more > 1)} not understood; skipped")


def decode_saved_text(data: bytes, file: str, on_warning: Callable[[str], None]) -> str:
    """Decode UTF-8; other bytes, as in the reason of a drained node, are replaced, and a warning names their line."""
    data = data.removeprefix(codecs.BOM_UTF8)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        on_warning(f"{file}:{line}: not UTF-8 text; the bytes that are not are replaced")
        return data.decode(errors="replace")


def split_saved_output(text: str) -> SavedOutput:
    """Split a saved text into its parts."""
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = _remove_margin(text)
    first = _FIRST_RECORD.search(text)
    if first and first[1]:
        text = _INDENTED_RECORD.sub("", text)
    tables: list[SinfoTable] = []
    if STATE_COLUMN in text:  # a quick search: dumps of nodes have many MB
        lines = text.split("\n")
        tables = cut_tables(lines, _OTHER_LINE)
        text = "\n".join(lines)
    output = _split_records(text, tuple(tables))
    if not any(TOPOCONF_BEGIN.match(line) for _, line in output.unknown):
        return output
    lines = text.split("\n")
    yaml = _cut_yaml(lines)
    return replace(_split_records("\n".join(lines), tuple(tables)), yaml=yaml)


def _split_records(text: str, tables: tuple[SinfoTable, ...]) -> SavedOutput:
    records: dict[str, list[str]] = {key: [] for key in RECORD_KEYS}
    record_lines: dict[str, list[int]] = {key: [] for key in RECORD_KEYS}
    config, unknown = [], []
    last = ""  # key of the record that a field without indentation continues
    for index, line in enumerate(text.replace(_CONTINUATION, " ").split("\n")):
        if not line:
            continue
        key = line.partition("=")[0].lstrip()
        if key in records:
            records[key].append(line.lstrip())
            record_lines[key].append(index)
            last = key
        elif line.isspace():
            continue
        elif last and _FIELD.match(line) and len(records[last][-1]) < _MAX_RECORD_CHARS:
            records[last][-1] += f" {line.strip()}"
        else:
            last = ""
            if _CONFIG_LINE.match(line):
                config.append(line)
            elif not _OTHER_LINE.match(line):
                unknown.append((index, line))
    return SavedOutput(records, record_lines, tuple(config), tables, "", tuple(unknown), text)


def _remove_margin(text: str) -> str:
    """Remove the indentation that all lines share, as in text copied from a document."""
    if not text[:1].isspace() or not text.strip():
        return text
    import textwrap

    return textwrap.dedent(text)


def _cut_yaml(lines: list[str]) -> str:
    begin, end = find_topoconf(lines)
    yaml = "\n" * begin + "\n".join(lines[begin:end]) if begin < end else ""
    while begin and _YAML_HEADER.match(lines[begin - 1]):
        begin -= 1
    lines[begin:end] = [""] * (end - begin)
    return yaml
