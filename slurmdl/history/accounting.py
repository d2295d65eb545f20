"""Job records of sacct, as arrays: one row per job, array task or run of a requeued job.

Facts of the format: sacct(1), and src/sacct/print.c and src/common/parse_time.c of Slurm.
"""

from __future__ import annotations

import gzip
import io
import itertools
import os
import re
import time
import zlib
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import comb
from typing import NoReturn, TextIO

import numpy as np
import numpy.typing as npt

from slurmdl import files
from slurmdl.errors import InputError
from slurmdl.history.sacct_format import TimestampParser, job_fields, parse_time_limit
from slurmdl.placement.arrays import BoolArray, IntArray
from slurmdl.slurm import process
from slurmdl.slurm.hostlist import expand_hostlist
from slurmdl.text import pluralize, truncate

Int32Array = npt.NDArray[np.int32]

#: columns that `slurmdl audit` requests from sacct
SACCT_COLUMNS = ("JobID", "User", "Partition", "State", "Submit", "Start", "End", "Timelimit", "NNodes", "NCPUS",
                 "NodeList")
#: command that saves the records that are read here
SACCT_COMMAND = f"sacct -a -X -P -D -S now-7days -o {','.join(SACCT_COLUMNS)}"
_NEEDED = ("jobid", "start", "end", "nodelist")
#: other names of columns
_SAME_COLUMN = {"jobidraw": "jobid", "allocnodes": "nnodes", "alloccpus": "ncpus"}
#: a job, an array task or several tasks that wait, and a component of a heterogeneous job
_JOB_ID = re.compile(r"[0-9]+(?:_[0-9]+|_\[[^\[\]]*\])?(?:\+[0-9]+)?")
#: the first two names of a header and the delimiter between them, which `sacct --delimiter` sets
_HEADER_START = re.compile(r"[A-Za-z][A-Za-z0-9]*([^A-Za-z0-9]+)[A-Za-z]")
#: columns that may contain the delimiter, because users write them
_FREE_TEXT = frozenset({"jobname", "comment", "admincomment", "systemcomment", "workdir", "submitline", "container",
                        "extra", "stdin", "stdout", "stderr", "wckey"})
#: columns that Slurm separates by commas
_COMMA_LISTS = frozenset({"nodelist", "partition", "alloctres", "reqtres", "flags", "licenses", "constraints",
                          "reservation", "qosreq"})
_MAX_REPAIRS = 1_000  # ways to assign the fields of a record to its columns
_STATE = re.compile(r"[A-Z_]*(?: by .+|\+)?")
_USER = re.compile(r"[\w.@\\-]*\$?")
_COUNT = re.compile(r"[0-9]+(?:\.[0-9]+)?[KMG]?")
_NO_NODES = frozenset({"", "None assigned", "None", "(null)", "Unknown"})
#: variables of Slurm that a query keeps: where the cluster is, and how to log in
_KEPT_VARIABLES = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_SACK_KEY", "SLURM_SACK_JWKS")
QUERY_TIMEOUT_S = 600.0
_MAX_LINE_CHARS = 2**20
_MAX_HEADER_LINES = 50  # lines before the header, such as warnings
#: bounds of the memory: 0.6 GB per million records, and the text of distinct node lists
_MAX_RECORDS = 20_000_000


@dataclass(frozen=True)
class RecordProblem:
    """A kind of record that is not used, or used in part.

    Attributes:
        kind: what is wrong, e.g. "fewer fields than the header".
        effect: what was done about it.
        line: number of the first such line, from 1.
        example: content of this line, or the field that is wrong.
    """

    kind: str
    effect: str
    count: int
    line: int
    example: str

    def __str__(self) -> str:
        return (f"{pluralize(self.count, 'record')} with {self.kind}: {self.effect}; the first is line "
                f"{self.line:,}: {self.example!r}")


