"""Time and bytes between zones until each method reaches the loss of allreduce after a fixed number of steps."""

from __future__ import annotations

import functools
import math
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks import sandbox_mpi
from benchmarks.islands.virtual_training import Case, train_all
from benchmarks.results import Row, make_row
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.iteration_cost import network_links
from slurmdl.sandbox import lifecycle
from slurmdl.sandbox.spec import SandboxSpec, round_robin_topology
from slurmdl.simulate.predict import predict_step
from slurmdl.simulate.workload import TrainingWorkload
from slurmdl.traffic import Traffic

NODES, NAME = 8, f"islands-{os.getpid()}"
#: links between the zones in bit/s; those of the nodes are not shaped
RATES = {"50 Mbit/s": 5e7, "100 Mbit/s": 1e8, "1 Gbit/s": 1e9}
PARAMETERS = 470_784
#: seconds of a step of this model with 8 samples on one core of the machine that wrote the results
COMPUTE_S = 0.024
#: steps of allreduce, whose loss is the target, and steps of the other methods
TARGET_STEPS, MAX_STEPS = 240, 480
DDP = "DistributedDataParallel"
RING, ISLANDS = "allreduce, ring", "islands, local-sgd every 16 steps, int4"
#: method -> options of `slurmdl train`
METHODS: dict[str, tuple[str, ...]] = {
    DDP: (),
    RING: ("--strategy", "allreduce", "--comm-pattern", "ring"),
    "allreduce, hierarchical": ("--strategy", "allreduce", "--comm-pattern", "hierarchical"),
    "local-sgd every 16 steps, int4": ("--strategy", "local-sgd", "--period", "16", "--compression", "int4"),
    "DiLoCo every 64 steps": ("--preset", "diloco", "--period", "64"),
    "gossip": ("--strategy", "gossip"),
    ISLANDS: ("--strategy", "local-sgd", "--period", "16", "--compression", "int4", "--islands", "zone"),
    "islands, DiLoCo every 64 steps": ("--preset", "diloco", "--period", "64", "--islands", "zone"),
    "islands, gossip every 16 steps, int4": ("--strategy", "gossip", "--comm-pattern", "base-2", "--period", "16",
                                             "--compression", "int4", "--islands", "zone")}
#: methods with the steps of allreduce, since they compute the same
SAME_STEPS = (DDP, "allreduce, hierarchical")
CONTROL = f"{ISLANDS}, half of each zone (control)"
#: goals: times sooner than DDP at the slowest rate, share of its bytes, and times slower than the best other method
SOONER, BYTES_SHARE, SLOWER = 5.0, 0.01, 1.05
#: largest relative error of predicted seconds, and bit/s of the sandbox's links that are not shaped, about
PREDICTION_ERROR, UNSHAPED = 0.2, 2e10


def rows(seed: int, quick: bool = False) -> Iterator[Row]:
    """Yield seconds to the target loss, losses and bytes of each method."""
    seeds = range(seed, seed + (2 if quick else 5))
    courses = train_all({method: Case((*options, "--emulate-compute", "0", "--steps", str(
        TARGET_STEPS if method == RING else MAX_STEPS))) for method, options in METHODS.items()
        if method not in SAME_STEPS}, seeds)
    targets = [courses[RING, each].losses[TARGET_STEPS] for each in seeds]
    steps = {method: [courses[RING if method in SAME_STEPS else method, each].steps_to(target)
                      for each, target in zip(seeds, targets, strict=True)] for method in METHODS}
    for method in METHODS:
        if method not in SAME_STEPS:
            yield make_row(f"{method}: test loss after {TARGET_STEPS} steps",
                           [courses[method, each].losses[TARGET_STEPS] for each in seeds], "nats",
                           baseline=statistics.median(targets))
            yield from steps_rows(method, steps[method])
    for row in evaluate(steps, measure_steps(repeats=1 if quick else 3)):
        if all(map(math.isfinite, row.samples)):
            yield row


def steps_rows(method: str, steps: Sequence[float]) -> Iterator[Row]:
    """Yield the steps of a method to the loss, and the number of seeds that do not reach it, if there are any."""
    reached = [count for count in steps if math.isfinite(count)]
    if reached:
        yield make_row(f"{method}: steps to the loss of allreduce after {TARGET_STEPS}", reached, "steps",
                       baseline=TARGET_STEPS)
    if len(reached) < len(steps):
        yield make_row(f"{method}: seeds that do not reach the loss in {MAX_STEPS} steps",
                       [len(steps) - len(reached)], "seeds", baseline=0)


