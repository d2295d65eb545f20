"""Figures in the documentation: each is a row of results/*.json, or its page says what it is instead.

A figure is a number with a unit of time, bytes, rate or percent, or with "times" or "points"; and a table cell, other
than in the first column, that is only a number. Code does not count. A comment after the paragraph, list or table
names the source of each, one on a line (it is not shown):

    <!-- figures
    0.56 s = launchers: torchrun, c10d: all-reduce
    1.62 s = baseline of launchers: torchrun, c10d: all-reduce
    settings: 50 Mbit/s, 2 MB
    -->

`FIGURE = FILE: METRIC`: the value of this row of results/FILE.json, rounded to FIGURE. `*` in METRIC stands for any
text; if it selects several rows, FIGURE is the value of each, or a range (`4 to 9 ms`) from the smallest to the
largest. `WHAT of FILE: METRIC` is another value: `baseline`, or those of CALCULATIONS; `smallest WHAT of`, `largest
WHAT of` for one of several rows (`value` is a WHAT, too). `0.56 (s)` is a number whose unit is elsewhere, as in the
head of a table; without it the unit is that of the row.

`KIND: FIGURE, FIGURE` are other figures, and `<!-- figures: KIND -->` all those of a block. KIND is

- `settings`: defaults, limits, sizes, versions, definitions, conditions that were chosen
- `published`: by others, with the source in the text
- `tested by FILE`: a test that checks the figure
- `measured once, COMMAND`: with no file of results; COMMAND says how

If one figure of a block is from a file of results, its other numbers with a decimal point need a source, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results import ResultsFile, Row
from slurmdl.errors import InputError

#: name -> dimension, size
UNITS = {"ns": ("time", 1e-9), "us": ("time", 1e-6), "ms": ("time", 1e-3), "s": ("time", 1.0), "min": ("time", 60.0),
         "minute": ("time", 60.0), "minutes": ("time", 60.0), "hour": ("time", 3600.0), "hours": ("time", 3600.0),
         **{f"{prefix}{name}": (name, size) for name in ("B", "bytes", "bit/s", "B/s")
            for prefix, size in {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2.0**10, "Mi": 2.0**20,
                                 "Gi": 2.0**30}.items()},
         "/s": ("rate", 1.0), "1/s": ("rate", 1.0), "points": ("points", 1.0), "%": ("share", 0.01),
         **dict.fromkeys(("times", "share", "x", "ratio", ""), ("share", 1.0))}
#: WHAT of a row with a baseline, relative to 1
CALCULATIONS: Mapping[str, Callable[[float, float], float]] = {
    "ratio": lambda value, baseline: value / baseline,
    "change": lambda value, baseline: value / baseline - 1,
    "saving": lambda value, baseline: 1 - value / baseline,
    "speedup": lambda value, baseline: baseline / value,
}
_NUMBER = r"-?\d+(?:,\d{3})*(?:\.\d+)?"
_UNIT = "|".join(sorted((re.escape(unit) for unit in UNITS.keys() - {"x", "share", "ratio", "", "B"}),
                        key=len, reverse=True))
_WITH_UNIT = re.compile(rf"(?<![\w.,/-]){_NUMBER}(?: to {_NUMBER})?(?: ?(?:{_UNIT})| B)(?![\w/])")
_ONLY_NUMBERS = re.compile(rf"(?<=[^\n]\|) *[~<>]?{_NUMBER}(?: (?:to|/|or) {_NUMBER})* *(?=\|)")
_DECIMAL = re.compile(r"(?<![\w.,/-])-?\d+\.\d+(?!\.?\w)")
_FIGURE = re.compile(rf"({_NUMBER})(?: to ({_NUMBER}))?(?: ?({_UNIT}|B)| \(({_UNIT}|B)\))?")
_FRACTION = re.compile(r"(\d+) of (\d+)")
_SOURCE = re.compile(rf"(?:(smallest|largest) )?(?:(value|baseline|{'|'.join(CALCULATIONS)}) of )?([\w-]+): (.+)")
_KIND = re.compile(r"settings|published|tested by (\S+)|measured once, .+")


@dataclass
class Block:
    """A paragraph, list, table or code block, and the comments after it.

    Attributes:
        line: of its beginning, from 1.
        text: without inline code and link targets, whitespace folded except between the rows of a table.
        is_code: whether it is fenced; then it needs no sources, but may have some.
        notes: lines of its comments.
    """

    line: int
    text: str
    is_code: bool
    notes: list[str]


def split_blocks(page: str) -> list[Block]:
    """Split a page into its blocks; ValueError for a comment without a block."""
    blocks: list[Block] = []
    lines = page.splitlines()
    number = 0
    while number < len(lines):
        start, line = number, lines[number]
        number += 1
        if line.lstrip().startswith("<!-- figures"):
            while number < len(lines) and "-->" not in lines[number - 1]:
                number += 1
            if not blocks:
                raise ValueError(f"{start + 1}: figures of no paragraph")
            comment = "\n".join(lines[start:number]).lstrip().removeprefix("<!-- figures").partition("-->")[0]
            blocks[-1].notes += filter(None, map(str.strip, comment.splitlines()))
        elif line.lstrip().startswith("```"):
            while number < len(lines) and not lines[number].lstrip().startswith("```"):
                number += 1
            number += 1
            blocks.append(Block(start + 1, "\n".join(lines[start:number]), True, []))
        elif line.strip():
            while number < len(lines) and lines[number].strip() and not lines[number].lstrip().startswith(
                    ("<!--", "```")):
                number += 1
            blocks.append(Block(start + 1, _plain_text(lines[start:number]), False, []))
    return blocks


def _plain_text(lines: list[str]) -> str:
    text = "\n".join(lines)
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|<!--.*?-->", lambda match: "§" * len(match[0]), text, flags=re.DOTALL)
    return text if lines[0].startswith("|") else re.sub(r"\s+", " ", text)


def find_errors(page: str, files: Mapping[str, ResultsFile], root: Path) -> Iterator[str]:
    """Yield `LINE: problem` for each figure without a source, and for each source that does not give its figure."""
    for block in split_blocks(page):
        sources: list[tuple[str, str]] = []
        kinds: list[str] = []
        for note in block.notes:
            figure, equals, source = note.partition(" = ")
            kind, _, listed = note.partition(": ")
            if equals:
                sources.append((figure, source))
            else:
                kinds.append(kind or listed)
                sources += [(other, "") for other in listed.split(", ") if kind]
        for figure, source in sources:
            if not _spans(figure, block.text):
                yield f"{block.line}: {_quoted(figure)} is not in the text"
            if source:
                yield from (f"{block.line}: {figure}: {error}" for error in _source_errors(figure, source, files))
        yield from (f"{block.line}: {error}" for kind in kinds for error in _kind_errors(kind, root))
        if not block.is_code and not any(note.startswith(":") for note in block.notes):
            yield from (f"{block.line}: {figure} has no source" for figure in _missing(block.text, sources))


def _kind_errors(kind: str, root: Path) -> Iterator[str]:
    match = _KIND.fullmatch(kind)
    if match is None:
        yield f"{kind!r}; expected FIGURE = FILE: METRIC, or settings, published, tested by X, measured once, X"
    elif match[1] and not (root / match[1]).exists():
        yield f"{match[1]} does not exist"


def _quoted(figure: str) -> str:
    """The part of a figure that is in the text: without a unit in parentheses."""
    return figure.partition(" (")[0]


def _spans(figure: str, text: str) -> list[tuple[int, int]]:
    quoted = re.escape(_quoted(figure))
    return [match.span() for match in re.finditer(rf"(?<![\w.,-]){quoted}(?![\w]|[.,]\d)", text)]


def _missing(text: str, sources: list[tuple[str, str]]) -> Iterator[str]:
    """Yield the figures of a text that no source covers."""
    has_rows = any(source for _, source in sources)
    patterns = [_WITH_UNIT] + [_ONLY_NUMBERS] * text.startswith("|") + [_DECIMAL] * has_rows
    covered = [span for figure, _ in sources for span in _spans(figure, text)]
    for pattern in patterns:
        for match in pattern.finditer(text):
            numbers = [(match.start() + number.start(), match.start() + number.end())
                       for number in re.finditer(_NUMBER, match[0])]
            if not all(any(first <= start and end <= last for first, last in covered) for start, end in numbers):
                covered.append(match.span())
                yield match[0].strip()


def _source_errors(figure: str, source: str, files: Mapping[str, ResultsFile]) -> Iterator[str]:
    match = _SOURCE.fullmatch(source)
    if match is None or match[3] not in files:
        yield f"{source!r}; expected [WHAT of ]FILE: METRIC with a file of results"
        return
    choice, what, file, metric = match.groups()
    try:
        rows = files[file].select(metric)
    except InputError as error:
        yield str(error)
        return
    if what not in (None, "value") and any(row.baseline is None for row in rows):
        yield f"{what} of a row without a baseline"
        return
    values = [_value(row, what or "value") for row in rows]
    unit = "" if what in CALCULATIONS else rows[0].unit
    if choice:
        values = [min(values) if choice == "smallest" else max(values)]
    if not _is_rounded(figure, values, unit):
        yield f"the file has {', '.join(f'{value:.5g}' for value in values[:8])} {unit}".rstrip()


def _value(row: Row, what: str) -> float:
    if what == "value":
        return row.value
    assert row.baseline is not None
    return row.baseline if what == "baseline" else CALCULATIONS[what](row.value, row.baseline)


def _is_rounded(figure: str, values: list[float], unit: str) -> bool:
    """Return whether a figure gives values in `unit`, rounded: one number for all, or a range of them."""
    if fraction := _FRACTION.fullmatch(figure):
        return all(abs(int(fraction[1]) / int(fraction[2]) - value) < 1e-9 for value in values)
    match = _FIGURE.fullmatch(figure)
    if match is None:
        return False
    low, high, quoted_unit = match[1], match[2], match[3] or match[4]
    if quoted_unit:
        dimension, size = UNITS[quoted_unit]
        if UNITS.get(unit, (unit, 1.0))[0] != dimension:
            return False
        values = [value * UNITS[unit][1] / size for value in values]
    pairs = [(low, min(values)), (high, max(values))] if high else [(low, value) for value in values]
    return all(abs(float(number.replace(",", "")) - value) <= 0.5 * 10.0 ** -_decimals(number) * (1 + 1e-9)
               for number, value in pairs)


def _decimals(number: str) -> int:
    return len(number.partition(".")[2])
