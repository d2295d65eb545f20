"""Named groups of nodes in one job, e.g. trainer and rollout nodes of reinforcement learning.

`trainer=8,rollout=24` gives the first ranks to the trainer nodes and the next ones to the rollout nodes. The ranks
of a group may form a mesh: `trainer:dp=8,tp=8/rollout:dp=24,tp=8`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from slurmdl.errors import InputError, PlacementError, UsageError, sort_by_similarity
from slurmdl.mesh import KINDS, MAX_TIE, Mesh, MeshTraffic, parse_mesh
from slurmdl.plan import plan_from_environ
from slurmdl.text import pluralize
from slurmdl.traffic import IntArray, Phase, Traffic, check_rank_count, ring
from slurmdl.units import parse_bytes

#: role names of parameter servers (--dl-ps), prefix of a mesh in Megatron-LM's order, dimensions of meshes
_RESERVED = ("ps", "worker", "megatron", *KINDS)
_EXPECTED = "expected names and numbers of nodes, e.g. trainer=8,rollout=24"
MAX_LISTED_PAIRS = 2**12  # pairs of ranks of two groups that are listed, so that swaps of nodes can be evaluated


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


def split_bytes(text: str, groups: tuple[Group, ...]) -> tuple[str, str]:
    """Split `--dl-bytes` into the items of groups, `trainer=1G` or `trainer:rollout=1G`, and those of dimensions."""
    has_mesh = any(group.mesh for group in groups)
    items = text.split(",") if "=" in text else []
    of_dimensions = [item for item in items if has_mesh and item.strip().partition("=")[0] in KINDS]
    return ",".join(item for item in items if item not in of_dimensions), ",".join(of_dimensions)


def parse_group_bytes(text: str, groups: tuple[Group, ...],
                      source: str) -> tuple[dict[str, float], dict[tuple[str, str], float]]:
    """Parse `trainer=14G,trainer:rollout=14G` into bytes inside groups, and between two.

    Raises UsageError for an unknown group or an invalid number of bytes.
    """
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
    return inside, between


@dataclass(frozen=True, eq=False, kw_only=True)
class GroupTraffic(Traffic):
    """Traffic of groups of nodes.

    Attributes:
        inside: group -> bytes that its ranks reduce per iteration (a ring all-reduce).
        between: (group, group) -> bytes that all ranks of the first send to those of the second, in equal messages.
        meshes: group -> traffic of its mesh.
    """

    groups: tuple[Group, ...]
    inside: Mapping[str, float]
    between: Mapping[tuple[str, str], float]
    meshes: Mapping[str, MeshTraffic]
    kind: ClassVar[str] = "groups"
    tie: ClassVar[float] = MAX_TIE

    @classmethod
    def of_groups(cls, groups: tuple[Group, ...], model: str, bytes_text: str, model_bytes: float) -> GroupTraffic:
        """Groups with the bytes of --dl-model and --dl-bytes; UsageError if they are invalid.

        Unless --dl-bytes names groups, each group without a mesh reduces one replica of `model_bytes`; else groups
        that it does not name send nothing.
        """
        of_groups, of_dimensions = split_bytes(bytes_text, groups)
        inside, between = parse_group_bytes(of_groups, groups, "--dl-bytes") if of_groups else (
            {group.name: model_bytes for group in groups if not group.mesh}, {})
        meshes = {group.name: MeshTraffic.of_mesh(group.mesh, model, of_dimensions) for group in groups if group.mesh}
        return cls(groups=groups, inside=inside, between=between, meshes=meshes)

    def group_sizes(self) -> list[int]:
        return [group.nodes for group in self.groups]

    @property
    def nodes(self) -> int:
        return sum(self.group_sizes())

    def ranks_by_group(self, ranks: int) -> dict[str, IntArray]:
        """Ranks of each group. Raises PlacementError unless each node has the same number, that of the meshes."""
        per_node, rest = divmod(ranks, self.nodes)
        for group in self.groups:
            if group.mesh and (group.ranks_per_node != per_node or rest):
                raise PlacementError(f"--dl-mesh: {group.name}: {pluralize(group.ranks_per_node, 'rank')} on each "
                                     f"node; the job has {pluralize(ranks, 'rank')} on "
                                     f"{pluralize(self.nodes, 'node')}")
        if rest:
            raise PlacementError(f"--dl-groups: {pluralize(ranks, 'rank')} on {pluralize(self.nodes, 'node')}; "
                                 "expected the same number on each node (--ntasks-per-node)")
        ends = np.cumsum(self.group_sizes()) * per_node
        return dict(zip((group.name for group in self.groups), np.split(np.arange(ranks), ends[:-1]), strict=True))

    def size_mismatch(self, nodes: int, ranks: int) -> str:
        if self.nodes == nodes:
            return ""
        text = ",".join(f"{group.name}={group.nodes}" for group in self.groups)
        last = nodes - self.nodes + self.groups[-1].nodes
        expected = f"{self.groups[-1].name}={last}" if last > 0 else f"{pluralize(self.nodes, 'node')}"
        return f"--dl-groups={text}: {pluralize(self.nodes, 'node')}; the job has {nodes}; expected {expected}"

    def launched_ranks_per_node(self, tasks: int, nodes: int) -> int:
        ranks = max(group.ranks_per_node for group in self.groups)
        return ranks if tasks == nodes and ranks > 1 else 0

    def min_node_bytes(self, ranks_per_node: int) -> float:
        return 0.0  # some groups may send nothing

    def roles(self, ranks: int) -> tuple[str, ...]:
        return tuple(name for name, own in self.ranks_by_group(ranks).items() for _ in own)

    def phases(self, ranks: int, zone_of_rank: IntArray | None = None) -> list[Phase]:
        """Phases of one iteration: those of each group, then those between groups; exceptions as `ranks_by_group`."""
        check_rank_count(ranks)
        by_group = self.ranks_by_group(ranks)
        phases = [phase for name in by_group for phase in self.phases_inside(name, by_group[name])]
        for (source, target), count in self.between.items():
            phases += messages_between(by_group[source], by_group[target], count)
        return phases

    def phases_inside(self, name: str, ranks: IntArray) -> list[Phase]:
        """Phases inside a group that has these ranks."""
        if name in self.meshes:
            return [replace(phase, source=ranks[phase.source], target=ranks[phase.target])
                    for phase in self.meshes[name].phases(len(ranks))]
        return list(ring(ranks, self.inside.get(name, 0.0)))


def messages_between(source: IntArray, target: IntArray, total_bytes: float) -> Iterator[Phase]:
    """Messages of equal size from each rank of one group to each rank of another one, `total_bytes` in all."""
    size = total_bytes / (len(source) * len(target))
    if len(source) * len(target) <= MAX_LISTED_PAIRS:
        yield Phase(np.repeat(source, len(target)), np.tile(target, len(source)), size)
    else:
        yield Phase(source, target, size, all_pairs=True)


def planned_mesh(environ: Mapping[str, str] = os.environ) -> Mesh:
    """The mesh that the ranks of this step were mapped for, e.g. for torch.distributed.device_mesh.init_device_mesh.

    With groups of nodes it is the mesh of this task's group, for its rank in the group.

        mesh = slurmdl.planned_mesh()
        device_mesh = init_device_mesh("cuda", mesh.sizes, mesh_dim_names=mesh.names)
        mesh.coordinates(rank)    # {"dp": 0, "pp": 1, "tp": 3}

    Raises InputError if the step has no plan, or a plan without a mesh.
    """
    plan = plan_from_environ(environ)
    if plan is None or not plan.mesh:
        raise InputError("the step has no mesh; expected `slurmdl srun` with --dl-mesh=DIM=N,...")
    if plan.groups:
        role = environ.get("SLURMDL_ROLE", "")
        groups = parse_groups(plan.groups, "SLURMDL_PLAN: groups", plan.mesh)
        group = next((group for group in groups if group.name == role), None)
        if group is None or group.mesh is None:
            raise InputError(f"the group {role!r} (SLURMDL_ROLE) has no mesh; the meshes are {plan.mesh}")
        return group.mesh
    return parse_mesh(plan.mesh, "SLURMDL_PLAN: mesh")
