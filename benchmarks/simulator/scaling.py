"""Simulated value of placement from 8 to 10,000 nodes.

One job at a time runs on a cluster with three levels of zones behind 2:1 uplinks, of which a fifth is busy. The
negative control, random nodes and ranks, must be slower if each rank communicates with its neighbors in rank order.
If all ranks communicate with all, or with servers whose own links are the bottleneck, random nodes can be as fast;
this is shown without a target.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.results import Row, make_row
from slurmdl.links.link_scores import LinkScores
from slurmdl.simulate.compare import PLACEMENT_POLICIES, SimulatedJob
from slurmdl.simulate.predict import Prediction
from slurmdl.simulate.workload import TrainingWorkload
from slurmdl.topology.source import tree_topology
from slurmdl.traffic import Traffic

SIZES = (8, 32, 128, 512, 2_048, 10_000)
#: number of zones of each level, then of nodes; share of busy nodes
CLUSTER, BUSY = (1, 25, 625, 12_500), 0.2
#: parameters of ResNet-50, and computation of a step in seconds
PARAMETERS, COMPUTE = 25_557_032, 0.1
#: nodes per parameter server, and maximum number of servers
NODES_PER_SERVER, MAX_SERVERS = 16, 64
#: maximum seconds for the prediction of one placement
MAX_PREDICTION_S = 60.0
#: tolerance of placed jobs relative to leaf order: placement uses another model than the simulator
SLACK = 0.02
#: line styles of the placements in the plot: wide below narrow, so that coincident lines stay visible
LINES: tuple[dict[str, Any], ...] = ({"linewidth": 4, "alpha": 0.5},
                                     {"linewidth": 1.2, "marker": "o", "markersize": 3},
                                     {"linewidth": 1.2, "linestyle": ":", "color": "black"})
#: strategy for which random placement is the negative control
CONTROLLED = "allreduce"


@dataclass(frozen=True)
class Point:
    """One job with its predictions by placement."""

    strategy: str
    nodes: int
    predictions: dict[str, Prediction]


def trainings(nodes: int, seed: int) -> tuple[TrainingWorkload, ...]:
    """Return the workloads of a job with `nodes` nodes, one for each strategy."""
    servers = min(MAX_SERVERS, max(1, nodes // NODES_PER_SERVER))
    size = 4 * PARAMETERS
    return (TrainingWorkload(Traffic("allreduce", size, pattern="hierarchical"), COMPUTE),
            TrainingWorkload(Traffic("gossip", size), COMPUTE, seed=seed),
            TrainingWorkload(Traffic("adaptive-gossip", size), COMPUTE, period=8, compression="int4"),
            TrainingWorkload(Traffic("ps", size, servers), COMPUTE))


def rows(seed: int, quick: bool, points: list[Point]) -> Iterator[Row]:
    """Yield seconds and bytes by strategy and size, the control, and prediction times; append to `points`."""
    topology = tree_topology(CLUSTER)
    for nodes in SIZES[:4] if quick else SIZES:
        for training in trainings(nodes, seed):
            case = SimulatedJob(training, topology, LinkScores(), nodes, nodes, busy_share=BUSY, seed=seed)
            start = time.monotonic()
            strategy = training.traffic.strategy
            point = Point(strategy, nodes, case.predict_policies())
            taken = (time.monotonic() - start) / len(PLACEMENT_POLICIES)
            points.append(point)
            print(f"scaling: {strategy}, {nodes} nodes: {taken:.1f} s each", file=sys.stderr, flush=True)
            yield from _evaluate(point)
            if nodes == SIZES[-1]:
                yield make_row(f"{strategy}, {nodes} nodes: seconds to predict one placement", [taken],
                               "s", target=f"at most {MAX_PREDICTION_S:g} s", met=taken <= MAX_PREDICTION_S)


def _evaluate(point: Point) -> Iterator[Row]:
    name = f"{point.strategy}, {point.nodes} nodes"
    placed, leaves, random = (point.predictions[variant] for variant in PLACEMENT_POLICIES)
    yield make_row(f"{name}: seconds per step, placed (baseline: leaf order)", [placed.step_seconds], "s",
                   baseline=leaves.step_seconds, target=f"at most {1 + SLACK} times",
                   met=placed.step_seconds <= leaves.step_seconds * (1 + SLACK))
    yield make_row(f"{name}: share of communication, placed (baseline: leaf order)", [placed.exposed_comm_fraction],
                   "share", baseline=leaves.exposed_comm_fraction)
    yield make_row(f"{name}: MB across leaf zones, placed (baseline: leaf order)", [placed.inter_zone_bytes / 1e6],
                   "MB", baseline=leaves.inter_zone_bytes / 1e6)
    judged = point.strategy == CONTROLLED
    yield make_row(f"{name}: seconds per step, random ({'control; ' if judged else ''}baseline: placed)",
                   [random.step_seconds], "s", baseline=placed.step_seconds,
                   target="longer, or more bytes across leaf zones" if judged else "",
                   met=random.step_seconds > placed.step_seconds * (1 + SLACK)
                   or random.inter_zone_bytes > placed.inter_zone_bytes * (1 + SLACK) if judged else None)


def draw(path: str, points: Sequence[Point]) -> None:
    """Plot step time over nodes, with a panel for each strategy and a line for each placement."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator

    names = list(dict.fromkeys(point.strategy for point in points))
    figure = Figure(figsize=(4 * len(names), 3.5), layout="constrained")
    for panel, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        series = [point for point in points if point.strategy == name]
        for variant, style in zip(PLACEMENT_POLICIES, LINES, strict=True):
            panel.plot([point.nodes for point in series],
                       [point.predictions[variant].step_seconds for point in series], label=variant, **style)
        taken = [prediction.step_seconds for point in series for prediction in point.predictions.values()]
        panel.set(title=name, xlabel="nodes", xscale="log", **(
            {"yscale": "log"} if max(taken) > 3 * min(taken) else {"ylim": (0, 1.1 * max(taken))}))
        sizes = sorted({point.nodes for point in series})
        panel.set_xticks(sizes, [f"{nodes:,}" for nodes in sizes], fontsize=7)
        panel.xaxis.set_minor_locator(NullLocator())
        if panel.get_yscale() == "log":
            panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            panel.yaxis.set_minor_locator(NullLocator())
            panel.yaxis.set_major_formatter("{x:g}")
        panel.grid(alpha=0.3)
        panel.legend()
    figure.supylabel("s per step")
    figure.savefig(path)
