"""What belongs to places in the parameters, so that servers of another number can share it out anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

#: begin and end in the parameters, and by name tensors of that length, or what holds for all of it
ShardState = tuple[int, int, Mapping[str, Any]]


def assemble_shard(states: Sequence[ShardState], part: slice) -> dict[str, Any]:
    """What pieces say of a part of the parameters: by name a tensor as long as the part, or what holds for all of it.

    Parameters
    ----------
    pieces : which cover the part.
    """
    import torch

    found: dict[str, list[Any]] = {}
    for start, stop, its in sorted(states, key=lambda piece: piece[0]):
        low, high = max(start, part.start), min(stop, part.stop)
        if low < high:
            for name, value in its.items():
                found.setdefault(name, []).append(value[low - start:high - start]
                                 if _is_per_parameter(value) else value)
    return {name: torch.cat(values) if _is_per_parameter(values[0]) else values[0] for name, values in found.items()}


def _is_per_parameter(value: Any) -> bool:
    """Whether there is one for each parameter."""
    return getattr(value, "ndim", 0) == 1
