"""Mesh of a parallel training job: its dimensions, the coordinates of each rank, and the traffic of each dimension.

`dp=16,pp=4,tp=8` names the slowest-varying dimension first, as torch.distributed.device_mesh.init_device_mesh takes
it: rank = (dp * 4 + pp) * 8 + tp. `megatron:tp8-cp1-ep8-dp16-pp4` names the fastest first, as Megatron-LM's
parallel_state.initialize_model_parallel numbers its ranks: there the expert groups (ep) divide the data-parallel
ranks, so ep does not multiply the number of ranks.

Bytes per iteration are given, or follow from a model: with b micro-batches of A = seq * micro-batch * hidden * bytes
per number each, L layers and the sizes of the dimensions:

- tp: 4 all-reduces of A / cp per layer and micro-batch, two forward and two backward (Shoeybi et al., Megatron-LM,
  2019; with sequence parallelism all-gathers and reduce-scatters of the same volume: Korthikanti et al., 2022).
- cp: a ring passes the keys and values of each layer forward, and these and their gradients backward, 6 A / tp in all
  (Liu et al., Ring attention with blockwise transformers, 2023).
- ep: all-to-all before and after the experts, forward and backward: 4 * topk * A / (cp * tp) per layer (Lepikhin et
  al., GShard, 2020).
- pp: A / (cp * tp) per micro-batch to the next stage and back (Narayanan et al., Efficient large-scale language model
  training on GPU clusters using Megatron-LM, SC 2021).
- dp: an all-reduce of the gradients, params / (tp * pp) numbers; those of the experts are divided by ep as well.
- fsdp: two all-gathers of the parameters and a reduce-scatter of the gradients (Rajbhandari et al., ZeRO, SC 2020);
  dp beside it reduces the shards (hybrid sharding).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from slurmdl.errors import PlacementError, UsageError, sort_by_similarity
from slurmdl.text import pluralize
from slurmdl.traffic import MAX_RANKS, IntArray, Phase, Traffic
from slurmdl.units import parse_bytes

#: dimension -> the parallelism that it stands for; the second name of dp and fsdp is torchtitan's
KINDS = {"dp": "dp", "dp_replicate": "dp", "fsdp": "fsdp", "dp_shard": "fsdp", "pp": "pp", "tp": "tp", "cp": "cp",
         "ep": "ep"}
BYTES_PER_NUMBER = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}
#: a model of 7 billion parameters, used if neither --dl-model nor --dl-bytes is given
DEFAULT_MODEL = "params=7B,hidden=4096,layers=32,seq=4096"
_COUNT_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
#: kinds in the order of their phases
_PHASE_ORDER = ("tp", "cp", "ep", "pp", "fsdp", "dp")
MAX_TIE = 0.005  # relative difference of times of a mesh or of groups that count as equal

_EXPECTED = "expected dimensions and sizes, slowest first, e.g. dp=16,pp=4,tp=8, or megatron:tp8-cp1-ep8-dp16-pp4"

Box = tuple[int, ...]
"""Ranks of a part of a mesh along each of its dimensions."""


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


@dataclass(frozen=True)
class ModelShape:
    """Numbers of a transformer that its traffic depends on.

    Attributes:
        params, expert_params: all parameters, and those of experts.
        micro_batches: of one rank in an iteration; 0 for 4 times the stages of the pipeline, which make its bubble
            small (Huang et al., GPipe, 2019), or 1 without a pipeline.
        topk: experts that receive each token.
        dtype: a key of BYTES_PER_NUMBER, of activations and gradients.
    """

    params: float
    hidden: int
    layers: int
    seq: int
    micro_batch: int = 1
    micro_batches: int = 0
    topk: int = 2
    expert_params: float = 0
    dtype: str = "bf16"


def parse_model(text: str, source: str) -> ModelShape:
    """Parse `params=7B,hidden=4096,layers=32,seq=4096,...`; UsageError names the missing or invalid key."""
    required, optional = ("params", "hidden", "layers", "seq"), ("micro-batch", "micro-batches", "topk",
                                                                 "expert-params", "dtype")
    values: dict[str, str] = {}
    for item in text.split(","):
        key, _, value = item.strip().partition("=")
        if key not in (*required, *optional):
            raise UsageError(f"{source}={text}: unknown key {key!r}; expected "
                             f"{', '.join(sort_by_similarity(key, [*required, *optional]))}")
        values[key] = value
    missing = [key for key in required if key not in values]
    if missing:
        raise UsageError(f"{source}={text}: {missing[0]} is missing; expected {', '.join(required)}")
    dtype = values.pop("dtype", "bf16")
    if dtype not in BYTES_PER_NUMBER:
        raise UsageError(f"{source}={text}: dtype: invalid value {dtype!r}; expected {', '.join(BYTES_PER_NUMBER)}")
    numbers = {key.replace("-", "_"): _parse_count(value, key, f"{source}={text}") for key, value in values.items()}
    if numbers.get("expert_params", 0) > numbers["params"]:
        raise UsageError(f"{source}={text}: expert-params: expected at most params")
    return ModelShape(**numbers, dtype=dtype)  # type: ignore[arg-type]


def _parse_count(text: str, key: str, source: str) -> float:
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)([KMBGT]?)", text)
    number = float(match[1]) * _COUNT_FACTORS[match[2]] if match else 0
    if not number or number != int(number):
        raise UsageError(f"{source}: {key}: invalid value {text!r}; expected a number above 0, e.g. 4096 or 7B")
    return number


@dataclass(frozen=True)
class Volume:
    """Traffic of one dimension: bytes of the buffers of all its operations in one iteration, and their number."""

    bytes: float
    operations: float = 1


def model_volumes(model: ModelShape, mesh: Mesh) -> dict[str, Volume]:
    """Volume of each kind of dimension; see the head of this module."""
    number = BYTES_PER_NUMBER[model.dtype]
    tp, cp, pp, ep, fsdp = (mesh.size_of(kind) for kind in ("tp", "cp", "pp", "ep", "fsdp"))
    activations = model.seq * model.micro_batch * model.hidden * number
    # each stage of the pipeline has its share of the layers
    micro_batches = model.micro_batches or (4 * pp if pp > 1 else 1)
    layer_passes = model.layers / pp * micro_batches
    dense = (model.params - model.expert_params) / (tp * pp)
    local = (dense + model.expert_params / (tp * pp * ep)) * number
    return {"tp": Volume(4 * layer_passes * activations / cp, 4 * layer_passes),
            "cp": Volume(6 * layer_passes * activations / tp, 3 * layer_passes),
            "ep": Volume(4 * layer_passes * model.topk * activations / (cp * tp), 4 * layer_passes),
            "pp": Volume(micro_batches * activations / (cp * tp), micro_batches),
            "fsdp": Volume(3 * local, 3 * model.layers / pp),
            "dp": Volume(local / fsdp)}


def parse_volumes(text: str, mesh: Mesh, source: str) -> dict[str, Volume]:
    """Parse `tp=2G,dp=14G`; UsageError for a dimension that the mesh lacks or an invalid number of bytes."""
    volumes = {}
    for item in text.split(","):
        name, _, value = item.strip().partition("=")
        if name not in mesh.names:
            raise UsageError(f"{source}={text}: unknown dimension {name!r}; expected "
                             f"{', '.join(sort_by_similarity(name, mesh.names))}")
        volumes[KINDS[name]] = Volume(parse_bytes(value, f"{source}={text}: {name}"))
    return volumes


@dataclass(frozen=True, eq=False)
class DimensionTraffic:
    """Messages along one dimension.

    Attributes:
        kind: a value of mesh.KINDS.
        dims: indices of the mesh's dimensions along which a group extends.
        size: ranks of a group.
        bytes_per_message: bytes from a rank to each of its targets in one phase.
        pairs: "ring" to the next rank, "line" to the next rank and back, "all" to each other rank of the group.
        rounds: sequential message rounds of one iteration.
    """

    kind: str
    dims: tuple[int, ...]
    size: int
    bytes_per_message: float
    pairs: str
    rounds: float


@dataclass(frozen=True, eq=False, kw_only=True)
class MeshTraffic(Traffic):
    """Traffic of a mesh; `volumes` maps a kind of dimension to its volume."""

    mesh: Mesh
    volumes: Mapping[str, Volume]
    kind: ClassVar[str] = "mesh"
    tie: ClassVar[float] = MAX_TIE

    @classmethod
    def of_mesh(cls, mesh: Mesh, model: str, bytes_text: str) -> MeshTraffic:
        """A mesh with the bytes of --dl-model and --dl-bytes; UsageError if they are invalid.

        Bytes given directly take precedence. Without both options the traffic is that of DEFAULT_MODEL; with
        --dl-bytes alone, dimensions that it does not name send nothing.
        """
        volumes: dict[str, Volume] = {}
        if model or not bytes_text:
            volumes = model_volumes(parse_model(model or DEFAULT_MODEL, "--dl-model"), mesh)
        if bytes_text:
            volumes.update(parse_volumes(bytes_text, mesh, "--dl-bytes"))
        return cls(mesh=mesh, volumes=volumes)

    @cached_property
    def dimensions(self) -> tuple[DimensionTraffic, ...]:
        """The dimensions that send anything, in the order of their phases."""
        found = []
        for kind in _PHASE_ORDER:
            volume, dims = self.volumes.get(kind, Volume(0)), self.mesh.group_dims(kind)
            size = math.prod(self.mesh.sizes[i] for i in dims)
            if size > 1 and volume.bytes:
                found.append(_dimension_traffic(kind, dims, size, volume))
        return tuple(found)

    def groups(self, dims: tuple[int, ...]) -> IntArray:
        """Ranks of each group along these dimensions, in rank order; shape (groups, ranks of a group)."""
        sizes = self.mesh.sizes
        ranks = np.arange(self.mesh.ranks).reshape(sizes)
        others = [i for i in range(len(sizes)) if i not in dims]
        return ranks.transpose([*others, *dims]).reshape(-1, math.prod(sizes[i] for i in dims))

    def size_mismatch(self, nodes: int, ranks: int) -> str:
        mesh = self.mesh
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

    def launched_ranks_per_node(self, tasks: int, nodes: int) -> int:
        ranks = self.mesh.ranks // nodes
        return ranks if tasks == nodes and ranks > 1 else 0

    def min_node_bytes(self, ranks_per_node: int) -> float:
        """Least bytes that leave a node, over all boxes of this size; 0 if there is none."""
        sizes = self.mesh.sizes
        return min((bytes_leaving(self, box) for box in boxes(sizes, ranks_per_node, (1,) * len(sizes))), default=0.0)

    def rounds(self, phases: Sequence[Phase], ranks_per_node: int) -> float:
        return sum(dimension.rounds for dimension in self.dimensions if dimension.size > ranks_per_node)

    def phases(self, ranks: int, zone_of_rank: IntArray | None = None) -> list[Phase]:
        """Phases of one iteration: one for each dimension, two for pipelines."""
        if mismatch := self.size_mismatch(0, ranks):
            raise PlacementError(mismatch)
        return [phase for dimension in self.dimensions for phase in self._dimension_phases(dimension)]

    def _dimension_phases(self, dimension: DimensionTraffic) -> Iterator[Phase]:
        groups, size, rounds = self.groups(dimension.dims), dimension.bytes_per_message, dimension.rounds
        if dimension.pairs == "line":
            source, target = groups[:, :-1].ravel(), groups[:, 1:].ravel()
            yield Phase(source, target, size, rounds)
            yield Phase(target, source, size, rounds)
        elif dimension.pairs == "ring":
            yield Phase(groups.ravel(), np.roll(groups, -1, axis=1).ravel(), size, rounds)
        else:
            count = groups.shape[1]
            first, second = np.nonzero(~np.eye(count, dtype=bool))
            yield Phase(groups[:, first].ravel(), groups[:, second].ravel(), size, rounds)


def _dimension_traffic(kind: str, dims: tuple[int, ...], size: int, volume: Volume) -> DimensionTraffic:
    if kind == "ep":
        return DimensionTraffic(kind, dims, size, volume.bytes / size, "all", volume.operations)
    if kind == "pp":
        return DimensionTraffic(kind, dims, size, volume.bytes, "line", volume.operations)
    # a ring passes (k - 1)/k of the buffer in k - 1 rounds; an all-reduce is a reduce-scatter and an all-gather
    passes = 2 if kind in ("tp", "dp") else 1
    return DimensionTraffic(kind, dims, size, passes * volume.bytes * (size - 1) / size, "ring",
                            passes * volume.operations * (size - 1))


def boxes(sizes: Box, ranks: int, inner: Box) -> Iterator[Box]:
    """Boxes of `ranks` ranks that consist of whole inner boxes and divide the mesh; none if nothing fits."""
    if not sizes:
        if ranks == 1:
            yield ()
        return
    for count in range(inner[0], sizes[0] + 1, inner[0]):
        if sizes[0] % count == 0 and ranks % count == 0:
            for rest in boxes(sizes[1:], ranks // count, inner[1:]):
                yield (count, *rest)


def bytes_leaving(traffic: MeshTraffic, box: Box) -> float:
    """Bytes that leave a box per iteration, summed over the phases, in the busier direction of each."""
    return sum(_dimension_bytes(dimension, traffic.mesh.sizes, box) for dimension in traffic.dimensions)


def _dimension_bytes(dimension: DimensionTraffic, sizes: Box, box: Box) -> float:
    inside = math.prod(box[i] for i in dimension.dims)
    if inside == dimension.size:
        return 0.0
    groups = math.prod(box) // inside
    if dimension.pairs == "all":
        return groups * inside * (dimension.size - inside) * dimension.bytes_per_message
    # neighbors in a group: a part of consecutive ranks is left once, with several parts once for each
    parts, is_partial = 1, False
    for i in reversed(dimension.dims):
        parts *= box[i] if is_partial else 1
        is_partial = is_partial or box[i] < sizes[i]
    directions = 2 if dimension.pairs == "line" else 1
    return directions * groups * parts * dimension.bytes_per_message
