"""YAML as Slurm loads it: every scalar stays a string, and each value knows its line.

The usual loaders turn `0012` into 10 and `on` into True; Slurm does not (src/plugins/serializer/yaml). Aliases
are an error there and here, so no document grows while it is read.
"""

from __future__ import annotations

from dataclasses import dataclass

import yaml

from slurmdl.errors import InputError

#: nested lists and maps; Slurm's own files have six
_MAX_DEPTH = 16
#: lists, maps and scalars of one document; 100,000 nodes on leaves of 20 make 35,000
_MAX_ENTRIES = 300_000
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass
class Entry:
    """A value with its place: a string, a list, or a map with strings as keys."""

    value: str | list[Entry] | dict[str, Entry]
    file: str
    line: int

    def error(self, message: str) -> InputError:
        return InputError(message, self.file, self.line, _shown(self))

    def text(self) -> str:
        """The string; InputError where it is a list or a map."""
        if not isinstance(self.value, str):
            raise self.error("one value is expected here, not a list or a map")
        return self.value

    def items(self) -> list[Entry]:
        """The entries of a list; an empty string counts as an empty list."""
        if self.value == "":
            return []
        if not isinstance(self.value, list):
            raise self.error("a list is expected here, entries that begin with `- `")
        return self.value

    def fields(self) -> dict[str, Entry]:
        """The fields of a map; an empty string counts as an empty map."""
        if self.value == "":
            return {}
        if not isinstance(self.value, dict):
            raise self.error("a map is expected here, lines of the form `key: value`")
        return self.value


def tree_of(text: str, source: str) -> Entry:
    """The one document in a text; an empty text is an empty list.

    Raises
    ------
    InputError : with `source` and line, where it is no YAML, has an alias or a second document, a key that is no
        string, or is deeper or larger than a topology can be.
    """
    try:
        return _tree(text, source)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or str(error)
        raise InputError(f"is not YAML ({what})", source, mark.line + 1 if mark else None) from error


def _tree(text: str, source: str) -> Entry:
    documents: list[Entry] = []
    # open lists and maps; beside each map the key whose value comes next
    stack: list[tuple[Entry, list[str]]] = []
    count = 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, (yaml.SequenceEndEvent, yaml.MappingEndEvent)):
            stack.pop()
            continue
        if not isinstance(event, yaml.NodeEvent) or event.start_mark is None:
            continue
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            raise InputError("aliases are not valid here, as Slurm refuses them; write the value out", source, line,
                             f"*{event.anchor}")
        value: str | list[Entry] | dict[str, Entry] = \
            event.value if isinstance(event, yaml.ScalarEvent) else \
            [] if isinstance(event, yaml.SequenceStartEvent) else {}
        entry = Entry(value, source, line)
        count += 1
        if count > _MAX_ENTRIES or len(stack) > _MAX_DEPTH:
            raise InputError(f"holds more than {_MAX_ENTRIES} values" if count > _MAX_ENTRIES else
                             f"is nested deeper than {_MAX_DEPTH} lists and maps", source, entry.line)
        _add(entry, stack, documents)
        if not isinstance(entry.value, str):
            stack.append((entry, []))
    return documents[0] if documents else Entry([], source, 1)


def _add(entry: Entry, stack: list[tuple[Entry, list[str]]], documents: list[Entry]) -> None:
    """Put a value where it belongs: into the open list or map, or as the document."""
    if not stack:
        if documents:
            raise entry.error("a second document begins here; valid is one")
        documents.append(entry)
        return
    above, key = stack[-1]
    if isinstance(above.value, list):
        above.value.append(entry)
    elif not key:
        if not isinstance(entry.value, str):
            raise entry.error("a key must be a string")
        key.append(entry.value)
    else:
        assert isinstance(above.value, dict)
        above.value[key.pop()] = entry  # of a key that stands twice the last wins, as in Slurm


def _shown(entry: Entry) -> str:
    if isinstance(entry.value, str):
        return entry.value
    if isinstance(entry.value, list):
        return f"a list of {len(entry.value)}"
    return "{" + ", ".join(list(entry.value)[:6]) + "}"
