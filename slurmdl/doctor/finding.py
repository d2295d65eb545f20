"""What a check gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["OK", "warn", "fail"]
#: grade of the worst finding -> exit status, after the Monitoring Plugins Development Guidelines
SEVERITY_EXIT_STATUS: dict[Severity, int] = {"OK": 0, "warn": 1, "fail": 2}


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

    severity: Severity
    text: str
    fix: str = ""
    blocks_dependents: bool = False


def ok(text: str) -> Finding:
    return Finding("OK", text)


def warning(text: str, fix: str, blocks_dependents: bool = False) -> Finding:
    return Finding("warn", text, fix, blocks_dependents)


def failure(text: str, fix: str) -> Finding:
    return Finding("fail", text, fix, True)
