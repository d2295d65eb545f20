"""Reader of topology.yaml (topology.yaml(5), Slurm 25.05 and newer) and of `scontrol show topoconf`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slurmdl.errors import InputError
from slurmdl.topology import blocks, hostlist
from slurmdl.topology.build import SIMPLIFIED, Declared
from slurmdl.topology.contents import Contents, OnFault, refuse
from slurmdl.topology.files import text_of
from slurmdl.topology.topologies import Topologies
from slurmdl.topology.yamltree import Entry, tree_of

_YES, _NO = ("y", "yes", "t", "true", "on"), ("n", "no", "f", "false", "off")
_KINDS = ("tree", "block", "flat", "ring", "torus3d")


def parse_file(path: str) -> Topologies:
    """The topologies in a topology.yaml.

    Raises
    ------
    InputError : with file, line, text and what is valid, wherever slurmctld would refuse the file, too.
    """
    return parse(text_of(path), path)


def parse(text: str, source: str) -> Topologies:
    """The topologies in a text; `source` names it in messages."""
    each, default = declare(text, source)
    return Topologies(tuple(contents.topology() for contents in each), default)


def declare(text: str, source: str, on_fault: OnFault = refuse) -> tuple[list[Contents], str]:
    """What a text declares, and the name of the default; a zone or topology with a fault is passed over where
    `on_fault` returns.

    Raises
    ------
    InputError : from `on_fault`, and where the text is no YAML or declares no topology.
    """
    top = tree_of(text, source)
    entries = top.items() if isinstance(top.value, list) else [top]
    if not entries:
        raise InputError("declares no topology; an entry `topology: NAME` with tree, block, flat, ring or torus3d "
                         "is needed", file=source)
    names = _Names()
    found: dict[str, Contents] = {}
    default = ""
    for entry in entries:
        try:
            reader = _Reader(source, entry, names, on_fault)
            contents = reader.contents()
            if contents.name in found:
                raise reader.top["topology"].error(f"topology {contents.name!r} is declared twice")
        except InputError as fault:
            on_fault(fault)
            continue
        found[contents.name] = contents
        if reader.is_default and not default:
            default = contents.name
    return list(found.values()), default or next(iter(found), "")


class _Reader:
    """One topology of a file; fields that Slurm does not know either are noted and passed over."""

    def __init__(self, source: str, entry: Entry, names: _Names, on_fault: OnFault) -> None:
        self.source = source
        self.entry = entry
        self.names = names
        self.on_fault = on_fault
        self.notes: list[str] = []
        self.top = self.fields(entry, "a topology", ("topology", "cluster_default", *_KINDS))
        if "topology" not in self.top or not self.top["topology"].text():
            raise entry.error("a topology needs a name, `topology: NAME`")
        default = self.top.get("cluster_default")
        self.is_default = default is not None and _truth(default)

    def contents(self) -> Contents:
        used = [kind for kind in _KINDS if kind in self.top and not _unused(self.top[kind])]
        name = self.top["topology"].text()
        if len(used) != 1:
            raise self.entry.error(f"topology {name!r} has {' and '.join(used) or 'no kind'}; "
                                   f"exactly one of {', '.join(_KINDS)} is needed")
        kind, body = used[0], self.top[used[0]]
        zones: list[Declared] = []
        sizes: tuple[int, ...] = ()
        if kind == "tree":
            zones = self.each(body, kind, "switches", self.switch)
        elif kind == "block":
            zones = self.each(body, kind, "blocks", lambda item: self.leaf(item, "block"), ("block_sizes",))
            sizes = _sizes(body.fields().get("block_sizes"))
        elif kind == "ring":
            self.notes.append(SIMPLIFIED.format("ring"))
            zones = self.each(body, kind, "rings", lambda item: self.leaf(item, "ring"))
        elif kind == "torus3d":
            self.notes.append(SIMPLIFIED.format("torus"))
            zones = self.each(body, kind, "toruses", self.torus)
        return Contents(tuple(zones), kind, self.source, name, tuple(self.notes), sizes)

    def each(self, body: Entry, kind: str, key: str, read: Callable[[Entry], Declared],
             others: tuple[str, ...] = ()) -> list[Declared]:
        """The zones of the list `key`."""
        zones = []
        for item in _items(self.fields(body, kind, (key, *others)), key, body):
            try:
                zones.append(read(item))
            except InputError as fault:
                self.on_fault(fault)
        return zones

    def switch(self, item: Entry) -> Declared:
        fields = self.fields(item, "a switch", ("switch", "children", "nodes"))
        children, nodes = (self.names.expand(fields.get(key)) for key in ("children", "nodes"))
        if children and nodes:
            raise item.error("has both nodes and children; a leaf has nodes, a switch above has children")
        return _declared(item, fields, "switch", nodes, children)

    def leaf(self, item: Entry, key: str) -> Declared:
        fields = self.fields(item, f"a {key}", (key, "nodes"))
        return _declared(item, fields, key, self.names.expand(fields.get("nodes")))

    def torus(self, item: Entry) -> Declared:
        """A torus with all of its nodes; how they are laid out (dims, regions, placements) is not read."""
        fields = item.fields()
        regions = fields["regions"].items() if "regions" in fields else []
        parts = [fields, *(region.fields() for region in regions)]
        nodes = [node for part in parts for node in self.names.expand(part.get("nodes"))]
        return _declared(item, fields, "torus" if "torus" in fields else "name", nodes)

    def fields(self, entry: Entry, what: str, valid: Sequence[str]) -> dict[str, Entry]:
        fields = entry.fields()
        for key, value in fields.items():
            if key not in valid:
                self.notes.append(f"{self.source}:{value.line}: unknown field {key!r} of {what} is passed over; "
                                  f"valid: {', '.join(valid)}")
        return fields


def _unused(kind: Entry) -> bool:
    """Whether a kind stands there empty, as the controller's dump has those that are not used."""
    if isinstance(kind.value, str):
        return not kind.value or not _truth(kind)
    return not any(value.value for value in kind.fields().values())


