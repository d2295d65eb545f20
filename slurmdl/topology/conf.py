"""Reader of topology.conf (topology.conf(5)): trees of switches, blocks with their aggregates, and rings.

The lexical rules are those of Slurm's src/common/parse_config.c: `#` starts a comment unless an odd number
of backslashes precedes it, a backslash at the end joins the next line, keys are case-insensitive.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from slurmdl.errors import InputError
from slurmdl.topology import blocks, hostlist
from slurmdl.topology.build import SIMPLIFIED, Declared, build
from slurmdl.topology.files import text_of
from slurmdl.topology.model import Topology

# s_p_parse_line's expression: a value is never empty, so the word after `Nodes=` is its value, whatever it is
_PAIR = re.compile(r"""\s*(?P<key>[\w.]+)\s*[-*+/]?=\s*(?:"(?P<quoted>[^"]*)"|(?P<bare>\S+))(?=\s|\Z)""", re.ASCII)
# strtoul(3) with base 0, and a k of 1024
_NUMBER = re.compile(r"(?:\s*\+?(0x[0-9a-f]+|0[0-7]*|[1-9]\d*))?(k?)", re.ASCII | re.IGNORECASE)
_BLANKS = " \t\n\v\f\r"
_KEYS = {"SwitchName": ("SwitchName", "Switches", "Nodes", "LinkSpeed"),
         "BlockName": ("BlockName", "Nodes"),
         "RingName": ("RingName", "Nodes"),
         "BlockSizes": ("BlockSizes",)}
_KINDS = {"SwitchName": "tree", "BlockName": "block", "RingName": "ring"}
_FULL = {key.lower(): key for keys in _KEYS.values() for key in keys}
_MAX_INCLUDES = 32


@dataclass(frozen=True)
class Line:
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
    declared: dict[str, list[Declared]] = {key: [] for key in _KINDS}
    notes: list[str] = []
    sizes, sizes_line = "", Line(path, 0, "")
    for line in lines(path):
        pairs = _pairs(line)
        kind = next(iter(pairs))
        if kind not in _KEYS:
            raise line.error(f"a line begins with one of {', '.join(_KEYS)}")
        for key in pairs:
            if key not in _KEYS[kind]:
                raise line.error(f"{key} does not belong to {kind}; valid: {', '.join(_KEYS[kind])}")
        if kind == "BlockSizes":
            sizes, sizes_line = pairs[kind], line
            continue
        zone = _declared(kind, pairs, line)
        if kind != "BlockName" and not zone.children and not zone.nodes:
            notes.append(f"{line.file}:{line.line}: {zone.name} is empty, which Slurm before 25.05 refuses")
        declared[kind].append(zone)
    used = [key for key, zones in declared.items() if zones]
    if len(used) > 1:
        raise InputError(f"holds both {' and '.join(used)}; a topology is either a tree, blocks or rings", file=path)
    if not used:
        raise InputError("declares no zone; a line SwitchName=NAME Nodes=LIST or BlockName=NAME Nodes=LIST "
                         "is needed", file=path)
    zones, kind = declared[used[0]], _KINDS[used[0]]
    if kind == "block":
        return _blocks(zones, sizes, sizes_line, path, notes)
    if kind == "ring":
        notes.append(SIMPLIFIED.format("ring"))
    return build(zones, kind=kind, source=path, notes=tuple(notes))


def _blocks(base: list[Declared], text: str, line: Line, path: str, notes: list[str]) -> Topology:
    if text and not re.fullmatch(r"[1-9][0-9]{0,8}(, *[1-9][0-9]{0,8})*", text):
        raise line.error("BlockSizes takes numbers of nodes, e.g. BlockSizes=30,120")
    sizes = tuple(int(size) for size in text.split(",") if text)
    try:
        steps = blocks.steps(sizes)
    except ValueError as error:
        raise line.error(str(error)) from error
    small = blocks.too_small(base, sizes)
    if small:
        raise small[0].error(small[1])
    return build([*base, *blocks.aggregates(base, steps)], kind="block", source=path, notes=tuple(notes),
                 block_sizes=sizes)


