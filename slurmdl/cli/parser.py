"""What commands share: the parser of those that have options of their own only, and the files that they write."""

from __future__ import annotations

import argparse
from typing import NoReturn

from slurmdl.errors import UsageError


def write_file(path: str, option: str, text: str) -> None:
    """Write the file that an option names; UsageError where that is not possible."""
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"{option}={path}: cannot be written ({error.strerror})") from error


class Parser(argparse.ArgumentParser):
    """argparse whose errors are UsageErrors: one line, exit status 64."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message} (`{self.prog} --help` lists what is valid)")
