"""Readers of link score files: JSON, CSV, and JSON lines of samples."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping
from typing import Any

from slurmdl import file_trust
from slurmdl.errors import InputError
from slurmdl.links.aggregate import (
    DEFAULT_RULES,
    MAX_CLOCK_SKEW_S,
    AggregationRules,
    aggregate_scores,
    with_current_ages,
)
from slurmdl.links.link_scores import LinkScore, LinkScores, raise_rejection
from slurmdl.links.samples import LINK_KINDS, is_link_name, link_name_form, parse_sample_lines, reject_duplicate_keys

#: metric column of a CSV file -> type of its values
_CSV_COLUMNS = {"throughput": float, "rtt": float, "rtt_p99": float, "loss": float, "age": float, "samples": int}


def load_scores(path: str, now: float, trusted_users: str = "", rules: AggregationRules = DEFAULT_RULES,
                on_reject: Callable[[str], None] = raise_rejection) -> LinkScores:
    """Read the scores in a trusted file (see file_trust.read_trusted_text), with current ages.

    Parameters
    ----------
    now : seconds since the epoch.
    trusted_users : owners that are trusted in addition to root and the reader.
    on_reject : called with the reason for each invalid score or sample; if it returns, the others are kept.

    Raises
    ------
    InputError : the file cannot be read, is not trusted, or holds no scores.
    """
    text = file_trust.read_trusted_text(path, trusted_users)
    try:
        return parse_scores(text, now, path.endswith(".csv"), rules, on_reject)
    except InputError as error:
        raise InputError(str(error), file=path) from error


def parse_scores(text: str, now: float, is_csv: bool = False, rules: AggregationRules = DEFAULT_RULES,
                 on_reject: Callable[[str], None] = raise_rejection) -> LinkScores:
    """Parse CSV, one JSON object of `LinkScores.to_json`, or samples as JSON lines."""
    if is_csv:
        return _parse_csv(text, on_reject)
    first_line = text.lstrip().partition("\n")[0]
    if first_line.startswith("{") and '"kind"' in first_line:
        return _aggregate_sample_lines(text, now, rules, on_reject)
    scores = LinkScores.from_json(_parse_json(text), on_reject)
    if scores.time > now + MAX_CLOCK_SKEW_S:
        raise InputError(f"link scores: time is {scores.time - now:.0f} s in the future")
    return with_current_ages(scores, now)


def _aggregate_sample_lines(text: str, now: float, rules: AggregationRules,
                            on_reject: Callable[[str], None]) -> LinkScores:
    """Aggregate the valid lines; InputError if there are only invalid ones."""
    results = list(parse_sample_lines(text.splitlines()))
    errors = [each for each in results if isinstance(each, InputError)]
    samples = [each for each in results if not isinstance(each, InputError)]
    if errors and not samples:
        raise errors[0]
    for error in errors:
        on_reject(f"line {str(error).lstrip(':')}")
    return aggregate_scores(samples, now, rules=rules).scores


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=reject_duplicate_keys)
    except (ValueError, RecursionError) as error:
        raise InputError(f"is not JSON ({error})") from error


def _parse_csv(text: str, on_reject: Callable[[str], None]) -> LinkScores:
    """Parse a table with the column `name`, and optionally `kind` (default: node) and metrics of LinkScore."""
    scores: dict[str, dict[str, LinkScore]] = {kind: {} for kind in LINK_KINDS}
    try:
        rows = csv.DictReader(io.StringIO(text), strict=True, skipinitialspace=True)
        header, valid = rows.fieldnames or (), ("kind", "name", *_CSV_COLUMNS)
        for column in header:
            if column not in valid:
                raise InputError(f"unknown column {column!r}; expected {', '.join(valid)}")
        if "name" not in header or len(set(header)) < len(header):
            raise InputError(f"first line: expected column names, each once, including name; valid: "
                             f"{', '.join(valid)}")
        for row in rows:
            try:
                kind, name, score = _parse_csv_row(row, len(header))
                if name in scores[kind]:
                    raise InputError(f"{kind} {name!r}: duplicate row")
                scores[kind][name] = score
            except InputError as error:
                on_reject(f"line {rows.line_num}: {error}")
    except csv.Error as error:
        raise InputError(f"is not CSV ({error})") from error
    return LinkScores(nodes=scores["node"], zones=scores["zone"], inter_leaf=scores["inter_leaf"])


def _parse_csv_row(row: Mapping[str | Any, str | Any], columns: int) -> tuple[str, str, LinkScore]:
    """Kind, name and score of one row; InputError if it is not valid."""
    if None in row or None in row.values():
        raise InputError(f"expected {columns} columns")
    kind, name = row.get("kind") or "node", row["name"]
    if kind not in LINK_KINDS:
        raise InputError(f"kind {kind!r}: expected one of {', '.join(LINK_KINDS)}")
    if not is_link_name(name, kind):
        raise InputError(f"name {name!r}: expected {link_name_form(kind)}")
    return kind, name, LinkScore.from_json(name, {key: _parse_number(value, convert)
                                                  for key, convert in _CSV_COLUMNS.items()
                                                  if (value := row.get(key) or "").strip()})


def _parse_number(text: str, convert: type[int] | type[float]) -> float:
    try:
        return convert(text)
    except ValueError as error:
        raise InputError(f"{text[:40]!r}: expected a number") from error
