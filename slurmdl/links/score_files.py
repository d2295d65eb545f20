"""Readers of files of link scores: JSON, CSV, and JSON lines of samples."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping
from typing import Any

from slurmdl import file_trust
from slurmdl.errors import InputError
from slurmdl.links import aggregate
from slurmdl.links.link_scores import LinkScore, LinkScores, raise_rejection
from slurmdl.links.samples import LINK_KINDS, is_link_name, parse_sample_lines, reject_duplicate_keys

#: column of a CSV file -> how its text becomes the value of LinkScore
_CSV_COLUMNS = {"throughput": float, "delay": float, "delay_tail": float, "loss": float, "age": float, "samples": int}


def load_scores(path: str, now: float, trusted_users: str = "", rules: aggregate.AggregationRules = aggregate.DEFAULT_RULES,
              on_reject: Callable[[str], None] = raise_rejection) -> LinkScores:
    """The scores in a file that can be trusted (see trust.trusted_text), with the ages that they have now.

    Parameters
    ----------
    now : seconds since the epoch.
    owner : user whose files are trusted beside root's and the reader's own.
    refuse : called with what is wrong with a score or sample; where it returns, the rest is kept.

    Raises
    ------
    InputError : with the file, where it cannot be read or trusted, or does not hold scores.
    """
    text = file_trust.read_trusted_text(path, trusted_users)
    try:
        return parse_scores(text, now, path.endswith(".csv"), rules, on_reject)
    except InputError as error:
        raise InputError(str(error), file=path) from error


def parse_scores(text: str, now: float, is_csv: bool = False, rules: aggregate.AggregationRules = aggregate.DEFAULT_RULES,
              on_reject: Callable[[str], None] = raise_rejection) -> LinkScores:
    """The scores in a text: CSV, one JSON object as `LinkScores.to_json` makes it, or samples as JSON lines."""
    if is_csv:
        return _parse_csv(text, on_reject)
    first = text.lstrip()[:1]
    if first == "{" and '"kind"' in text.lstrip().partition("\n")[0]:
        return _aggregate_sample_lines(text, now, rules, on_reject)
    found = LinkScores.from_json(_parse_json(text), on_reject)
    if found.time > now + aggregate.MAX_CLOCK_SKEW_S:
        raise InputError(f"the scores were made {found.time - now:.0f} s in the future")
    return aggregate.with_current_ages(found, now)


def _aggregate_sample_lines(text: str, now: float, rules: aggregate.AggregationRules,
                            on_reject: Callable[[str], None]) -> LinkScores:
    """What is malformed is passed over, as long as something is left."""
    found = list(parse_sample_lines(text.splitlines()))
    faults = [each for each in found if isinstance(each, InputError)]
    samples = [each for each in found if not isinstance(each, InputError)]
    if faults and not samples:
        raise faults[0]
    for fault in faults:
        on_reject(f"line {str(fault).lstrip(':')}")
    return aggregate.aggregate_scores(samples, now, rules=rules).scores


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=reject_duplicate_keys)
    except (ValueError, RecursionError) as error:
        raise InputError(f"is not JSON ({error})") from error


def _parse_csv(text: str, on_reject: Callable[[str], None]) -> LinkScores:
    """A header with `name`, and any of `kind` (node where it is absent) and the figures of LinkScore."""
    found: dict[str, dict[str, LinkScore]] = {kind: {} for kind in LINK_KINDS}
    try:
        rows = csv.DictReader(io.StringIO(text), strict=True, skipinitialspace=True)
        header = rows.fieldnames or ()
        valid = ("kind", "name", *_CSV_COLUMNS)
        for column in header:
            if column not in valid:
                raise InputError(f"unknown column {column!r}; valid: {', '.join(valid)}")
        if "name" not in header or len(set(header)) < len(header):
            raise InputError(f"the first line must name the columns, each once, `name` among them; valid: "
                             f"{', '.join(valid)}")
        for row in rows:
            try:
                kind, name, score = _parse_csv_row(row, len(header))
                if name in found[kind]:
                    raise InputError(f"{kind} {name!r} stands there twice")
                found[kind][name] = score
            except InputError as error:
                on_reject(f"line {rows.line_num}: {error}")
    except csv.Error as error:
        raise InputError(f"is not CSV ({error})") from error
    return LinkScores(nodes=found["node"], zones=found["zone"], inter_leaf=found["trunk"])


def _parse_csv_row(row: Mapping[str | Any, str | Any], columns: int) -> tuple[str, str, LinkScore]:
    """Kind, name and score of one row; InputError where it has none."""
    if None in row or None in row.values():
        raise InputError(f"{columns} columns expected")
    kind, name = row.get("kind") or "node", row["name"]
    if kind not in LINK_KINDS or not is_link_name(name, kind):
        raise InputError(f"{kind} {name!r} is not valid; valid: {', '.join(LINK_KINDS)} with a name")
    return kind, name, LinkScore.from_json(name, {key: _parse_number(value, read) for key, read in _CSV_COLUMNS.items()
                                                  if (value := row.get(key) or "").strip()})


def _parse_number(text: str, convert: type[int] | type[float]) -> float:
    try:
        return convert(text)
    except ValueError as error:
        raise InputError(f"{text[:40]!r} is no number") from error
