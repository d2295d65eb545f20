"""Reader of topology.conf (topology.conf(5)): trees of switches, and blocks as zones of level 0.

The lexical rules are those of Slurm's src/common/parse_config.c: `#` starts a comment unless an odd number
of backslashes precedes it, a backslash at the end joins the next line, keys are case-insensitive.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from slurmdl.errors import InputError
from slurmdl.topology import hostlist
from slurmdl.topology.build import Declared, build
from slurmdl.topology.model import Topology

_PAIR = re.compile(r"""\s*(?P<key>\w+)\s*=\s*(?:"(?P<quoted>[^"]*)"|(?P<bare>[^\s"]*))(?=\s|$)""")
_KEYS = {"SwitchName": ("SwitchName", "Switches", "Nodes", "LinkSpeed"),
         "BlockName": ("BlockName", "Nodes"),
         "BlockSizes": ("BlockSizes",)}
_FULL = {key.lower(): key for keys in _KEYS.values() for key in keys}
_MAX_INCLUDES = 32


@dataclass(frozen=True)
class _Line:
    """One logical line: continuations joined, comment cut, `line` where it begins."""

    file: str
    line: int
    text: str

    def error(self, message: str) -> InputError:
        return InputError(message, self.file, self.line, self.text.strip())


def parse_file(path: str) -> Topology:
    """The topology in a topology.conf.

    Raises
    ------
    InputError : with file, line, text and what is valid, wherever slurmctld would refuse the file, too.
    """
    declared: dict[str, list[Declared]] = {"SwitchName": [], "BlockName": []}
    for line in _lines(path, os.path.dirname(path), ()):
        pairs = _pairs(line)
        kind = next((kind for kind in _KEYS if kind in pairs), None)
        if kind is None:
            raise line.error(f"a line begins with one of {', '.join(_KEYS)}")
        for key in pairs:
            if key not in _KEYS[kind]:
                raise line.error(f"{key} does not belong to {kind}; valid: {', '.join(_KEYS[kind])}")
        if kind == "BlockSizes":
            if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", pairs[kind]):
                raise line.error("BlockSizes takes numbers of nodes, e.g. BlockSizes=30,120")
        else:
            declared[kind].append(_declared(kind, pairs, line))
    if declared["SwitchName"] and declared["BlockName"]:
        raise InputError("holds both SwitchName and BlockName; a topology is either a tree or blocks", file=path)
    if declared["BlockName"]:
        return build(declared["BlockName"], kind="block", source=path)
    if not declared["SwitchName"]:
        raise InputError("declares no zone; a line SwitchName=NAME Nodes=LIST or BlockName=NAME Nodes=LIST "
                         "is needed", file=path)
    return build(declared["SwitchName"], kind="tree", source=path)


def _declared(kind: str, pairs: dict[str, str], line: _Line) -> Declared:
    if not pairs[kind]:
        raise line.error(f"{kind} needs a name")
    if "Nodes" in pairs and "Switches" in pairs:
        raise line.error("has both Nodes and Switches; a leaf has Nodes, a switch above has Switches")
    if kind == "BlockName" and "Nodes" not in pairs:
        raise line.error("a block needs Nodes, e.g. BlockName=b1 Nodes=n[1-18]")
    if kind == "SwitchName" and "Nodes" not in pairs and "Switches" not in pairs:
        raise line.error("a switch needs Nodes or Switches")
    speed = pairs.get("LinkSpeed")
    if speed is not None and not re.fullmatch(r"\d{1,10}", speed):
        raise line.error("LinkSpeed takes a whole number")
    try:
        children, nodes = (tuple(hostlist.expand(pairs.get(key, ""))) for key in ("Switches", "Nodes"))
    except InputError as error:
        raise line.error(str(error)) from error
    return Declared(pairs[kind], children, nodes, int(speed) if speed is not None else None,
                    line.file, line.line, line.text.strip())


def _pairs(line: _Line) -> dict[str, str]:
    """Key (in full spelling) -> value; of a key that stands twice the last wins, as in Slurm."""
    pairs: dict[str, str] = {}
    at, text = 0, line.text.rstrip()
    while at < len(text):
        match = _PAIR.match(text, at)
        if not match:
            raise line.error(f"{text[at:].split()[0]!r} is no KEY=VALUE; valid keys: {', '.join(_FULL.values())}")
        key = _FULL.get(match["key"].lower())
        if key is None:
            raise line.error(f"unknown key {match['key']!r}; valid: {', '.join(_FULL.values())}")
        pairs[key] = match["quoted"] if match["quoted"] is not None else match["bare"]
        at = match.end()
    return pairs


def _lines(path: str, base: str, stack: tuple[str, ...]) -> Iterator[_Line]:
    """Logical lines of a file and of those that it includes, relative to `base`."""
    if path in stack or len(stack) > _MAX_INCLUDES:
        raise InputError(f"includes itself ({' -> '.join([*stack, path])})", file=path)
    try:
        with open(path, encoding="utf-8") as file:
            raw = file.read().split("\n")
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", file=path) from error
    except UnicodeDecodeError as error:
        raise InputError("is not text in UTF-8", file=path) from error
    joined, begin = "", 0
    for number, part in enumerate(raw, 1):
        begin = begin or number
        text = joined + _without_comment(part)
        stripped = text.rstrip()
        if (len(stripped) - len(stripped.rstrip("\\"))) % 2 and number < len(raw):
            joined = stripped[:-1]
            continue
        line = _Line(path, begin, re.sub(r"\\(.)", r"\1", text))
        joined, begin = "", 0
        include = re.match(r"include\s+(\S+)\s*$", line.text, re.IGNORECASE)
        if include:
            yield from _lines(os.path.join(base, include[1]), base, (*stack, path))
        elif line.text.strip():
            yield line


def _without_comment(text: str) -> str:
    for match in re.finditer("#", text):
        before = text[:match.start()]
        if (len(before) - len(before.rstrip("\\"))) % 2 == 0:
            return before
    return text