@dataclass(frozen=True, eq=False)
class JobTable:
    """Records in the order of their source; arrays have shape (records,).

    A requeued job has one record per run. Components of heterogeneous jobs, and array tasks, are jobs of their own.

    Attributes:
        job_ids: as in Slurm, e.g. "123", "123_4", "123+0", or "123_[5-9]" for tasks that are not yet submitted.
        user, partition, state: indices in `users`, `partitions` and `states`.
        submit_s, start_s, end_s: epoch seconds, -1 if unknown: the job has not started, or not ended. A job that was
            cancelled while it waited has an end only.
        limit_s: time limit in seconds, -1 if unlimited or unknown.
        nodes: number of nodes, of a job without nodes the requested number; 0 if unknown. Counted in the node list if
            sacct gives none, or rounded it to "1K".
        cpus: number of CPUs, 0 if unknown.
        hostlist: index in `hostlists`, -1 without nodes.
        users, partitions, states: names; states are Slurm's, without "by 1000" of CANCELLED.
        hostlists: distinct node lists, unchecked.
        source: file name, or "sacct".
        problems: records that are not used, or used in part.
        notes: assumptions, one sentence each.
    """

    job_ids: tuple[str, ...]
    user: Int32Array
    partition: Int32Array
    state: Int32Array
    submit_s: IntArray
    start_s: IntArray
    end_s: IntArray
    limit_s: IntArray
    nodes: Int32Array
    cpus: Int32Array
    hostlist: Int32Array
    users: tuple[str, ...]
    partitions: tuple[str, ...]
    states: tuple[str, ...]
    hostlists: tuple[str, ...]
    source: str
    problems: tuple[RecordProblem, ...] = ()
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.job_ids)

    @property
    def has_run(self) -> BoolArray:
        """Whether a job has started and has nodes."""
        return np.asarray((self.start_s >= 0) & (self.hostlist >= 0))

    def select(self, rows: BoolArray) -> JobTable:
        """The records of a mask, with the same names."""
        index = np.flatnonzero(rows)
        arrays = {name: getattr(self, name)[index] for name in (
            "user", "partition", "state", "submit_s", "start_s", "end_s", "limit_s", "nodes", "cpus", "hostlist")}
        return replace(self, job_ids=tuple(self.job_ids[i] for i in index.tolist()), **arrays)


@contextmanager
def open_text(path: str) -> Iterator[TextIO]:
    """A text file of records, which may be compressed; InputError if it cannot be read, and as `decoded_text`."""
    try:
        with open(path, "rb") as file, decoded_text(file, path) as text:
            yield text
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror or error})", file=path) from error
    except ValueError as error:
        if "\0" not in path:
            raise
        raise InputError("cannot be read (its name holds a NUL byte)", file=path.replace("\0", "?")) from error


@contextmanager
def decoded_text(file: io.BufferedReader, source: str) -> Iterator[TextIO]:
    """The text of an open file, unpacked if gzip compressed it.

    Raises InputError if it is damaged or unpacks to more than files.MAX_UNPACKED_BYTES.
    """
    try:
        # bytes that are not UTF-8 can occur in names only
        yield io.TextIOWrapper(files.unpacked(file, source), encoding="utf-8-sig", errors="replace", newline="\n")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"is damaged ({error})", file=source) from error


def bounded_lines(text: TextIO) -> Iterator[str]:
    """The lines; longer ones than _MAX_LINE_CHARS in pieces."""
    return iter(partial(text.readline, _MAX_LINE_CHARS), "")


def read_start(text: TextIO) -> str:
    """The text up to the first line that is not blank, at most _MAX_HEADER_LINES lines."""
    start = ""
    for line in itertools.islice(bounded_lines(text), _MAX_HEADER_LINES):
        start += line
        if line.strip():
            break
    return start


