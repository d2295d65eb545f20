"""Quasi-global momentum: of the way that a model goes with the mixing, not of its own gradients alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from slurmdl.errors import TrainError
from slurmdl.train.library.replica import Replica


class QuasiGlobal:
    """Takes the place of an SGD's own momentum where data are skewed, so that it does not pull models apart.

    With x the model, g its gradient, eta and beta the optimizer's learning rate and momentum, step t is

        x' = x_t - eta (g + beta m),  x_{t+1} = x' mixed with others',  m <- beta m + (1 - beta) (x_t - x_{t+1}) / eta

    The optimizer stays as it is, but for its step is given g + beta m and no momentum. Where models are mixed after k
    steps, the way that the mixing takes is that of k steps, and counts 1/k: as a whole it would throw each model
    beyond the others'.

    Raises
    ------
    TrainError : an optimizer that has no such momentum.

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
            raise TrainError("--quasi-global: it takes the place of the momentum of an SGD that minimises, and there "
                             "is none; valid: torch.optim.SGD(..., momentum=0.9)")
        group_of = {id(tensor): group for group in groups for tensor in group["params"]}
        self._replica, self._groups = replica, groups
        self._parts = [(replica.part(index), group_of[id(tensor)]) for index, tensor in enumerate(replica.tensors)]
        self._momentum, self._before = np.zeros_like(replica.parameters), np.empty_like(replica.parameters)
        self._stepped = np.empty_like(replica.parameters)
        self._betas: list[float] = []
        #: steps since models were mixed
        self._steps = 0

    def lead(self) -> None:
        """All gradients of a step are there; the optimizer is about to use them."""
        replica = self._replica
        replica.fetch_parameters()
        replica.fetch_gradients(slice(None))()
        self._before[:] = replica.parameters
        for part, group in self._parts:
            replica.gradients[part] += np.float32(group["momentum"]) * self._momentum[part]
        # schedules may change it from step to step
        self._betas = [group["momentum"] for group in self._groups]
        for group in self._groups:
            group["momentum"] = 0.0
        replica.store_gradients()

    def stepped(self) -> None:
        """The optimizer has made its step, and `replica.parameters` are about to be mixed with others'."""
        for group, beta in zip(self._groups, self._betas, strict=True):
            group["momentum"] = beta
        self._replica.fetch_parameters()
        self._stepped[:] = self._replica.parameters
        self._before -= self._stepped
        self._steps += 1

    def follow(self) -> None:
        """They are mixed, or stay as they are where no exchange was due."""
        self._stepped -= self._replica.parameters
        if self._stepped.any():
            self._stepped *= np.float32(1 / self._steps)
            self._before += self._stepped
            self._steps = 0
        for part, group in self._parts:
            if group["lr"]:
                self._momentum[part] *= np.float32(group["momentum"])
                self._momentum[part] += np.float32((1 - group["momentum"]) / group["lr"]) * self._before[part]

    def state_dict(self) -> dict[str, Any]:
        import torch

        return {"momentum": torch.from_numpy(self._momentum), "steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._momentum[:], self._steps = state["momentum"].numpy(), state["steps"]
