"""Objects whose checkpoint state is a declared list of attributes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np


class CheckpointedFields:
    """An object with checkpoint state.

    Attributes:
        state_fields: names of the saved attributes, in addition to those of base classes. Values are numbers, arrays,
            dicts of these, CheckpointedFields, dicts of these, or None; all others are rebuilt from the options.
    """

    state_fields: tuple[str, ...] = ()

    def state_dict(self) -> dict[str, Any]:
        """Saved attributes by name, as numbers, torch tensors and dicts; arrays are not copied."""
        return {name: _to_plain(getattr(self, name)) for name in self._field_names()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state into an object built with the same options; arrays are filled in place."""
        for name in self._field_names():
            current, saved = getattr(self, name), state[name]
            if isinstance(current, CheckpointedFields):
                current.load_state_dict(saved)
            elif isinstance(current, np.ndarray):
                current[...] = saved.numpy()
            elif isinstance(current, dict) and any(isinstance(item, CheckpointedFields) for item in current.values()):
                for key, item in current.items():
                    item.load_state_dict(saved[key])
            else:
                setattr(self, name, _from_plain(saved))

    def _field_names(self) -> Iterator[str]:
        for kind in type(self).__mro__:
            yield from vars(kind).get("state_fields", ())


def _to_plain(value: Any) -> Any:
    import torch

    if isinstance(value, CheckpointedFields):
        return value.state_dict()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, dict):
        return {key: _to_plain(item) for key, item in value.items()}
    return value


def _from_plain(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return value.numpy().copy()
    if isinstance(value, dict):
        return {key: _from_plain(item) for key, item in value.items()}
    return value
