"""Train a small network on a device, as one rank: DEVICE OUTPUT [--amp] [--profile TRACE].

The first worker writes the parameters of the final model to OUTPUT. With --profile it records its steps after the
third, as a trace for chrome://tracing.
"""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

import torch
from torch import nn

from slurmdl.train import init

STEPS, BATCH, WARMUP = 24, 16, 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("device")
    parser.add_argument("output")
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--profile", default="")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False

    run = init()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 10))
    model = model.to(args.device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = run.wrap(model, optimizer)  # a parameter server ends here
    generator = torch.Generator().manual_seed(100 + (run.worker_rank or 0))
    images = torch.randn(BATCH, 3, 8, 8, generator=generator).to(args.device, memory_format=torch.channels_last)
    labels = torch.randint(10, (BATCH,), generator=generator).to(args.device)
    scaler = torch.amp.GradScaler(torch.device(args.device).type, enabled=args.amp)

    with contextlib.ExitStack() as stack:
        for step in range(STEPS):
            if step == WARMUP and args.profile and run.is_main:
                stack.enter_context(profile(args.profile))
            with run.data_phase():
                batch, target = images, labels
            optimizer.zero_grad()
            with torch.autocast(torch.device(args.device).type, torch.bfloat16, enabled=args.amp):
                loss = nn.functional.cross_entropy(model(batch), target)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    run.finish()
    if run.is_main:
        torch.save({name: tensor.cpu() for name, tensor in model.named_parameters()}, args.output)


def profile(path: str) -> Any:
    """A profiler of the CPU and of a GPU, which writes a trace at its end."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=activities,
                                  on_trace_ready=lambda profiler: profiler.export_chrome_trace(path))


if __name__ == "__main__":
    main()
