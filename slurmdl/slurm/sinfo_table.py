"""Tables that sinfo prints, found in saved text by their header line.

A table has a header of sinfo's column names: NODELIST or HOSTNAMES, STATE or STATECOMPLETE, and any others. So the
default form, `-l`, `-N`, `-N -l`, and own formats of `-o` and `-O` are found, but not a table without header
(`sinfo -h`) or without states (`-s`, `-R`).

Reference: src/sinfo/print.c and opts.c of Slurm (names, widths and justification of columns).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

NODE_COLUMNS = ("NODELIST", "HOSTNAMES")
STATE_COLUMN = "STATE"
STATE_COLUMNS = (STATE_COLUMN, "STATECOMPLETE")
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
_COMMA = re.compile(r",(?![^\[\]]*\])")  # not in the brackets of a hostlist
_SEPARATORS = {"|": re.compile(r"\|"), ",": _COMMA, ";": re.compile(";")}


@dataclass(frozen=True)
class SinfoTable:
    """One table.

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


def parse_table_header(line: str) -> tuple[tuple[str, ...], frozenset[str], re.Pattern[str] | None] | None:
    """Return columns, the ones with a cut-off name, and separator of a header line; None for any other line."""
    if STATE_COLUMN not in line or not any(column in line for column in NODE_COLUMNS):
        return None
    separator = next((pattern for mark, pattern in _SEPARATORS.items() if mark in line), None)
    words = [word.strip() for word in separator.split(line)] if separator else line.split()
    columns = [_full_column(word) for word in words]
    if not all(columns) or not {*STATE_COLUMNS} & {*columns}:
        return None
    cut = frozenset(column for column, word in zip(columns, words, strict=True) if column and column != word)
    return tuple(column for column in columns if column), cut, separator


def _full_column(word: str) -> str | None:
    if word in _COLUMNS:
        return word
    matches = sorted(column for column in _COLUMNS if column.startswith(word))
    return matches[0] if matches and len(word) >= _MIN_TRUNCATED_CHARS else None


def cut_tables(lines: list[str], is_end: re.Pattern[str]) -> list[SinfoTable]:
    """Return the tables in these lines, and replace their lines by empty ones.

    A table ends before an empty line, the next header, or a line that `is_end` matches.
    """
    tables = []
    headers = [(i, header) for i, line in enumerate(lines) if (header := parse_table_header(line))]
    for number, (begin, header) in enumerate(headers):
        last = headers[number + 1][0] if number + 1 < len(headers) else len(lines)
        end = next((i for i in range(begin + 1, last) if not lines[i].strip() or is_end.match(lines[i])), last)
        columns, cut, separator = header
        tables.append(SinfoTable(begin + 1, columns, cut, _numbered(lines, begin + 1, end), separator))
        lines[begin:end] = [""] * (end - begin)
    return tables


def _numbered(lines: Sequence[str], begin: int, end: int) -> tuple[tuple[int, str], ...]:
    return tuple((i + 1, lines[i]) for i in range(begin, end))
