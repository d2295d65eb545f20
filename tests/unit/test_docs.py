"""The tables of the README say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from slurmdl.cli.main import COMMANDS
from slurmdl.dl_options import OPTIONS
from slurmdl.errors import EXIT_STATUS

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_every_option_is_in_the_table():
    for option in OPTIONS:
        values = option.values.replace("|", ", ")
        row = f"| `--dl-{option.name}{'=' + values if values else ''}` | {option.help} |"
        assert row in README, row
    assert set(re.findall(r"--dl-[a-z-]+", README)) <= {f"--dl-{option.name}" for option in OPTIONS}


def test_every_exit_status_is_in_the_table():
    for status, meaning in EXIT_STATUS.items():
        row = f"| {status} | {meaning} |"
        assert row in README, row


def test_every_command_is_in_the_table():
    for command in COMMANDS:
        assert f"| `slurmdl {command}" in README
