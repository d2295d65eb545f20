"""What reaches the tasks: the one versioned schema between launch (writes) and train (reads).

A plan travels in the step's environment as SLURMDL_PLAN: JSON, deflated, base64; where that is longer
than 96 KiB it is a file in a shared directory, and the variable holds `file:PATH`.
"""

from __future__ import annotations

import base64
import binascii
import errno
import json
import os
import secrets
import stat
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from slurmdl.errors import InputError

VERSION = 2
#: longest value of SLURMDL_PLAN, bytes (the kernel allows 128 KiB for one string)
MAX_ENV_BYTES = 96 * 1024

ROLES = ("ps", "worker")
STRATEGIES = ("allreduce", "gossip", "adaptive-gossip", "local-sgd", "ps")
#: strategy -> names of the patterns of its traffic, the default first
COMM_PATTERNS = {"allreduce": ("ring", "hierarchical"), "ps": ("shards",),
            "gossip": ("random", "exponential", "base", "zones", "links"),
            "adaptive-gossip": ("base", "random", "exponential", "zones", "links"),
            "local-sgd": ("ring", "hierarchical")}


def default_pattern(strategy: str, multiple_zones: bool) -> str:
    """The pattern of a training's traffic where nobody asks for one, and no plan has one.

    Allreduce between zones that are known is hierarchical: less goes between them than round a ring.
    """
    return "hierarchical" if strategy == "allreduce" and multiple_zones else COMM_PATTERNS[strategy][0]


def group_ranks(ranks: Sequence[int], labels: Sequence[str]) -> list[list[int]]:
    """The ranks in groups of one zone, in the order of their first ranks; entry i of `zones` is that of rank i."""
    groups: dict[str, list[int]] = {}
    for rank in ranks:
        groups.setdefault(labels[rank], []).append(rank)
    return list(groups.values())


@dataclass(frozen=True)
class Plan:
    """The rank map of one step with its roles and zones.

    Attributes
    ----------
    strategy : one of STRATEGIES.
    nodes : entry i is the node of rank i.
    roles : entry i is the role of rank i, one of ROLES.
    zones : node -> zone path, root first, leaf last; () for a node without a zone.
    costs : "leafA|leafB" (names sorted) -> seconds per byte between two leaf zones, "leaf|leaf" inside one.
    traffic : the pattern for which the ranks are mapped, one of PATTERNS[strategy]; "" where they are mapped for
        none of them, but for matrices of the user's own.
    """

    strategy: str
    nodes: tuple[str, ...]
    roles: tuple[str, ...]
    zones: Mapping[str, tuple[str, ...]]
    costs: Mapping[str, float] = field(default_factory=dict)
    comm_pattern: str = ""

    def __post_init__(self) -> None:
        if len(self.nodes) != len(self.roles):
            raise InputError(f"plan: {len(self.nodes)} ranks but {len(self.roles)} roles")
        for role in self.roles:
            if role not in ROLES:
                raise InputError(f"plan: role {role!r} is not one of {', '.join(ROLES)}")
        if self.strategy not in STRATEGIES:
            raise InputError(f"plan: strategy {self.strategy!r} is not one of {', '.join(STRATEGIES)}")
        if self.comm_pattern not in ("", *COMM_PATTERNS[self.strategy]):
            raise InputError(
                f"plan: traffic {self.comm_pattern!r} is not one of {', '.join(COMM_PATTERNS[self.strategy])}")

    def __len__(self) -> int:
        return len(self.nodes)

    def leaf_zone(self, rank: int) -> str:
        """Leaf zone of a rank, "" where the node has none."""
        path = self.zones.get(self.nodes[rank], ())
        return path[-1] if path else ""

    def to_json(self) -> dict[str, Any]:
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, data: Any) -> Plan:
        """Read the parsed JSON of a plan; InputError names what is missing or of another version."""
        if not isinstance(data, dict):
            raise InputError(f"plan: expected an object, found {type(data).__name__}")
        if data.get("version") != VERSION:
            raise InputError(f"plan: version {data.get('version')!r} is not {VERSION}")
        try:
            return cls(strategy=str(data["strategy"]),
                       nodes=tuple(map(str, data["nodes"])),
                       roles=tuple(map(str, data["roles"])),
                       zones={str(node): tuple(map(str, path)) for node, path in data["zones"].items()},
                       costs={str(pair): float(cost) for pair, cost in data.get("costs", {}).items()},
                       comm_pattern=str(data.get("comm_pattern", "")))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"plan: malformed ({type(error).__name__}: {error})") from error


def encode_plan(plan: Plan) -> str:
    """The text of SLURMDL_PLAN (its length is not bounded here; see MAX_ENV_BYTES)."""
    text = json.dumps(plan.to_json(), separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def decode_plan(text: str) -> Plan:
    """The plan behind a value of SLURMDL_PLAN. InputError where it is not one."""
    if text.startswith("file:"):
        text = _read_plan_file(text[len("file:"):])
    try:
        data = json.loads(zlib.decompress(base64.b64decode(text, validate=True)))
    except (binascii.Error, zlib.error, ValueError) as error:
        raise InputError("SLURMDL_PLAN is not a plan (expected base64 of deflated JSON)") from error
    return Plan.from_json(data)


def write_plan_file(text: str, directory: str) -> str:
    """Keep the text of a plan in a new file that its owner alone can read, and return its path.

    Others may write to the directory: the name is drawn at random, and no link of theirs is followed.

    Raises
    ------
    OSError : it cannot be written.
    """
    directory = os.path.abspath(directory)
    os.makedirs(directory, mode=0o700, exist_ok=True)
    status = os.lstat(directory)
    if stat.S_ISLNK(status.st_mode) and status.st_uid not in (0, os.geteuid()):
        raise OSError(errno.ELOOP, "a symbolic link of another user", directory)
    folder = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        name = f"plan-{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(name, flags, 0o600, dir_fd=folder), "w", encoding="utf-8") as file:
            file.write(text)
    finally:
        os.close(folder)
    return os.path.join(directory, name)


def _read_plan_file(path: str) -> str:
    """The text of a plan's file. InputError where it is not a regular file of this user's own."""
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


def plan_from_environ(environ: Mapping[str, str] = os.environ) -> Plan | None:
    """The plan of this step, or None where the step has none."""
    text = environ.get("SLURMDL_PLAN")
    return decode_plan(text) if text else None
