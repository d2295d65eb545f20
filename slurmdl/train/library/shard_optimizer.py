"""The user's optimizer on a shard of the flat buffers, for parameter servers."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.errors import TrainError
from slurmdl.train.library.checkpoint import save_state
from slurmdl.train.library.replica import Replica
from slurmdl.train.strategies.parameter_server import assemble_shard
from slurmdl.train.strategies.strategy import ShardState

Numbers = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]

#: torch.optim classes that are not element-wise
_NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Muon", "SparseAdam")

#: GPU-only settings; shards are on the host
_HOST_OVERRIDES = {"capturable": False, "fused": None}


def hyperparameters(optimizer: Any) -> Numbers:
    """Numeric hyperparameters of all parameter groups, in the order of `hyperparameter_entries`."""
    return np.array([number for _, _, value in hyperparameter_entries(optimizer)
                    for number in _numeric_values(value)], np.float64)


def hyperparameter_entries(optimizer: Any) -> list[tuple[int, str, Any]]:
    """Group index, name and value of each hyperparameter, without entries that LR schedulers add."""
    return [(index, key, group[key]) for index, group in enumerate(optimizer.param_groups)
            for key in sorted(optimizer.defaults) if key in group and _numeric_values(group[key])]


def lr_indices(optimizer: Any) -> tuple[int, ...]:
    """Indices of the learning rates in `hyperparameters`."""
    keys = [key for _, key, value in hyperparameter_entries(optimizer) for _ in _numeric_values(value)]
    return tuple(index for index, key in enumerate(keys) if key == "lr")


class TorchShardOptimizer:
    """Optimizer of a shard; `slices` are those of its parameters in the buffers, empty for a placeholder."""

    def __init__(self, optimizer: Any, slices: Sequence[slice]) -> None:
        self._optimizer, self._slices = optimizer, slices

    def __call__(self, values: Numbers) -> None:
        queue = iter(values.tolist())
        for index, key, value in hyperparameter_entries(self._optimizer):
            new = tuple(next(queue) for _ in _numeric_values(value))
            self._optimizer.param_groups[index][key] = new if isinstance(value, tuple) else new[0]
        self._optimizer.step()

    def state_bytes(self) -> Bytes:
        file = io.BytesIO()
        save_state(f"the optimizer {type(self._optimizer).__name__}", self._optimizer.state_dict(), file)
        return np.frombuffer(file.getbuffer(), np.uint8)

    def load_state_bytes(self, state: Bytes) -> None:
        import torch

        self._optimizer.load_state_dict(torch.load(io.BytesIO(state), weights_only=True))

    def shard_states(self) -> list[ShardState]:
        state = self._optimizer.state_dict()["state"]
        return [(part.start, part.stop, state[index]) for index, part in enumerate(self._slices) if index in state]

    def load_shard_states(self, states: Sequence[ShardState]) -> None:
        state = {index: assemble_shard(states, part) for index, part in enumerate(self._slices)}
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": {index: entries for index, entries in state.items() if entries},
                                         "param_groups": groups})


def make_shard_optimizer(optimizer: Any, replica: Replica, part: slice) -> TorchShardOptimizer:
    """Make an optimizer of the same class for a part of the buffers, split where the parameter group changes.

    A call takes the hyperparameters of a worker's optimizer, so that its LR schedule applies, and updates this part
    of `replica.parameters`. Raises TrainError if the optimizer is not element-wise, or cannot be built.
    """
    kind = type(optimizer)
    if kind.__name__ in _NOT_ELEMENTWISE:
        raise TrainError(f"--strategy ps: {kind.__name__} needs whole tensors, not shards; expected optimizers that "
                         "are element-wise, e.g. SGD, Adam, AdamW, RMSprop, Adagrad")
    import torch

    host = torch.from_numpy(replica.parameters), torch.from_numpy(replica.gradients)
    parameters: list[list[Any]] = [[] for _ in optimizer.param_groups]
    slices: list[list[slice]] = [[] for _ in optimizer.param_groups]
    for group, piece in _split_by_group(optimizer, replica, part):
        shard = torch.nn.Parameter(host[0][piece])
        shard.grad = host[1][piece]
        parameters[group].append(shard)
        slices[group].append(piece)
    # a placeholder, since torch rejects an optimizer if all its groups are empty
    groups = [{**group, **{key: value for key, value in _HOST_OVERRIDES.items() if key in group},
               "params": parameters[index] or [torch.nn.Parameter(torch.zeros(0))]}
              for index, group in enumerate(optimizer.param_groups)]
    accepted = inspect.signature(kind).parameters
    options = {key: _HOST_OVERRIDES.get(key, value) for key, value in optimizer.defaults.items() if key in accepted}
    try:
        shard_optimizer = kind(groups, **options)
    except (TypeError, ValueError, AttributeError) as error:
        raise TrainError(f"--strategy ps: {kind.__name__} cannot be built for a shard: {error}") from error
    _check_elementwise(kind.__name__, lambda parameters: kind([{**groups[0], "params": parameters}], **options))
    return TorchShardOptimizer(shard_optimizer, [piece for group in slices for piece in group or [slice(0, 0)]])


def _check_elementwise(name: str, make: Callable[[list[Any]], Any]) -> None:
    """Reject an optimizer that updates the rows of a matrix otherwise than a vector each, as shards are vectors."""
    import torch

    values = torch.tensor([[1.0, -2.0, 0.5], [3.0, 0.25, -1.0]])
    results = []
    for tensors in ([values.clone()], [row.clone() for row in values]):
        parameters = [torch.nn.Parameter(tensor) for tensor in tensors]
        probe = make(parameters)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for _ in range(2):
                for parameter in parameters:
                    parameter.grad = 0.1 * parameter.detach()
                probe.step()
        results.append(torch.cat([parameter.detach().reshape(-1) for parameter in parameters]))
    if not torch.allclose(*results, rtol=1e-5, atol=1e-7):
        raise TrainError(f"--strategy ps: {name} updates matrices otherwise than vectors, and "
                         "shards are vectors; expected optimizers that are element-wise, e.g. SGD, Adam, RMSprop")


def _numeric_values(value: Any) -> list[float]:
    """Numbers in a value of a parameter group; none for flags and strings."""
    if isinstance(value, tuple):
        return [number for item in value for number in _numeric_values(item)]
    if isinstance(value, bool) or not (isinstance(value, (int, float)) or getattr(value, "ndim", None) == 0):
        return []
    return [float(value)]


def _split_by_group(optimizer: Any, replica: Replica, part: slice) -> Iterator[tuple[int, slice]]:
    """Split a part where the parameter group changes."""
    group_of = {id(tensor): index for index, group in enumerate(optimizer.param_groups)
                for tensor in group["params"]}
    pieces = [(group_of[id(tensor)], max(start, part.start), min(start + size, part.stop))
              for tensor, start, size in zip(replica.tensors, replica.starts, replica.sizes, strict=True)]
    for group, adjacent in groupby((piece for piece in pieces if piece[1] < piece[2]), lambda piece: piece[0]):
        bounds = list(adjacent)
        yield group, slice(bounds[0][1], bounds[-1][2])
