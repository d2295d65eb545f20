"""Time and memory of the library on one rank, beside plain PyTorch.

Both train in the same process, in alternating blocks of steps: other programs disturb both alike. The control
compares plain PyTorch with itself.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from benchmarks.results import Row, make_row

#: name, layers, samples of a batch, and steps of a block: some 10 to 100 ms
NETWORKS = (("0.1 million parameters", (128, 256, 256, 10), 32, 20),
            ("1.1 million parameters", (512, 768, 768, 128), 64, 10),
            ("25 million parameters", (2048, 3000, 4000, 1700), 16, 2))
BLOCKS, REPEATS = 40, 5
MAX_TIME, MAX_COPIES = 1.02, 1.0
TIMEOUT_S = 600.0
_MEMORY_NETWORK = NETWORKS[2]


def rows(seed: int, quick: bool = False) -> Iterator[Row]:
    """Rows of time ratios, each sample of a fresh process, and of memory. `seed` is not used."""
    repeats = 2 if quick else REPEATS
    for index, (text, *_) in enumerate(NETWORKS):
        library, plain = ([_measure("time", str(index), kind) for _ in range(repeats)]
                          for kind in ("library", "plain"))
        ratios = [result["ratio"] for result in library]
        yield make_row(f"{text}: time per step of plain PyTorch",
                       [1000 * result["step_s"] for result in library], "ms")
        yield make_row(f"{text}: time per step, library to plain PyTorch", ratios, "times", baseline=1.0,
                       target=f"at most {MAX_TIME:g}", met=statistics.median(ratios) <= MAX_TIME)
        yield make_row(f"control: {text}: plain PyTorch to plain PyTorch", [result["ratio"] for result in plain],
                       "times", baseline=1.0)
    size = sum(before * after + after for before, after in pairwise(_MEMORY_NETWORK[1])) * 4
    peaks = {kind: [_measure("memory", "2", kind)["peak"] for _ in range(repeats)] for kind in ("plain", "library")}
    extra = [(peak - statistics.median(peaks["plain"])) / size for peak in peaks["library"]]
    yield make_row(f"{_MEMORY_NETWORK[0]}: peak memory above that of plain PyTorch", extra, "copies",
                   target=f"at most {MAX_COPIES:g} copy of the parameters",
                   met=statistics.median(extra) <= MAX_COPIES)


def _measure(*arguments: str) -> dict[str, float]:
    result = subprocess.run([sys.executable, "-m", "benchmarks.training.overhead", *arguments], capture_output=True,
                            text=True, timeout=TIMEOUT_S, check=False)
    if result.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {result.stderr.strip()[-500:]}")
    return dict(json.loads(result.stdout.splitlines()[0]))


def make_network(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    import torch

    layers: list[Any] = []
    for before, after in pairwise(sizes):
        layers += [torch.nn.Linear(before, after), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers[:-1])
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def time_steps(model: Any, opt: Any, x: Any, y: Any, count: int) -> float:
    """Seconds of some steps."""
    import torch

    start = time.perf_counter()
    for _ in range(count):
        opt.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
    return time.perf_counter() - start


def _main(task: str, network: str, kind: str) -> None:
    import resource

    import torch

    torch.set_num_threads(1)
    _, sizes, batch, block_steps = NETWORKS[int(network)]
    x, y = torch.randn(batch, sizes[0]), torch.randint(sizes[-1], (batch,))
    model, opt = make_network(sizes)
    run = None
    if kind == "library":
        from slurmdl.train import init

        run = init()
        run.wrap(model, opt)
    if task == "memory":
        time_steps(model, opt, x, y, 5)
        result = {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0}
    else:
        plain = make_network(sizes)
        ratios, step_s = [], []
        for block in range(-2, BLOCKS):
            first = time_steps(model, opt, x, y, block_steps) if block % 2 else 0.0
            other = time_steps(*plain, x, y, block_steps)
            first = first or time_steps(model, opt, x, y, block_steps)
            if block >= 0:
                ratios.append(first / other)
                step_s.append(other / block_steps)
        result = {"ratio": statistics.median(ratios), "step_s": statistics.median(step_s)}
    print(json.dumps(result), flush=True)
    if run:
        run.finish()


if __name__ == "__main__":
    _main(*sys.argv[1:])
