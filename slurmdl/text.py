"""Text for terminals and messages: escaping, truncation, plurals and samples of lists."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO


def escape_nonprintable(text: str) -> str:
    r"""`text` on one line, with non-printable characters (control, bidirectional) escaped as in Python, e.g. \x1b."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def print_escaped(text: str, file: TextIO | None = None) -> None:
    """Print lines for people on stdout or `file`, non-printable characters escaped."""
    print("\n".join(map(escape_nonprintable, text.split("\n"))), file=file or sys.stdout, flush=True)


def csv_cell(value: object) -> object:
    """A value of a CSV file: text that a spreadsheet would run as a formula gets an apostrophe in front.

    Users choose such text, e.g. the names of their jobs (CWE-1236).
    """
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


def pluralize(count: int, noun: str) -> str:
    """`1 zone`, `10,000 nodes`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def truncate(text: str, max_chars: int, ellipsis: str = "...") -> str:
    """The start of `text`, ending in `ellipsis` if it is longer than `max_chars`."""
    return text if len(text) <= max_chars else text[:max_chars - len(ellipsis)].rstrip() + ellipsis


def truncate_middle(text: str, max_chars: int) -> str:
    """`text` without its middle if it is longer than `max_chars`."""
    return text if len(text) <= max_chars else f"{text[:max_chars // 2]}...{text[-max_chars // 2:]}"


def sample_names(names: Sequence[str], max_names: int = 6) -> str:
    """The first names, with `, ...` if there are more; "none" for no names."""
    return ", ".join(names[:max_names]) + (", ..." if len(names) > max_names else "") or "none"


def short_json_repr(value: object) -> str:
    """Shortened repr of a JSON value; lists and objects are not expanded."""
    if isinstance(value, (list, dict)):
        return "[...]" if isinstance(value, list) else "{...}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:30]}...{text[-20:]}"
