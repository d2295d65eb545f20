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
from slurmdl.files import MAX_TEXT_BYTES, read_text_limited
from slurmdl.slurm import hostlist
from slurmdl.topology import source
from slurmdl.topology.source import TREE_APPROXIMATION_NOTE, OnError, TopologySource, ZoneDecl, raise_error
from slurmdl.topology.topology import Topology

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
_CANONICAL_KEYS = {key.lower(): key for keys in _KEYS.values() for key in keys}
_INCLUDE = re.compile(r"include\s+(\S+)\s*\Z", re.IGNORECASE | re.ASCII)
#: a `#` after an even number of backslashes begins a comment; the backslashes before it belong to the text
_COMMENT = re.compile(r"(?<!\\)((?:\\\\)*)#.*", re.DOTALL)
_MAX_INCLUDED_FILES = 1024


@dataclass(frozen=True)
class LogicalLine:
    """One logical line: continuations joined, comment cut, `line` where it begins."""

    file: str
    line: int
    text: str

    def error(self, message: str) -> InputError:
        return InputError(message, self.file, self.line, self.text.strip())


def parse_topology_conf(path: str) -> Topology:
    """The topology in a topology.conf.

    Raises
    ------
    InputError : with file, line, text and what is valid, wherever slurmctld would refuse the file, too.
    """
    return declare_topology_conf(path).to_topology()


def declare_topology_conf(path: str, on_error: OnError = raise_error) -> TopologySource:
    """What a topology.conf declares; a line with a fault is passed over where `on_fault` returns.

    Raises
    ------
    InputError : from `on_fault`, and where the file as a whole cannot be read or declares no zone.
    """
    declared: dict[str, list[ZoneDecl]] = {key: [] for key in _KINDS}
    notes: list[str] = []
    sizes: tuple[int, ...] = ()
    room = hostlist.MAX_NAMES
    for line in logical_lines(path):
        try:
            pairs = _parse_pairs(line)
            kind = _line_kind(pairs, line)
            if kind == "BlockSizes":
                sizes = _parse_block_sizes(pairs[kind], line)
                continue
            zone = _parse_zone(kind, pairs, line, room)
        except InputError as fault:
            on_error(fault)
            continue
        room -= 1 + len(zone.nodes) + len(zone.children)
        if kind != "BlockName" and not zone.children and not zone.nodes:
            notes.append(f"{line.file}:{line.line}: {zone.name} is empty, which Slurm before 25.05 refuses")
        declared[kind].append(zone)
    used = [key for key, zones in declared.items() if zones]
    if len(used) > 1:
        on_error(InputError(f"holds both {' and '.join(used)}; a topology is either a tree, blocks or rings",
                            file=path))
    if not used:
        raise InputError("declares no zone; a line SwitchName=NAME Nodes=LIST or BlockName=NAME Nodes=LIST "
                         "is needed", file=path)
    if used[0] == "RingName":
        notes.append(TREE_APPROXIMATION_NOTE.format("ring"))
    return TopologySource(tuple(declared[used[0]]), _KINDS[used[0]], path, notes=tuple(notes),
                    block_sizes=sizes if used[0] == "BlockName" else ())


def _line_kind(pairs: dict[str, str], line: LogicalLine) -> str:
    kind = next(iter(pairs))
    if kind not in _KEYS:
        raise line.error(f"a line begins with one of {', '.join(_KEYS)}")
    for key in pairs:
        if key not in _KEYS[kind]:
            raise line.error(f"{key} does not belong to {kind}; valid: {', '.join(_KEYS[kind])}")
    return kind


def _parse_block_sizes(text: str, line: LogicalLine) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9][0-9]{0,8}(, *[1-9][0-9]{0,8})*", text):
        raise line.error("BlockSizes takes numbers of nodes, e.g. BlockSizes=30,120")
    sizes = tuple(map(int, text.split(",")))
    try:
        source.level_multiples(sizes)
    except ValueError as error:
        raise line.error(str(error)) from error
    return sizes


