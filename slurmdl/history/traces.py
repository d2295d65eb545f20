"""Job traces as arrays: records of sacct, the Standard Workload Format, CSV, and a generator.

Reference: Chapin et al., Benchmarks and standards for the evaluation of parallel job schedulers, JSSPP 1999, and the
Parallel Workloads Archive (Standard Workload Format).

The generator of rigid parallel jobs has the published parameters of the combined model of batch and interactive jobs
of Lublin and Feitelson, The workload on parallel supercomputers: modeling the characteristics of rigid jobs, Journal
of Parallel and Distributed Computing 63(11), 2003.

Size: serial with a fixed probability; otherwise 2^u with u two-stage uniform, rounded to a power of two with a fixed
probability. Run time: e^g with g hyper-gamma, whose probability of the first gamma falls linearly with the size.
Arrivals: gaps of e^g with g gamma, in a time that passes faster in busy half hours of the day; the numbers of
arrivals per half hour follow a gamma density. Not in the model, and stated in the notes of the trace: time limits
(the run time times a uniform factor, rounded up to minutes) and users (a few of them submit most jobs).
"""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone

import numpy as np

from slurmdl.errors import InputError, UsageError
from slurmdl.history import accounting
from slurmdl.placement.arrays import BoolArray, FloatArray, IntArray
from slurmdl.text import pluralize, sample_names

FORMATS = ("sacct", "swf", "csv")
#: columns of CSV that have a meaning
CSV_FIELDS = ("submit", "start", "end", "run", "limit", "nodes", "cpus", "gpus", "user")
#: lines of a file, which bound the memory
MAX_LINES = 20_000_000
_SWF_FIELDS = 18
_SWF_PARTIAL = ("2", "3", "4")  # status of pieces of a job whose whole has a line of its own
_SWF_HEADER = re.compile(r";\s*(MaxNodes|MaxProcs):\s*([0-9]{1,9})")
MAX_RUN_S = 366 * 86400.0  # longer run times are errors of the record
MAX_NAMED_RECORDS = 3  # records that a note names as examples

# parameters of the generator
SERIAL_PROBABILITY, POWER_OF_TWO_PROBABILITY = 0.244, 0.576
#: two-stage uniform of log2 of the size: lowest value, middle below the highest, probability of the lower stage
LOW, MIDDLE_BELOW_HIGH, LOWER_PROBABILITY = 0.8, 2.5, 0.86
#: shape and scale of the two gammas of ln(run time in s); probability of the first one: slope per node, intercept
RUN_GAMMA_1, RUN_GAMMA_2 = (4.2, 0.94), (312.0, 0.03)
FIRST_SLOPE, FIRST_INTERCEPT = -0.0054, 0.78
MAX_LN_RUN = 12.0
#: shape and scale of the gammas of ln(gap in s) and of the half hour of an arrival, counted from CYCLE_BEGIN
GAP_GAMMA, CYCLE_GAMMA = (10.2303, 0.4871), (8.1737, 3.9631)
MAX_LN_GAP = 13.0
HALF_HOURS, CYCLE_BEGIN = 48, 11
#: time limits are the run time times a uniform factor from 1 to this
MAX_LIMIT_FACTOR = 4.0
USERS = 40



