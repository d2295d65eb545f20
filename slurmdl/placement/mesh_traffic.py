"""Traffic of a mesh of ranks: bytes of each dimension, from a model description or given, and its phases.

Per iteration, with b micro-batches of A = seq * micro-batch * hidden * bytes per number each, L layers and the
sizes of the dimensions:

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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from slurmdl.dl_options import DlOptions
from slurmdl.errors import UsageError, sort_by_similarity
from slurmdl.mesh import KINDS, Mesh, parse_mesh
from slurmdl.placement.arrays import IntArray
from slurmdl.placement.iteration_cost import Phase
from slurmdl.units import parse_bytes

BYTES_PER_NUMBER = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}
#: a model of 7 billion parameters, used if neither --dl-model nor --dl-bytes is given
DEFAULT_MODEL = "params=7B,hidden=4096,layers=32,seq=4096"
_COUNT_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
#: kinds in the order of their phases
_PHASE_ORDER = ("tp", "cp", "ep", "pp", "fsdp", "dp")


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


@dataclass(frozen=True, eq=False)
class MeshTraffic:
    """Traffic of a mesh; `volumes` maps a kind of dimension to its volume."""

    mesh: Mesh
    volumes: Mapping[str, Volume]

    @classmethod
    def from_options(cls, dl: DlOptions) -> MeshTraffic | None:
        """The mesh of --dl-mesh; None without one, and for meshes of groups."""
        if not dl.mesh or dl.groups:
            return None
        return cls.of_mesh(parse_mesh(dl.mesh, "--dl-mesh"), dl.model, dl.bytes)

    @classmethod
    def of_mesh(cls, mesh: Mesh, model: str, bytes_text: str) -> MeshTraffic:
        """A mesh with the bytes of --dl-model and --dl-bytes.

        Bytes given directly take precedence. Without both options the traffic is that of DEFAULT_MODEL; with
        --dl-bytes alone, dimensions that it does not name send nothing.
        """
        volumes: dict[str, Volume] = {}
        if model or not bytes_text:
            volumes = model_volumes(parse_model(model or DEFAULT_MODEL, "--dl-model"), mesh)
        if bytes_text:
            volumes.update(parse_volumes(bytes_text, mesh, "--dl-bytes"))
        return cls(mesh, volumes)

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

    def phases(self) -> list[Phase]:
        """Phases of one iteration: one for each dimension, two for pipelines."""
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