def _declared(kind: str, pairs: dict[str, str], line: Line) -> Declared:
    if not pairs[kind]:
        raise line.error(f"{kind} needs a name")
    if "Nodes" in pairs and "Switches" in pairs:
        raise line.error("has both Nodes and Switches; a leaf has Nodes, a switch above has Switches")
    if kind == "BlockName" and "Nodes" not in pairs:
        raise line.error("a block needs Nodes, e.g. BlockName=b1 Nodes=n[1-18]")
    speed = _number(pairs["LinkSpeed"]) if "LinkSpeed" in pairs else None
    if "LinkSpeed" in pairs and speed is None:
        raise line.error("LinkSpeed takes a whole number of at most 32 bits")
    try:
        children, nodes = (tuple(hostlist.expand(pairs.get(key, ""))) for key in ("Switches", "Nodes"))
    except InputError as error:
        raise line.error(str(error)) from error
    if "Switches" in pairs and not children:
        raise line.error("Switches names no switch; a switch needs Nodes or Switches")
    return Declared(pairs[kind], children, nodes, speed, line.file, line.line, line.text.strip())


def _number(text: str) -> int | None:
    """The number that Slurm reads (s_p_handle_uint32), None where it refuses."""
    if text.lower() in ("unlimited", "infinite"):
        return 0xFFFFFFFF
    match = _NUMBER.fullmatch(text)
    if not match or len(text) > 40:
        return None
    digits = match[1] or "0"
    base = 16 if digits[:2].lower() == "0x" else 8 if digits[0] == "0" else 10
    number = int(digits, base) * (1024 if match[2] else 1)
    return number if number <= 0xFFFFFFFF else None


def _pairs(line: Line) -> dict[str, str]:
    """Key (in full spelling) -> value; of a key that stands twice the last wins, as in Slurm."""
    pairs: dict[str, str] = {}
    at, text = 0, line.text.rstrip(_BLANKS)
    while at < len(text):
        match = _PAIR.match(text, at)
        if not match:
            raise line.error(f"{text[at:].strip(_BLANKS).split(' ')[0]!r} is no KEY=VALUE; "
                             f"valid keys: {', '.join(_FULL.values())}")
        key = _FULL.get(match["key"].lower())
        if key is None:
            raise line.error(f"unknown key {match['key']!r}; valid: {', '.join(_FULL.values())}")
        if pairs and key in _KEYS:
            raise line.error(f"{key} stands only at the beginning of a line, and once")
        pairs[key] = match["quoted"] if match["quoted"] is not None else match["bare"]
        at = match.end()
    return pairs


def lines(path: str) -> Iterator[Line]:
    """Logical lines of a file in the format of slurm.conf, those of included files among them, without blank ones.

    Raises
    ------
    InputError : a file cannot be read or includes itself.
    """
    return _included(path, os.path.dirname(path), ())


def _included(path: str, base: str, stack: tuple[str, ...]) -> Iterator[Line]:
    """Logical lines of a file and of those that it includes, relative to `base`."""
    if path in stack or len(stack) > _MAX_INCLUDES:
        raise InputError(f"includes itself ({' -> '.join([*stack, path])})", file=path)
    raw = text_of(path).split("\n")
    joined, begin = "", 0
    for number, part in enumerate(raw, 1):
        begin = begin or number
        text = joined + _without_comment(part.partition("\0")[0])  # to Slurm, which is C, a line ends there
        stripped = text.rstrip(_BLANKS)
        if (len(stripped) - len(stripped.rstrip("\\"))) % 2:
            joined = text = stripped[:-1]
            if number < len(raw):
                continue
        line = Line(path, begin, re.sub(r"\\(.)", r"\1", text))
        joined, begin = "", 0
        include = re.match(r"include\s+(\S+)\s*\Z", line.text, re.IGNORECASE | re.ASCII)
        if include:
            yield from _included(os.path.join(base, include[1]), base, (*stack, path))
        elif line.text.strip(_BLANKS):
            yield line


def _without_comment(text: str) -> str:
    for match in re.finditer("#", text):
        before = text[:match.start()]
        if (len(before) - len(before.rstrip("\\"))) % 2 == 0:
            return before
    return text
