"""Islands of two ranks kept together by DistributedDataParallel or FSDP2; one case after the other.

    torchrun --nproc-per-node=4 island_program.py outer|hook CASE...

Rank 0 prints a line with each case and the results of all ranks. Cases that are rejected end the program: each rank
prints its error.

Of sync_islands(): ddp, ddp-of-all-ranks, inner or compiled, for which it gets the module inside or the result of
torch.compile, fsdp, subclass, whose optimizer calls super().step(), bfloat16, whose second island moves by the least
change in each step, or scaler, with which its gradients overflow in two steps. With -resumed, other models continue
after 7 steps from a checkpoint of torch.distributed; -overlapped has an exchange in flight then. Rejected:
bad-groups, drift, model, other-group, late-ddp and bad-state. Of hierarchical_hook: compressions, or plain.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from slurmdl.train import HierarchicalState, hierarchical_hook, sync_islands
from slurmdl.train.strategy_config import StrategyConfig

dist.init_process_group("gloo")
torch.set_num_threads(1)
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("islands", "inside"))
group = mesh["inside"].get_group()


def end_with_error(error):
    """In one write: the ranks share an unbuffered stdout, and print writes twice."""
    os.write(1, f"{type(error).__name__}: {error}\n".encode())
    os._exit(0)


class Subclass(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


def build(kind, seed):
    """A model with its optimizer and exchanges."""
    own_group = group
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
    if kind.startswith("fsdp"):
        fully_shard(model, mesh=mesh["inside"])
    else:
        model = torch.nn.parallel.DistributedDataParallel(model, process_group={
            **dict.fromkeys(("ddp-of-all-ranks", "inner", "compiled")),
            "other-group": mesh["islands"].get_group()}.get(kind, group))
    optimizer = (Subclass if kind == "subclass" else torch.optim.SGD)(model.parameters(), lr=0.1, momentum=0.9)
    if kind == "bad-groups":
        own_group = dist.group.WORLD if rank == 0 else group
    if kind == "model" and rank >= 2:
        optimizer = torch.optim.SGD([*model.parameters()][:2], lr=0.1)
    config = StrategyConfig("adaptive-gossip" if kind == "drift" else "local-sgd", period=3, outer_lr=0.6,
                            outer_momentum=0.4, overlap=2 if "overlapped" in kind else 0)
    try:
        given = model.module if kind == "inner" else torch.compile(model) if kind == "compiled" else model
        sync = sync_islands(given, optimizer, own_group, config)
        if kind == "bad-state":
            sync.load_state_dict({f"rank {rank % 2}": next(iter(sync.state_dict().values()))[:-100]})
        if kind == "late-ddp":
            late = torch.nn.parallel.DistributedDataParallel(model.module)
            late(torch.ones(1, 5)).sum().backward()
            optimizer.step()
        return model, optimizer, sync
    except Exception as error:
        end_with_error(error)


def resume(kind, model, optimizer, sync):
    """Save model, optimizer and exchanges, and return others that have loaded them."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    place = {"checkpoint_id": f"{folder[0]}/island{rank // 2}", "process_group": group}
    weights, state = get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optimizer": state, "outer": sync}, **place)
    model, optimizer, sync = build(kind, 3)
    weights, state = get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": state, "outer": sync}
    checkpoint.load(saved, **place)
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    return model, optimizer, sync


def train_bfloat16():
    """The only parameter."""
    network = torch.nn.Linear(1, 1, bias=False).bfloat16()
    with torch.no_grad():
        network.weight.fill_(1.0)
    model = torch.nn.parallel.DistributedDataParallel(network, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0 ** -7)
    sync = sync_islands(model, optimizer, group, StrategyConfig(
        "local-sgd", period=1, outer_lr=1.0, outer_momentum=0.0))
    for _ in range(8):
        optimizer.zero_grad()
        (-(rank >= 2) * model(torch.ones(1, 1).bfloat16())).sum().backward()
        optimizer.step()
    sync.finish()
    return float(network.weight.detach())


def train(kind):
    """The model, bytes sent between islands, whether it is sharded, number of exchanges and of skipped steps."""
    if kind == "bfloat16":
        return train_bfloat16()
    # sync_islands() starts all islands with the first one's model
    model, optimizer, sync = build(kind, 2 if kind != "ddp" else 2 + rank // 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=kind == "scaler")
    skipped = 0
    for step in range(12):
        if step == 7 and kind.endswith("resumed"):
            model, optimizer, sync = resume(kind, model, optimizer, sync)
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
    if kind == "scaler":  # afterwards it unscales gradients itself again
        gradient = model.module[0].weight.grad
        gradient.fill_(scaler.get_scale())
        scaler.step(optimizer)
        assert torch.equal(gradient, torch.ones_like(gradient))
    return values.tolist(), inter_island, sync.is_sharded, sync.strategy.exchanges, skipped


def train_with_hook(compression):
    """The model, bytes sent between islands, and the mean loss of the last steps."""
    torch.manual_seed(2)
    network = torch.nn.Sequential(torch.nn.Linear(5, 300), torch.nn.Tanh(), torch.nn.Linear(300, 1))
    # several buckets
    model = torch.nn.parallel.DistributedDataParallel(network, bucket_cap_mb=0.001)
    try:
        state = None if compression == "plain" else HierarchicalState(group, compression)
    except Exception as error:
        end_with_error(error)
    if state:
        model.register_comm_hook(state, hierarchical_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    losses = []
    for step in range(40):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(8, 5, generator=generator)
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    sent = sum(state.islands.p2p.bytes_sent.values()) if state else 0
    if state:
        state.close()
    values = torch.cat([tensor.detach().reshape(-1) for tensor in model.parameters()])
    return values.tolist(), sent, sum(losses[-5:]) / 5


for case in sys.argv[2:]:
    results = [None] * dist.get_world_size()
    dist.all_gather_object(results, {"outer": train, "hook": train_with_hook}[sys.argv[1]](case))
    dist.barrier()
    if rank == 0:
        print((case, results), flush=True)
os._exit(0)
