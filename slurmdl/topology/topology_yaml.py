"""Reader of topology.yaml (topology.yaml(5), Slurm 25.05 and newer) and of `scontrol show topoconf`.

YAML is loaded as Slurm does (src/plugins/serializer/yaml): every scalar stays a string, while the usual loaders turn
`0012` into 10 and `on` into True. Aliases are an error in Slurm and here, so documents cannot expand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import yaml

from slurmdl.errors import InputError, OnError, raise_error
from slurmdl.slurm import hostlist
from slurmdl.topology.source import TREE_APPROXIMATION_NOTE, ZoneDecl, ZoneDeclarations, level_multiples
from slurmdl.yaml_input import yaml_syntax_error

_TRUE_WORDS, _FALSE_WORDS = ("y", "yes", "t", "true", "on"), ("n", "no", "f", "false", "off")
_KINDS = ("tree", "block", "flat", "ring", "torus3d")
_ZONE_LISTS = {"tree": "switches", "block": "blocks", "ring": "rings", "torus3d": "toruses"}
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


def parse_topology_yaml(text: str, source: str,
                        on_error: OnError = raise_error) -> tuple[list[ZoneDeclarations], str]:
    """Return the declarations of a text and the name of the default topology.

    A faulty zone or topology is skipped if `on_error` returns. InputError if the text is not YAML or has no topology;
    slurmctld rejects it, too. `source` is for messages.
    """
    try:
        root = _build_tree(text, source)
    except yaml.YAMLError as error:
        raise yaml_syntax_error(error, source) from error
    entries = root.as_list() if isinstance(root.value, list) else [root]
    if not entries:
        raise InputError("declares no topology; expected an entry `topology: NAME` with one of "
                         f"{', '.join(_KINDS)}", file=source)
    reader = _Reader(source, on_error)
    for entry in entries:
        try:
            reader.read_topology(entry)
        except InputError as error:
            on_error(error)
    return list(reader.sources.values()), reader.default or next(iter(reader.sources), "")


class _Reader:
    """Reader of one file; unknown fields are noted and ignored, as in Slurm."""

    def __init__(self, source: str, on_error: OnError) -> None:
        self.source, self.on_error = source, on_error
        self.sources: dict[str, ZoneDeclarations] = {}
        self.default = ""
        self.notes: list[str] = []
        self.names_left = hostlist.MAX_NAMES

    def read_topology(self, entry: YamlNode) -> None:
        self.notes = []
        fields = self.checked_fields(entry, "a topology", ("topology", "cluster_default", *_KINDS))
        name = fields["topology"].as_string() if "topology" in fields else ""
        if not name:
            raise entry.error("topology without a name; expected `topology: NAME`")
        is_default = "cluster_default" in fields and _parse_bool(fields["cluster_default"])
        used = [kind for kind in _KINDS if kind in fields and not _is_unused(fields[kind])]
        if len(used) != 1:
            raise entry.error(f"topology {name!r} has {' and '.join(used) or 'no kind'}; "
                              f"expected exactly one of {', '.join(_KINDS)}")
        kind, body = used[0], fields[used[0]]
        if kind in ("ring", "torus3d"):
            self.notes.append(TREE_APPROXIMATION_NOTE.format(kind.removesuffix("3d")))
        zones = self.read_zones(body, kind) if kind != "flat" else ()
        sizes = _parse_block_sizes(body.as_map().get("block_sizes")) if kind == "block" else ()
        if name in self.sources:
            raise fields["topology"].error(f"topology {name!r} is declared twice")
        self.sources[name] = ZoneDeclarations(tuple(zones), kind, self.source, name, tuple(self.notes), sizes)
        if is_default and not self.default:
            self.default = name

    def read_zones(self, body: YamlNode, kind: str) -> list[ZoneDecl]:
        zones, key = list[ZoneDecl](), _ZONE_LISTS[kind]
        fields = self.checked_fields(body, kind, (key, "block_sizes") if kind == "block" else (key,))
        if key not in fields:
            raise body.error(f"expected a list `{key}`")
        for item in fields[key].as_list():
            try:
                zones.append(self.read_torus(item) if kind == "torus3d" else
                             self.read_switch(item) if kind == "tree" else self.read_leaf(item, kind))
            except InputError as error:
                self.on_error(error)
        return zones

    def read_switch(self, item: YamlNode) -> ZoneDecl:
        fields = self.checked_fields(item, "a switch", ("switch", "children", "nodes"))
        children, nodes = (self.expand_entry(fields.get(key)) for key in ("children", "nodes"))
        if children and nodes:
            raise item.error("has both nodes and children; expected nodes for a leaf, children for other switches")
        return _to_zone_decl(item, fields, "switch", nodes, children)

    def read_leaf(self, item: YamlNode, key: str) -> ZoneDecl:
        fields = self.checked_fields(item, f"a {key}", (key, "nodes"))
        return _to_zone_decl(item, fields, key, self.expand_entry(fields.get("nodes")))

    def read_torus(self, item: YamlNode) -> ZoneDecl:
        """Read a torus as one zone with all of its nodes; their layout (dims, regions, placements) is not used."""
        fields = item.as_map()
        regions = fields["regions"].as_list() if "regions" in fields else []
        parts = [fields, *(region.as_map() for region in regions)]
        nodes = [node for part in parts for node in self.expand_entry(part.get("nodes"))]
        return _to_zone_decl(item, fields, "torus" if "torus" in fields else "name", nodes)

    def checked_fields(self, entry: YamlNode, owner: str, valid_keys: Sequence[str]) -> dict[str, YamlNode]:
        fields = entry.as_map()
        self.notes += [f"{self.source}:{value.line}: unknown field {key!r} of {owner} is ignored; "
                       f"expected {', '.join(valid_keys)}" for key, value in fields.items() if key not in valid_keys]
        return fields

    def expand_entry(self, entry: YamlNode | None) -> list[str]:
        """Expand a hostlist; `names_left` limits those of the file together."""
        if entry is None:
            return []
        if not isinstance(entry.value, str):
            raise entry.error("expected a hostlist as one string, e.g. n[1-4,7], not a list or a map")
        try:
            names = hostlist.expand_hostlist(entry.value, self.names_left)
        except InputError as error:
            raise entry.error(str(error)) from error
        self.names_left -= len(names)
        return names


def _is_unused(kind: YamlNode) -> bool:
    """Whether a kind is empty, as the controller's dump shows unused kinds."""
    if isinstance(kind.value, str):
        return not kind.value or not _parse_bool(kind)
    return not any(value.value for value in kind.as_map().values())