def _parse_zone(kind: str, pairs: dict[str, str], line: LogicalLine, names_left: int) -> ZoneDecl:
    """The zone of a line, with at most `room` names."""
    if not pairs[kind]:
        raise line.error(f"{kind} needs a name")
    if "Nodes" in pairs and "Switches" in pairs:
        raise line.error("has both Nodes and Switches; a leaf has Nodes, a switch above has Switches")
    if kind == "BlockName" and "Nodes" not in pairs:
        raise line.error("a block needs Nodes, e.g. BlockName=b1 Nodes=n[1-18]")
    speed = _parse_uint32(pairs["LinkSpeed"]) if "LinkSpeed" in pairs else None
    try:
        children, nodes = (tuple(hostlist.expand_hostlist(pairs.get(key, ""), names_left))
                           for key in ("Switches", "Nodes"))
    except InputError as error:
        raise line.error(str(error)) from error
    if "Switches" in pairs and not children:
        raise line.error("Switches names no switch; a switch needs Nodes or Switches")
    return ZoneDecl(pairs[kind], children, nodes, speed, line.file, line.line, line.text.strip())


def _parse_uint32(text: str) -> int | None:
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


def _parse_pairs(line: LogicalLine) -> dict[str, str]:
    """Key (in full spelling) -> value; of a key that stands twice the last wins, but Slurm checks each."""
    pairs: dict[str, str] = {}
    at, text = 0, line.text.rstrip(_BLANKS)
    while at < len(text):
        match = _PAIR.match(text, at)
        if not match:
            raise line.error(f"{text[at:].strip(_BLANKS).split(' ')[0]!r} is no KEY=VALUE; "
                             f"valid keys: {', '.join(_CANONICAL_KEYS.values())}")
        key = _CANONICAL_KEYS.get(match["key"].lower())
        if key is None:
            raise line.error(f"unknown key {match['key']!r}; valid: {', '.join(_CANONICAL_KEYS.values())}")
        if pairs and key in _KEYS:
            raise line.error(f"{key} stands only at the beginning of a line, and once")
        pairs[key] = match["quoted"] if match["quoted"] is not None else match["bare"]
        if key == "LinkSpeed" and _parse_uint32(pairs[key]) is None:
            raise line.error("LinkSpeed takes a whole number of at most 32 bits")
        at = match.end()
    return pairs


def logical_lines(path: str) -> Iterator[LogicalLine]:
    """Logical lines of a file in the format of slurm.conf, those of included files among them, without blank ones.

    Raises
    ------
    InputError : a file cannot be read or includes itself, or there are too many files or bytes in all.
    """
    base, left, opened = os.path.dirname(path), MAX_TEXT_BYTES, 1
    text = read_text_limited(path, left)
    stack = [(path, _split_logical_lines(path, text))]
    while stack:
        line = next(stack[-1][1], None)
        if line is None:
            stack.pop()
            continue
        include = _INCLUDE.match(line.text)
        if not include:
            yield line
            continue
        below = os.path.join(base, include[1])
        if below in [path for path, _ in stack]:
            raise line.error(f"{below} includes itself")
        opened, left = opened + 1, left - len(text)
        if opened > _MAX_INCLUDED_FILES or left < 0:
            raise line.error(f"more than {_MAX_INCLUDED_FILES} files, or {MAX_TEXT_BYTES} bytes in all, are included")
        text = read_text_limited(below, left)
        stack.append((below, _split_logical_lines(below, text)))


def _split_logical_lines(path: str, text: str) -> Iterator[LogicalLine]:
    """Lines with their continuations, without comments; those that are blank are left out."""
    parts: list[str] = []
    raw = text.split("\n")
    for number, part in enumerate(raw, 1):
        if not part and not parts:
            continue
        if part.startswith("#") and not parts:
            continue
        kept = _COMMENT.sub(r"\1", part) if "#" in part else part
        stripped = kept.rstrip(_BLANKS)
        if stripped.endswith("\\") and (len(stripped) - len(stripped.rstrip("\\"))) % 2:
            kept = stripped[:-1]
            if number < len(raw):
                parts.append(kept)
                continue
        whole = "".join([*parts, kept])
        begin, parts = number - len(parts), []
        if whole.strip(_BLANKS):
            yield LogicalLine(path, begin, re.sub(r"\\(.)", r"\1", whole) if "\\" in whole else whole)
