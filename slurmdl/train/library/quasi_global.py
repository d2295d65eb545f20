"""Quasi-global momentum for gossip with non-IID data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from slurmdl.errors import TrainError
from slurmdl.train.library.replica import Replica


class QuasiGlobalMomentum:
    """Replaces the momentum of SGD by that of the mixed model's path, so that non-IID data do not separate models.

    With x the model, g its gradient, eta and beta the optimizer's learning rate and momentum, step t is

        x' = x_t - eta (g + beta m),  x_{t+1} = mixed x',  m <- beta m + (1 - beta) (x_t - x_{t+1}) / eta

    The optimizer receives g + beta m and no momentum. If models are mixed after k steps, the displacement by mixing
    counts 1/k, otherwise models would overshoot.

    Raises
    ------
    TrainError : an optimizer without momentum.

    References
    ----------
    T. Lin, S. P. Karimireddy, S. Stich, M. Jaggi: Quasi-global momentum: accelerating decentralized deep learning on
    heterogeneous data. ICML 2021. arXiv:2102.04761
    """

    def __init__(self, replica: Replica, optimizer: Any) -> None:
        import torch

        groups = optimizer.param_groups
        if not isinstance(optimizer, torch.optim.SGD) or any(
                not group["momentum"] or group["maximize"] for group in groups):
            raise TrainError("--quasi-global-momentum: requires SGD with momentum that minimizes; valid: "
                             "torch.optim.SGD(..., momentum=0.9)")
        group_of = {id(tensor): group for group in groups for tensor in group["params"]}
        self._replica, self._groups = replica, groups
        self._group_slices = [(replica.slice_of(index), group_of[id(tensor)])
                              for index, tensor in enumerate(replica.tensors)]
        self._momentum, self._displacement = np.zeros_like(replica.parameters), np.empty_like(replica.parameters)
        self._after_step = np.empty_like(replica.parameters)
        self._betas: list[float] = []
        self._steps_since_mixing = 0

    def before_optimizer_step(self) -> None:
        """Call when all gradients of a step are complete."""
        replica = self._replica
        replica.copy_to_host()
        replica.copy_gradients_to_host(slice(None))()
        self._displacement[:] = replica.parameters
        for part, group in self._group_slices:
            replica.gradients[part] += np.float32(group["momentum"]) * self._momentum[part]
        # LR schedulers may change it between steps
        self._betas = [group["momentum"] for group in self._groups]
        for group in self._groups:
            group["momentum"] = 0.0
        replica.copy_gradients_to_device()

    def after_optimizer_step(self) -> None:
        """Call after the optimizer step, before mixing."""
        for group, beta in zip(self._groups, self._betas, strict=True):
            group["momentum"] = beta
        self._replica.copy_to_host()
        self._after_step[:] = self._replica.parameters
        self._displacement -= self._after_step
        self._steps_since_mixing += 1

    def after_mixing(self) -> None:
        """Call after `replica.parameters` were mixed, or left unchanged if no exchange was due."""
        self._after_step -= self._replica.parameters
        if self._after_step.any():
            self._after_step *= np.float32(1 / self._steps_since_mixing)
            self._displacement += self._after_step
            self._steps_since_mixing = 0
        for part, group in self._group_slices:
            if group["lr"]:
                self._momentum[part] *= np.float32(group["momentum"])
                self._momentum[part] += np.float32((1 - group["momentum"]) / group["lr"]) * self._displacement[part]

    def state_dict(self) -> dict[str, Any]:
        import torch

        return {"momentum": torch.from_numpy(self._momentum), "steps": self._steps_since_mixing}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._momentum[:], self._steps_since_mixing = state["momentum"].numpy(), state["steps"]