def read_accounting_text(text: TextIO, source: str, start: str) -> JobTable:
    """Read the output of `sacct -P` or `sacct --json`; InputError as `read_job_records`.

    `start` is what `read_start` returned.
    """
    if "\0" in start:
        raise InputError("is not text; expected the output of `sacct -P` or `sacct --json`", source)
    if not start.lstrip().startswith(("{", "[")):
        return read_job_records(itertools.chain(io.StringIO(start), bounded_lines(text)), source)
    jobs = job_fields(text, start, source, SACCT_COLUMNS)
    return _RecordReader(source).read(((line, "\x1f".join(fields)) for line, fields in jobs),
                                      _Header("\x1f", SACCT_COLUMNS))


def read_accounting_file(path: str) -> JobTable:
    """Read the saved output of sacct; InputError if it cannot be read, or as `read_accounting_stream`."""
    with open_text(path) as text:
        return read_accounting_text(text, path, read_start(text))


def read_accounting_stream(file: io.BufferedReader, source: str) -> JobTable:
    """Read the output of sacct from an open file; InputError as `decoded_text` and `read_accounting_text`."""
    with decoded_text(file, source) as text:
        return read_accounting_text(text, source, read_start(text))


def read_job_records(lines: Iterable[str], source: str) -> JobTable:
    """Read lines of `sacct -P` with a header; the columns may have any order, and steps are skipped.

    The delimiter is that of the header. Raises InputError if the header is missing or lacks JobID, Start, End or
    NodeList, if there are more than _MAX_RECORDS records, or if none is usable.
    """
    return _RecordReader(source).read(enumerate(lines, 1))


def query_accounting(since_s: int, until_s: int) -> JobTable:
    """Records of all jobs that ran or waited in a period, from `sacct`.

    Raises UnavailableError if sacct is missing, hangs or fails, and InputError as `read_job_records`.
    """
    # sacct reads local times; these are times of its TZ, which is this process's
    period = [f"-{option}{time.strftime('%FT%T', time.localtime(seconds))}"
              for option, seconds in (("S", since_s), ("E", until_s))]
    argv = ["sacct", "-a", "-X", "-P", "-D", *period, "-o", ",".join(SACCT_COLUMNS)]
    # epoch seconds and English words, whatever the user has set
    kept = {name: value for name, value in os.environ.items()
            if not name.startswith(("SLURM_", "SACCT_", "LC_")) or name in _KEPT_VARIABLES}
    lines = process.stream_lines(argv, stdin="", timeout=QUERY_TIMEOUT_S,
                                 env={**kept, "LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"})
    return read_job_records(lines, "sacct")


class _Header:
    """Names of the columns of the records that follow.

    Attributes:
        index: index of each column by its name in lower case; of columns with the same meaning the first one.
        positions: index of each of SACCT_COLUMNS; the number of columns for a column that does not exist.
        absent: necessary columns that do not exist.
        free: indices of the columns that may contain the delimiter.
    """

    def __init__(self, delimiter: str, names: Sequence[str]) -> None:
        self.delimiter, self.names = delimiter, tuple(names)
        self.index: dict[str, int] = {}
        for i, name in enumerate(names):
            self.index.setdefault(_SAME_COLUMN.get(name.lower(), name.lower()), i)
        self.positions = [self.index.get(name.lower(), len(names)) for name in SACCT_COLUMNS]
        self.absent = [name for name in SACCT_COLUMNS if name.lower() in _NEEDED and name.lower() not in self.index]
        may_contain = _FREE_TEXT | _COMMA_LISTS if delimiter == "," else _FREE_TEXT
        self.free = [i for i, name in enumerate(names) if name.lower() in may_contain]


def _new_names() -> dict[str, int]:
    """A map of distinct strings to their numbers, in order of appearance."""
    names: defaultdict[str, int] = defaultdict()
    names.default_factory = names.__len__
    return names


