"""Export the model of a checkpoint as a state dict that plain PyTorch loads."""

from __future__ import annotations

import os
from typing import Any

from slurmdl.errors import InputError, warn
from slurmdl.train.library.checkpoint import CheckpointDir, CorruptCheckpointError, Manifest, write_checkpoint_file
from slurmdl.train.library.checkpoint_restore import average_states


def export_model(directory: str, step: int | None, output: str) -> tuple[int, int]:
    """Write the model of a checkpoint, None for the newest complete one, as `torch.save(state_dict)`.

    Returns the number of the checkpoint, and how many models were averaged. Raises InputError if there is no such
    checkpoint, or none is complete, or the file cannot be written.
    """
    import torch

    folder = CheckpointDir(directory)
    numbers = folder.list_numbers()
    if step is not None and step not in numbers:
        raise InputError(f"no checkpoint of step {step}; expected one of {', '.join(map(str, numbers)) or 'none'}",
                         directory)
    fault = "no checkpoint"
    for number in numbers if step is None else (step,):
        try:
            models, weights, changes = _read_models(folder, folder.read_manifest(number))
            break
        except CorruptCheckpointError as error:
            fault = str(error)
            warn(f"train export: a checkpoint is skipped: {fault}")
    else:
        raise InputError(fault, directory)
    state = average_states(models, [weight / sum(weights) for weight in weights]) if len(models) > 1 else models[0]
    for name, change in changes.items():
        state[name] = (state[name].double() + change / sum(weights)).to(state[name].dtype)
    try:
        write_checkpoint_file(os.path.abspath(output), lambda file: torch.save(state, file))
    except OSError as error:
        raise InputError(str(error.strerror), output) from error
    return number, len(models)


def _read_models(folder: CheckpointDir,
                 manifest: Manifest) -> tuple[list[dict[str, Any]], list[float], dict[str, Any]]:
    """State dicts and weights of the workers' models: of equal ones one, with the sum of their weights.

    Buffers differ between workers with equal models, too: the third value has the weighted sum of their differences.
    """
    models: list[dict[str, Any]] = []
    weights: list[float] = []
    changes: dict[str, Any] = {}
    groups, holders = manifest.rank_layout["nodes"], dict[int, int]()
    for index in range(manifest.rank_layout["workers"]):
        content = folder.read_rank_file(manifest, f"worker-{index}")
        weight = float(content["strategy"].get("model_weight", 1.0))
        if content["model"] is not None:
            holders[index] = len(models)
            models.append(content["model"])
            weights.append(weight)
            continue
        position = holders[groups[index]] if groups else 0
        weights[position] += weight
        for name, value in content["untrained"].items():
            held = models[position].get(name)
            if held is not None and held.is_floating_point() and held.shape == value.shape and not held.equal(value):
                changes[name] = changes.get(name, 0) + weight * (value.double() - held.double())
    return models, weights, changes
