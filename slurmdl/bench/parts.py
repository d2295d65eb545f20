"""A benchmark of several parts, of which some may be left out, and its table."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from slurmdl.bench import results
from slurmdl.bench.results import Row
from slurmdl.errors import SlurmdlError, UsageError


@dataclass(frozen=True)
class Bench:
    """What is measured, and how.

    Attributes
    ----------
    name : of its command.
    parts : names, in the order in which they are measured.
    rows : measures a part with a seed.
    versions : of what the figures depend on.
    options : further words of the command.
    positional : the parts are words of the command, not the values of --only.
    """

    name: str
    parts: tuple[str, ...]
    rows: Callable[[str, int], Iterator[Row]]
    versions: Callable[[], Mapping[str, str]]
    options: str = ""
    positional: bool = False

    def run(self, only: Sequence[str], results_file: str | None, seed: int) -> None:
        """Measure the parts in `only` (all by default), print the table, and write the figures where wanted.

        Progress goes to stderr. A part that breaks counts as missed; the others are measured all the same.

        Raises
        ------
        UsageError : a part that does not exist.
        """
        for part in only:
            if part not in self.parts:
                raise UsageError(f"{'' if self.positional else '--only '}{part}: no such part; "
                                 f"valid: {', '.join(self.parts)}")
        found: dict[str, list[Row]] = {}
        for part in only or self.parts:
            began = time.monotonic()
            found[part] = []
            try:
                for row in self.rows(part, seed):
                    found[part].append(row)
                    print(f"{part}: {line(row)}", file=sys.stderr, flush=True)
            except (SlurmdlError, OSError, RuntimeError, subprocess.SubprocessError) as error:
                print(f"{part}: broken off: {error}", file=sys.stderr, flush=True)
                found[part].append(results.row(f"{part}: measured to its end", [0], "", target="1", met=False))
            print(f"{part}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        rows = list(itertools.chain.from_iterable(found.values()))
        print(table(found))
        if results_file:
            chosen = " ".join(only) if self.positional else f"--only {','.join(only)}" if only else ""
            words = [f"slurmdl bench {self.name}", *filter(None, (chosen, self.options))]
            results.write(results_file, rows, seed=seed, versions=self.versions(),
                          command=f"{' '.join(words)} --seed {seed} --results {results_file}")
        else:
            print(results.closing(rows))


def table(found: Mapping[str, Sequence[Row]]) -> str:
    """All parts one below the other, and what missed its target once more at the end."""
    missed = [row for rows in found.values() for row in rows if row.met is False]
    parts = {**found, "missed": missed} if missed else found
    lines = [f"{'':7}{'median':>10} {'beside':>10} unit   what (smallest to largest): target"]
    for part, rows in parts.items():
        lines += ["", part, *map(line, rows)]
    return "\n".join(lines)


def line(row: Row) -> str:
    """One line of the table: whether the target is met, the figure, what it stands beside, what it is, its range and
    its target."""
    verdict = {None: "", True: "met", False: "MISSED"}[row.met]
    target = f": {row.target}" if row.target else ""
    return f"{verdict:7}{row.value:10.4g} {row.beside:>10} {row.unit:6} {row.metric}{row.extremes}{target}"
