"""What a check gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Grade = Literal["OK", "warn", "fail"]
#: grade of the worst finding -> exit status, after the Monitoring Plugins Development Guidelines
EXIT_STATUS: dict[Grade, int] = {"OK": 0, "warn": 1, "fail": 2}


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes
    ----------
    grade : "fail" where slurmdl, or a part of it that is set up, does not work; "warn" where it soon may not, or
        serves less than it could.
    text : the culprit, and what is the matter with it.
    mend : what puts it right, "" where nothing has to be.
    last : whether the checks that need this one have nothing to look at; so it is where it fails.
    """

    grade: Grade
    text: str
    mend: str = ""
    last: bool = False


def ok(text: str) -> Finding:
    return Finding("OK", text)


def warning(text: str, mend: str, last: bool = False) -> Finding:
    return Finding("warn", text, mend, last)


def failure(text: str, mend: str) -> Finding:
    return Finding("fail", text, mend, True)
