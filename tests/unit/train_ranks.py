"""An MPI program for test_train_strategies.py: runs each strategy for real and prints what happened as JSON.

Zones of three ranks are pretended, two of them on one node, so that zones differ in size and every level of the byte
meter is used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from slurmdl.plan import group_ranks
from slurmdl.train.comm_thread import CommThread
from slurmdl.train.library.replica import Replica
from slurmdl.train.mixing.collectives import AllreduceOp
from slurmdl.train.p2p import CHUNK_BYTES, MeteredP2P
from slurmdl.train.strategies import STRATEGIES, StrategyContext
from slurmdl.train.strategy_config import StrategyConfig
from slurmdl.train.trainer import models
from slurmdl.train.trainer.data import load_dataset
from slurmdl.train.transports.mpi import MpiTransport
from slurmdl.train.world import World

STEPS, BATCH, LR, MOMENTUM = 12, 16, 0.1, 0.9
comm = MPI.COMM_WORLD
transport = MpiTransport(comm)
rank, size = transport.rank, transport.size
ranks = tuple(range(size))
world = World(transport, StrategyConfig("allreduce", "ring"), tuple(f"n{r // 3}{r % 3 // 2}" for r in ranks),
              tuple(f"leaf{r // 3}" for r in ranks), ("worker",) * size, {})


def summed(groups: Sequence[Sequence[int]], length: int,
           wire: type[np.floating[Any]] = np.float32) -> dict[str, Any]:
    random = np.random.default_rng(length)
    inputs = random.standard_normal((size, length)).astype(np.float32)
    messages = MeteredP2P(transport, world.locality_levels())
    vector = inputs[rank].copy()
    AllreduceOp(messages, groups, vector, wire).run()
    everyone = comm.gather(vector)
    sent = comm.gather(messages.bytes_sent)
    if rank:
        return {}
    return {"length": length, "sent": sent, "alike": all((v == vector).all() for v in everyone),
            "error": float(np.abs(vector - inputs.sum(0, dtype=np.float64)).max(initial=0))}


def sgd(replica: Replica, part: slice) -> Callable[[], None]:
    """SGD for a part of the flat buffers; each call makes a step."""
    shard = torch.nn.Parameter(torch.from_numpy(replica.parameters[part]))
    shard.grad = torch.from_numpy(replica.gradients[part])
    return torch.optim.SGD([shard], lr=LR, momentum=MOMENTUM).step


def updater(replica: Replica, part: slice) -> Callable[[Any], None]:
    step = sgd(replica, part)
    return lambda numbers: step()


def setting(messages: MeteredP2P, replica: Replica, strategy: str, traffic: str, servers: int = 0) -> StrategyContext:
    return StrategyContext(messages, CommThread(transport.supports_comm_thread), ranks[servers:], ranks[:servers], replica.parameters,
                   replica.gradients, replica.sizes, StrategyConfig(
                       strategy, traffic), 7, world.nodes, world.zones, {},
                   lambda: LR, lambda part: updater(replica, part))


def gossip(traffic: str) -> dict[str, Any]:
    """Different models, no gradients: only the averaging is left."""
    messages = MeteredP2P(transport, world.locality_levels())
    replica = Replica(models.build_model("mlp:16", (64,), 10, rank))
    its = setting(messages, replica, "gossip", traffic)
    strategy = STRATEGIES["gossip"](its)
    before = np.array(comm.allgather(replica.parameters.copy()))
    for number in range(STEPS):
        strategy.after_optimizer_step(number)
    its.comm_thread.close()
    after = np.array(comm.allgather(replica.parameters.copy()))
    sent = comm.allgather(messages.bytes_sent)
    return {"sum_error": float(np.abs(before.sum(0) - after.sum(0)).max()), "sent": sent, "length": before.shape[1],
            "spread": float(np.ptp(after, axis=0).max() / np.ptp(before, axis=0).max())}


def against_big_batch(name: str, traffic: str, servers: int = 0) -> dict[str, Any]:
    """Train on digits, and again in one process on the workers' batches together, with torch's own optimizer."""
    data = load_dataset("digits", 3)
    messages = MeteredP2P(transport, world.locality_levels())
    network = models.build_model("mlp:32", (1, 8, 8), 10, 5)
    replica = Replica(network)
    its = setting(messages, replica, name, traffic, servers)
    strategy = STRATEGIES[name](its)
    update = sgd(replica, slice(None)) if strategy.updates_locally else lambda: None
    workers = len(its.workers)
    mine = None if rank in its.servers else data.batches(its.workers.index(rank), workers, BATCH, 1)
    for number in range(STEPS):
        if not mine:
            strategy.serve_step(number)
            continue
        images, labels = map(torch.from_numpy, next(mine))
        replica.gradients.fill(0)
        torch.nn.functional.cross_entropy(network(images), labels).backward()
        strategy.before_optimizer_step(number)
        update()
        strategy.after_optimizer_step(number)
    its.comm_thread.close()
    sent = comm.allgather(messages.bytes_sent)
    distance = 0.0
    if rank in its.workers:
        module = models.build_model("mlp:32", (1, 8, 8), 10, 5)
        first = module[1].weight.detach().clone()
        optimizer = torch.optim.SGD(module.parameters(), lr=LR, momentum=MOMENTUM)
        shares = [data.batches(worker, workers, BATCH, 1) for worker in range(workers)]
        for _ in range(STEPS):
            parts = [next(share) for share in shares]
            images, labels = (torch.from_numpy(np.concatenate(part)) for part in zip(*parts, strict=True))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(module(images), labels).backward()
            optimizer.step()
        assert (module[1].weight - first).abs().max() > 1e-2, "the reference did not learn"
        reference = torch.cat([p.detach().reshape(-1) for p in module.parameters()]).numpy()
        distance = float(np.abs(reference - replica.parameters).max())
    return {"distance": max(comm.allgather(distance)), "sent": sent, "length": replica.parameters.size}


torch.set_num_threads(1)
lengths = (0, 1, size - 1, size, size + 1, 1000, size * max(CHUNK_BYTES.values()) // 4 + 3)
# the bytes are compared over whole periods of a graph: STEPS is a multiple of that of base for 2^k ranks only
graphs = ["random", "exponential"] + ["base"] * (size & size - 1 == 0)
result = {"zones": world.zones, "nodes": world.nodes,
          "ring": [summed([ranks], length) for length in lengths],
          "hierarchical": [summed(group_ranks(ranks, world.zones), length) for length in lengths],
          "halved": summed(group_ranks(ranks, world.zones), 1000, np.float16),
          "gossip": {graph: gossip(graph) for graph in graphs},
          "allreduce": {traffic: against_big_batch("allreduce", traffic) for traffic in ("ring", "hierarchical")},
          "ps": [against_big_batch("ps", "shards", servers) for servers in range(1, min(size, 3))]}
if rank == 0:
    print(json.dumps(result))
