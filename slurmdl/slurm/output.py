"""Output of `scontrol show` and sinfo: records, settings, tables and YAML of one text, whatever their order.

The output of the running cluster holds records, settings and YAML only, and must be complete. Saved text may also
hold tables of sinfo, prompts, messages, indentation, CRLF line ends, and a last record that is cut off. Readers raise
the first problem, or collect all (`Problems`), by their argument `on_error`.

Reference: src/sinfo/print.c and opts.c of Slurm (names, widths and justification of columns).
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from slurmdl.errors import InputError

RECORD_KEYS = ("NodeName", "PartitionName", "ReservationName", "SwitchName", "BlockName", "AggregatedBlock",
               "RingName", "TorusName")
MAX_SAVED_BYTES = 256 * 2**20  # 100,000 nodes have about 90 MB
_MAX_RECORD_CHARS = 2**16  # of a record whose fields have no indentation; bounds the time for a file of KEY=VALUE
_MAX_WARNINGS = 5  # lines of one file that are reported one by one

_CONTINUATION = "\n   "  # between the parts of a record; a blank with -o
_KEYS = "|".join(RECORD_KEYS)
_FIRST_RECORD = re.compile(rf"^([ \t]*)(?:{_KEYS})=", re.MULTILINE)
_INDENTED_RECORD = re.compile(rf"^[ \t]+(?=(?:{_KEYS})=)", re.MULTILINE)
#: a shell prompt, with or without a command
_PROMPT = (r"(?:\[[^\]]*\]|[^\s=]*)[$#%>]"
           r"(?:\s*$| *(?:\S*/)?(?:scontrol|sinfo|squeue|sudo|ssh|cat|date|echo)(?:\s|$))")
#: the beginning of a line that is not a row of a table: a record, a prompt, a comment, a date or a message
_OTHER_LINE = re.compile(
    rf"\s*(?:{_KEYS})=|scontrol:|#|\.\.\.$|{_PROMPT}|(?:scontrol|sinfo)(?:\s|$)|No \w+ in the system"
    r"|[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d( \w+)? \d{4}\s*$")
_CONFIG_LINE = re.compile(r"[\w/()\[\] ]+ = |[\w/ ]+:$|Configuration data as of |Slurmctld\(")
_FIELD = re.compile(r"\s*\w+=")

#: the YAML of `show topoconf`: in any line of a text (a quick search), its first line, the lines before that, its end
_ANY_TOPOCONF = re.compile(r"topology[\"']?\s*:")
TOPOCONF_BEGIN = re.compile(r"""(-\s+)?["']?topology["']?\s*:""")
_YAML_HEADER = re.compile(r"%YAML|---")
_TOPOCONF_END = re.compile(rf"scontrol:|\w+\s*=|\.\.\.|[a-zA-Z ]+\.?$|{_PROMPT}")
#: with a topology.conf, 26.05 shows one topology in which all kinds are empty
_EMPTY_TOPOCONF = re.compile(r"-?\s*(topology|cluster_default):|\s*\w+: \{\}$|$")

#: a table of sinfo has a header of columns, among them one of NODE_COLUMNS and STATE_COLUMNS. So the default form,
#: `-l`, `-N`, `-N -l` and own formats of `-o` and `-O` are found, but not a table without header (`sinfo -h`) or
#: without states (`-s`, `-R`)
NODE_COLUMNS = ("NODELIST", "HOSTNAMES")
STATE_COLUMNS = ("STATE", "STATECOMPLETE")
_COLUMNS = frozenset([
    *NODE_COLUMNS, *STATE_COLUMNS, "ACTIVE_FEATURES", "ALLOCMEM", "ALLOCNODES", "AVAIL", "AVAIL_FEATURES", "CLUSTER",
    "COMMENT", "CORES", "CPUS", "CPUS(A/I/O/T)", "CPU_LOAD", "DEFAULTTIME", "EXTRA", "FEATURES", "FREE_MEM", "GRES",
    "GRES_USED", "GROUPS", "JOB_SIZE", "MAX_CPUS_PER_NODE", "MEMORY", "NODES", "NODES(A/I)", "NODES(A/I/O/T)",
    "NODE_ADDR", "OVERSUBSCRIBE", "PARTITION", "PORT", "PREEMPT_MODE", "PRIO_JOB_FACTOR", "PRIO_TIER", "REASON",
    "RESERVATION", "ROOT", "S:C:T", "SOCKETS", "THREADS", "TIMELIMIT", "TIMESTAMP", "TMP_DISK", "USER", "VERSION",
    "WEIGHT"])
_FREE_TEXT = ("REASON", "COMMENT", "EXTRA")  # values with blanks
_OFTEN_EMPTY = "RESERVATION"
_MIN_TRUNCATED_CHARS = 4  # sinfo cuts a header to the width of its column: AVAIL_FE, OVERSUBS
#: mark -> pattern of a separator; commas in the brackets of a hostlist separate no columns
_SEPARATORS = {"|": re.compile(r"\|"), ",": re.compile(r",(?![^\[\]]*\])"), ";": re.compile(";")}


@dataclass(frozen=True)
class SlurmOutput:
    """The parts of an output.

    Attributes:
        file: name of the saved text; "" for the output of the running cluster.
        records: index and text of the records by their first key, one line each; `line_number` converts the index.
        config: settings of `show config`.
        tables: tables of sinfo, in saved text only.
        yaml: text of `show topoconf`, with empty lines before it so that line numbers agree; "" if there is none, or
            it has no topology of its own, because there is a topology.conf.
        unknown: index and text of the lines that are none of these.
        text: the text without tables and YAML.
    """

    file: str
    records: dict[str, list[tuple[int, str]]]
    config: dict[str, str]
    tables: tuple[SinfoTable, ...]
    yaml: str
    unknown: tuple[tuple[int, str], ...]
    text: str = field(repr=False)

    @property
    def has_zones(self) -> bool:
        return bool(self.yaml) or any(self.records[key] for key in RECORD_KEYS[3:])

    @cached_property
    def _first_lines(self) -> list[int]:
        return [number for number, line in enumerate(self.text.split("\n"), 1)
                if number == 1 or not line.startswith(_CONTINUATION[1:])]

    def line_number(self, index: int) -> int:
        return self._first_lines[index]

    def error(self, index: int, text: str, message: str) -> InputError:
        """Return the error of a record or an unknown line."""
        return InputError(message, self.file or "scontrol", self.line_number(index), text)


class Problems:
    """Collects the errors of one saved text, to report them as warnings in the order of the file."""

    def __init__(self, output: SlurmOutput) -> None:
        self._file = output.file
        self._errors = [output.error(index, line, "not understood") for index, line in output.unknown]

    def __call__(self, error: InputError) -> None:
        self._errors.append(error)

    def report(self, on_warning: Callable[[str], None]) -> None:
        """Report the first errors one by one, and how many more there are."""
        errors = sorted(self._errors, key=lambda error: error.line or 0)
        for error in errors[:_MAX_WARNINGS]:
            on_warning(f"{error}; skipped")
        more = len(errors) - _MAX_WARNINGS
        if more > 0:
            on_warning(f"{self._file}: {more:,} more line{'s' * (more > 1)} not understood; skipped")


def decode_saved_text(data: bytes, file: str, on_warning: Callable[[str], None]) -> str:
    """Decode UTF-8; other bytes, as in the reason of a drained node, are replaced, and a warning names their line."""
    data = data.removeprefix(codecs.BOM_UTF8)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        on_warning(f"{file}:{line}: not UTF-8 text; the bytes that are not are replaced")
        return data.decode(errors="replace")


def split_output(text: str, file: str = "") -> SlurmOutput:
    """Split a text into its parts; `file` is the name of a saved text."""
    tables: list[SinfoTable] = []
    if file:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        if text[:1].isspace() and text.strip():  # the indentation of all lines, as in text copied from a document
            import textwrap

            text = textwrap.dedent(text)
        first = _FIRST_RECORD.search(text)
        if first and first[1]:
            text = _INDENTED_RECORD.sub("", text)
        if STATE_COLUMNS[0] in text:  # a quick search: dumps of nodes have many MB
            lines = text.split("\n")
            tables = _cut_tables(lines)
            text = "\n".join(lines)
    yaml = ""
    if _ANY_TOPOCONF.search(text):
        lines = text.split("\n")
        yaml = _cut_topoconf(lines)
        text = "\n".join(lines)
    records: dict[str, list[tuple[int, str]]] = {key: [] for key in RECORD_KEYS}
    config: dict[str, str] = {}
    unknown: list[tuple[int, str]] = []
    last = ""  # key of the record that a field without indentation continues
    for index, line in enumerate(text.replace(_CONTINUATION, " ").split("\n")):
        key = line.partition("=")[0].lstrip()
        if key in records:
            records[key].append((index, line.lstrip()))
            last = key if file else ""
        elif not line or line.isspace():
            continue
        elif last and _FIELD.match(line) and len(records[last][-1][1]) < _MAX_RECORD_CHARS:
            first_index, record = records[last][-1]
            records[last][-1] = (first_index, f"{record} {line.strip()}")
        else:
            last = ""
            if _CONFIG_LINE.match(line):
                config[key.strip()] = line.partition("=")[2].strip()
            elif not _OTHER_LINE.match(line):
                unknown.append((index, line))
    return SlurmOutput(file, records, config, tuple(tables), yaml, tuple(unknown), text)


def _cut_topoconf(lines: list[str]) -> str:
    """Return the YAML of `show topoconf` in these lines, and replace its lines by empty ones."""
    begin = next((i for i, line in enumerate(lines) if TOPOCONF_BEGIN.match(line)), len(lines))
    end = next((i for i in range(begin, len(lines)) if _TOPOCONF_END.match(lines[i])), len(lines))
    content = lines[begin:end]
    yaml = "" if all(map(_EMPTY_TOPOCONF.match, content)) else "\n" * begin + "\n".join(content)
    while begin and _YAML_HEADER.match(lines[begin - 1]):
        begin -= 1
    lines[begin:end] = [""] * (end - begin)
    return yaml


@dataclass(frozen=True)
class SinfoTable:
    """A table that sinfo prints.

    Attributes:
        line: number of the header line.
        columns: full names, in their order; those that sinfo cut off are in `cut_columns`, too.
        rows: line number and text of each row.
        separator: pattern between cells; None for blanks.
    """

    line: int
    columns: tuple[str, ...]
    cut_columns: frozenset[str]
    rows: tuple[tuple[int, str], ...]
    separator: re.Pattern[str] | None

    def row_cells(self, text: str) -> dict[str, str] | None:
        """Return the cells of a row by column, or None if they cannot be assigned to the columns."""
        columns = self.columns
        if self.separator:
            cells = [cell.strip() for cell in self.separator.split(text)]
            return dict(zip(columns, cells, strict=True)) if len(cells) == len(columns) else None
        cells = text.split()
        if len(cells) == len(columns) - 1 and _OFTEN_EMPTY in columns:
            columns = tuple(column for column in columns if column != _OFTEN_EMPTY)
        surplus = len(cells) - len(columns)
        if surplus > 0:
            free = next((i for i, column in enumerate(columns) if column in _FREE_TEXT), None)
            if free is None:
                return None
            cells[free:free + surplus + 1] = [" ".join(cells[free:free + surplus + 1])]
        elif surplus < 0:
            return None
        return dict(zip(columns, cells, strict=True))


def _cut_tables(lines: list[str]) -> list[SinfoTable]:
    """Return the tables in these lines, and replace their lines by empty ones.

    A table ends before an empty line, the next header, or a line of other output.
    """
    tables = []
    headers = [(i, header) for i, line in enumerate(lines) if (header := _parse_table_header(line))]
    ends = [*(begin for begin, _ in headers[1:]), len(lines)]
    for (begin, (columns, cut_columns, separator)), last in zip(headers, ends, strict=False):
        end = next((i for i in range(begin + 1, last) if not lines[i].strip() or _OTHER_LINE.match(lines[i])), last)
        rows = tuple((i + 1, lines[i]) for i in range(begin + 1, end))
        tables.append(SinfoTable(begin + 1, columns, cut_columns, rows, separator))
        lines[begin:end] = [""] * (end - begin)
    return tables


def _parse_table_header(line: str) -> tuple[tuple[str, ...], frozenset[str], re.Pattern[str] | None] | None:
    """Return columns, the ones with a cut-off name, and separator of a header line; None for any other line."""
    if STATE_COLUMNS[0] not in line or not any(column in line for column in NODE_COLUMNS):
        return None
    separator = next((pattern for mark, pattern in _SEPARATORS.items() if mark in line), None)
    words = [word.strip() for word in separator.split(line)] if separator else line.split()
    columns = tuple(filter(None, map(_full_column, words)))
    if len(columns) < len(words) or not {*STATE_COLUMNS} & {*columns}:
        return None
    return columns, frozenset(columns) - {*words}, separator


def _full_column(word: str) -> str | None:
    if word in _COLUMNS:
        return word
    matches = sorted(column for column in _COLUMNS if column.startswith(word))
    return matches[0] if matches and len(word) >= _MIN_TRUNCATED_CHARS else None