def _truth(entry: Entry) -> bool:
    word = entry.text().lower()
    if word not in _YES + _NO:
        raise entry.error(f"valid are {', '.join(_YES)} and {', '.join(_NO)}")
    return word in _YES


def _items(fields: dict[str, Entry], key: str, body: Entry) -> list[Entry]:
    if key not in fields:
        raise body.error(f"needs a list `{key}`")
    return fields[key].items()


def _sizes(entry: Entry | None) -> tuple[int, ...]:
    if entry is None:
        return ()
    sizes = tuple(map(_size, entry.items()))
    try:
        blocks.steps(sizes)
    except ValueError as error:
        raise entry.error(str(error)) from error
    return sizes


def _size(entry: Entry) -> int:
    text = entry.text()
    if not text.isascii() or not text.isdigit() or len(text) > 9 or not int(text):
        raise entry.error("block_sizes takes numbers of nodes, e.g. [30, 120]")
    return int(text)


def _declared(item: Entry, fields: dict[str, Entry], key: str, nodes: Sequence[str],
              children: Sequence[str] = ()) -> Declared:
    name = fields[key].text() if key in fields else ""
    if not name:
        raise item.error(f"needs a name, `{key}: NAME`")
    return Declared(name, tuple(children), tuple(nodes), None, item.file, item.line, f"{key}: {name}")


class _Names:
    """Expands the hostlists of a file, which may stand for so many names in all."""

    def __init__(self) -> None:
        self.left = hostlist.MAX_NAMES

    def expand(self, entry: Entry | None) -> list[str]:
        if entry is None:
            return []
        if not isinstance(entry.value, str):
            raise entry.error("takes a hostlist as one string, e.g. n[1-4,7], not a list or a map")
        try:
            names = hostlist.expand(entry.value, self.left)
        except InputError as error:
            raise entry.error(str(error)) from error
        self.left -= len(names)
        return names