class _RecordReader:
    """Reader of one source; see `read_job_records`."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.times = TimestampParser()
        #: (kind, effect) -> the first such problem, and how often
        self.problems: dict[tuple[str, str], RecordProblem] = {}
        self.counts: Counter[tuple[str, str]] = Counter()
        self.users, self.partitions, self.states, self.hostlists = (_new_names() for _ in range(4))
        self.job_ids: list[str] = []
        self.line_numbers, self.int32_columns = array("q"), [array("i") for _ in range(6)]
        self.int64_columns = [array("q") for _ in range(4)]
        self.limits: dict[str, int] = {}
        self.het_components = 0
        #: columns that contain the delimiter -> (records, line of the first)
        self.repaired: dict[str, tuple[int, int]] = {}

    def read(self, numbered: Iterator[tuple[int, str]], header: _Header | None = None) -> JobTable:
        """Read (line number, line) of all records, after their header if that is not given."""
        header = header or self._read_header(numbered)
        self._read_records(numbered, header)
        if not self.job_ids:
            self._raise_nothing_usable()
        missing = [name for name in SACCT_COLUMNS if name.lower() not in header.index]
        table = self._without_repeats(self._build_table(missing))
        return replace(table, problems=self._all_problems())

    def _build_table(self, missing: Sequence[str]) -> JobTable:
        notes = [f"no column {', '.join(missing)}: taken as unknown"] if missing else []
        if self.times.has_local_times:
            notes.append(f"times without zone are read in this machine's time zone, {'/'.join(time.tzname)}: set TZ "
                         "to the cluster's if it differs; a time that occurs twice, when clocks go back, is the "
                         "first one, unless the job would end before its start")
        if self.het_components:
            notes.append(f"{pluralize(self.het_components, 'component')} of heterogeneous jobs: each is taken as a "
                         "job")
        for columns, (count, number) in self.repaired.items():
            notes.append(f"{pluralize(count, 'record')} with the delimiter in {columns}: read as one field; the "
                         f"first is line {number:,}")
        user, partition, state, nodes, cpus, hostlist = (
            np.frombuffer(column, np.int32) for column in self.int32_columns)
        submit, start, end, limit = (np.frombuffer(column, np.int64) for column in self.int64_columns)
        hostlists = tuple(self.hostlists)
        return JobTable(tuple(self.job_ids), user, partition, state, submit, start, end, limit,
                        _filled_node_counts(nodes, hostlist, hostlists), cpus, hostlist, tuple(self.users),
                        tuple(self.partitions), tuple(self.states), hostlists, self.source,
                        notes=tuple(notes))

    def _read_header(self, numbered: Iterator[tuple[int, str]]) -> _Header:
        """InputError if there is no header, or if a necessary column is missing."""
        first = ""
        for number, line in numbered:
            text = line.rstrip("\r\n")
            start = _HEADER_START.match(text)
            header = _Header(start[1], text.split(start[1])) if start else _Header("|", text.split("|"))
            if len(header.absent) == len(_NEEDED) and "|" in text:
                header = _Header("|", text.split("|"))
            if len(header.absent) < len(_NEEDED) or "|" in text:
                if not header.delimiter.strip(" "):
                    raise InputError(f"columns that are separated by blanks; expected the output of "
                                     f"`{SACCT_COMMAND}`", self.source, number, line)
                if header.absent:
                    raise InputError(f"the header has no column {', '.join(header.absent)}; expected the output of "
                                     f"`{SACCT_COMMAND}`, without -n", self.source, number, line)
                return header
            first = first or line
            if number >= _MAX_HEADER_LINES:
                break
        if not first:
            raise InputError(f"is empty; expected the output of `{SACCT_COMMAND}`", self.source)
        raise InputError(f"no header of sacct; expected the output of `{SACCT_COMMAND}` or `sacct --json`",
                         self.source, 1, first)

    def _read_records(self, numbered: Iterator[tuple[int, str]], header: _Header) -> None:
        """Read the records after the header. This loop runs a million times: it avoids calls."""
        get, width, delimiter = header.positions, len(header.names), header.delimiter
        parse = self.times.parse
        for number, line in numbered:
            fields = line.rstrip("\r\n").split(delimiter)
            if "NodeList" in fields:  # the header of another output that was appended
                header = _Header(delimiter, fields)
                if header.absent:
                    raise InputError("a second header without JobID, Start, End or NodeList", self.source, number,
                                     line)
                get, width = header.positions, len(fields)
                continue
            if len(fields) > width:
                fields = self._repaired(fields, header, number)
            if len(fields) != width:
                if line.strip():
                    kind = "fewer" if len(fields) < width else "more"
                    self._add_problem(f"{kind} fields than the header", "not used", number, line)
                continue
            fields.append("")  # for a column that does not exist
            (job_id, user, partition, state, submit_text, start_text, end_text, limit_text, node_text, cpu_text,
             nodelist) = [fields[i] for i in get]
            if "." in job_id:
                continue  # a step
            if not _JOB_ID.fullmatch(job_id):
                self._add_problem("an unreadable JobID", "not used", number, job_id)
                continue
            try:
                start, end = parse(start_text), parse(end_text)
            except ValueError:
                self._add_problem("an unreadable Start or End", "not used", number, f"{start_text}, {end_text}")
                continue
            try:
                submit = parse(submit_text)
            except ValueError:
                self._add_problem("an unreadable Submit", "taken as unknown", number, submit_text)
                submit = -1
            if 0 <= start < submit:
                start = self.times.second_occurrence(start_text, start)
                if start < submit:
                    self._add_problem("Start before Submit", "Submit taken as unknown", number,
                                      f"{submit_text}, {start_text}")
                    submit = -1
            if 0 <= end < start:
                end = self.times.second_occurrence(end_text, end)
                if end < start:
                    self._add_problem("End before Start", "not used", number, f"{start_text}, {end_text}")
                    continue
            limit = self.limits.get(limit_text)
            if limit is None:
                limit = self._parse_limit(limit_text, number)
            if nodelist in _NO_NODES:
                hostlist = -1
                if end > start >= 0:
                    self._add_problem("a run time but no nodes", "not used as a run", number, line)
            else:
                hostlist = self.hostlists[nodelist]
            self.het_components += "+" in job_id
            if len(self.job_ids) == _MAX_RECORDS:
                raise InputError(f"more than {_MAX_RECORDS:,} records; expected a shorter period (sacct -S, -E)",
                                 self.source, number)
            self.job_ids.append(job_id)
            self.line_numbers.append(number)
            values = (self.users[user], self.partitions[partition], self.states[state.partition(" ")[0].upper()],
                      int(node_text) if node_text.isdecimal() and len(node_text) < 9 else 0,
                      int(cpu_text) if cpu_text.isdecimal() and len(cpu_text) < 10 else 0, hostlist)
            for column, value in zip(self.int32_columns, values, strict=True):
                column.append(value)
            for column, value in zip(self.int64_columns, (submit, start, end, limit), strict=True):
                column.append(value)

    def _repaired(self, fields: list[str], header: _Header, number: int) -> list[str]:
        """The fields of a record whose text contains the delimiter; unchanged if they have several or no meanings."""
        extra, free = len(fields) - len(header.names), header.free
        if not free or comb(extra + len(free) - 1, extra) > _MAX_REPAIRS:
            return fields
        found = []
        for columns in itertools.combinations_with_replacement(free, extra):
            joined, position = [], 0
            more = Counter(columns)
            for i in range(len(header.names)):
                end = position + more[i] + 1
                joined.append(header.delimiter.join(fields[position:end]))
                position = end
            if len(free) == 1 or _is_plausible(joined, header):
                found.append((joined, sorted(more)))
        if len(found) != 1:
            return fields
        joined, indices = found[0]
        names = ", ".join(header.names[i] for i in indices if header.names[i].lower() not in _COMMA_LISTS)
        if names and "." not in joined[header.index["jobid"]]:
            count, first = self.repaired.get(names, (0, number))
            self.repaired[names] = count + 1, first
        return joined

    def _parse_limit(self, text: str, number: int) -> int:
        try:
            limit = parse_time_limit(text)
        except ValueError:
            self._add_problem("an unreadable Timelimit", "taken as unknown", number, text)
            return -1
        self.limits[text] = limit
        return limit

    def _without_repeats(self, table: JobTable) -> JobTable:
        """Keep one record of each run; a run appears twice if outputs overlap, the second time with its end."""
        ids = np.fromiter(map(hash, table.job_ids), np.int64, len(table))
        # the record to keep comes last
        order = np.lexsort((np.arange(len(table)), table.end_s, table.start_s, ids))
        same = (ids[order[1:]] == ids[order[:-1]]) & (table.start_s[order[1:]] == table.start_s[order[:-1]])
        repeated = np.zeros(len(table), bool)
        repeated[order[:-1][same]] = True
        if not repeated.any():
            return table
        first = int(np.flatnonzero(repeated)[0])
        self._add_problem("the JobID and Start of another record", "the later End is used", self.line_numbers[first],
                          table.job_ids[first], int(repeated.sum()))
        return table.select(~repeated)

    def _add_problem(self, kind: str, effect: str, number: int, example: str, count: int = 1) -> None:
        key = (kind, effect)
        if key not in self.problems:
            self.problems[key] = RecordProblem(kind, effect, 0, number, truncate(" ".join(example.split()), 100))
        self.counts[key] += count

    def _all_problems(self) -> tuple[RecordProblem, ...]:
        return tuple(replace(problem, count=self.counts[key]) for key, problem in self.problems.items())

    def _raise_nothing_usable(self) -> NoReturn:
        problems = self._all_problems()
        if any("Start or End" in problem.kind for problem in problems):
            raise InputError("no record has a readable time; expected ISO 8601 or epoch seconds: set "
                             "SLURM_TIME_FORMAT=standard for sacct", self.source, problems[0].line)
        reasons = "; ".join(map(str, problems)) or "none follows the header"
        raise InputError(f"no usable record: {reasons}", self.source)


def _is_plausible(fields: Sequence[str], header: _Header) -> bool:
    """Whether all fields of known columns have the form of their column."""
    job_id, user, partition, state, submit, start, end, limit, nodes, cpus, nodelist = (
        [*fields, ""][i] for i in header.positions)
    if not (_STATE.fullmatch(state) and _USER.fullmatch(user)
            and all(not text or _COUNT.fullmatch(text) for text in (nodes, cpus))
            and ("." in job_id or _JOB_ID.fullmatch(job_id))
            # only a job that waits has several partitions
            and ("," not in partition or nodelist in _NO_NODES)):
        return False
    times = TimestampParser()
    try:
        for text in (submit, start, end):
            times.parse(text)
        parse_time_limit(limit)
        names = [] if nodelist in _NO_NODES else expand_hostlist(nodelist)
    except (ValueError, InputError):
        return False
    return not names or not nodes.isdecimal() or len(names) == int(nodes)


def _filled_node_counts(nodes: Int32Array, hostlist: Int32Array, hostlists: Sequence[str]) -> Int32Array:
    """The node counts, with those of the node lists where they are 0."""
    unknown = np.flatnonzero((nodes == 0) & (hostlist >= 0))
    if not len(unknown):
        return nodes
    filled = nodes.copy()
    counts: dict[int, int] = {}
    for i, index in zip(unknown.tolist(), hostlist[unknown].tolist(), strict=True):
        if index not in counts:
            try:
                counts[index] = len(expand_hostlist(hostlists[index]))
            except InputError:
                counts[index] = 0
        filled[i] = counts[index]
    return filled
