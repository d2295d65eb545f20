"""Models, optimizers and data of scripts of users."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

torch.set_num_threads(1)
_random = np.random.default_rng(3)
#: samples and labels
X = torch.from_numpy(_random.standard_normal((100, 6)).astype(np.float32))
Y = torch.from_numpy(_random.integers(0, 3, 100))


class Net(nn.Module):
    """Model with tied, frozen and unused parameters."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.one, self.two, self.out = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.again, self.unused = nn.Linear(8, 8, bias=False), nn.Linear(2, 2)
        self.again.weight = self.two.weight
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)

    def forward(self, x: Any) -> Any:
        return self.out(self.again(torch.relu(self.two(torch.relu(self.one(x))))) + self.frozen)


def make_mlp() -> Any:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)


def backward(model: Any, x: Any, y: Any, factor: float = 1.0) -> Any:
    """Return the loss, cross entropy."""
    loss = nn.functional.cross_entropy(model(x), y) * factor
    loss.backward()
    return loss


class Lookahead(torch.optim.Optimizer):
    """As most implementations: without super().__init__(), with the groups and the state of its base."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.param_groups, self.state = base, base.param_groups, base.state
        self.steps = 0
        self.slow = [tensor.detach().clone() for tensor in base.param_groups[0]["params"]]

    def step(self, closure: Any = None) -> Any:
        loss = self.base.step(closure)
        self.steps += 1
        if self.steps % 2 == 0:
            with torch.no_grad():
                for slow, fast in zip(self.slow, self.param_groups[0]["params"], strict=True):
                    fast.copy_(slow.lerp_(fast, 0.5))
        return loss


class MatrixNormalized(torch.optim.SGD):
    """Normalizes the gradients of matrices."""

    def step(self, closure: Any = None) -> Any:
        for tensor in self.param_groups[0]["params"]:
            if tensor.ndim == 2:
                tensor.grad.div_(tensor.grad.norm())
        return super().step(closure)