@dataclass(frozen=True, eq=False)
class JobTrace:
    """Jobs in order of submission; arrays of shape (jobs,).

    Attributes:
        submit_s: seconds since the first submission.
        run_s: recorded run time.
        limit_s: time limit, at least the run time.
        nodes: whole nodes.
        user: number of the user, from 0.
        source: file or generator, for messages.
        notes: what was assumed or skipped, one sentence each.
    """

    submit_s: FloatArray
    run_s: FloatArray
    limit_s: FloatArray
    nodes: IntArray
    user: IntArray
    source: str
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.submit_s)

    def load(self, nodes: int) -> float:
        """Node-seconds of all jobs over those of `nodes` nodes from the first to the last submission."""
        span = float(self.submit_s[-1]) if len(self) else 0.0
        return float((self.run_s * self.nodes).sum()) / (span * nodes) if span else 0.0

    def scaled_to_load(self, load: float, nodes: int) -> JobTrace:
        """The same jobs with all times between submissions multiplied, so that `load(nodes)` is `load`."""
        factor = self.load(nodes) / load
        note = f"times between submissions multiplied by {factor:.3g} for a load of {load:g}"
        return replace(self, submit_s=self.submit_s * factor, notes=(*self.notes, note))

    def without_jobs_above(self, nodes: int) -> JobTrace:
        """Skip the jobs that need more nodes than the cluster has; InputError if none is left."""
        fits = self.nodes <= nodes
        if fits.all():
            return self
        note = (f"{pluralize(int((~fits).sum()), 'job')} skipped: more than the cluster's {nodes:,} nodes, up to "
                f"{int(self.nodes.max()):,}")
        if not fits.any():
            raise InputError(f"no usable job: {note}", self.source)
        return replace(self.selected(fits), notes=(*self.notes, note))

    def selected(self, chosen: BoolArray) -> JobTrace:
        """Some of the jobs, at least one; shape (jobs,)."""
        submit = self.submit_s[chosen]
        return JobTrace(submit - submit[0], self.run_s[chosen], self.limit_s[chosen], self.nodes[chosen],
                        self.user[chosen], self.source, self.notes)

    def first(self, jobs: int) -> JobTrace:
        """The first `jobs` jobs; 0 for all."""
        if not 0 < jobs < len(self):
            return self
        part = self.selected(np.arange(len(self)) < jobs)
        return replace(part, notes=(*self.notes, f"the first {jobs:,} of {len(self):,} jobs"))


@dataclass
class TraceBuilder:
    """Collects records of a source, counts the skipped ones by reason, and makes the trace."""

    source: str
    rows: list[tuple[float, float, float, int, str]] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    remarks: Counter[str] = field(default_factory=Counter)

    def skip(self, reason: str, record: str) -> None:
        """Count a record that is not used; `record` names it, e.g. `line 7`."""
        self.skipped[reason] += 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) <= MAX_NAMED_RECORDS:
            examples.append(record)

    def add(self, record: str, submit_s: float, run_s: float, limit_s: float, nodes: int, user: str) -> None:
        """Add a job, or skip it if its values are impossible; a limit of 0 or less is unknown."""
        if not np.isfinite(submit_s):
            self.skip("no time of submission", record)
        elif not 0 < run_s <= MAX_RUN_S:
            self.skip(f"run time not above 0 s or above {MAX_RUN_S / 86400:g} days", record)
        elif nodes < 1:
            self.skip("no nodes", record)
        else:
            if limit_s <= 0:
                self.remarks["without a time limit: the run time is taken as the limit"] += 1
            elif limit_s < run_s:
                self.remarks["ran longer than the time limit: the run time is taken as the limit"] += 1
            self.rows.append((submit_s, run_s, max(limit_s, run_s), nodes, user))

    def build(self, notes: Sequence[str] = ()) -> JobTrace:
        """Return the trace in order of submission; InputError if no record is usable."""
        said = [*notes, *(f"{pluralize(count, 'record')} skipped, {reason}: "
                          f"{sample_names(self.examples[reason], MAX_NAMED_RECORDS)}"
                          for reason, count in self.skipped.items()),
                *(f"{pluralize(count, 'job')} {remark}" for remark, count in self.remarks.items())]
        if not self.rows:
            raise InputError(f"no usable job{': ' * bool(said)}{'; '.join(said)}", self.source)
        submit, run, limit, nodes = np.array([row[:4] for row in self.rows], float).T
        backwards = int((np.diff(submit) < 0).sum())
        if backwards:
            said.append(f"submission times go backwards at {pluralize(backwards, 'record')}: sorted")
        users = {name: i for i, name in enumerate(dict.fromkeys(row[4] for row in self.rows))}
        user = np.array([users[row[4]] for row in self.rows], np.int64)
        order = np.argsort(submit, kind="stable")
        return JobTrace(submit[order] - submit[order[0]], run[order], limit[order], nodes[order].astype(np.int64),
                        user[order], self.source, tuple(said))


