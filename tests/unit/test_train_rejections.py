"""What the library rejects: what a script does, and the message; on virtual ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from user_scripts import Lookahead, MatrixNormalized, Net, X, Y, backward, sgd
from virtual_ranks import attach_or_serve, library, on_zones, process_group

from slurmdl.errors import InvalidRunError, SlurmdlError, TrainError
from slurmdl.train.library.run import Run
from slurmdl.train.strategy_config import StrategyConfig

ALLREDUCE, GOSSIP, LOCAL_SGD = (StrategyConfig(name) for name in ("allreduce", "gossip", "local-sgd"))
PS, PS_ASYNC = StrategyConfig("ps", ps=1), StrategyConfig("ps", ps=2, asynchronous=True)
#: a row of a table: method, ranks, what each rank does with a model and its optimizer, and the error
Row = tuple[StrategyConfig, int, Callable[[Run, Any, Any], Any], str]


def check_row(row: Row, error_type: type[SlurmdlError], **options: Any) -> None:
    method, ranks, act, message = row

    def program(run: Run) -> None:
        model = Net()
        act(run, model, sgd(model))
    with pytest.raises(error_type, match=message):
        library(ranks, method, program, **options)


def row_id(value: Any) -> str | None:
    return f"{value[0].strategy}-{value[3][:40]}" if isinstance(value, tuple) and len(value) == 4 else None


def on_rank_1(change: Callable[[Any, Any], Any]) -> Callable[[Run, Any, Any], Any]:
    def act(run: Run, model: Any, opt: Any) -> None:
        if run.rank == 1:
            change(model, opt)
        run.wrap(model, opt)
    return act


def wrap_changed(change: Callable[[Any, Any], Any]) -> Callable[[Run, Any, Any], Any]:
    return lambda run, model, opt: (change(model, opt), run.wrap(model, opt))


def wrap_optimizer(make: Callable[[Any], Any]) -> Callable[[Run, Any, Any], Any]:
    return lambda run, model, opt: run.attach(model, make(model))


def share_memory(model: Any, opt: Any) -> None:
    model.again.weight = nn.Parameter(model.one.weight.data[:6, :6])
    opt.add_param_group({"params": model.again.weight})


def keep_copies(holder: str) -> Callable[[Run, Any, Any], Any]:
    """An optimizer with copies of an initial model that rank 0's replaces."""
    def act(run: Run, _: Any, __: Any) -> None:
        torch.manual_seed(run.rank)
        model = nn.Linear(3, 2)
        opt: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        opt.state[model.bias]["momentum_buffer"] = model.bias.detach().clone()
        if holder == "attribute":
            opt = Lookahead(opt)
        elif holder == "group":
            opt.param_groups[0]["copies"] = [tensor.detach().clone() for tensor in model.parameters()]
        else:
            opt.base = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1))
        run.attach(model, opt)
    return act


def sharded() -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    with process_group():
        return nn.Parameter(distribute_tensor(torch.ones(3), init_device_mesh("cpu", (1,))))


def with_extra(make: Callable[[], Any]) -> Callable[[Run, Any, Any], Any]:
    def act(run: Run, model: Any, opt: Any) -> None:
        tensor = make()
        if isinstance(tensor, nn.Parameter):
            model.extra = tensor
        else:
            model.register_buffer("extra", tensor)
        run.attach(model, opt)
    return act


class FullyShardedDataParallel(nn.Sequential):
    """Of the name of PyTorch's, which needs a process group."""


class Sharding(torch.optim.SGD):
    def consolidate_state_dict(self) -> None:
        """As of ZeroRedundancyOptimizer."""


class Scheduled:
    """No optimizer."""

    def __init__(self, base: Any) -> None:
        self.base = base


