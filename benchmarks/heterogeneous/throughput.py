"""Samples per second of ranks of different speeds, relative to the same ranks with communication off.

Eight ranks, each on a node of a sandbox; some compute several times as long. Computation is emulated by sleep,
because the ranks outnumber the cores; messages are real. All variants alternate. In synchronous variants the batch
sizes first need to converge, so only the steps after SETTLED count. The negative control is allreduce without load
balance, which runs at the speed of the slowest rank. In one more case ranks with different CPU quotas really compute
a network.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.heterogeneous.trainer_jobs import SETTINGS, Jobs, Result, cpu_bound_note
from benchmarks.results import Row, make_row
from slurmdl.sandbox import lifecycle
from slurmdl.sandbox.spec import SandboxSpec, round_robin_topology

RANKS, CPUS = 8, 8
#: computation of a step at full speed in seconds, its samples, and elements of the model
COMPUTE, BATCH, PARAMETERS = 0.1, 64, 100_000
#: speeds -> value of --straggler: factors of the computation time by rank
SPEEDS = {"one rank of 8 at a quarter of the speed": "7=4", "ranks at 1 x, 2 x and 4 x": "0=4,1=4,2=2,3=2,4=2"}
OFF = "communication off"
GOSSIP, BALANCED = "asynchronous gossip", "balanced allreduce"
NEGATIVE_CONTROL = "unbalanced allreduce (control)"
#: variant -> its options; ranks with a period of a million steps never exchange
VARIANTS = {OFF: "--strategy gossip --async --load-balance --period 1000000",
            GOSSIP: "--strategy gossip --async --load-balance",
            BALANCED: "--strategy allreduce --load-balance", NEGATIVE_CONTROL: "--strategy allreduce"}
#: steps of a run, and steps at its start in which the batch sizes converge
STEPS, SETTLED = 160, 60
REPEATS, TARGET = 3, 0.95
#: options of the computed network; its steps last as long as the emulated ones, far above the period of a quota. Runs
#: are short and repeated more often, because the speed of a shared machine changes from minute to minute.
REAL, REAL_REPEATS = "--model cnn --data digits-rgb32 --batch-size 64 --steps 120 --log-every 120", 5
#: relative CPU quotas of its ranks, and their sum as a share of the cores
QUOTAS, CORES = (4, 4, 4, 1), 0.75


def rows(seed: int) -> Iterator[Row]:
    """Yield ratios of samples per second for each mixture of speeds."""
    sandbox = lifecycle.sandbox_up(SandboxSpec(f"speed-{os.getpid()}", round_robin_topology(RANKS, 1), cpus=CPUS,
                                               slurm_conf_lines=SETTINGS))
    try:
        jobs = Jobs(sandbox)
        for speeds, straggler in SPEEDS.items():
            options = f"{common(STEPS, seed)} --straggler {straggler}"
            yield from evaluate(speeds, _alternate(jobs, RANKS, options, speeds, REPEATS))
        for node, speed in zip(sandbox.spec.topology.nodes, QUOTAS, strict=False):
            sandbox.limit_cpu(node, CORES * (os.cpu_count() or 1) * speed / sum(QUOTAS))
        speeds = f"real computation, CPU quotas of {':'.join(map(str, QUOTAS))}"
        yield from evaluate(speeds, _alternate(jobs, len(QUOTAS), f"{REAL} --seed {seed}", speeds, REAL_REPEATS))
    finally:
        lifecycle.sandbox_down(sandbox.spec.name)


def _alternate(jobs: Jobs, ranks: int, options: str, label: str, repeats: int) -> dict[str, list[Result]]:
    """Run the variants in turn, with one rank on each node."""
    results: dict[str, list[Result]] = {variant: [] for variant in VARIANTS}
    for repeat in range(repeats):
        for variant, variant_options in VARIANTS.items():
            results[variant].append(jobs.train(ranks, 1, f"{options} {variant_options}"))
        print(f"throughput: {label}: {repeat + 1} of {repeats}", file=sys.stderr, flush=True)
    return results


def common(steps: int, seed: int) -> str:
    """Return the options of all runs."""
    return (f"--emulate-compute {COMPUTE}:{PARAMETERS} --batch-size {BATCH} --steps {steps} --log-every {steps} "
            f"--seed {seed}")


def rate(result: Result, options: str) -> float:
    """Return samples per second, summed over all workers; `options` are those of the run."""
    summary = result.summary
    if "--async" in options:
        return float(summary["samples_per_second"])
    settled = result.seconds[SETTLED:]
    return float(summary["num_workers"] * summary["batch_size"] * len(settled) / sum(settled))


def evaluate(speeds: str, results: Mapping[str, Sequence[Result]]) -> Iterator[Row]:
    """Yield the rows of one mixture of speeds."""
    rates = {variant: [rate(result, VARIANTS[variant]) for result in variant_results]
             for variant, variant_results in results.items()}
    rate_without_comm = statistics.median(rates[OFF])
    yield make_row(f"{speeds}: {OFF}{cpu_bound_note(results[OFF])}", rates[OFF], "1/s", target="sum over all ranks")
    for variant in (GOSSIP, BALANCED, NEGATIVE_CONTROL):
        shares = [value / reference for value, reference in zip(rates[variant], rates[OFF], strict=True)]
        is_met = statistics.median(shares) >= TARGET
        yield make_row(f"{speeds}: {variant}{cpu_bound_note(results[variant])}", rates[variant], "1/s",
                       baseline=rate_without_comm)
        yield make_row(f"{speeds}: {variant}, as a share of {OFF}", shares, "share", baseline=1.0,
                       target=f"{'below' if variant == NEGATIVE_CONTROL else 'at least'} {TARGET:g}",
                       met=is_met != (variant == NEGATIVE_CONTROL))
