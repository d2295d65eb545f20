"""What is written to terminals: names, options and messages of others may hold escape sequences."""

from __future__ import annotations

import sys
from typing import TextIO


def escape_nonprintable(text: str) -> str:
    r"""`text` as one line; characters that a terminal obeys or hides are written as in Python's source, e.g. \x1b.

    These are control characters (line breaks included), marks that turn the direction of text, and others that
    have no picture.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def print_escaped(text: str, file: TextIO | None = None) -> None:
    """Print lines of text for people, on stdout or `file`. What programs read is printed as it is."""
    print("\n".join(map(escape_nonprintable, text.split("\n"))), file=file or sys.stdout, flush=True)
