"""Checks of the site's setup; each returns a Finding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["OK", "warn", "fail"]
#: exit status by the worst severity (Monitoring Plugins Development Guidelines)
SEVERITY_EXIT_STATUS: dict[Severity, int] = {"OK": 0, "warn": 1, "fail": 2}


@dataclass(frozen=True)
class Finding:
    """One line of the report: culprit and problem, and a suggested fix ("" if none is needed).

    It is a "fail" if slurmdl, or a configured part of it, does not work; a "warn" if it may soon fail or works less
    well than it could. `blocks_dependents`: checks that require this one are skipped; True for failures.
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
