"""Means of tensors over ranks, and the bytes of each rank: GROUPS (JSON) DEVICE. Under torchrun, by gloo."""

import json
import sys
from typing import Any

import numpy as np
import torch
from torch import distributed

from slurmdl.train.collectives import AllreduceOp
from slurmdl.train.p2p import MeteredP2P
from slurmdl.train.strategies.allreduce import DeviceMean
from slurmdl.train.transports.torch_distributed import TorchTransport

SIZE = 1009


def levels(groups: list[list[int]], rank: int) -> list[str]:
    own = next(group for group in groups if rank in group)
    return ["intra_zone" if other in own else "inter_zone" for other in range(sum(map(len, groups)))]


groups = json.loads(sys.argv[1])
distributed.init_process_group("gloo")
transport = TorchTransport()
rank, size = transport.rank, transport.size
values = np.stack([np.random.default_rng(seed).standard_normal(SIZE, np.float32) for seed in range(size)])
results: dict[str, Any] = {}
for dtype in (torch.float32, torch.bfloat16):
    vector = torch.from_numpy(values[rank].copy()).to(sys.argv[2], dtype)
    expected = torch.from_numpy(values).to(dtype).float().mean(0)
    p2p = MeteredP2P(transport, levels(groups, rank))
    mean = DeviceMean(vector, p2p, groups, "gloo")
    middle = SIZE // 2 // mean.shards * mean.shards
    for part in (slice(middle, SIZE), slice(0, middle)):
        mean.start(part)
    mean.wait()
    vector = vector.cpu()
    results[str(dtype)] = {"error": float((vector.float() - expected).abs().max()),
                           "equal": len(set(transport.allgather(vector.float().numpy().tobytes()))) == 1}
    if dtype == torch.float32:
        by_messages = MeteredP2P(transport, levels(groups, rank))
        for part in (slice(middle, SIZE), slice(0, middle)):
            AllreduceOp(by_messages, groups, values[rank, part].copy()).run(size)
        results["bytes"], results["bytes of messages"] = p2p.bytes_sent, by_messages.bytes_sent
print(json.dumps(results))
transport.close()