def evaluate(steps: Mapping[str, Sequence[float]], measured: Mapping[str, Mapping[str, Any]]) -> Iterator[Row]:
    """Yield rows from the steps of each method in each seed, infinity for a loss not reached, and its measurements.

    `measured` is rate -> method -> result of step_time_worker.
    """
    for rate, methods in measured.items():
        for method in (name for name in METHODS if "islands" in name):
            predicted = predict_seconds(METHODS[method], RATES[rate])
            ratios = [predicted / seconds for seconds in methods[method]["seconds"]]
            yield make_row(f"{rate}: {method}: predicted seconds of a step, of those measured", ratios, "times",
                           baseline=1.0, target=f"within {PREDICTION_ERROR:.0%}",
                           met=abs(statistics.median(ratios) - 1) <= PREDICTION_ERROR)
        per_step = {method: statistics.median(result["seconds"]) for method, result in methods.items()}
        seconds = {method: [count * per_step[method] for count in steps.get(method, steps[ISLANDS])]
                   for method in methods}
        medians = {method: statistics.median(values) for method, values in seconds.items()}
        others = min(value for method, value in medians.items() if "islands" not in method)
        for method in methods:
            yield make_row(f"{rate}: {method}: seconds of a step", methods[method]["seconds"], "s",
                           baseline=per_step[DDP])
            target, met = "", None
            if method == CONTROL:
                target, met = "longer than islands of whole zones", medians[method] > medians[ISLANDS]
            elif method == ISLANDS:
                target = f"at most {SLOWER} of the best other method"
                met = medians[method] <= SLOWER * others
                if rate == min(RATES, key=lambda name: RATES[name]):
                    target += f", and {SOONER:g} times sooner than {DDP}"
                    met = met and medians[method] * SOONER <= medians[DDP]
            yield make_row(f"{rate}: {method}: time to the loss", seconds[method], "s", baseline=medians[DDP],
                           target=target, met=met)
    _, methods = next(iter(measured.items()))
    sent = {method: [count * result["inter_zone_bytes"] / 1e6 for count in steps.get(method, steps[ISLANDS])]
            for method, result in methods.items() if method != DDP}
    whole = statistics.median(sent[RING])
    for method, values in sent.items():
        judged = method == ISLANDS
        yield make_row(f"{method}: bytes between zones to the loss", values, "MB", baseline=whole,
                       target=f"at most {BYTES_SHARE:.0%} of the ring" if judged else "",
                       met=statistics.median(values) <= BYTES_SHARE * whole if judged else None)


@functools.cache
def predict_seconds(options: tuple[str, ...], rate: float, inside: str = "zone", node_count: int = NODES,
                    compute_s: float = COMPUTE_S, node_rate: float = UNSHAPED) -> float:
    """Seconds of a step of a method, by `slurmdl simulate`; rates between zones and of nodes are in bit/s."""
    from slurmdl.train.trainer.options import parse_train_options

    config = parse_train_options(options, {}).strategy_config
    traffic = Traffic(config.strategy or "", 4 * PARAMETERS, pattern=config.comm_pattern or "", islands=inside)
    workload = TrainingWorkload(traffic, compute_s, period=config.exchange_period, compression=config.compression)
    topology = round_robin_topology(node_count, 2)
    nodes = sorted(topology.nodes, key=lambda node: topology.leaf[topology.node_index[node]])
    links = network_links(nodes, topology, LinkScores(default_node_bandwidth=node_rate / 8,
                                                      default_zone_bandwidth=(rate / 8,), default_latency=0.0))
    return predict_step(workload, links, np.arange(node_count)).step_seconds


def measure_steps(repeats: int) -> dict[str, dict[str, Any]]:
    """Measure a step of each method at each rate; rate -> method -> result of step_time_worker."""
    topology = round_robin_topology(NODES, 2)
    zones = {node: topology.zones[leaf] for node, leaf in zip(topology.nodes, topology.leaf, strict=True)}
    nodes = sorted(zones, key=lambda node: (zones[node], int(node[1:])))
    own, mixed = [zones[node] for node in nodes], ["x", "x", "y", "y"] * 2
    sandbox = lifecycle.sandbox_up(SandboxSpec(NAME, topology))
    try:
        for node in nodes:
            sandbox.shape_link(node, rate=0)
        measured = {}
        for rate, bits in RATES.items():
            for zone in sorted(set(own)):
                sandbox.shape_link(zone, rate=bits)
            jobs = [{"nodes": nodes, "zones": mixed if method == CONTROL else own, "options": options,
                     "parameters": PARAMETERS, "seconds": COMPUTE_S, "repeats": repeats,
                     "steps": 64 if "every" in method else 16}
                    for method, options in {**METHODS, CONTROL: METHODS[ISLANDS]}.items()]
            results = sandbox_mpi.run_program(sandbox, "islands.step_time_worker", {"jobs": jobs})
            measured[rate] = dict(zip([*METHODS, CONTROL], results, strict=True))
            print(f"{rate}: measured", file=sys.stderr, flush=True)
        return measured
    finally:
        lifecycle.sandbox_down(NAME)
