"""What commands share: the parser of those that have options of their own only, and the files that they write."""

from __future__ import annotations

import argparse
import os
from typing import Any, NoReturn

from slurmdl import files
from slurmdl.errors import UsageError


def check_output_file(path: str, option: str) -> None:
    """Before long work: UsageError where the file that an option names cannot be written."""
    try:
        files.check_writable(path)
    except OSError as error:
        raise _unwritable_error(path, option, error) from error


def write_output_file(path: str, option: str, text: str) -> None:
    """Write the file that an option names; UsageError where that is not possible."""
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise _unwritable_error(path, option, error) from error


def _unwritable_error(path: str, option: str, error: OSError) -> UsageError:
    return UsageError(f"{option}={path}: cannot be written ({error.strerror})")


class _TerminalWidthFormatter(argparse.HelpFormatter):
    """As wide as the terminal. argparse asks shutil for that, at each option, and shutil loads all compressors."""

    def __init__(self, prog: str) -> None:
        try:
            columns = int(os.environ.get("COLUMNS", "0")) or os.get_terminal_size().columns
        except (ValueError, OSError):
            columns = 80
        super().__init__(prog, width=columns - 2)


class CliParser(argparse.ArgumentParser):
    """argparse whose errors are UsageErrors: one line, exit status 64."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": _TerminalWidthFormatter, **options})

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message} (`{self.prog} --help` lists what is valid)")