def parse_column_map(text: str) -> dict[str, str]:
    """Parse `submit=submit_time,run=duration,...`; UsageError for an unknown field."""
    columns = {}
    for part in filter(None, text.split(",")):
        name, separator, column = part.partition("=")
        if name not in CSV_FIELDS or not separator or not column:
            raise UsageError(f"--columns {part}: expected FIELD=COLUMN with one of {', '.join(CSV_FIELDS)}")
        columns[name] = column
    return columns


def read_trace(path: str, kind: str = "", columns: Mapping[str, str] | None = None, cpus_per_node: int = 0,
               gpus_per_node: int = 0) -> JobTrace:
    """Read a trace file, which may be compressed by gzip; InputError if it cannot be read or has no usable job.

    Args:
        kind: one of FORMATS, "" to recognize it by its content.
        columns: field of CSV_FIELDS -> name of the column of a CSV file, if not the same.
        cpus_per_node, gpus_per_node: convert processors and GPUs to whole nodes; 0 if not given.
    """
    with accounting.open_text(path) as text:
        start = accounting.read_start(text)
        name = kind or _recognize_format(start.strip())
        if name == "sacct":
            return trace_from_table(accounting.read_accounting_text(text, path, start))
        lines = _limited(itertools.chain(io.StringIO(start.lstrip()), accounting.bounded_lines(text)), path)
        if name == "swf":
            return _read_swf(lines, path, cpus_per_node)
        return _read_csv(lines, path, columns or {}, {"nodes": 1, "gpus": gpus_per_node, "cpus": cpus_per_node})


def _limited(lines: Iterator[str], path: str) -> Iterator[str]:
    """Yield the lines; InputError beyond MAX_LINES of them."""
    yield from itertools.islice(lines, MAX_LINES)
    if next(lines, ""):
        raise InputError(f"more than {MAX_LINES:,} lines; expected a shorter period", path)


def _recognize_format(line: str) -> str:
    """The format of a file by its first line that is not blank."""
    if line.startswith(";") or (len(line.split()) == _SWF_FIELDS and _number(line.split()[0]) is not None):
        return "swf"
    return "sacct" if line.startswith(("{", "[")) or "|" in line else "csv"


def trace_from_table(table: accounting.JobTable) -> JobTrace:
    """The jobs of accounting records that ran; each array task, component and run of a requeued job is a job."""
    builder = TraceBuilder(table.source)
    notes = [*(str(problem) for problem in table.problems), *table.notes]
    requeued = len(table) - len(set(table.job_ids))
    if requeued:
        notes.append(f"{pluralize(requeued, 'record')} of requeued jobs: each run is a job")
    tasks = sum("_" in job_id for job_id in table.job_ids)
    if tasks:
        notes.append(f"{pluralize(tasks, 'array task')}: each is a job")
    columns = zip(table.job_ids, table.submit_s.tolist(), table.start_s.tolist(), table.end_s.tolist(),
                  table.limit_s.tolist(), table.nodes.tolist(), table.user.tolist(), table.hostlist.tolist(),
                  strict=True)
    for job_id, submit, start, end, limit, nodes, user, hostlist in columns:
        if start < 0 or hostlist < 0:
            builder.skip("never started", f"job {job_id}")
        elif end < 0:
            builder.skip("still running", f"job {job_id}")
        else:
            if submit < 0:
                builder.remarks["without a time of submission: the start is taken"] += 1
            builder.add(f"job {job_id}", start if submit < 0 else submit, end - start, limit, nodes,
                        table.users[user])
    return builder.build(notes)


