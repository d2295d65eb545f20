"""Versioned schema of the rank map that launch writes and train reads.

A plan is passed in the step's environment as SLURMDL_PLAN: deflated JSON in base64. If that exceeds 96 KiB, it is a
file in a shared directory, and the variable holds `file:PATH`.
"""

from __future__ import annotations

import base64
import binascii
import errno
import json
import os
import re
import stat
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slurmdl import records
from slurmdl.errors import InputError
from slurmdl.text import pluralize, sample_names

VERSION = 2
#: longest value of SLURMDL_PLAN, bytes (the kernel allows 128 KiB for one string)
MAX_ENV_BYTES = 96 * 1024

_MAX_NAMED_RANKS = 3  # misplaced ranks that a message names
STRATEGIES = ("allreduce", "gossip", "adaptive-gossip", "local-sgd", "ps")
#: strategy -> its communication patterns, the default first
COMM_PATTERNS = {
    "allreduce": ("ring", "hierarchical"), "ps": ("shards",),
    "gossip": ("random-matching", "one-peer-exponential", "base-2", "zone-aware"),
    "adaptive-gossip": ("base-2", "random-matching", "one-peer-exponential", "zone-aware"),
    "local-sgd": ("ring", "hierarchical")}


#: what can be an island, whose ranks train as one: all ranks of a leaf zone, or of a node
ISLAND_LEVELS = ("zone", "node")
#: strategies that can run between islands
ISLAND_STRATEGIES = ("local-sgd", "gossip", "adaptive-gossip")


def default_pattern(strategy: str, multiple_zones: bool) -> str:
    """Default pattern; hierarchical for allreduce between known zones, which sends less between them."""
    return "hierarchical" if strategy == "allreduce" and multiple_zones else COMM_PATTERNS[strategy][0]


def group_ranks(ranks: Sequence[int], labels: Sequence[str]) -> list[list[int]]:
    """Group ranks by label, e.g. zone or node, in order of first occurrence; `labels` has an entry per rank."""
    groups: dict[str, list[int]] = {}
    for rank in ranks:
        groups.setdefault(labels[rank], []).append(rank)
    return list(groups.values())


@dataclass(frozen=True)
class Plan:
    """Rank map of one step with its roles and zones.

    Attributes:
        strategy: one of STRATEGIES.
        nodes, roles: entry i belongs to rank i; a role is "ps", "worker" or the name of a group of nodes.
        zones: node -> zone path, root first, leaf last; () for a node without a zone.
        costs: "leafA|leafB" (names sorted) -> seconds per byte between two leaf zones, "leaf|leaf" inside one.
        comm_pattern: one of COMM_PATTERNS[strategy]; "" if the ranks are mapped for traffic matrices of the user.
        mesh, groups: the mesh of the ranks and their groups as in --dl-mesh and --dl-groups; "" without.
        islands: what is an island, one of ISLAND_LEVELS; "" without islands.
    """

    strategy: str
    nodes: tuple[str, ...]
    roles: tuple[str, ...]
    zones: Mapping[str, tuple[str, ...]]
    costs: Mapping[str, float] = field(default_factory=dict)
    comm_pattern: str = ""
    mesh: str = ""
    groups: str = ""
    islands: str = ""

    def __post_init__(self) -> None:
        if len(self.nodes) != len(self.roles):
            raise InputError(f"plan: {pluralize(len(self.nodes), 'rank')} but {pluralize(len(self.roles), 'role')}")
        if invalid := [role for role in set(self.roles) if not re.fullmatch(r"[A-Za-z][\w-]{0,31}", role)]:
            raise InputError(f"plan: invalid role {invalid[0]!r}; expected ps, worker or the name of a group")
        if self.strategy not in STRATEGIES:
            raise InputError(f"plan: strategy {self.strategy!r} is not one of {', '.join(STRATEGIES)}")
        if self.comm_pattern not in ("", *COMM_PATTERNS[self.strategy]):
            raise InputError(
                f"plan: comm_pattern {self.comm_pattern!r} is not one of {', '.join(COMM_PATTERNS[self.strategy])}")

        if self.islands and (self.islands not in ISLAND_LEVELS or self.strategy not in ISLAND_STRATEGIES):
            raise InputError(f"plan: islands {self.islands!r} with strategy {self.strategy}; expected "
                             f"{', '.join(ISLAND_LEVELS)} with {', '.join(ISLAND_STRATEGIES)}")

    def __len__(self) -> int:
        return len(self.nodes)

    def leaf_zone(self, rank: int) -> str:
        """Leaf zone of a rank, or "" if its node has none."""
        path = self.zones.get(self.nodes[rank], ())
        return path[-1] if path else ""


def encode_plan(plan: Plan) -> str:
    """Encode a plan as text for SLURMDL_PLAN; it may exceed MAX_ENV_BYTES."""
    text = json.dumps(records.to_json(plan, VERSION), separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def decode_plan(text: str) -> Plan:
    """Decode a value of SLURMDL_PLAN; raise InputError if it is invalid."""
    if text.startswith("file:"):
        text = _read_plan_file(text[len("file:"):])
    try:
        data = json.loads(zlib.decompress(base64.b64decode(text, validate=True)))
    except (binascii.Error, zlib.error, ValueError) as error:
        raise InputError("SLURMDL_PLAN is not a plan (expected base64 of deflated JSON)") from error
    return records.from_json(Plan, data, "plan", VERSION)


def write_plan_file(text: str, directory: str) -> str:
    """Write an encoded plan to a new file with mode 0600 and return its path; raise OSError if that fails.

    The directory may be writable by others: the name is random, and symbolic links are not followed.
    """
    directory = os.path.abspath(directory)
    os.makedirs(directory, mode=0o700, exist_ok=True)
    status = os.lstat(directory)
    if stat.S_ISLNK(status.st_mode) and status.st_uid not in (0, os.geteuid()):
        raise OSError(errno.ELOOP, "a symbolic link of another user", directory)
    directory_fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        name = f"plan-{os.urandom(8).hex()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(name, flags, 0o600, dir_fd=directory_fd), "w", encoding="utf-8") as file:
            file.write(text)
    finally:
        os.close(directory_fd)
    return os.path.join(directory, name)


def _read_plan_file(path: str) -> str:
    """Read a plan file; raise InputError if it is not a regular file of this user."""
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(path, flags), encoding="utf-8") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                raise InputError("the plan is not a regular file of this user", file=path)
            return file.read()
    except OSError as error:
        raise InputError(f"cannot read the plan: {error.strerror}", file=path) from error
    except UnicodeDecodeError as error:
        raise InputError("the plan is not UTF-8 text", file=path) from error


