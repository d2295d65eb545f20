"""The argument parser of the commands that have options of their own only (not sbatch's or srun's)."""

from __future__ import annotations

import argparse
from typing import NoReturn

from slurmdl.errors import UsageError


class Parser(argparse.ArgumentParser):
    """argparse whose errors are UsageErrors: one line, exit status 64."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message} (`{self.prog} --help` lists what is valid)")