def wrap_convolution(run: Run, _: Any, __: Any) -> None:
    model = nn.Conv2d(3, 5, 3)
    run.wrap(model.to(memory_format=torch.channels_last) if run.rank == 1 else model, sgd(model))


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("row", [
    (ALLREDUCE, 2, wrap_changed(lambda model, opt: model.two.half()),
     "parameter two.weight is float16; expected float32 or bfloat16, the same for all"),
    (ALLREDUCE, 2, wrap_changed(lambda model, opt: model.two.bfloat16()),
     "parameter two.weight is bfloat16; expected float32 or bfloat16, the same for all"),
    (ALLREDUCE, 2, wrap_changed(share_memory), "parameters one.weight and again.weight share their memory"),
    (ALLREDUCE, 2, wrap_changed(lambda model, opt: model.requires_grad_(False)),
     "the optimizer trains no parameter of the model"),
    (ALLREDUCE, 2, wrap_changed(lambda model, opt: opt.add_param_group({"params": nn.Parameter(torch.zeros(2, 9))})),
     r"tensor of shape \(2, 9\) that is no parameter of the model"),
    (ALLREDUCE, 2, on_rank_1(lambda model, opt: setattr(model, "out", nn.Linear(8, 4))),
     r"rank 1 on \S+ has parameter out.weight \(4, 8\) float32 trained where rank 0 has parameter out.weight "
     r"\(3, 8\) float32 trained"),
    (ALLREDUCE, 2, on_rank_1(lambda model, opt: setattr(model, "more", nn.Linear(8, 4))),
     "rank 1 .* has parameter more.weight"),
    (ALLREDUCE, 2, on_rank_1(lambda model, opt: opt.param_groups[0].update(lr=0.3)),
     "rank 1 .* has lr of parameter group 0 0.3 where rank 0 has lr of parameter group 0 0.1"),
    (ALLREDUCE, 2, wrap_convolution, r"rank 1 on \S+ has parameter weight \(5, 3, 3, 3\) float32 strides "
     r"\(27, 1, 9, 3\) trained where rank 0 has parameter weight \(5, 3, 3, 3\) float32 trained"),
    (GOSSIP, 2, on_rank_1(lambda model, opt: opt.state[model.out.bias].update(note=Path("x"))),
     r"^rank 1 on \S+: the optimizer SGD: \d+: note: its state holds pathlib"),
    (GOSSIP, 2, keep_copies("attribute"),
     r"^rank 1 on \S+: Lookahead\.slow\[0\] is a copy of parameter weight, [^\n]*$"),
    (GOSSIP, 2, keep_copies("group"),
     r"^rank 1 on \S+: SGD\.param_groups\[0\]\['copies'\]\[0\] is a copy of parameter weight, [^\n]*$"),
    (GOSSIP, 2, keep_copies("base"), r"^rank 1 on \S+: SGD\.base\.slow\[0\] is a copy of parameter weight, [^\n]*$"),
    (ALLREDUCE, 1, with_extra(sharded),
     r"^parameter extra is a DTensor, .*; expected a model on each rank, or slurmdl.train.sync_islands[^\n]*$"),
    (ALLREDUCE, 1, with_extra(lambda: torch.eye(3).to_sparse()),
     r"^buffer extra is sparse \(sparse_coo\); expected a dense one[^\n]*$"),
    (ALLREDUCE, 1, with_extra(lambda: torch.eye(3).to_sparse_csr()),
     r"^buffer extra is sparse \(sparse_csr\); expected a dense one[^\n]*$"),
    (ALLREDUCE, 1, with_extra(lambda: torch.ones(1).expand(3)),
     r"^buffer extra is expanded, .*; expected a copy \(clone\(\)\)$"),
    (ALLREDUCE, 1, with_extra(nn.parameter.UninitializedBuffer),
     r"^buffer extra has no shape yet; expected a first forward pass[^\n]*$"),
    (ALLREDUCE, 1, lambda run, model, opt: run.attach(FullyShardedDataParallel(model), opt),
     r"^wrap\(\): FullyShardedDataParallel distributes the model [^\n]*$"),
    (ALLREDUCE, 1, wrap_optimizer(lambda model: Sharding(model.parameters(), lr=0.1)),
     r"^wrap\(\): Sharding distributes its state over ranks; [^\n]*$"),
    (ALLREDUCE, 1, lambda run, model, opt: run.attach(model, Scheduled(opt)),
     r"^wrap\(Net, Scheduled\): .*Optimizer, as its attribute base"),
    (PS, 2, wrap_optimizer(lambda model: Lookahead(sgd(model))),
     r"--strategy ps: Lookahead cannot be built for a shard: [^\n]*$"),
    (PS, 2, wrap_optimizer(lambda model: torch.optim.LBFGS(model.parameters())),
     r"--strategy ps: \w+ needs whole tensors"),
    (PS, 2, wrap_optimizer(lambda model: torch.optim.Adafactor(model.parameters())),
     r"--strategy ps: \w+ needs whole tensors")], ids=row_id)
def test_models_and_optimizers_that_wrap_rejects(row: Row) -> None:
    check_row(row, InvalidRunError)


def step_in_hooks(hooks_first: bool) -> Callable[[Run, Any, Any], Any]:
    """As in PyTorch's tutorial on optimizer steps in the backward pass."""
    def act(run: Run, model: Any, opt: Any) -> None:
        optimizers = {tensor: torch.optim.SGD([tensor], lr=0.1) for tensor in model.parameters() if
                      tensor.requires_grad}

        def hook(tensor: Any) -> None:
            optimizers[tensor].step()
            optimizers[tensor].zero_grad()

        for installs in (hooks_first, not hooks_first):
            if installs:
                for tensor in optimizers:
                    tensor.register_post_accumulate_grad_hook(hook)
            else:
                run.wrap(model, opt)
        backward(model, X, Y)
    return act


