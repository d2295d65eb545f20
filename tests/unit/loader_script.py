"""User script for test_stream_loader.py: with DataLoader processes batches have the same samples as without them."""

import torch

from slurmdl.train import init


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 61

    def __getitem__(self, index):
        return torch.full((4,), float(index))


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        start, stride = (info.id, info.num_workers) if info else (0, 1)
        return (torch.full((4,), float(index)) for index in range(start, 64, stride))


run = init(check_every=1)
model = torch.nn.Linear(4, 2)
model, opt = run.wrap(model, torch.optim.SGD(model.parameters(), lr=1e-6))


def train(loader):
    seen = []
    for batch in loader:
        opt.zero_grad()
        model(batch).square().mean().backward()
        opt.step()
        seen.append(batch[:, 0].tolist())
    return seen


for data, same_order in ((Squares(), True), (Stream(), False)):
    alone, helped = (train(run.loader(data, batch_size=4, num_workers=number)) for number in (0, 2))
    if not same_order:
        alone, helped = (sorted(number for batches in run.all_gather_object(seen) for batch in batches
                                for number in batch) for seen in (alone, helped))
    assert alone == helped, (alone, helped)
run.finish()
print("equal", flush=True)
