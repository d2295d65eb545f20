"""Scripts whose model is that of one process on all samples, however they make their steps; on virtual ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from user_scripts import Lookahead, X, Y, backward, make_mlp
from virtual_ranks import attach_or_serve, flat, library

from slurmdl.train.library.replica import Replica
from slurmdl.train.library.run import Run
from slurmdl.train.strategy_config import StrategyConfig

STEPS, WORKERS, SAMPLES = 5, 2, 24
METHODS = {"allreduce": StrategyConfig("allreduce"), "ps": StrategyConfig("ps", ps=1),
           "gossip": StrategyConfig("gossip"), "local-sgd": StrategyConfig("local-sgd", period=1)}


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Blocks(nn.Module):
    """Model of blocks; `checkpointed` blocks, or -1 the whole model, use re-entrant activation checkpoints."""

    def __init__(self, *checkpointed: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))
        self.blocks.append(nn.Linear(6, 3))
        self.checkpointed = checkpointed

    def run_blocks(self, x: Any) -> Any:
        for index, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=True) if index in self.checkpointed else block(x)
        return x

    def forward(self, x: Any) -> Any:
        x = x.clone().requires_grad_()
        return checkpoint(self.run_blocks, x, use_reentrant=True) if -1 in self.checkpointed else self.run_blocks(x)


class SharpnessAware(torch.optim.Optimizer):
    """Minimizes the loss at a perturbed point: P. Foret et al.: Sharpness-aware minimization. ICLR 2021."""

    def __init__(self, model: Any) -> None:
        super().__init__(model.parameters(), {"rho": 0.05})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def perturb(self) -> None:
        tensors = self.param_groups[0]["params"]
        scale = 0.05 / torch.stack([tensor.grad.norm() for tensor in tensors]).norm()
        for tensor in tensors:
            self.state[tensor]["old"] = tensor.clone()
            tensor.add_(tensor.grad * scale)
        self.zero_grad()

    @torch.no_grad()
    def descend(self) -> None:
        for tensor in self.param_groups[0]["params"]:
            tensor.copy_(self.state[tensor].pop("old"))
        self.base.step()

    def step(self, closure: Any = None) -> Any:
        self.perturb()
        with torch.enable_grad():
            loss = closure()
        self.descend()
        return loss


class AssigningSharpnessAware(SharpnessAware):
    """As published implementations, which give the parameters other memory."""

    @torch.no_grad()
    def descend(self) -> None:
        for tensor in self.param_groups[0]["params"]:
            tensor.data = self.state[tensor]["old"]
        self.base.step()


class RegularLookahead(Lookahead):
    """With super().__init__()."""

    def __init__(self, model: Any) -> None:
        torch.optim.Optimizer.__init__(self, list(model.parameters()), {"lr": 0.1})
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        self.base, self.steps = base, 0
        self.slow = [tensor.detach().clone() for tensor in model.parameters()]


class AssigningLookahead(RegularLookahead):
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        assign(self.param_groups[0]["params"])
        return loss


def assign(tensors: Any) -> None:
    """Give parameters other memory."""
    for tensor in tensors:
        tensor.data = tensor.detach().clone()


#: a step: model, optimizer, samples, labels, and the run or None
Step = Callable[[Any, Any, Any, Any, Any], None]


def plainly(model: Any, opt: Any, x: Any, y: Any, run: Any) -> None:
    backward(model, x, y)
    opt.step()


def clipped(model: Any, opt: Any, x: Any, y: Any, run: Any) -> None:
    """Gradients are averaged when the backward pass returns."""
    backward(model, x, y)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    opt.step()


def assigning(model: Any, opt: Any, x: Any, y: Any, run: Any) -> None:
    plainly(model, opt, x, y, run)
    assign(model.parameters())


def in_overlapping_passes(model: Any, opt: Any, x: Any, y: Any, run: Any) -> None:
    """Two passes over different parameters, then a third over all."""
    last = list(model.blocks[3:].parameters())
    first = [parameter for parameter in model.parameters() if all(parameter is not other for other in last)]
    for inputs in (last, first):
        nn.functional.cross_entropy(model(x), y).backward(inputs=inputs)
    plainly(model, opt, x, y, run)


def in_passes(count: int, silent: set[int] = frozenset()) -> Step:  # type: ignore[assignment]
    """Passes over parts of the samples, some of them in `no_sync`."""
    def step(model: Any, opt: Any, x: Any, y: Any, run: Any) -> None:
        for part in range(count):
            with run.no_sync() if run and part in silent else nullcontext():
                backward(model, x[part::count], y[part::count], 1 / count)
        opt.step()
    return step


def with_closure(call: Callable[[Any, Any], Any]) -> Step:
    """As Lightning's automatic optimization does it; the step returns the loss."""
    def step(model: Any, opt: Any, x: Any, y: Any, run: Any) -> None:
        losses = []

        def closure() -> Any:
            opt.zero_grad()
            losses.append(backward(model, x, y))
            return losses[-1]
        assert call(opt, closure) is losses[-1]
    return step


