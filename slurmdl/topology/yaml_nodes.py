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
_MAX_YAML_NODES = 300_000
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass
class YamlNode:
    """A value with its place: a string, a list, or a map with strings as keys."""

    value: str | list[YamlNode] | dict[str, YamlNode]
    file: str
    line: int

    def error(self, message: str) -> InputError:
        return InputError(message, self.file, self.line, _excerpt(self))

    def as_string(self) -> str:
        """The string; InputError where it is a list or a map."""
        if not isinstance(self.value, str):
            raise self.error("one value is expected here, not a list or a map")
        return self.value

    def as_list(self) -> list[YamlNode]:
        """The entries of a list; an empty string counts as an empty list."""
        if self.value == "":
            return []
        if not isinstance(self.value, list):
            raise self.error("a list is expected here, entries that begin with `- `")
        return self.value

    def as_map(self) -> dict[str, YamlNode]:
        """The fields of a map; an empty string counts as an empty map."""
        if self.value == "":
            return {}
        if not isinstance(self.value, dict):
            raise self.error("a map is expected here, lines of the form `key: value`")
        return self.value


def parse_yaml_nodes(text: str, source: str) -> YamlNode:
    """The one document in a text; an empty text is an empty list.

    Raises
    ------
    InputError : with `source` and line, where it is no YAML, has an alias or a second document, a key that is no
        string, or is deeper or larger than a topology can be.
    """
    try:
        return _build_tree(text, source)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or str(error)
        raise InputError(f"is not YAML ({what})", source, mark.line + 1 if mark else None) from error


def _build_tree(text: str, source: str) -> YamlNode:
    documents: list[YamlNode] = []
    # open lists and maps; beside each map the key whose value comes next
    stack: list[tuple[YamlNode, list[str]]] = []
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
        value: str | list[YamlNode] | dict[str, YamlNode] = \
            event.value if isinstance(event, yaml.ScalarEvent) else \
            [] if isinstance(event, yaml.SequenceStartEvent) else {}
        entry = YamlNode(value, source, line)
        count += 1
        if count > _MAX_YAML_NODES or len(stack) > _MAX_DEPTH:
            raise InputError(f"holds more than {_MAX_YAML_NODES} values" if count > _MAX_YAML_NODES else
                             f"is nested deeper than {_MAX_DEPTH} lists and maps", source, entry.line)
        _attach(entry, stack, documents)
        if not isinstance(entry.value, str):
            stack.append((entry, []))
    return documents[0] if documents else YamlNode([], source, 1)


def _attach(entry: YamlNode, stack: list[tuple[YamlNode, list[str]]], documents: list[YamlNode]) -> None:
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


def _excerpt(entry: YamlNode) -> str:
    if isinstance(entry.value, str):
        return entry.value
    if isinstance(entry.value, list):
        return f"a list of {len(entry.value)}"
    return "{" + ", ".join(list(entry.value)[:6]) + "}"
