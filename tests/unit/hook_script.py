"""DistributedDataParallel with hierarchical_hook over two islands; one compression after the other.

    torchrun --nproc-per-node=4 hook_script.py COMPRESSION|plain...

Rank 0 prints a line with the models, bytes and losses of all ranks per compression. After an unknown one each rank
prints its error, and ends.
"""

import torch
import torch.distributed as dist
from island_cases import end_with_error, init_islands, run_cases

from slurmdl.train import HierarchicalState, hierarchical_hook

group = init_islands()["inside"].get_group()
rank = dist.get_rank()


def train(compression):
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


run_cases(train)
