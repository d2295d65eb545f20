"""Value of placement from 8 to 10,000 nodes, simulated: one job at a time on a cluster with three levels of zones
behind 2:1 uplinks, of which other jobs hold a fifth.

The negative control, random nodes and ranks, must be slower if each rank communicates with its neighbors in rank
order. If all ranks communicate with all, or with servers whose own links are the bottleneck, random nodes may be as
fast; this is shown without a target.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.results import Row, make_row
from slurmdl.network.model import LinkScores
from slurmdl.simulate.compare import WAYS, Case
from slurmdl.simulate.predict import Prediction
from slurmdl.simulate.training import Training
from slurmdl.topology import example

SIZES = (8, 32, 128, 512, 2_048, 10_000)
#: zones of each level, then nodes; share that others hold
CLUSTER, BUSY = (1, 25, 625, 12_500), 0.2
#: of ResNet-50, and seconds that a step computes
PARAMETERS, COMPUTE = 25_557_032, 0.1
#: nodes to a parameter server, and most servers
NODES_PER_SERVER, MOST_SERVERS = 16, 64
#: seconds that the prediction of one placement may take
LIMIT = 60.0
#: how much longer a placed job may take than in leaf order: choices are made by another model
SLACK = 0.02
#: line styles of the placements: broad below narrow, so that coinciding lines are visible
LINES: tuple[dict[str, Any], ...] = ({"linewidth": 4, "alpha": 0.5},
                                     {"linewidth": 1.2, "marker": "o", "markersize": 3},
                                     {"linewidth": 1.2, "linestyle": ":", "color": "black"})
#: the strategy of which random placement is the control
CONTROLLED = "allreduce"


@dataclass(frozen=True)
class Point:
    """One job with its predictions by placement."""

    strategy: str
    nodes: int
    found: dict[str, Prediction]


def trainings(nodes: int, seed: int) -> tuple[Training, ...]:
    """Return the strategies of a job with `nodes` nodes."""
    servers = min(MOST_SERVERS, max(1, nodes // NODES_PER_SERVER))
    return (Training("allreduce", PARAMETERS, traffic="hierarchical", compute=COMPUTE),
            Training("gossip", PARAMETERS, compute=COMPUTE, seed=seed),
            Training("adaptive-gossip", PARAMETERS, compute=COMPUTE, period=8, compress="int4"),
            Training("ps", PARAMETERS, servers, compute=COMPUTE))


def rows(seed: int, quick: bool, points: list[Point]) -> Iterator[Row]:
    """Yield seconds and bytes by strategy and size, the control, and prediction times; append to `points`."""
    topology = example.tree(CLUSTER)
    for nodes in SIZES[:4] if quick else SIZES:
        for training in trainings(nodes, seed):
            case = Case(training, topology, LinkScores(), nodes, nodes, busy=BUSY, seed=seed)
            begun = time.monotonic()
            point = Point(training.strategy, nodes, case.predictions())
            taken = (time.monotonic() - begun) / len(WAYS)
            points.append(point)
            print(f"scaling: {training.strategy}, {nodes} nodes: {taken:.1f} s each", file=sys.stderr, flush=True)
            yield from _evaluate(point)
            if nodes == SIZES[-1]:
                yield make_row(f"{training.strategy}, {nodes} nodes: seconds to predict one placement", [taken],
                               "s", target=f"at most {LIMIT:g} s", met=taken <= LIMIT)


def _evaluate(point: Point) -> Iterator[Row]:
    name = f"{point.strategy}, {point.nodes} nodes"
    placed, leaves, random = (point.found[variant] for variant in WAYS)
    yield make_row(f"{name}: seconds per step, placed, beside leaf order", [placed.seconds], "s",
                   baseline=leaves.seconds, target=f"at most {1 + SLACK} times",
                   met=placed.seconds <= leaves.seconds * (1 + SLACK))
    yield make_row(f"{name}: share of communication, placed, beside leaf order", [placed.communication], "share",
                   baseline=leaves.communication)
    yield make_row(f"{name}: MB across leaf zones, placed, beside leaf order", [placed.bytes_across_zones / 1e6],
                   "MB", baseline=leaves.bytes_across_zones / 1e6)
    judged = point.strategy == CONTROLLED
    yield make_row(f"{name}: seconds per step at random{' (control)' if judged else ''}, beside placed",
                   [random.seconds], "s", baseline=placed.seconds,
                   target="longer, or more bytes across leaf zones" if judged else "",
                   met=random.seconds > placed.seconds * (1 + SLACK)
                   or random.bytes_across_zones > placed.bytes_across_zones * (1 + SLACK) if judged else None)


def draw(path: str, points: Sequence[Point]) -> None:
    """Plot step time over nodes, with a panel for each strategy and a line for each placement."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator

    names = list(dict.fromkeys(point.strategy for point in points))
    figure = Figure(figsize=(4 * len(names), 3.5), layout="constrained")
    for panel, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        mine = [point for point in points if point.strategy == name]
        for variant, style in zip(WAYS, LINES, strict=True):
            panel.plot([point.nodes for point in mine], [point.found[variant].seconds for point in mine],
                       label=variant, **style)
        taken = [its.seconds for point in mine for its in point.found.values()]
        panel.set(title=name, xlabel="nodes", xscale="log", **(
            {"yscale": "log"} if max(taken) > 3 * min(taken) else {"ylim": (0, 1.1 * max(taken))}))
        sizes = sorted({point.nodes for point in mine})
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