by_closure = with_closure(lambda opt, closure: opt.step(closure))


def perturbed(call: Callable[[Any, Any], Any]) -> Step:
    """A pass before that of the closure."""
    def step(model: Any, opt: Any, x: Any, y: Any, run: Any) -> None:
        backward(model, x, y)
        call(opt, lambda: backward(model, x, y))
    return step


in_two_calls = perturbed(lambda opt, closure: (opt.perturb(), closure(), opt.descend()))
in_one_call = perturbed(lambda opt, closure: opt.step(closure))


@dataclass
class Script:
    """A script that makes steps in some way.

    Attributes:
        methods: names in METHODS; gossip and local-sgd give the models of a script with plain steps.
        exchanges: in each step with gradients; models are exchanged once. None for more than one.
        options: of init.
        staged: whether host buffers are copies, as with parameters on a GPU.
        lacks: (owner, name) of functions that older versions of PyTorch do not have.
    """

    step: Step = plainly
    make_optimizer: Callable[[Any], Any] = sgd
    make_model: Callable[[], Any] = make_mlp
    methods: str = "allreduce"
    exchanges: int | None = 1
    options: dict[str, Any] = field(default_factory=dict)
    staged: bool = False
    lacks: tuple[tuple[Any, str], ...] = ()
    set_to_none: bool = True


OLD_HOOKS = ((torch.optim.Optimizer, "register_step_pre_hook"), (torch.optim.Optimizer, "register_step_post_hook"),
             (torch.Tensor, "register_post_accumulate_grad_hook"))
ALL, BY_MODELS = "allreduce ps gossip local-sgd", "allreduce gossip local-sgd"
SCRIPTS = {
    "clipped": Script(clipped), "zeroed": Script(methods=ALL, set_to_none=False),
    "PyTorch 1.13": Script(methods=ALL, lacks=OLD_HOOKS), "assigning": Script(assigning, methods=ALL),
    "closure": Script(by_closure, methods=ALL),
    "named closure": Script(with_closure(lambda opt, closure: opt.step(closure=closure)), methods=ALL),
    # backward passes
    "5 passes": Script(in_passes(4), options={"backward_passes_per_step": 4}),
    "2 passes": Script(in_passes(2), exchanges=2),
    **{f"silent {silent}": Script(in_passes(4, silent), exchanges=exchanges) for silent, exchanges in (
        ({0, 1, 2}, 1), ({0, 1, 2, 3}, 1), ({0, 2}, 2), ({1, 2, 3}, 2), (set(), 4))},
    "overlapping": Script(in_overlapping_passes, make_model=Blocks, exchanges=3),
    "staged": Script(in_overlapping_passes, make_model=Blocks, exchanges=3, staged=True),
    **{f"overlapping, {passes} configured": Script(in_overlapping_passes, make_model=Blocks, exchanges=4 - passes,
                                                   options={"backward_passes_per_step": passes})
       for passes in (2, 3)},
    # re-entrant activation checkpoints
    **{f"checkpoints {blocks}": Script(make_model=lambda blocks=blocks: Blocks(*blocks), methods="allreduce ps")
       for blocks in ((4,), (0,), (0, 1, 2, 3, 4), (1, 2, 4), (-1,))},
    "PyTorch before 2.1": Script(make_model=lambda: Blocks(2, 4), exchanges=None,
                                 lacks=((torch._C, "_current_autograd_node"),)),
    # optimizers with a base optimizer
    "Lookahead without super().__init__()": Script(make_optimizer=lambda model: Lookahead(sgd(model)),
                                                   methods=BY_MODELS),
    "Lookahead": Script(make_optimizer=RegularLookahead, methods=BY_MODELS),
    "Lookahead, closure": Script(by_closure, RegularLookahead, methods=BY_MODELS),
    "Lookahead, assigning": Script(make_optimizer=AssigningLookahead, methods=BY_MODELS),
    **{f"{kind.__name__}, {name}": Script(step, kind, methods=BY_MODELS, exchanges=2)
       for kind in (SharpnessAware, AssigningSharpnessAware)
       for name, step in (("two calls", in_two_calls), ("one call", in_one_call))}}


