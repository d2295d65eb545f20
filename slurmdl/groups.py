"""Named groups of nodes in one job, e.g. trainer and rollout nodes of reinforcement learning.

`trainer=8,rollout=24` gives the first ranks to the trainer nodes and the next ones to the rollout nodes. The ranks
of a group may form a mesh: `trainer:dp=8,tp=8/rollout:dp=24,tp=8`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from slurmdl.errors import UsageError, sort_by_similarity
from slurmdl.mesh import KINDS, Mesh, parse_mesh
from slurmdl.text import pluralize
from slurmdl.units import parse_bytes

#: role names of parameter servers (--dl-ps), prefix of a mesh in Megatron-LM's order, dimensions of meshes
_RESERVED = ("ps", "worker", "megatron", *KINDS)
_EXPECTED = "expected names and numbers of nodes, e.g. trainer=8,rollout=24"


@dataclass(frozen=True)
class Group:
    """A group of nodes with consecutive ranks.

    `mesh` is the mesh of its ranks, None without one.
    """

    name: str
    nodes: int
    mesh: Mesh | None = None

    @property
    def ranks_per_node(self) -> int:
        """Ranks of its mesh on each node; 0 without a mesh."""
        return self.mesh.ranks // self.nodes if self.mesh else 0


def parse_groups(text: str, source: str, meshes: str = "", mesh_source: str = "--dl-mesh") -> tuple[Group, ...]:
    """Parse groups and the meshes of some of them; UsageError names `source` or `mesh_source`.

    A mesh must have the same number of ranks on each node of its group, and all groups the same number.
    """
    nodes: dict[str, int] = {}
    for item in text.split(","):
        match = re.fullmatch(r"([A-Za-z][\w-]{0,31})=([0-9]{1,6})", item.strip())
        if not match or not int(match[2]):
            raise UsageError(f"{source}={text}: invalid group {item!r}; {_EXPECTED}")
        if match[1] in nodes or match[1] in _RESERVED:
            problem = "is given twice" if match[1] in nodes else "is a reserved name"
            raise UsageError(f"{source}={text}: {match[1]} {problem}; {_EXPECTED}")
        nodes[match[1]] = int(match[2])
    if len(nodes) < 2:
        raise UsageError(f"{source}={text}: one group; {_EXPECTED}")
    groups = {name: Group(name, count) for name, count in nodes.items()}
    for item in filter(None, meshes.split("/")):
        name, colon, mesh = item.partition(":")
        if not colon or name not in nodes:
            raise UsageError(f"{mesh_source}={meshes}: no group {name!r}; expected GROUP:MESH/..., the groups "
                             f"{', '.join(sort_by_similarity(name, list(nodes)))}")
        groups[name] = Group(name, nodes[name], parse_mesh(mesh, f"{mesh_source}={name}:"))
    for group in groups.values():
        if group.mesh and group.mesh.ranks % group.nodes:
            raise UsageError(f"{mesh_source}: {group.name}: a mesh of {pluralize(group.mesh.ranks, 'rank')} on "
                             f"{pluralize(group.nodes, 'node')}; expected the same number on each node")
    per_node = {group.name: group.ranks_per_node for group in groups.values() if group.mesh}
    if len(set(per_node.values())) > 1:
        numbers = ", ".join(f"{name} {count}" for name, count in per_node.items())
        raise UsageError(f"{mesh_source}={meshes}: ranks per node: {numbers}; expected equal numbers")
    return tuple(groups.values())


def launched_ranks_per_node(mesh: str, groups: str, tasks: int, nodes: int) -> int:
    """Ranks that each task starts if it is a launcher: one task per node, and a mesh with more ranks; else 0.

    `mesh` and `groups` are as in --dl-mesh and --dl-groups.
    """
    if not mesh or tasks != nodes:
        return 0
    ranks = max(group.ranks_per_node for group in parse_groups(groups, "--dl-groups", mesh)) if groups else \
        parse_mesh(mesh, "--dl-mesh").ranks // nodes
    return ranks if ranks > 1 else 0


@dataclass(frozen=True)
class GroupBytes:
    """Bytes of one iteration.

    Attributes:
        inside: group -> bytes that its ranks reduce (a ring all-reduce).
        between: (group, group) -> bytes that all ranks of the first send to those of the second, in equal messages.
    """

    inside: Mapping[str, float]
    between: Mapping[tuple[str, str], float]


def split_bytes(text: str, groups: tuple[Group, ...]) -> tuple[str, str]:
    """Split `--dl-bytes` into the items of groups, `trainer=1G` or `trainer:rollout=1G`, and those of dimensions."""
    has_mesh = any(group.mesh for group in groups)
    items = text.split(",") if "=" in text else []
    of_dimensions = [item for item in items if has_mesh and item.strip().partition("=")[0] in KINDS]
    return ",".join(item for item in items if item not in of_dimensions), ",".join(of_dimensions)


def parse_group_bytes(text: str, groups: tuple[Group, ...], source: str) -> GroupBytes:
    """Parse `trainer=14G,trainer:rollout=14G`; UsageError for an unknown group or an invalid number of bytes."""
    names, inside, between = [group.name for group in groups], dict[str, float](), dict[tuple[str, str], float]()
    for item in text.split(","):
        key, _, value = item.strip().partition("=")
        first, colon, second = key.partition(":")
        for name in (first, second)[:1 + bool(colon)]:
            if name not in names:
                raise UsageError(f"{source}={text}: unknown group {name!r}; expected "
                                 f"{', '.join(sort_by_similarity(name, names))}")
        count = parse_bytes(value, f"{source}={text}: {key}")
        if colon and first != second:
            between[first, second] = count
        elif next(group for group in groups if group.name == first).mesh:
            raise UsageError(f"{source}={text}: {first} has a mesh; its bytes follow from --dl-model or "
                             "those of its dimensions, e.g. tp=2G")
        else:
            inside[first] = count
    return GroupBytes(inside, between)


def node_count_mismatch(groups: tuple[Group, ...], nodes: int) -> str:
    """Why the groups do not fit a number of nodes, and the size that would; "" if they fit."""
    total = sum(group.nodes for group in groups)
    if total == nodes:
        return ""
    text = ",".join(f"{group.name}={group.nodes}" for group in groups)
    last = nodes - total + groups[-1].nodes
    expected = f"{groups[-1].name}={last}" if last > 0 else f"{pluralize(total, 'node')}"
    return f"--dl-groups={text}: {pluralize(total, 'node')}; the job has {nodes}; expected {expected}"
