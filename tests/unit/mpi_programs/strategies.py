"""MPI program of test_train_strategies.py: runs each strategy; prints JSON.

Then writes the results of virtual_vs_mpi.py to the directory argv[1], if it is given.
Zones of three ranks are emulated, two of them on one node, so that zones differ in size and all levels occur.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from virtual_vs_mpi import write_results

from slurmdl.plan import group_ranks
from slurmdl.train.comm_thread import CommThread
from slurmdl.train.library.replica import Replica
from slurmdl.train.mixing.collectives import AllreduceOp
from slurmdl.train.p2p import MeteredP2P
from slurmdl.train.strategies import STRATEGIES, StrategyContext
from slurmdl.train.strategy_config import StrategyConfig
from slurmdl.train.trainer import models
from slurmdl.train.trainer.data_readers import load_dataset
from slurmdl.train.transports.mpi import MpiTransport
from slurmdl.train.transports.transport import CHUNK_BYTES
from slurmdl.train.world import World

STEPS, BATCH, LR, MOMENTUM = 12, 16, 0.1, 0.9
comm = MPI.COMM_WORLD
transport = MpiTransport(comm)
rank, size = transport.rank, transport.size
ranks = tuple(range(size))
world = World(transport, StrategyConfig("allreduce", "ring"), tuple(f"n{r // 3}{r % 3 // 2}" for r in ranks),
              tuple(f"leaf{r // 3}" for r in ranks), ("worker",) * size, {})


def run_allreduce(groups: Sequence[Sequence[int]], length: int,
                  wire_dtype: type[np.floating[Any]] = np.float32) -> dict[str, Any]:
    random = np.random.default_rng(length)
    inputs = random.standard_normal((size, length)).astype(np.float32)
    p2p = MeteredP2P(transport, world.locality_levels())
    vector = inputs[rank].copy()
    AllreduceOp(p2p, groups, vector, wire_dtype).run()
    vectors = comm.gather(vector)
    sent = comm.gather(p2p.bytes_sent)
    if rank:
        return {}
    return {"length": length, "bytes_sent": sent, "identical": all((v == vector).all() for v in vectors),
            "error": float(np.abs(vector - inputs.sum(0, dtype=np.float64)).max(initial=0))}


def sgd(replica: Replica, part: slice) -> Callable[[], None]:
    """SGD on a slice of the flat buffers, as a function that makes a step."""
    shard = torch.nn.Parameter(torch.from_numpy(replica.parameters[part]))
    shard.grad = torch.from_numpy(replica.gradients[part])
    return torch.optim.SGD([shard], lr=LR, momentum=MOMENTUM).step


def make_context(p2p: MeteredP2P, replica: Replica, strategy: str, comm_pattern: str,
                 servers: int = 0) -> StrategyContext:
    def make_optimizer(part: slice) -> Callable[[Any], None]:
        step = sgd(replica, part)
        return lambda hyperparameters: step()

    return StrategyContext(p2p, CommThread(transport.supports_comm_thread), ranks[servers:], ranks[:servers],
                           replica.parameters, replica.gradients, replica.sizes,
                           StrategyConfig(strategy, comm_pattern), 7, world.nodes, world.zones, {}, lambda: LR,
                           make_optimizer)


def run_gossip(comm_pattern: str) -> dict[str, Any]:
    """Average different models, without gradients."""
    p2p = MeteredP2P(transport, world.locality_levels())
    replica = Replica(models.build_model("mlp:16", (64,), 10, rank))
    ctx = make_context(p2p, replica, "gossip", comm_pattern)
    strategy = STRATEGIES["gossip"](ctx)
    initial = np.array(comm.allgather(replica.parameters.copy()))
    for number in range(STEPS):
        strategy.after_optimizer_step(number)
    ctx.comm_thread.close()
    final = np.array(comm.allgather(replica.parameters.copy()))
    sent = comm.allgather(p2p.bytes_sent)
    return {"sum_error": float(np.abs(initial.sum(0) - final.sum(0)).max()), "bytes_sent": sent,
            "length": initial.shape[1],
            "spread": float(np.ptp(final, axis=0).max() / np.ptp(initial, axis=0).max())}


def compare_with_one_process(strategy_name: str, comm_pattern: str, servers: int = 0) -> dict[str, Any]:
    """Train on digits, and compare with one process on the workers' batches with torch's own optimizer."""
    data = load_dataset("digits", 3)
    p2p = MeteredP2P(transport, world.locality_levels())
    network = models.build_model("mlp:32", (1, 8, 8), 10, 5)
    replica = Replica(network)
    ctx = make_context(p2p, replica, strategy_name, comm_pattern, servers)
    strategy = STRATEGIES[strategy_name](ctx)
    update = sgd(replica, slice(None)) if strategy.updates_locally else lambda: None
    workers = len(ctx.workers)
    batches = None if rank in ctx.servers else data.batches(ctx.workers.index(rank), workers, BATCH, 1)
    for step in range(STEPS):
        if not batches:
            strategy.serve_step(step)
            continue
        images, labels = map(torch.from_numpy, next(batches))
        replica.gradients.fill(0)
        torch.nn.functional.cross_entropy(network(images), labels).backward()
        strategy.before_optimizer_step(step)
        update()
        strategy.after_optimizer_step(step)
    ctx.comm_thread.close()
    sent = comm.allgather(p2p.bytes_sent)
    distance = 0.0
    if rank in ctx.workers:
        module = models.build_model("mlp:32", (1, 8, 8), 10, 5)
        initial_weight = module[1].weight.detach().clone()
        optimizer = torch.optim.SGD(module.parameters(), lr=LR, momentum=MOMENTUM)
        all_batches = [data.batches(worker, workers, BATCH, 1) for worker in range(workers)]
        for _ in range(STEPS):
            parts = [next(worker_batches) for worker_batches in all_batches]
            images, labels = (torch.from_numpy(np.concatenate(part)) for part in zip(*parts, strict=True))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(module(images), labels).backward()
            optimizer.step()
        assert (module[1].weight - initial_weight).abs().max() > 1e-2, "the reference did not learn"
        reference = torch.cat([p.detach().reshape(-1) for p in module.parameters()]).numpy()
        distance = float(np.abs(reference - replica.parameters).max())
    return {"distance": max(comm.allgather(distance)), "bytes_sent": sent, "length": replica.parameters.size}


torch.set_num_threads(1)
lengths = (0, 1, size - 1, size, size + 1, 1000, size * CHUNK_BYTES // 4 + 3)
# bytes are compared over whole periods of a graph: STEPS is a multiple of base-2's period only for 2^k ranks
graphs = ["random-matching", "one-peer-exponential"] + ["base-2"] * (size & size - 1 == 0)
result = {"zones": world.zones, "nodes": world.nodes,
          "ring": [run_allreduce([ranks], length) for length in lengths],
          "hierarchical": [run_allreduce(group_ranks(ranks, world.zones), length) for length in lengths],
          "fp16": run_allreduce(group_ranks(ranks, world.zones), 1000, np.float16),
          "gossip": {graph: run_gossip(graph) for graph in graphs},
          "allreduce": {pattern: compare_with_one_process("allreduce", pattern)
                        for pattern in ("ring", "hierarchical")},
          "ps": [compare_with_one_process("ps", "shards", servers) for servers in range(1, min(size, 3))]}
if rank == 0:
    print(json.dumps(result))
if len(sys.argv) > 1:
    write_results(Path(sys.argv[1]))
