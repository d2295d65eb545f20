"""Where plugstack.conf names the plugin (spank(8))."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass

from slurmdl.errors import InputError

_PLUGIN = "slurmdl.so"
#: files that include each other end somewhere
_DEPTH = 8


@dataclass(frozen=True)
class Line:
    """A line of plugstack.conf: where it stands, whether jobs fail without the plugin, and the plugin's file."""

    where: str
    required: bool
    path: str


def find(file: str, plugins: Sequence[str], depth: int = _DEPTH) -> Line | None:
    """The first line that names the plugin, in the file or in one that it includes; None where there is none.

    Parameters
    ----------
    plugins : Slurm's PluginDir, in which a plugin is looked for that is named without a directory.

    Raises
    ------
    InputError : a file cannot be read.
    """
    if not os.path.lexists(file):
        return None
    try:
        with open(file, encoding="utf-8", errors="replace") as opened:
            lines = opened.read().splitlines()
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", file) from error
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if len(words) > 1 and words[0] == "include" and depth:
            pattern = os.path.join(os.path.dirname(file), words[1])
            inner = next(filter(None, (find(each, plugins, depth - 1) for each in sorted(glob.glob(pattern)))), None)
            if inner:
                return inner
        elif len(words) > 1 and os.path.basename(words[1]) == _PLUGIN:
            found = (os.path.join(directory, words[1]) for directory in plugins)
            path = words[1] if os.path.isabs(words[1]) else next(filter(os.path.exists, found), words[1])
            return Line(f"{file}:{number}", words[0] == "required", path)
    return None