def _parse_bool(entry: YamlNode) -> bool:
    word = entry.as_string().lower()
    if word not in _TRUE_WORDS + _FALSE_WORDS:
        raise entry.error(f"not a boolean; expected one of {', '.join(_TRUE_WORDS + _FALSE_WORDS)}")
    return word in _TRUE_WORDS


def _parse_block_sizes(entry: YamlNode | None) -> tuple[int, ...]:
    if entry is None:
        return ()
    sizes = list[int]()
    for size in entry.as_list():
        text = size.as_string()
        if not text.isascii() or not text.isdigit() or len(text) > 9 or not int(text):
            raise size.error("block_sizes: expected numbers of nodes, e.g. [30, 120]")
        sizes.append(int(text))
    try:
        level_multiples(sizes)
    except ValueError as error:
        raise entry.error(str(error)) from error
    return tuple(sizes)


def _to_zone_decl(item: YamlNode, fields: dict[str, YamlNode], key: str, nodes: Sequence[str],
                  children: Sequence[str] = ()) -> ZoneDecl:
    name = fields[key].as_string() if key in fields else ""
    if not name:
        raise item.error(f"no name; expected `{key}: NAME`")
    return ZoneDecl(name, tuple(children), tuple(nodes), None, item.file, item.line, f"{key}: {name}")


def _build_tree(text: str, source: str) -> YamlNode:
    """Parse a text of one document; an empty text is an empty list.

    Raises YAMLError for invalid YAML, and InputError with `source` and line for an alias, a second document, a key
    that is not a string, or too many values or levels.
    """
    documents = YamlNode([], source, 1)
    # open lists and maps, each with the pending key of a map
    stack: list[tuple[YamlNode, list[str]]] = [(documents, [])]
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
        if count > _MAX_YAML_NODES:
            raise InputError(f"has more than {_MAX_YAML_NODES} values", source, line)
        if len(stack) > _MAX_DEPTH + 1:
            raise InputError(f"is nested deeper than {_MAX_DEPTH} lists and maps", source, line)
        if len(stack) == 1 and documents.value:
            raise entry.error("second document; expected one")
        _attach(entry, *stack[-1])
        if not isinstance(entry.value, str):
            stack.append((entry, []))
    return documents.as_list()[0] if documents.value else documents


def _attach(entry: YamlNode, container: YamlNode, key: list[str]) -> None:
    """Append a value to a list, or store it as the pending key of a map, or under that key."""
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
