"""Mesh of a parallel training job: names and sizes of its dimensions, and the coordinates of each rank.

`dp=16,pp=4,tp=8` names the slowest-varying dimension first, as torch.distributed.device_mesh.init_device_mesh takes
it: rank = (dp * 4 + pp) * 8 + tp. `megatron:tp8-cp1-ep8-dp16-pp4` names the fastest first, as Megatron-LM's
parallel_state.initialize_model_parallel numbers its ranks: there the expert groups (ep) divide the data-parallel
ranks, so ep does not multiply the number of ranks.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from slurmdl.errors import UsageError, sort_by_similarity
from slurmdl.text import pluralize

#: dimension -> the parallelism that it stands for; the second name of dp and fsdp is torchtitan's
KINDS = {"dp": "dp", "dp_replicate": "dp", "fsdp": "fsdp", "dp_shard": "fsdp", "pp": "pp", "tp": "tp", "cp": "cp",
         "ep": "ep"}
MAX_RANKS = 2**20

_EXPECTED = "expected dimensions and sizes, slowest first, e.g. dp=16,pp=4,tp=8, or megatron:tp8-cp1-ep8-dp16-pp4"


@dataclass(frozen=True)
class Mesh:
    """Mesh of ranks.

    Attributes:
        names: keys of KINDS, slowest-varying first, at most one of each kind.
        sizes: size of each dimension.
        expert_dims: the dimensions that form a group of experts; () without experts.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    expert_dims: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes)

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinate of a rank in each dimension."""
        position: dict[str, int] = {}
        for name, size in zip(reversed(self.names), reversed(self.sizes), strict=True):
            rank, position[name] = divmod(rank, size)
        return {name: position[name] for name in self.names}

    def size_of(self, kind: str) -> int:
        """Size of the dimension of a kind; 1 without it."""
        return math.prod(size for name, size in zip(self.names, self.sizes, strict=True) if KINDS[name] == kind)

    def group_dims(self, kind: str) -> tuple[int, ...]:
        """Indices of the dimensions along which the ranks of one group of this kind differ.

        The ranks of a context-parallel or expert group hold different tokens, so the gradients of the other
        parameters are reduced over them, too: dp, or with both dp and fsdp the latter, includes cp and ep.
        """
        reduces = "fsdp" if self.size_of("fsdp") > 1 else "dp"
        kinds = {kind, "cp", "ep"} if kind == reduces else {kind}
        return tuple(i for i, name in enumerate(self.names)
                     if (name in self.expert_dims if kind == "ep" else KINDS[name] in kinds))


def parse_mesh(text: str, source: str) -> Mesh:
    """Parse a mesh; UsageError names `source`, e.g. the option, and the valid dimensions."""
    if text.startswith("megatron:"):
        return _parse_megatron(text, source)
    sizes: dict[str, int] = {}
    for item in text.split(","):
        name, equals, size = item.strip().partition("=")
        if not equals:
            raise UsageError(f"{source}={text}: {_EXPECTED}")
        if name == "hsdp" and (pair := re.fullmatch(r"([0-9]{1,7})x([0-9]{1,7})", size)):
            entries = [("dp", pair[1]), ("fsdp", pair[2])]
        else:
            entries = [(name, size)]
        for dimension, value in entries:
            _add_dimension(sizes, dimension, value, f"{source}={text}")
    return _checked(Mesh(tuple(sizes), tuple(sizes.values()), ("ep",) if "ep" in sizes else ()), f"{source}={text}")


def _add_dimension(sizes: dict[str, int], name: str, size: str, source: str) -> None:
    if name not in KINDS:
        valid = ", ".join(sort_by_similarity(name, [*KINDS, "hsdp"]))
        raise UsageError(f"{source}: unknown dimension {name!r}; expected {valid}")
    if any(KINDS[name] == KINDS[known] for known in sizes):
        raise UsageError(f"{source}: {name} is given twice; expected one dimension of each kind")
    if not re.fullmatch(r"[0-9]{1,7}", size) or not int(size):
        raise UsageError(f"{source}: {name}: invalid size {size!r}; expected a whole number, 1 or more")
    sizes[name] = int(size)


def _checked(mesh: Mesh, source: str) -> Mesh:
    if mesh.ranks > MAX_RANKS:
        raise UsageError(f"{source}: {mesh.ranks} ranks; expected at most {MAX_RANKS}")
    return mesh


def _parse_megatron(text: str, source: str) -> Mesh:
    """Convert Megatron-LM's order: world size tp * cp * dp * pp, expert groups of neighbors in the dp x cp ranks."""
    sizes: dict[str, int] = {}
    for item in text.removeprefix("megatron:").split("-"):
        match = re.fullmatch(r"([a-z_]+)([0-9]*)", item)
        if not match:
            raise UsageError(f"{source}={text}: {_EXPECTED}")
        _add_dimension(sizes, match[1], match[2], f"{source}={text}")
    experts = sizes.pop("ep", 1)
    order = list(sizes)
    context, data = sizes.get("cp", 1), sizes.get("dp", 1)
    if experts == 1:
        return _checked(Mesh(tuple(reversed(order)), tuple(sizes[name] for name in reversed(order))),
                        f"{source}={text}")
    if experts % context or data % (experts // context) or \
            (context > 1 and order.index("dp") != order.index("cp") + 1):
        raise UsageError(f"{source}={text}: ep{experts} does not divide dp{data} x cp{context}; expected a multiple "
                         "of cp that divides dp * cp, and dp directly after cp")
    inner = experts // context
    split = {"dp": ("dp", data // inner), "ep": ("ep", inner)}
    fastest_first = [entry for name in order
                     for entry in ((split["ep"], split["dp"]) if name == "dp" else ((name, sizes[name]),))]
    names, counts = zip(*reversed(fastest_first), strict=True)
    return _checked(Mesh(names, counts, ("ep", "cp") if context > 1 else ("ep",)), f"{source}={text}")


def size_mismatch(mesh: Mesh, ranks: int) -> str:
    """Why a mesh does not fit a number of ranks, and the sizes that would; "" if it fits."""
    if mesh.ranks == ranks:
        return ""
    line = f"--dl-mesh={mesh}: a mesh of {pluralize(mesh.ranks, 'rank')}; the job has {ranks}"
    data = next((i for i, name in enumerate(mesh.names) if KINDS[name] in ("dp", "fsdp")), 0)
    others = mesh.ranks // mesh.sizes[data]
    if ranks % others == 0:
        return f"{line}; expected {mesh.names[data]}={ranks // others}"
    below = ranks // others * others
    near = f"{below} or {below + others}" if below else f"{others}"
    return f"{line}; expected {near} rank{'s' * (near != '1')}, or sizes whose product is {ranks}"
