"""YAML as Slurm loads it: every scalar stays a string; each value keeps its line number.

The usual loaders turn `0012` into 10 and `on` into True; Slurm does not (src/plugins/serializer/yaml). Aliases are an
error in Slurm and here, so documents cannot expand.
"""

from __future__ import annotations

from dataclasses import dataclass

import yaml

from slurmdl.errors import InputError

_MAX_DEPTH = 16  # Slurm's own files have six levels
_MAX_YAML_NODES = 300_000  # 100,000 cluster nodes on leaves of 20 make 35,000
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass
class YamlNode:
    """A string, a list, or a map with string keys, with its location."""

    value: str | list[YamlNode] | dict[str, YamlNode]
    file: str
    line: int

    def error(self, message: str) -> InputError:
        return InputError(message, self.file, self.line, _excerpt(self))

    def as_string(self) -> str:
        """Return the string; InputError for a list or a map."""
        if not isinstance(self.value, str):
            raise self.error("expected one value, not a list or a map")
        return self.value

    def as_list(self) -> list[YamlNode]:
        """Return the entries of a list; an empty string is an empty list."""
        if self.value == "":
            return []
        if not isinstance(self.value, list):
            raise self.error("expected a list: entries that begin with `- `")
        return self.value

    def as_map(self) -> dict[str, YamlNode]:
        """Return the fields of a map; an empty string is an empty map."""
        if self.value == "":
            return {}
        if not isinstance(self.value, dict):
            raise self.error("expected a map: lines of the form `key: value`")
        return self.value


def parse_yaml_nodes(text: str, source: str) -> YamlNode:
    """Parse a text of one document; an empty text is an empty list.

    Raises InputError: with `source` and line, for invalid YAML, an alias, a second document, a key that is not a
    string, or too many values or levels.
    """
    try:
        return _build_tree(text, source)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error)
        raise InputError(f"is not YAML ({problem})", source, mark.line + 1 if mark else None) from error


def _build_tree(text: str, source: str) -> YamlNode:
    documents: list[YamlNode] = []
    # open lists and maps, each with the pending key of a map
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
            raise InputError("aliases are not valid, as in Slurm; expected the value itself", source, line,
                             f"*{event.anchor}")
        value: str | list[YamlNode] | dict[str, YamlNode] = \
            event.value if isinstance(event, yaml.ScalarEvent) else \
            [] if isinstance(event, yaml.SequenceStartEvent) else {}
        entry = YamlNode(value, source, line)
        count += 1
        if count > _MAX_YAML_NODES or len(stack) > _MAX_DEPTH:
            raise InputError(f"has more than {_MAX_YAML_NODES} values" if count > _MAX_YAML_NODES else
                             f"is nested deeper than {_MAX_DEPTH} lists and maps", source, entry.line)
        _attach(entry, stack, documents)
        if not isinstance(entry.value, str):
            stack.append((entry, []))
    return documents[0] if documents else YamlNode([], source, 1)


def _attach(entry: YamlNode, stack: list[tuple[YamlNode, list[str]]], documents: list[YamlNode]) -> None:
    """Append a value to the open list or map, or make it the document."""
    if not stack:
        if documents:
            raise entry.error("second document; expected one")
        documents.append(entry)
        return
    container, key = stack[-1]
    if isinstance(container.value, list):
        container.value.append(entry)
    elif not key:
        if not isinstance(entry.value, str):
            raise entry.error("expected a string as key")
        key.append(entry.value)
    else:
        assert isinstance(container.value, dict)
        container.value[key.pop()] = entry  # the last of duplicate keys wins, as in Slurm


def _excerpt(entry: YamlNode) -> str:
    if isinstance(entry.value, str):
        return entry.value
    if isinstance(entry.value, list):
        return f"a list of {len(entry.value)}"
    return "{" + ", ".join(list(entry.value)[:6]) + "}"
