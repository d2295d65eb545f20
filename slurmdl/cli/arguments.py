"""Argument parser, checks of values, and output files of the commands that do not wrap a Slurm command."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from slurmdl import units
from slurmdl.errors import UsageError

MAX_SEED = 2**32


def write_output_file(path: str, option: str, text: str) -> None:
    """Write the file of an option; UsageError on failure."""
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"{option}={path}: cannot be written ({error.strerror})") from error


def duration_between(min_s: float, max_s: float) -> Callable[[str], float]:
    """Type of an option: a duration with a unit (see units.parse_duration), in seconds."""
    def parse(text: str) -> float:
        try:
            return units.parse_duration(text, min_s=min_s, max_s=max_s)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return parse


def check_bounds(options: argparse.Namespace, bounds: Mapping[str, tuple[float, float]]) -> None:
    """Check numbers against the lowest and highest valid value of their option; UsageError names the option."""
    for name, (low, high) in bounds.items():
        value = getattr(options, name)
        if value is not None and not low <= value <= high:
            shown = f"{value:g}" if isinstance(value, float) else value
            raise UsageError(f"--{name.replace('_', '-')} {shown}: expected {low} to {high}")


class _HelpFormatter(argparse.HelpFormatter):
    """Formatter that keeps paragraphs, and does not break the names of options.

    It reads the terminal's width itself, without importing shutil and its compression modules as argparse does.
    """

    def __init__(self, prog: str) -> None:
        try:
            columns = int(os.environ.get("COLUMNS", "0")) or os.get_terminal_size().columns
        except (ValueError, OSError):
            columns = 80
        super().__init__(prog, width=columns - 2)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = (self._split_lines(paragraph, width - len(indent)) for paragraph in text.split("\n\n"))
        return "\n\n".join("\n".join(indent + line for line in lines) for lines in paragraphs)

    def _split_lines(self, text: str, width: int) -> list[str]:
        import textwrap  # only for help

        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class CliParser(argparse.ArgumentParser):
    """argparse whose errors are UsageErrors: one line, exit status 64."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": _HelpFormatter, **options})

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message} (`{self.prog} --help` lists the options)")
