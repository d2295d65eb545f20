"""An MPI program for test_train_strategies.py: runs each strategy for real and prints what happened as JSON.

Two ranks to a node and four to a zone are pretended, so that every level of the byte meter is used.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from slurmdl.train import models
from slurmdl.train.data import digits
from slurmdl.train.messages import CHUNK, Messages, ring_sum
from slurmdl.train.replica import Replica
from slurmdl.train.runtime import World
from slurmdl.train.strategies import STRATEGIES, Setting

STEPS, BATCH, LR, MOMENTUM = 12, 16, 0.1, 0.9
comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
ranks = tuple(range(size))
world = World(comm, rank, "allreduce", tuple(f"n{r // 2}" for r in ranks), tuple(f"leaf{r // 4}" for r in ranks),
              ("worker",) * size)


def ring(length: int) -> dict[str, Any]:
    random = np.random.default_rng(length)
    inputs = random.standard_normal((size, length)).astype(np.float32)
    messages = Messages(comm, world.levels())
    vector = inputs[rank].copy()
    ring_sum(messages, ranks, vector)
    everyone = comm.gather(vector)
    sent = comm.gather(messages.sent)
    if rank:
        return {}
    return {"length": length, "sent": sent, "alike": all((v == vector).all() for v in everyone),
            "error": float(np.abs(vector - inputs.sum(0, dtype=np.float64)).max(initial=0))}


def setting(messages: Messages, replica: Replica, servers: int = 0) -> Setting:
    return Setting(messages, ranks[servers:], ranks[:servers], replica.parameters, replica.gradients, LR, MOMENTUM, 7)


def gossip() -> dict[str, Any]:
    """Different models, no gradients: only the averaging is left."""
    messages = Messages(comm, world.levels())
    replica = Replica(models.build("mlp:16", 64, 10, rank))
    strategy = STRATEGIES["gossip"](setting(messages, replica))
    before = np.array(comm.allgather(replica.parameters.copy()))
    for number in range(STEPS):
        strategy.step(number)
    after = np.array(comm.allgather(replica.parameters.copy()))
    sent = sum(sum(s.values()) for s in comm.allgather(messages.sent))
    return {"sum_error": float(np.abs(before.sum(0) - after.sum(0)).max()), "sent": sent, "length": before.shape[1],
            "spread": float(np.ptp(after, axis=0).max() / np.ptp(before, axis=0).max())}


def against_big_batch(name: str, servers: int) -> dict[str, Any]:
    """Train on digits, and again in one process on the workers' batches together, with torch's own optimizer."""
    data = digits(3)
    messages = Messages(comm, world.levels())
    replica = Replica(models.build("mlp:32", 64, 10, 5))
    its = setting(messages, replica, servers)
    strategy = STRATEGIES[name](its)
    workers = len(its.workers)
    mine = None if rank in its.servers else data.batches(its.workers.index(rank), workers, BATCH, 1)
    for number in range(STEPS):
        if mine:
            replica.backward(*next(mine))
        strategy.step(number)
    sent = [sum(s.values()) for s in comm.allgather(messages.sent)]
    distance = 0.0
    if rank in its.workers:
        module = models.build("mlp:32", 64, 10, 5)
        first = module[0].weight.detach().clone()
        optimizer = torch.optim.SGD(module.parameters(), lr=LR, momentum=MOMENTUM)
        shares = [data.batches(worker, workers, BATCH, 1) for worker in range(workers)]
        for _ in range(STEPS):
            parts = [next(share) for share in shares]
            images, labels = (torch.from_numpy(np.concatenate(part)) for part in zip(*parts, strict=True))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(module(images), labels).backward()
            optimizer.step()
        assert (module[0].weight - first).abs().max() > 1e-2, "the reference did not learn"
        reference = torch.cat([p.detach().reshape(-1) for p in module.parameters()]).numpy()
        distance = float(np.abs(reference - replica.parameters).max())
    return {"distance": max(comm.allgather(distance)), "sent": sent, "length": replica.parameters.size}


torch.set_num_threads(1)
result = {"rings": [ring(length) for length in (0, 1, size - 1, size, size + 1, 1000, size * CHUNK + 3)],
          "gossip": gossip(), "allreduce": against_big_batch("allreduce", 0),
          "ps": [against_big_batch("ps", servers) for servers in range(1, min(size, 3))]}
if rank == 0:
    print(json.dumps(result))
