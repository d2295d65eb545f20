"""One description of an option: it is parsed, checked and shown wherever options are given."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import pytest

from slurmdl.errors import UsageError
from slurmdl.options import (
    SWITCH,
    add_arguments,
    choice,
    count,
    names,
    number,
    option,
    options_of,
    settings_from_environ,
    text,
)


@dataclass(frozen=True)
class Settings:
    workers: int = option(1, count("N", 1), "number of workers")
    share: float | None = option(None, number("SHARE", 0, 1, percent=True), "share of 1% or more", "10%")
    method: str = option("ring", choice("ring", "tree", settings=True), "method", valid_with=("sum",))
    zones: tuple[str, ...] = option((), names("NAME,..."), "zones")
    file: str = option("", text("FILE"), "file")
    asynchronous: bool = option(False, SWITCH, "no waits", name="async")


OPTIONS = {entry.field: entry for entry in options_of(Settings)}


@pytest.mark.parametrize(("field", "given", "value"), [
    ("workers", "3", 3), ("share", "5%", 0.05), ("share", "0.5", 0.5), ("method", "tree", "tree"),
    ("method", "tree:4", "tree:4"), ("zones", "a,b,a,", ("a", "b")), ("file", "x y", "x y"),
    ("asynchronous", "On", True), ("asynchronous", "0", False)])
def test_value_is_the_same_from_command_line_and_variable(field: str, given: str, value: object) -> None:
    entry = OPTIONS[field]
    assert entry.parse(given, "source") == value
    variable = f"TOOL_{entry.name.upper()}"
    assert settings_from_environ(OPTIONS.values(), "TOOL_", {variable: given, "OTHER": "x"}) == {field: given}
    parser = argparse.ArgumentParser()
    add_arguments(parser, OPTIONS.values(), "")
    assert vars(parser.parse_args([])) == {}
    if not entry.is_flag:
        assert vars(parser.parse_args([f"--{entry.name}={given}"])) == {field: value}
    assert vars(parser.parse_args(["--async"])) == {"asynchronous": True}


@pytest.mark.parametrize(("field", "given", "expected"), [
    ("workers", "0", "a whole number, 1 or more"), ("workers", "-1", "a whole number, 1 or more"),
    ("workers", "1" * 10, "a whole number, 1 or more"), ("share", "nan", "a number from 0 to below 1"),
    ("share", "100%", "a number from 0 to below 1"), ("share", "x", "a number from 0 to below 1"),
    ("method", "tre", "tree, ring"), ("zones", ",", "names separated by commas"), ("file", "", "FILE"),
    ("asynchronous", "maybe", "yes, no")])
def test_invalid_value_names_source_and_valid_values(field: str, given: str, expected: str) -> None:
    entry = OPTIONS[field]
    message = f"invalid value {given!r}; expected {expected}"
    with pytest.raises(UsageError, match=f"^TOOL_{entry.name.upper()}: {message}$"):
        settings_from_environ(OPTIONS.values(), "TOOL_", {f"TOOL_{entry.name.upper()}": given})
    if not entry.is_flag:
        parser = argparse.ArgumentParser()
        add_arguments(parser, [entry], "tool: ")
        with pytest.raises(UsageError, match=f"^tool: --{entry.name}: {message}$"):
            parser.parse_args([f"--{entry.name}={given}"])


def test_unknown_variable_names_the_most_similar_one() -> None:
    with pytest.raises(UsageError, match=r"^unknown variable TOOL_WORKRES; expected TOOL_WORKERS, "):
        settings_from_environ(OPTIONS.values(), "TOOL_", {"TOOL_WORKRES": "1"})


def test_help_shows_values_defaults_and_what_an_option_is_valid_with() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, OPTIONS.values(), "")
    shown = " ".join(parser.format_help().split())
    assert "--workers N number of workers (default: 1)" in shown
    assert "--share SHARE share of 1% or more (default: 10%)" in shown
    assert "--method ring|tree[:...] sum: method (default: ring)" in shown
    assert "--zones NAME,... zones --file FILE file --async no waits" in shown


def test_defaults_as_shown() -> None:
    shown = {entry.name: entry.shown_default for entry in OPTIONS.values()}
    assert shown == {"workers": "1", "share": "10%", "method": "ring", "zones": "", "file": "", "async": "off"}