def train(script: Script, run: Run | None) -> Any:
    model = script.make_model()
    opt = script.make_optimizer(model)
    if run and not attach_or_serve(run, model, opt):
        return None
    x, y = X[:SAMPLES], Y[:SAMPLES]
    if run:
        x, y = x[run.worker_rank::WORKERS], y[run.worker_rank::WORKERS]
    for _ in range(STEPS):
        getattr(opt, "base", opt).zero_grad(set_to_none=script.set_to_none)
        script.step(model, opt, x, y, run)
    if run is None:
        return flat(model)
    exchanges = run.strategy.exchanges
    result = flat(model), run.step, exchanges
    run.finish()
    assert not run.replica.relocated_parameter()
    return result


@pytest.mark.parametrize(("case", "method"), [(name, method) for name, script in SCRIPTS.items()
                                              for method in script.methods.split()])
def test_model_equals_that_of_one_process(case: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script, config = SCRIPTS[case], METHODS[method]
    expected = train(script, None)
    assert (expected - flat(script.make_model())).abs().max() > 1e-2, "the reference did not learn"
    init_replica = Replica.__init__
    monkeypatch.setattr(Replica, "__init__", lambda self, module, *words, **options: init_replica(
        self, module, *words, **{**options, **({"staged": True} if script.staged else {})}))
    for owner, name in script.lacks:
        monkeypatch.delattr(owner, name)
    results = library(WORKERS + (config.ps or 0), config, lambda run: train(script, run), **script.options)
    monkeypatch.undo()
    by_gradients = method in ("allreduce", "ps")
    for index, (model, steps, exchanges) in enumerate(result for result in results if result):
        assert steps == STEPS
        if by_gradients:
            assert torch.equal(model, results[-1][0]) and torch.allclose(model, expected, rtol=0, atol=3e-6)
        elif (script.make_model, script.make_optimizer) == (make_mlp, sgd):
            assert torch.equal(model, library(WORKERS, config, lambda run: train(Script(), run))[index][0])
        per_step = script.exchanges if by_gradients else 1
        assert exchanges == STEPS * per_step if per_step else exchanges > STEPS


@pytest.mark.parametrize("method", ["allreduce", "ps"])
def test_passes_over_uneven_batches_are_weighted(method: str) -> None:
    """All gradients, including those of later passes, are weighted by the samples of their batch."""
    def train_on(batches: Any, model: Any, run: Run | None) -> Any:
        opt = sgd(model)
        if run and not attach_or_serve(run, model, opt):
            return None
        for x, y in batches(run):
            assert not run or len(x) != 13 / 2
            in_overlapping_passes(model, opt, x, y, run)
        return flat(model)
    expected = train_on(lambda run: [(X[:13], Y[:13])], Blocks(), None)
    config = METHODS[method]
    results = library(2 + (config.ps or 0), config, lambda run: train_on(
        lambda run: run.loader((X[:13], Y[:13]), 13, shuffle=False), Blocks(), run))
    models = [model for model in results if model is not None]
    assert len(models) == 2 and all(torch.allclose(model, expected, rtol=0, atol=1e-6) for model in models)
