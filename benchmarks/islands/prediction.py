"""Predicted and measured seconds of a step with islands, where links and not the machine's cores set the time.

Two zones of two nodes on a sandbox. The computation sleeps; its time in a prediction is that of a step without
exchanges, measured. Nodes have links of 200 Mbit/s, so that a sum inside an island takes longer than the processor
needs for it. (In `time-to-loss` eight ranks share the machine's cores, and nothing slows the messages inside a zone;
the predicted time there, that of the links, is too short.) Control: the prediction for allreduce over all ranks.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator, Sequence

from benchmarks import sandbox_mpi
from benchmarks.islands.disturbances import ALLREDUCE
from benchmarks.islands.time_to_loss import METHODS, PARAMETERS, PREDICTION_ERROR, predict_seconds
from benchmarks.results import Row, make_row
from slurmdl.sandbox import lifecycle
from slurmdl.sandbox.spec import SandboxSpec, round_robin_topology

NODES, NAME = 4, f"islands-{os.getpid()}"
#: links of the nodes, and between the zones, in bit/s
NODE_RATE, RATES = 2e8, {"20 Mbit/s": 2e7, "50 Mbit/s": 5e7, "200 Mbit/s": 2e8}
SLEEP_S, STEPS = 0.1, 64
ISLANDS = tuple(method for method in METHODS if "islands" in method)
NO_EXCHANGE = ("--strategy", "local-sgd", "--period", "1000000")


def rows(seed: int, quick: bool = False) -> Iterator[Row]:
    """Yield predicted seconds as a multiple of those measured. `seed` is not used."""
    topology = round_robin_topology(NODES, 2)
    zones = {node: topology.zones[leaf] for node, leaf in zip(topology.nodes, topology.leaf, strict=True)}
    nodes = sorted(zones, key=lambda node: (zones[node], int(node[1:])))
    sandbox = lifecycle.sandbox_up(SandboxSpec(NAME, topology))
    try:
        for node in nodes:
            sandbox.shape_link(node, rate=NODE_RATE)
        for rate, bits in RATES.items():
            for zone in set(zones.values()):
                sandbox.shape_link(zone, rate=bits)
            jobs = [{"nodes": nodes, "zones": [zones[node] for node in nodes], "options": options,
                     "parameters": PARAMETERS, "seconds": SLEEP_S, "steps": STEPS, "repeats": 1 if quick else 3}
                    for options in (NO_EXCHANGE, *(METHODS[method] for method in ISLANDS))]
            alone, *results = sandbox_mpi.run_program(sandbox, "islands.step_time_worker", {"jobs": jobs})
            yield make_row(f"{rate}: seconds of a step without exchanges", alone["seconds"], "s", baseline=SLEEP_S)
            for method, result in zip(ISLANDS, results, strict=True):
                yield from compare(rate, bits, method, result["seconds"], statistics.median(alone["seconds"]))
            print(f"{rate}: measured", file=sys.stderr, flush=True)
    finally:
        lifecycle.sandbox_down(NAME)


def compare(rate: str, bits: float, method: str, measured: Sequence[float], compute_s: float) -> Iterator[Row]:
    """Yield the row of a method, and its control; `compute_s`: seconds of a step without exchanges."""
    predicted, other = (predict_seconds(METHODS[name], bits, inside, NODES, compute_s, NODE_RATE)
                        for name, inside in ((method, "zone"), (ALLREDUCE, "")))
    ratios = [predicted / seconds for seconds in measured]
    yield make_row(f"{rate}: {method}: predicted seconds of a step, of those measured", ratios, "times", baseline=1.0,
                   target=f"within {PREDICTION_ERROR:.0%}",
                   met=abs(statistics.median(ratios) - 1) <= PREDICTION_ERROR)
    ratios = [other / seconds for seconds in measured]
    judged = bits < NODE_RATE  # else the zones cost little
    yield make_row(f"control: {rate}: predicted seconds of allreduce, of those of {method}", ratios, "times",
                   baseline=1.0, target=f"off by more than {PREDICTION_ERROR:.0%}" if judged else "",
                   met=abs(statistics.median(ratios) - 1) > PREDICTION_ERROR if judged else None)