def wrap_and(change: Callable[[Any, Any], Any], x: Any = X) -> Callable[[Run, Any, Any], Any]:
    """Wrap, change, and make a step."""
    def act(run: Run, model: Any, opt: Any) -> None:
        run.wrap(model, opt)
        change(model, opt)
        model(x).sum().backward()
        opt.step()
    return act


def load_by_assignment(model: Any, opt: Any) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def make_nan_gradient(run: Run, model: Any, opt: Any) -> None:
    run.wrap(model, opt)
    for factor in (1, float("nan")):
        (model(X).sum() * factor).backward()
        opt.step()


def make_one_infinite(run: Run, model: Any, opt: Any) -> None:
    """On worker 1, in the second step."""
    if not attach_or_serve(run, model, opt):
        return
    for step in range(2):
        opt.zero_grad()
        (backward(model, X, Y, float("inf") if run.worker_rank == 1 and step else 1.0))
        opt.step()


def step_by_closure(run: Run, model: Any, opt: Any) -> None:
    lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=4)
    run.attach(model, lbfgs)

    def closure() -> Any:
        lbfgs.zero_grad()
        return backward(model, X, Y)

    lbfgs.step(closure)


def reuse_in_checkpoints(run: Run, model: Any, opt: Any) -> None:
    """A parameter in two re-entrant checkpoints."""
    run.wrap(model, opt)
    hidden = checkpoint(model.two, torch.ones(2, 8).requires_grad_(), use_reentrant=True)
    checkpoint(model.again, hidden, use_reentrant=True).sum().backward()


def unfreeze(run: Run, model: Any, opt: Any) -> None:
    model.one.requires_grad_(False)
    if not attach_or_serve(run, model, opt):
        return
    for step in range(3):
        if step == 2:
            model.one.requires_grad_(True)
        before = [tensor.detach().clone() for tensor in model.parameters()]
        backward(model, X[run.rank::2], Y[run.rank::2])
        try:
            opt.step()
        except TrainError:
            assert all(map(torch.equal, before, model.parameters())), "updated all the same"
            raise


def overflow_in_fp16(run: Run, model: Any, opt: Any) -> None:
    """Finite gradients whose mean overflows in fp16, between nodes."""
    run.attach(model, opt)
    (model(X).sum() * 1e4).backward()
    opt.step()


def end_early(run: Run, model: Any, opt: Any) -> None:
    run.wrap(model, opt)
    for _ in range(2 + run.rank):
        backward(model, X, Y)
        opt.step()


RELOCATED = r"step 1: parameter one.weight was relocated after run.wrap"


@pytest.mark.parametrize("row", [
    *((method, 2, step_in_hooks(first), "step 1: the backward pass changed parameters")
      for method in (ALLREDUCE, GOSSIP, LOCAL_SGD) for first in (True, False)),
    (ALLREDUCE, 1, lambda run, model, opt: run.no_sync().__enter__(), r"no_sync\(\): valid only after run.wrap\(\)"),
    (ALLREDUCE, 2, wrap_and(lambda model, opt: model.double().float()), RELOCATED),  # the gradients, too
    (ALLREDUCE, 2, wrap_and(load_by_assignment), RELOCATED), (GOSSIP, 2, wrap_and(load_by_assignment), RELOCATED),
    (GOSSIP, 2, wrap_and(lambda model, opt: model.double(), X.double()), RELOCATED),
    *((method, 2, wrap_and(lambda model, opt: opt.add_param_group({"params": nn.Parameter(torch.zeros(2))})),
       "step 1: the optimizer got another group after run.wrap") for method in (ALLREDUCE, GOSSIP)),
    (ALLREDUCE, 1, make_nan_gradient, "step 2: the gradient of one.weight has infinite or NaN entries"),
    *((method, 3 + (method.ps or 0), make_one_infinite, f"^{prefix}step 2: the gradient of one.weight has infinite")
      for method, prefix in ((ALLREDUCE, r"rank 1 on \S+: "), (GOSSIP, ""), (LOCAL_SGD, ""), (PS, ""), (PS_ASYNC, ""),
                             (StrategyConfig("gossip", asynchronous=True), ""))),
    (ALLREDUCE, 1, lambda run, model, opt: (run.wrap(model, opt), opt.step("closure")),
     r"opt.step\('closure'\): expected a closure"),
    (ALLREDUCE, 1, step_by_closure, r"opt.step\(closure\): LBFGS computes several gradients in a step"),
    (ALLREDUCE, 2, reuse_in_checkpoints, "step 1: .* gradient of two.weight twice.*use_reentrant=False"),
    *((method, 2 + (method.ps or 0), unfreeze,
       "step 3: parameter one.weight is trained now, but was not at run.wrap.*learning rate of 0")
      for method in (ALLREDUCE, GOSSIP, PS)),
    (PS, 2, lambda run, model, opt: run.wrap(model, opt), r"expected attach\(\) and serve\(\)"),
    (PS, 2, wrap_optimizer(lambda model: MatrixNormalized(model.parameters(), lr=0.1)),
     "MatrixNormalized updates matrices otherwise than vectors")], ids=row_id)
