"""Reader of topology.yaml (topology.yaml(5), Slurm 25.05 and newer) and of `scontrol show topoconf`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slurmdl.errors import InputError
from slurmdl.files import read_text_limited
from slurmdl.slurm import hostlist
from slurmdl.topology.source import (
    TREE_APPROXIMATION_NOTE,
    OnError,
    TopologySource,
    ZoneDecl,
    level_multiples,
    raise_error,
)
from slurmdl.topology.topology import TopologySet
from slurmdl.topology.yaml_nodes import YamlNode, parse_yaml_nodes

_TRUE_WORDS, _FALSE_WORDS = ("y", "yes", "t", "true", "on"), ("n", "no", "f", "false", "off")
_KINDS = ("tree", "block", "flat", "ring", "torus3d")


def load_topology_yaml(path: str) -> TopologySet:
    """Return the topologies in a topology.yaml; InputError wherever slurmctld rejects the file, too."""
    return parse_topology_yaml(read_text_limited(path), path)


def parse_topology_yaml(text: str, source: str) -> TopologySet:
    """Return the topologies in a text; `source` names it in messages."""
    sources, default = declare_topology_yaml(text, source)
    return TopologySet(tuple(declared.to_topology() for declared in sources), default)


def declare_topology_yaml(text: str, source: str,
                          on_error: OnError = raise_error) -> tuple[list[TopologySource], str]:
    """Return the declarations of a text and the name of the default topology; skip a faulty zone or topology if
    `on_error` returns.

    Raises InputError: from `on_error`, or if the text is not YAML or declares no topology.
    """
    root = parse_yaml_nodes(text, source)
    entries = root.as_list() if isinstance(root.value, list) else [root]
    if not entries:
        raise InputError("declares no topology; expected an entry `topology: NAME` with one of "
                         f"{', '.join(_KINDS)}", file=source)
    budget = _HostlistBudget()
    sources: dict[str, TopologySource] = {}
    default = ""
    for entry in entries:
        try:
            reader = _TopologyReader(source, entry, budget, on_error)
            declared = reader.to_source()
            if declared.name in sources:
                raise reader.top_fields["topology"].error(f"topology {declared.name!r} is declared twice")
        except InputError as error:
            on_error(error)
            continue
        sources[declared.name] = declared
        if reader.is_default and not default:
            default = declared.name
    return list(sources.values()), default or next(iter(sources), "")


class _TopologyReader:
    """Reader of one topology of a file; unknown fields are noted and ignored, as in Slurm."""

    def __init__(self, source: str, entry: YamlNode, budget: _HostlistBudget, on_error: OnError) -> None:
        self.source = source
        self.entry = entry
        self.budget = budget
        self.on_error = on_error
        self.notes: list[str] = []
        self.top_fields = self.checked_fields(entry, "a topology", ("topology", "cluster_default", *_KINDS))
        if "topology" not in self.top_fields or not self.top_fields["topology"].as_string():
            raise entry.error("topology without a name; expected `topology: NAME`")
        default = self.top_fields.get("cluster_default")
        self.is_default = default is not None and _parse_bool(default)

    def to_source(self) -> TopologySource:
        used = [kind for kind in _KINDS if kind in self.top_fields and not _is_unused(self.top_fields[kind])]
        name = self.top_fields["topology"].as_string()
        if len(used) != 1:
            raise self.entry.error(f"topology {name!r} has {' and '.join(used) or 'no kind'}; "
                                   f"expected exactly one of {', '.join(_KINDS)}")
        kind, body = used[0], self.top_fields[used[0]]
        if kind in ("ring", "torus3d"):
            self.notes.append(TREE_APPROXIMATION_NOTE.format("ring" if kind == "ring" else "torus"))
        zones: list[ZoneDecl] = []
        if kind == "tree":
            zones = self.read_zones(body, kind, "switches", self.read_switch)
        elif kind == "block":
            zones = self.read_zones(body, kind, "blocks", lambda item: self.read_leaf(item, kind), ("block_sizes",))
        elif kind == "ring":
            zones = self.read_zones(body, kind, "rings", lambda item: self.read_leaf(item, kind))
        elif kind == "torus3d":
            zones = self.read_zones(body, kind, "toruses", self.read_torus)
        sizes = _parse_block_sizes(body.as_map().get("block_sizes")) if kind == "block" else ()
        return TopologySource(tuple(zones), kind, self.source, name, tuple(self.notes), sizes)

    def read_zones(self, body: YamlNode, kind: str, key: str, read_zone: Callable[[YamlNode], ZoneDecl],
                   other_keys: tuple[str, ...] = ()) -> list[ZoneDecl]:
        """Read the zones of the list `key`."""
        zones = []
        fields = self.checked_fields(body, kind, (key, *other_keys))
        if key not in fields:
            raise body.error(f"expected a list `{key}`")
        for item in fields[key].as_list():
            try:
                zones.append(read_zone(item))
            except InputError as error:
                self.on_error(error)
        return zones

    def read_switch(self, item: YamlNode) -> ZoneDecl:
        fields = self.checked_fields(item, "a switch", ("switch", "children", "nodes"))
        children, nodes = (self.budget.expand_entry(fields.get(key)) for key in ("children", "nodes"))
        if children and nodes:
            raise item.error("has both nodes and children; expected nodes for a leaf, children for other switches")
        return _to_zone_decl(item, fields, "switch", nodes, children)

    def read_leaf(self, item: YamlNode, key: str) -> ZoneDecl:
        fields = self.checked_fields(item, f"a {key}", (key, "nodes"))
        return _to_zone_decl(item, fields, key, self.budget.expand_entry(fields.get("nodes")))

    def read_torus(self, item: YamlNode) -> ZoneDecl:
        """Read a torus as one zone with all of its nodes; their layout (dims, regions, placements) is not used."""
        fields = item.as_map()
        regions = fields["regions"].as_list() if "regions" in fields else []
        parts = [fields, *(region.as_map() for region in regions)]
        nodes = [node for part in parts for node in self.budget.expand_entry(part.get("nodes"))]
        return _to_zone_decl(item, fields, "torus" if "torus" in fields else "name", nodes)

    def checked_fields(self, entry: YamlNode, owner: str, valid_keys: Sequence[str]) -> dict[str, YamlNode]:
        fields = entry.as_map()
        for key, value in fields.items():
            if key not in valid_keys:
                self.notes.append(f"{self.source}:{value.line}: unknown field {key!r} of {owner} is ignored; "
                                  f"expected {', '.join(valid_keys)}")
        return fields


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
    sizes = tuple(map(_parse_block_size, entry.as_list()))
    try:
        level_multiples(sizes)
    except ValueError as error:
        raise entry.error(str(error)) from error
    return sizes


def _parse_block_size(entry: YamlNode) -> int:
    text = entry.as_string()
    if not text.isascii() or not text.isdigit() or len(text) > 9 or not int(text):
        raise entry.error("block_sizes: expected numbers of nodes, e.g. [30, 120]")
    return int(text)


def _to_zone_decl(item: YamlNode, fields: dict[str, YamlNode], key: str, nodes: Sequence[str],
                  children: Sequence[str] = ()) -> ZoneDecl:
    name = fields[key].as_string() if key in fields else ""
    if not name:
        raise item.error(f"no name; expected `{key}: NAME`")
    return ZoneDecl(name, tuple(children), tuple(nodes), None, item.file, item.line, f"{key}: {name}")


class _HostlistBudget:
    """Expand the hostlists of a file, up to a maximum number of names in total."""

    def __init__(self) -> None:
        self.names_left = hostlist.MAX_NAMES

    def expand_entry(self, entry: YamlNode | None) -> list[str]:
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
