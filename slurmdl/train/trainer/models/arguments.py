"""What stands behind a model's name."""

from __future__ import annotations

from collections.abc import Sequence

from slurmdl.errors import UsageError

#: width, or number of layers
MAX_ARGUMENT = 1_000_000


def parse_ints(model: str, arguments: str, default: Sequence[int], expected: str) -> list[int]:
    """Positive whole numbers, separated by commas; `what` says in words which are expected."""
    if not arguments:
        return list(default)
    found = [int(word) if word.strip().isdecimal() and len(word) < 10 else 0 for word in arguments.split(",")]
    if not 1 <= min(found) <= max(found) <= MAX_ARGUMENT:
        raise UsageError(f"train: --model {model}:{arguments}: {expected} expected")
    return found


def require_image_shape(model: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """A shape of (channels, height, width), or a UsageError for a model that needs images."""
    if len(shape) != 3:
        raise UsageError(f"train: --model {model} needs images of channels x height x width; "
                         f"the data's have shape {'x'.join(map(str, shape))}; mlp takes any")
    return shape[0], shape[1], shape[2]
