"""Reader of topology.conf (topology.conf(5)): switch trees, blocks with their aggregates, and rings.

The lexical rules are those of Slurm's src/common/parse_config.c: `#` starts a comment unless an odd number of
backslashes precedes it, a backslash at the end joins the next line, keys are case-insensitive.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from slurmdl.errors import InputError, OnError, raise_error
from slurmdl.files import MAX_TEXT_BYTES, read_text_limited
from slurmdl.slurm import hostlist
from slurmdl.topology.source import TREE_APPROXIMATION_NOTE, ZoneDecl, ZoneDeclarations, parse_block_sizes

# the expression of s_p_parse_line: a value is never empty, so any word after `Nodes=` is its value
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
_COMMENT = re.compile(r"(?<!\\)((?:\\\\)*)#.*", re.DOTALL)
_MAX_INCLUDED_FILES = 1024


@dataclass(frozen=True)
class LogicalLine:
    """One logical line: continuations joined, comment removed; `line` is its first line number."""

    file: str
    line: int
    text: str

    def error(self, message: str) -> InputError:
        return InputError(message, self.file, self.line, self.text.strip())

    def expand(self, hosts: str, max_names: int = hostlist.MAX_NAMES) -> tuple[str, ...]:
        """Expand a hostlist of this line."""
        try:
            return tuple(hostlist.expand_hostlist(hosts, max_names))
        except InputError as error:
            raise self.error(str(error)) from error


def parse_topology_conf(path: str, on_error: OnError = raise_error) -> ZoneDeclarations:
    """Return the declarations of a topology.conf; skip a faulty line if `on_error` returns.

    Raises InputError if the file cannot be read or declares no zone. With this and the checks of
    `ZoneDeclarations.to_topology` slurmdl rejects each file that slurmctld rejects.
    """
    declared: dict[str, list[ZoneDecl]] = {key: [] for key in _KINDS}
    notes: list[str] = []
    sizes: tuple[int, ...] = ()
    names_left = hostlist.MAX_NAMES
    for line in logical_lines(path):
        try:
            pairs = _parse_pairs(line)
            kind = _line_kind(pairs, line)
            if kind == "BlockSizes":
                try:
                    sizes = parse_block_sizes(pairs[kind])
                except ValueError as error:
                    raise line.error(str(error)) from error
                continue
            zone = _parse_zone(kind, pairs, line, names_left)
        except InputError as error:
            on_error(error)
            continue
        names_left -= 1 + len(zone.nodes) + len(zone.children)
        if kind != "BlockName" and not zone.children and not zone.nodes:
            notes.append(f"{line.file}:{line.line}: {zone.name} is empty; Slurm before 25.05 rejects it")
        declared[kind].append(zone)
    used_keys = [key for key, zones in declared.items() if zones]
    if len(used_keys) > 1:
        on_error(InputError(f"has both {' and '.join(used_keys)}; expected a tree, blocks or rings", file=path))
    if not used_keys:
        raise InputError("declares no zone; expected a line SwitchName=NAME Nodes=LIST or BlockName=NAME "
                         "Nodes=LIST", file=path)
    if used_keys[0] == "RingName":
        notes.append(TREE_APPROXIMATION_NOTE.format("ring"))
    return ZoneDeclarations(tuple(declared[used_keys[0]]), _KINDS[used_keys[0]], path, notes=tuple(notes),
                          block_sizes=sizes if used_keys[0] == "BlockName" else ())


def _line_kind(pairs: dict[str, str], line: LogicalLine) -> str:
    kind = next(iter(pairs))
    if kind not in _KEYS:
        raise line.error(f"{kind}: not a first key of a line; expected one of {', '.join(_KEYS)}")
    for key in pairs:
        if key not in _KEYS[kind]:
            raise line.error(f"{key}: not valid for {kind}; expected one of {', '.join(_KEYS[kind])}")
    return kind


def _parse_zone(kind: str, pairs: dict[str, str], line: LogicalLine, names_left: int) -> ZoneDecl:
    if not pairs[kind]:
        raise line.error(f"{kind} is empty; expected a name")
    if "Nodes" in pairs and "Switches" in pairs:
        raise line.error("has both Nodes and Switches; expected Nodes for a leaf, Switches for other switches")
    if kind == "BlockName" and "Nodes" not in pairs:
        raise line.error("block without Nodes; expected e.g. BlockName=b1 Nodes=n[1-18]")
    speed = _parse_uint32(pairs["LinkSpeed"]) if "LinkSpeed" in pairs else None
    children, nodes = (line.expand(pairs.get(key, ""), names_left) for key in ("Switches", "Nodes"))
    if "Switches" in pairs and not children:
        raise line.error("Switches is empty; expected Nodes or Switches")
    return ZoneDecl(pairs[kind], children, nodes, speed, line.file, line.line, line.text.strip())


def _parse_uint32(text: str) -> int | None:
    """Parse a number as Slurm does (s_p_handle_uint32); None if Slurm rejects it."""
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
    """Return the values by key in canonical spelling; the last duplicate wins, but each is checked, as in Slurm."""
    pairs: dict[str, str] = {}
    position, text = 0, line.text.rstrip(_BLANKS)
    while position < len(text):
        match = _PAIR.match(text, position)
        if not match:
            raise line.error(f"{text[position:].strip(_BLANKS).split(' ')[0]!r} is not KEY=VALUE; "
                             f"expected one of the keys {', '.join(_CANONICAL_KEYS.values())}")
        key = _CANONICAL_KEYS.get(match["key"].lower())
        if key is None:
            raise line.error(f"unknown key {match['key']!r}; expected one of {', '.join(_CANONICAL_KEYS.values())}")
        if pairs and key in _KEYS:
            raise line.error(f"{key} in the middle of a line; expected once, at the beginning")
        pairs[key] = match["quoted"] if match["quoted"] is not None else match["bare"]
        if key == "LinkSpeed" and _parse_uint32(pairs[key]) is None:
            raise line.error(f"LinkSpeed={pairs[key]}: expected an integer of at most 32 bits")
        position = match.end()
    return pairs


def logical_lines(path: str) -> Iterator[LogicalLine]:
    """Yield the non-blank logical lines of a file in slurm.conf format and of the files that it includes.

    Raises InputError if a file cannot be read or includes itself, or if there are too many files or bytes.
    """
    directory, bytes_left, file_count = os.path.dirname(path), MAX_TEXT_BYTES, 1
    text = read_text_limited(path, bytes_left)
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
        included = os.path.join(directory, include[1])
        if included in [path for path, _ in stack]:
            raise line.error(f"{included} includes itself")
        file_count, bytes_left = file_count + 1, bytes_left - len(text)
        if file_count > _MAX_INCLUDED_FILES or bytes_left < 0:
            raise line.error(f"too much included; at most {_MAX_INCLUDED_FILES} files, {MAX_TEXT_BYTES} bytes")
        text = read_text_limited(included, bytes_left)
        stack.append((included, _split_logical_lines(included, text)))


def _split_logical_lines(path: str, text: str) -> Iterator[LogicalLine]:
    """Yield the non-blank lines, with continuations joined and comments removed."""
    parts: list[str] = []
    lines = text.split("\n")
    for number, part in enumerate(lines, 1):
        if not parts and (not part or part.startswith("#")):
            continue
        content = _COMMENT.sub(r"\1", part) if "#" in part else part
        stripped = content.rstrip(_BLANKS)
        if stripped.endswith("\\") and (len(stripped) - len(stripped.rstrip("\\"))) % 2:
            content = stripped[:-1]
            if number < len(lines):
                parts.append(content)
                continue
        line = "".join([*parts, content])
        begin, parts = number - len(parts), []
        if line.strip(_BLANKS):
            yield LogicalLine(path, begin, re.sub(r"\\(.)", r"\1", line) if "\\" in line else line)