def _read_swf(lines: Iterator[str], path: str, cpus_per_node: int) -> JobTrace:
    builder, per_node, header = TraceBuilder(path), cpus_per_node, dict[str, int]()
    for number, line in enumerate(lines, 1):
        record, text = f"line {number}", line.strip()
        if not text:
            continue
        if text.startswith(";"):
            if match := _SWF_HEADER.match(text):
                header[match[1]] = int(match[2])
            continue
        fields = text.split()
        values = [_number(field) for field in fields]
        if len(fields) != _SWF_FIELDS or None in values:
            builder.skip(f"not {_SWF_FIELDS} numbers", record)
            continue
        submit, run, allocated, requested, limit = (values[i] or 0.0 for i in (1, 3, 4, 7, 8))
        if fields[10] in _SWF_PARTIAL:
            builder.skip("a part of a job", record)
        elif submit < 0:
            builder.skip("no time of submission", record)
        else:
            per_node = per_node or max(1, header.get("MaxProcs", 1) // max(1, header.get("MaxNodes", 1)))
            builder.add(record, submit, run, limit, _whole_nodes(allocated if allocated > 0 else requested, per_node),
                        fields[11])
    how = "--cpus-per-node" if cpus_per_node else "MaxProcs / MaxNodes of the header" \
        if {"MaxProcs", "MaxNodes"} <= header.keys() else "as the header does not say"
    return builder.build([f"{per_node or 1} processors per node ({how}), jobs take whole nodes"])


def _read_csv(lines: Iterator[str], path: str, columns: Mapping[str, str], per_node: Mapping[str, int]) -> JobTrace:
    """`per_node`: column of a size -> its units per node."""
    builder = TraceBuilder(path)
    rows = csv.reader(lines)
    try:
        header = next(rows, [])
    except csv.Error as error:
        raise InputError(f"not CSV ({error})", path, 1) from error
    index = {name: header.index(column) for name in CSV_FIELDS
             if (column := columns.get(name, name)) in header}
    for name, column in columns.items():
        if name not in index:
            raise InputError(f"no column {column!r} ({name}); the header has {', '.join(header[:20])}", path, 1)
    size = next((name for name in per_node if name in index), "")
    if "submit" not in index or not ("run" in index or {"start", "end"} <= index.keys()) or not size:
        raise InputError("expected columns submit, run (or start and end) and nodes (or gpus, cpus); name them by "
                         f"--columns submit=COLUMN,...; the header has {', '.join(header[:20])}", path, 1)
    if not per_node[size]:
        raise UsageError(f"--{size}-per-node: needed to convert the column {header[index[size]]} to nodes")
    while True:
        try:
            row = next(rows, None)
        except csv.Error as error:
            builder.skip(f"not CSV ({error})", f"line {rows.line_num}")
            continue
        if row is None:
            break
        record = f"line {rows.line_num}"
        if len(row) != len(header):
            if row:
                builder.skip(f"not {len(header)} fields", record)
            continue
        values = {name: row[i] for name, i in index.items()}
        times = {name: _parse_time(values.get(name, "")) for name in ("submit", "start", "end")}
        run = _number(values["run"]) if "run" in values else \
            times["end"] - times["start"] if times["end"] is not None and times["start"] is not None else None
        count = _number(values[size])
        if times["submit"] is None or run is None or count is None:
            builder.skip("an unreadable time or number", record)
            continue
        limit = _number(values.get("limit", "")) or 0.0
        builder.add(record, times["submit"], run, limit, _whole_nodes(count, per_node[size]), values.get("user", ""))
    return builder.build(["jobs take whole nodes"])


def _whole_nodes(count: float, per_node: int) -> int:
    return math.ceil(min(count, 1e9) / per_node) if count > 0 else 0


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _parse_time(text: str) -> float | None:
    """Seconds of a number, or of an ISO time; a time without zone is UTC, since only differences count."""
    seconds = _number(text)
    if seconds is not None:
        return seconds
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        return None
    try:
        return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()
    except (OverflowError, OSError):
        return None


def generate_lublin_trace(jobs: int, nodes: int, load: float, seed: int) -> JobTrace:
    """Generate a trace whose load (JobTrace.load) on `nodes` nodes is `load`, with the daily cycle unscaled."""
    if jobs < 2:
        raise UsageError(f"--jobs {jobs}: expected a number from 2")
    if nodes < 2:
        raise UsageError(f"a cluster of {nodes}: the generator of jobs expects at least 2 nodes")
    generator = np.random.default_rng(seed)
    sizes = draw_sizes(generator, jobs, nodes)
    run_s = draw_run_times(generator, sizes)
    span_s = float((run_s * sizes).sum()) / (nodes * load)
    submit_s = _draw_arrivals(generator, jobs, span_s)
    limit_s = np.ceil(run_s * generator.uniform(1, MAX_LIMIT_FACTOR, jobs) / 60) * 60
    weight = 1 / np.arange(1, USERS + 1)
    user = generator.choice(USERS, jobs, p=weight / weight.sum())
    return JobTrace(submit_s, run_s, limit_s, sizes, user.astype(np.int64), f"Lublin-Feitelson, seed {seed}",
                    (f"generated: {jobs:,} jobs, load {load:g}, limits of 1 to {MAX_LIMIT_FACTOR:g} run times, "
                     f"{USERS} users",))


def draw_sizes(generator: np.random.Generator, jobs: int, nodes: int) -> IntArray:
    """Numbers of nodes, shape (jobs,)."""
    high = math.log2(nodes)
    middle = max(high - MIDDLE_BELOW_HIGH, LOW)
    is_lower = generator.random(jobs) < LOWER_PROBABILITY
    low = np.where(is_lower, min(LOW, high), middle)
    exponent = generator.uniform(low, np.where(is_lower, middle, high))
    exponent = np.where(generator.random(jobs) < POWER_OF_TWO_PROBABILITY, np.round(exponent), exponent)
    size = np.clip(np.round(2.0 ** exponent), 2, nodes)
    return np.where(generator.random(jobs) < SERIAL_PROBABILITY, 1, size).astype(np.int64)


def draw_run_times(generator: np.random.Generator, sizes: IntArray) -> FloatArray:
    """Run times in whole seconds from 1, shape (jobs,); values above e^12 s are drawn again."""
    first = np.clip(FIRST_SLOPE * sizes + FIRST_INTERCEPT, 0, 1)
    logarithm = np.full(len(sizes), np.inf)
    while (again := logarithm > MAX_LN_RUN).any():
        is_first = generator.random(len(sizes)) < first
        drawn = np.where(is_first, generator.gamma(*RUN_GAMMA_1, len(sizes)),
                         generator.gamma(*RUN_GAMMA_2, len(sizes)))
        logarithm = np.where(again, drawn, logarithm)
    return np.asarray(np.maximum(1.0, np.round(np.exp(logarithm))))


def daily_weights() -> FloatArray:
    """Share of the arrivals in each half hour of the day, from midnight; shape (48,)."""
    shape, scale = CYCLE_GAMMA
    x = np.arange(HALF_HOURS) + 0.5
    density = np.exp((shape - 1) * np.log(x) - x / scale - math.lgamma(shape) - shape * math.log(scale))
    return np.asarray(np.roll(density / density.sum(), CYCLE_BEGIN))


def _draw_arrivals(generator: np.random.Generator, jobs: int, span_s: float) -> FloatArray:
    """Times of submission from 0 to `span_s`, shape (jobs,), the day beginning at midnight."""
    logarithm = np.minimum(generator.gamma(*GAP_GAMMA, jobs - 1), MAX_LN_GAP)
    busy = np.concatenate([[0.0], np.cumsum(np.exp(logarithm))])
    days = int(span_s // 86400) + 1
    border_s = np.arange(days * HALF_HOURS + 1) * (86400 / HALF_HOURS)
    # share of busy time that has passed at each border of a half hour
    passed = np.concatenate([[0.0], np.cumsum(np.tile(daily_weights(), days))])
    end = np.interp(span_s, border_s, passed)
    return np.asarray(np.interp(busy / busy[-1] * end, passed, border_s))
