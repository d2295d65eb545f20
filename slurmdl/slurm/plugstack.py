"""Find the plugin in plugstack.conf (spank(8)), reading lines and words as Slurm does."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from slurmdl.errors import InputError

_PLUGIN_FILE = "slurmdl.so"
#: bounds files that include each other
_MAX_INCLUDE_DEPTH = 8
#: a line as Slurm reads it, into 4096 bytes; a part of a longer line counts as a line
_LINE_PATTERN = re.compile(rb"[^\n]{0,4094}\n|[^\n]{1,4095}")
#: a carriage return and other blanks are part of a word
_WORD_PATTERN = re.compile(r"[^ \t\n]+")


@dataclass(frozen=True)
class PlugstackLine:
    """A plugin line of plugstack.conf: location, whether jobs fail without the plugin, path of the plugin."""

    location: str
    required: bool
    path: str


def find_plugin_line(file: str, plugin_dirs: Sequence[str], depth: int = _MAX_INCLUDE_DEPTH) -> PlugstackLine | None:
    """The first line that names the plugin, in the file or an included one, or None.

    Parameters
    ----------
    plugin_dirs : Slurm's PluginDir, searched for a plugin without a directory.

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
            included = (find_plugin_line(path, plugin_dirs, depth - 1) for path in sorted(glob.glob(pattern)))
            if line := next(filter(None, included), None):
                return line
        elif words[0] != "include" and os.path.basename(words[1]).rstrip() == _PLUGIN_FILE:
            candidates = (os.path.join(directory, words[1]) for directory in plugin_dirs)
            path = words[1] if os.path.isabs(words[1]) else next(filter(os.path.exists, candidates), words[1])
            return PlugstackLine(f"{file}:{number}", words[0] == "required", path)
    return None
