"""What a checkpoint holds of an object: the attributes that it names.

Whatever decides how a run goes on is a number, an array or another such object; all else is made anew from the
options. So a class says in one line what of it is to be kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np


class Stateful:
    """An object of which some attributes are kept.

    Attributes
    ----------
    kept : names of attributes, besides those that the classes above this one name: numbers, arrays, dicts of these,
        objects that are Kept themselves, or None.
    """

    state_fields: tuple[str, ...] = ()

    def state_dict(self) -> dict[str, Any]:
        """The attributes by name, as numbers, torch tensors and dicts; arrays are not copied."""
        return {name: _to_plain(getattr(self, name)) for name in self._field_names()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state, on an object that was made with the same options; arrays are filled in place."""
        for name in self._field_names():
            mine, its = getattr(self, name), state[name]
            if isinstance(mine, Stateful):
                mine.load_state_dict(its)
            elif isinstance(mine, np.ndarray):
                mine[...] = its.numpy()
            else:
                setattr(self, name, _from_plain(its))

    def _field_names(self) -> Iterator[str]:
        for kind in type(self).__mro__:
            yield from vars(kind).get("state_fields", ())


def _to_plain(value: Any) -> Any:
    import torch

    if isinstance(value, Stateful):
        return value.state_dict()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, dict):
        return {key: _to_plain(its) for key, its in value.items()}
    return value


def _from_plain(value: Any) -> Any:
    """As `_plain`, the other way."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.numpy().copy()
    if isinstance(value, dict):
        return {key: _from_plain(its) for key, its in value.items()}
    return value
