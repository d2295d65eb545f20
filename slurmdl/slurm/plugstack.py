"""Where plugstack.conf names the plugin (spank(8)), with the lines and words that Slurm finds in the file."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from slurmdl.errors import InputError

_PLUGIN_FILE = "slurmdl.so"
#: files that include each other end somewhere
_MAX_INCLUDE_DEPTH = 8
#: what Slurm reads at once, into 4096 bytes: a line, or a part of a longer line, which counts as a line
_LINE_PATTERN = re.compile(rb"[^\n]{0,4094}\n|[^\n]{1,4095}")
#: a carriage return is part of a word, and so are other blanks
_WORD_PATTERN = re.compile(r"[^ \t\n]+")


@dataclass(frozen=True)
class PlugstackLine:
    """A line of plugstack.conf: where it stands, whether jobs fail without the plugin, and the plugin's file."""

    location: str
    required: bool
    path: str


def find_plugin_line(file: str, plugin_dirs: Sequence[str], depth: int = _MAX_INCLUDE_DEPTH) -> PlugstackLine | None:
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
        with open(file, "rb") as opened:
            chunks = _LINE_PATTERN.findall(opened.read())
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", file) from error
    for number, chunk in enumerate(chunks, 1):
        words = _WORD_PATTERN.findall(os.fsdecode(re.split(b"[#\0]", chunk)[0]))
        if len(words) < 2 or words[0] not in ("required", "optional", "include"):
            continue
        if words[0] == "include" and depth:
            pattern = os.path.join(os.path.dirname(file), words[1])
            inner = next(filter(None, (find_plugin_line(each, plugin_dirs, depth - 1)
                         for each in sorted(glob.glob(pattern)))), None)
            if inner:
                return inner
        elif words[0] != "include" and os.path.basename(words[1]).rstrip() == _PLUGIN_FILE:
            found = (os.path.join(directory, words[1]) for directory in plugin_dirs)
            path = words[1] if os.path.isabs(words[1]) else next(filter(os.path.exists, found), words[1])
            return PlugstackLine(f"{file}:{number}", words[0] == "required", path)
    return None
