"""Parsing of command lines compared with getopt_long(3) and Python's getopt."""

from __future__ import annotations

import getopt as reference

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmdl.slurm.getopt import HasArg, parse_command_line

SHORT = {"n": "ntasks", "N": "nodes", "l": "label", "u": "unbuffered", "K": "kill-on-bad-exit"}
LONG: dict[str, HasArg] = {**dict.fromkeys(("ntasks", "ntasks-per-node", "nodes", "nodelist"), "required"),
                           "label": "no", "unbuffered": "no", "kill-on-bad-exit": "optional"}


@pytest.mark.parametrize(("argv", "options", "operands"), [
    (["-n", "4", "prog", "-N2"], [("ntasks", "4")], ["prog", "-N2"]),
    (["-lun4", "prog"], [("label", None), ("unbuffered", None), ("ntasks", "4")], ["prog"]),
    (["-lun", "4", "prog"], [("label", None), ("unbuffered", None), ("ntasks", "4")], ["prog"]),
    (["--ntasks=4", "--", "-prog"], [("ntasks", "4")], ["-prog"]),
    (["--ntasks", "-4", "-"], [("ntasks", "-4")], ["-"]),
    (["--ntasks=", "p"], [("ntasks", "")], ["p"]),
    (["--lab", "p"], [("label", None)], ["p"]),
    (["--ntasks-per=2", "p"], [("ntasks-per-node", "2")], ["p"]),
    (["-K", "p"], [("kill-on-bad-exit", None)], ["p"]),
    (["-K0", "p"], [("kill-on-bad-exit", "0")], ["p"]),
    (["--kill-on-bad-exit", "p"], [("kill-on-bad-exit", None)], ["p"]),
    ([], [], []),
])
def test_option_forms(argv: list[str], options: list[tuple[str, str | None]], operands: list[str]) -> None:
    line = parse_command_line(argv, SHORT, LONG)
    assert [(o.name, o.value) for o in line.options] == options
    assert list(line.operands) == operands
    assert all(o.is_known and o.is_complete for o in line.options)


def test_unknown_ambiguous_and_incomplete_options_are_kept() -> None:
    line = parse_command_line(["--new=1", "--node", "-lZ", "-lun4", "-N", "2", "--nodes=3", "prog"], SHORT, LONG)
    assert [o.name for o in line.options if not o.is_known] == ["new", "node", "Z"]
    assert line.args_except(["nodes", "ntasks"]) == ("--new=1", "--node", "-l", "-Z", "-l", "-u")
    assert line.last_value("nodes") == "3" and line.has_option("ntasks") and not line.has_option("nodelist")
    assert line.operands == ("prog",)
    assert not parse_command_line(["--ntasks"], SHORT, LONG).options[0].is_complete
    assert not parse_command_line(["-ln"], SHORT, LONG).options[1].is_complete


words = st.lists(st.sampled_from(["-n", "4", "-l", "-lu", "-un3", "--label", "--ntasks", "--ntasks=2", "--nodes",
                                  "--", "-", "prog", "--unbuf", "-N1"]), max_size=8)


@given(words)
def test_agrees_with_python_getopt(argv: list[str]) -> None:
    """Python's getopt implements the same convention, without optional values."""
    try:
        options, operands = reference.getopt(argv, "n:N:lu", ["ntasks=", "nodes=", "label", "unbuffered"])
    except reference.GetoptError:
        return
    full_names = {"-n": "ntasks", "-N": "nodes", "-l": "label", "-u": "unbuffered"}
    long: dict[str, HasArg] = {"ntasks": "required", "nodes": "required", "label": "no", "unbuffered": "no"}
    line = parse_command_line(argv, SHORT, long)
    assert [(o.name, o.value or "") for o in line.options] == \
        [(full_names.get(name, name.removeprefix("--")), value) for name, value in options]
    assert list(line.operands) == operands


@given(words)
def test_separate_spelling_parses_the_same(argv: list[str]) -> None:
    line = parse_command_line(argv, SHORT, LONG)
    parsed = parse_command_line([*line.args_except(()), "--", *line.operands], SHORT, LONG)
    if all(o.is_complete for o in line.options):
        assert [(o.name, o.value) for o in parsed.options] == [(o.name, o.value) for o in line.options]
        assert parsed.operands == line.operands