def compare_ranks(planned: Sequence[str], actual: Mapping[int, str]) -> tuple[str, str]:
    """Compare the node of each rank in a plan with the nodes on which the ranks run.

    Returns "correct", "misplaced" or "unseen" (ranks are missing in `actual`, the others are correct), and a line
    that says so, with the likely cause. `actual` maps a rank to its node.
    """
    correct = sum(actual.get(rank) == node for rank, node in enumerate(planned))
    place = "its planned node" if len(planned) == 1 else "their planned nodes"
    line = f"{correct} of {pluralize(len(planned), 'rank')} on {place}"
    wrong = [rank for rank, node in enumerate(planned) if actual.get(rank, node) != node]
    if wrong:
        named = [f"rank {rank} runs on {actual[rank]}, planned {planned[rank]}" for rank in wrong[:_MAX_NAMED_RANKS]]
        by_name = sorted(planned)
        cause = "the nodes are numbered by host name, as in a c10d rendezvous" \
            if all(actual.get(rank, node) == node for rank, node in enumerate(by_name)) \
            else "the launcher got another node rank than the planned one"
        dots = ", ..." if len(wrong) > len(named) else ""
        return "misplaced", f"{line}; {', '.join(named)}{dots}; likely cause: {cause}"
    unseen = sorted({node for rank, node in enumerate(planned) if rank not in actual})
    if unseen:
        return "unseen", f"{line}; the others were not seen, on {sample_names(unseen)}"
    return "correct", line


def segments_text(plan: Plan, environ: Mapping[str, str] = os.environ) -> str:
    """How many segments of the job are whole, to be added to the line of `compare_ranks`; "" without --segment.

    A segment is whole if its nodes share a leaf zone. Slurm sets SLURM_JOB_SEGMENT_SIZE since 25.05. An update of a
    job can break its segments without a message (SchedMD/slurm#225).
    """
    size = environ.get("SLURM_JOB_SEGMENT_SIZE", "")
    nodes = set(plan.nodes)
    if not size.isdigit() or int(size) < 2 or len(nodes) % int(size):
        return ""
    per_leaf = Counter(path[-1] for node in nodes if (path := plan.zones.get(node, ())))
    whole = sum(count // int(size) for count in per_leaf.values())
    segments = len(nodes) // int(size)
    return (f"; {whole} of {pluralize(segments, 'segment')} of {size} nodes {'is' if segments == 1 else 'are'} "
            "whole")


def planned_rank(local_rank: int = 0, environ: Mapping[str, str] = os.environ) -> int:
    """The rank that the plan of the step gives to a process: of the ranks of its node, the one at `local_rank`.

    For programs that number their ranks themselves. Raises InputError if there is no plan, or if it has no such rank
    on this node (SLURMD_NODENAME).
    """
    return planned_place(local_rank, environ)[1]


def planned_place(local_rank: int, environ: Mapping[str, str]) -> tuple[Plan, int]:
    """The plan of the step, and the rank as by `planned_rank`."""
    plan, node = plan_from_environ(environ), environ.get("SLURMD_NODENAME", "")
    if plan is None:
        raise InputError("SLURMDL_PLAN is not set; expected a step of `slurmdl srun`, or "
                         'eval "$(slurmdl env)" in the job script')
    ranks = [rank for rank, planned in enumerate(plan.nodes) if planned == node]
    if not 0 <= local_rank < len(ranks):
        raise InputError(f"the plan has {pluralize(len(ranks), 'rank')} on node {node or 'SLURMD_NODENAME'}, none "
                         f"with local rank {local_rank}")
    return plan, ranks[local_rank]


@dataclass(frozen=True)
class PlannedGroup:
    """A group of nodes: its name, its ranks in the step, and the node of each."""

    name: str
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]


def planned_group(environ: Mapping[str, str] = os.environ) -> PlannedGroup:
    """The group of this task (--dl-groups), or the ranks with its role, e.g. for torch.distributed.new_group.

        group = slurmdl.planned_group()
        trainers = torch.distributed.new_group(group.ranks)

    Raises InputError if the step has no plan, or the task no role in it (SLURMDL_ROLE).
    """
    plan, name = plan_from_environ(environ), environ.get("SLURMDL_ROLE", "")
    ranks = tuple(rank for rank, role in enumerate(plan.roles) if role == name) if plan else ()
    if plan is None or not ranks:
        raise InputError(f"SLURMDL_ROLE={name}: the step has no plan with this role; expected `slurmdl srun` with "
                         "--dl-groups=NAME=NODES,...")
    return PlannedGroup(name, ranks, tuple(plan.nodes[rank] for rank in ranks))


def plan_from_environ(environ: Mapping[str, str] = os.environ) -> Plan | None:
    """Plan of this step, or None if there is none."""
    text = environ.get("SLURMDL_PLAN")
    return decode_plan(text) if text else None