def test_scripts_whose_steps_are_rejected(row: Row) -> None:
    check_row(row, TrainError)


def test_overflow_in_fp16_mean_is_rejected() -> None:
    check_row((StrategyConfig("allreduce", compression="fp16"), 2, overflow_in_fp16,
               r"^step 1: the mean of the ranks' gradients of \S+ has infinite or NaN entries"), TrainError,
              own_nodes=True)


@pytest.mark.parametrize("method", [ALLREDUCE, GOSSIP], ids=lambda method: method.strategy)
def test_early_end_of_a_worker_fails_all(method: StrategyConfig) -> None:
    check_row((method, 2, end_early, "."), SlurmdlError)


def diverge(at: int, steps: int, by: float = 1e-6, dtype: Any = torch.float32) -> Callable[[Run, Any, Any], Any]:
    """Rank 1 changes a parameter by hand after a number of steps."""
    def act(run: Run, model: Any, _: Any) -> int:
        opt = sgd(model.to(dtype))
        run.attach(model, opt)
        for step in range(steps):
            if run.rank == 1 and step == at:
                model.out.bias.data[2] += by
            opt.zero_grad()
            backward(model, X[run.rank::3].to(dtype), Y[run.rank::3])
            opt.step()
        return run.step
    return act


@pytest.mark.parametrize(("act", "step", "options"), [
    (diverge(0, 3), 1, {}), (diverge(2, 9), 4, {}), (diverge(9, 16), 12, {"check_every": 6}),
    (diverge(20, 23), 23, {}), (diverge(2, 4, 0.5, torch.bfloat16), 3, {"check_every": 1})])
def test_different_replicas_are_rejected(act: Any, step: int, options: dict[str, int]) -> None:
    check_row((ALLREDUCE, 3, act, rf"^step {step}: parameter out.bias is not the same on all ranks: rank 0 on \S+ "
               "differs from rank 1 on .*expected "), InvalidRunError, **options)


def test_replicas_are_not_compared_if_disabled_or_unequal(monkeypatch: pytest.MonkeyPatch,
                                                          capsys: pytest.CaptureFixture[str]) -> None:
    """With check_every=0, with a strategy that does not require equal replicas, and with different rounding."""
    def program(run: Run) -> Any:
        return diverge(0, 5)(run, Net(), None)
    assert library(2, ALLREDUCE, program, check_every=0) == library(2, GOSSIP, program) == [5, 5]
    assert "bitwise" not in capsys.readouterr().err
    count = iter(range(4))
    monkeypatch.setattr(torch, "get_num_threads", lambda: next(count))
    assert library(2, ALLREDUCE, program) == [5, 5]
    assert capsys.readouterr().err.count("are not bitwise equal, and are not compared any more") == 1


@pytest.mark.parametrize(("zones", "config", "fault", "message"), [
    ("aabb", StrategyConfig("local-sgd", islands="zone", period=100), "differs",
     r"step 4: parameter out\.bias is not the same on all ranks of an island: rank 2 on n2 differs from rank 3 on"),
    ("aaab", StrategyConfig("local-sgd", islands="zone", period=2), "nan",
     r"step 4: (rank 2 on n2: )?the gradient of one\.weight has infinite")])
def test_faults_inside_an_island_are_found(zones: str, config: StrategyConfig, fault: str, message: str) -> None:
    def program(run: Run) -> None:
        model = Net()
        opt = sgd(model)
        run.wrap(model, opt)
        for step in range(6):
            backward(model, X[run.rank::4], Y[run.rank::4],
                     float("nan") if (fault, run.rank, step) == ("nan", 2, 3) else 1.0)
            opt.step()
            if (fault, run.rank, step) == ("differs", 3, 1):
                model.out.bias.data.add_(0.5)
    with pytest.raises(TrainError, match=message):
        on_zones(zones, config, program)
