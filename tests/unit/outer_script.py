"""Islands of two ranks kept together by DistributedDataParallel or FSDP2, with outer(); one case after the other.

    torchrun --nproc-per-node=4 outer_script.py CASE...

Rank 0 prints a line with the results of all ranks per case: ddp, ddp-of-all-ranks, fsdp, or scaler, with which the
gradients of the second island overflow in two steps. After bad-groups, drift, model or other-group each rank prints
its error, and ends.
"""

import torch
import torch.distributed as dist
from island_cases import end_with_error, init_islands, run_cases
from torch.distributed.fsdp import fully_shard

from slurmdl.train import outer
from slurmdl.train.strategy_config import StrategyConfig

mesh = init_islands()
rank = dist.get_rank()


def train(kind):
    """The model, bytes sent between islands, whether it is sharded, number of exchanges and of skipped steps."""
    group = mesh["inside"].get_group()
    torch.manual_seed(2 if kind != "ddp" else 2 + rank // 2)  # outer() starts all islands with the first one's model
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
    if kind == "fsdp":
        fully_shard(model, mesh=mesh["inside"])
    else:
        model = torch.nn.parallel.DistributedDataParallel(model, process_group={
            "ddp-of-all-ranks": None, "other-group": mesh["islands"].get_group()}.get(kind, group))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if kind == "bad-groups":
        group = dist.group.WORLD if rank == 0 else group
    if kind == "model" and rank >= 2:
        optimizer = torch.optim.SGD([*model.parameters()][:2], lr=0.1)
    config = StrategyConfig("adaptive-gossip" if kind == "drift" else "local-sgd", period=3, outer_lr=0.6,
                            outer_momentum=0.4)
    try:
        sync = outer(model, optimizer, group, config)
    except Exception as error:
        end_with_error(error)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=kind == "scaler")
    skipped = 0
    for step in range(12):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(8, 5, generator=generator)
        optimizer.zero_grad()
        loss = (model(x) - (rank + 1) * x.sum(1, keepdim=True)).square().mean()
        scaler.scale(loss * (float("inf") if kind == "scaler" and rank >= 2 and step in (4, 7) else 1.0)).backward()
        before = model.module[0].weight.detach().clone() if kind == "scaler" else None
        scaler.step(optimizer)
        skipped += before is not None and torch.equal(model.module[0].weight, before)
        scaler.update()
    inter_island = sum(sync.p2p.bytes_sent.values())
    sync.finish()
    whole = [tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for tensor in model.parameters()]
    values = torch.cat([tensor.detach().reshape(-1) for tensor in whole])
    return values.tolist(), inter_island, sync.is_sharded, sync.strategy.exchanges, skipped


run_cases(train)
