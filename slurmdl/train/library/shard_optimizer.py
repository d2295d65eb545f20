"""The user's optimizer over a part of the flat buffers, as a parameter server needs it."""

from __future__ import annotations

import inspect
import io
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.errors import TrainError
from slurmdl.train.library.replica import Replica
from slurmdl.train.strategies.shard_backup import assemble_shard
from slurmdl.train.strategies.strategy import ShardState

Numbers = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]

#: those of torch.optim whose step looks at more than one element at a time
_NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Muon", "SparseAdam")

#: what only a GPU's optimizers may be asked for; a shard lies on the host
_HOST_OVERRIDES = {"capturable": False, "fused": None}


def hyperparameters(optimizer: Any) -> Numbers:
    """The numbers of all parameter groups, as learning rates and betas, in the order of `set_numbers`."""
    return np.array([number for _, _, value in hyperparameter_entries(optimizer)
                    for number in _numeric_values(value)], np.float64)


def hyperparameter_entries(optimizer: Any) -> list[tuple[int, str, Any]]:
    """Group, name and value of what makes up `numbers`; what schedules keep in the groups is none of it."""
    return [(index, key, group[key]) for index, group in enumerate(optimizer.param_groups)
            for key in sorted(optimizer.defaults) if _numeric_values(group[key])]


def set_hyperparameters(optimizer: Any, values: Numbers) -> None:
    """Give the groups of an optimizer of the same kind these numbers."""
    queue = iter(values.tolist())
    for index, key, value in hyperparameter_entries(optimizer):
        new = tuple(next(queue) for _ in _numeric_values(value))
        optimizer.param_groups[index][key] = new if isinstance(value, tuple) else new[0]


def lr_indices(optimizer: Any) -> tuple[int, ...]:
    """Where among the `numbers` the learning rates stand."""
    keys = [key for _, key, value in hyperparameter_entries(optimizer) for _ in _numeric_values(value)]
    return tuple(place for place, key in enumerate(keys) if key == "lr")


class TorchShardOptimizer:
    """A part's optimizer; see strategy.Update.

    Parameters
    ----------
    places : where in the flat buffers each of its parameters lies, in their order; of no length for one that stands
        for none.
    """

    def __init__(self, optimizer: Any, slices: Sequence[slice]) -> None:
        self._optimizer, self._slices = optimizer, slices

    def __call__(self, values: Numbers) -> None:
        set_hyperparameters(self._optimizer, values)
        self._optimizer.step()

    def state_bytes(self) -> Bytes:
        import torch

        file = io.BytesIO()
        torch.save(self._optimizer.state_dict(), file)
        return np.frombuffer(file.getbuffer(), np.uint8)

    def load_state_bytes(self, state: Bytes) -> None:
        import torch

        self._optimizer.load_state_dict(torch.load(io.BytesIO(state), weights_only=True))

    def shard_states(self) -> list[ShardState]:
        state = self._optimizer.state_dict()["state"]
        return [(place.start, place.stop, state[index]) for index, place in enumerate(self._slices) if index in state]

    def load_shard_states(self, states: Sequence[ShardState]) -> None:
        state = {index: assemble_shard(states, place) for index, place in enumerate(self._slices)}
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": {index: its for index, its in state.items() if its},
                                    "param_groups": groups})


def make_shard_optimizer(optimizer: Any, replica: Replica, part: slice) -> TorchShardOptimizer:
    """An optimizer of the same class for a part of the buffers.

    Each call of what is returned takes the `numbers` of a worker's optimizer, so that its schedules of learning rates
    hold here, and turns that part of `replica.gradients` into new parameters. The part is cut where the group of
    parameters changes; that tensors are cut makes no difference to an optimizer which works element by element.

    Raises
    ------
    TrainError : an optimizer that cannot work on a part.
    """
    kind = type(optimizer)
    if kind.__name__ in _NOT_ELEMENTWISE:
        raise TrainError(f"--strategy ps: {kind.__name__} needs whole tensors, not shards; valid: optimizers that "
                         "work element by element, as SGD, Adam, AdamW, RMSprop, Adagrad")
    import torch

    host = torch.from_numpy(replica.parameters), torch.from_numpy(replica.gradients)
    pieces: list[list[Any]] = [[] for _ in optimizer.param_groups]
    places: list[list[slice]] = [[] for _ in optimizer.param_groups]
    for group, piece in _split_by_group(optimizer, replica, part):
        shard = torch.nn.Parameter(host[0][piece])
        shard.grad = host[1][piece]
        pieces[group].append(shard)
        places[group].append(piece)
    # torch refuses a group without parameters only where all are, which a shard's may be
    groups = [{**group, **{key: value for key, value in _HOST_OVERRIDES.items() if key in group},
               "params": pieces[index] or [torch.nn.Parameter(torch.zeros(0))]}
              for index, group in enumerate(optimizer.param_groups)]
    takes = inspect.signature(kind).parameters
    try:
        twin = kind(groups, **{key: _HOST_OVERRIDES.get(key, value) for key, value in optimizer.defaults.items()
                               if key in takes})
    except (TypeError, ValueError) as error:
        raise TrainError(f"--strategy ps: {kind.__name__} cannot be built for a shard: {error}") from error
    return TorchShardOptimizer(twin, [place for its in places for place in its or [slice(0, 0)]])


def _numeric_values(value: Any) -> list[float]:
    """The numbers that a value of a group holds; none in flags and words."""
    if isinstance(value, tuple):
        return [number for item in value for number in _numeric_values(item)]
    if isinstance(value, bool) or not (isinstance(value, (int, float)) or getattr(value, "ndim", None) == 0):
        return []
    return [float(value)]


def _split_by_group(optimizer: Any, replica: Replica, part: slice) -> Iterator[tuple[int, slice]]:
    """The part, cut where the group of parameters changes."""
    group_of = {id(tensor): index for index, group in enumerate(optimizer.param_groups)
                for tensor in group["params"]}
    open_group, begin, end = -1, part.start, part.start
    for tensor, start, size in zip(replica.tensors, replica.starts, replica.sizes, strict=True):
        low, high = max(start, part.start), min(start + size, part.stop)
        if low >= high:
            continue
        group = group_of[id(tensor)]
        if group != open_group:
            if end > begin:
                yield open_group, slice(begin, end)
            open_group, begin = group, low
        end = high
    if end > begin:
        yield open_group, slice(begin, end)
