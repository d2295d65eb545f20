"""Jobs of a trace as arrays, and the checks that all readers share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from slurmdl.errors import InputError
from slurmdl.text import pluralize, sample_names

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

MAX_RUN_S = 366 * 86400.0  # longer run times are errors of the record
MAX_NAMED_RECORDS = 3  # records that a note names as examples


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

    def selected(self, chosen: npt.NDArray[np.bool_]) -> JobTrace:
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
