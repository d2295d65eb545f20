"""When islands pay: simulated seconds of a step by the rate between zones and the size of the model.

Two zones of eight nodes, with 100 Gbit/s to each node and 0.2 s of computation per step. Baseline: hierarchical
allreduce. The chart shows how many times shorter a step of islands is, with local SGD every 32 steps in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.results import Row, make_row
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.iteration_cost import network_links
from slurmdl.sandbox.spec import round_robin_topology
from slurmdl.simulate.predict import predict_step
from slurmdl.simulate.workload import TrainingWorkload
from slurmdl.traffic import Traffic

NODES, COMPUTE_S, NODE_RATE = 16, 0.2, 1e11
#: bit/s between the zones, and parameters of the model
RATES = {"100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "10 Gbit/s": 1e10, "100 Gbit/s": 1e11, "400 Gbit/s": 4e11}
SIZES = {"1 M": 1_000_000, "10 M": 10_000_000, "100 M": 100_000_000, "1 G": 1_000_000_000}
LATENCY_S = 1e-5


def rows(seed: int, quick: bool = False) -> Iterator[Row]:
    """Yield the seconds of a step of islands for each rate and size; no slower than allreduce anywhere."""
    topology = round_robin_topology(NODES, 2)
    nodes = sorted(topology.nodes, key=lambda node: topology.leaf[topology.node_index[node]])
    for rate_name, rate in RATES.items():
        links = network_links(nodes, topology, LinkScores(
            default_node_bandwidth=NODE_RATE / 8, default_zone_bandwidth=(rate / 8,), default_latency=LATENCY_S))
        for size_name, parameters in SIZES.items():
            islands, allreduce = (predict_step(workload, links, np.arange(NODES), granularity="flows").step_seconds
                                  for workload in (
                TrainingWorkload(Traffic("local-sgd", 4 * parameters, islands="zone"), COMPUTE_S, period=32),
                TrainingWorkload(Traffic("allreduce", 4 * parameters, pattern="hierarchical"), COMPUTE_S)))
            yield make_row(f"simulated, {rate_name} between zones, {size_name} parameters: islands (baseline: "
                           "hierarchical allreduce)", [islands], "s", baseline=allreduce, target="at most 1.02 times",
                           met=islands <= 1.02 * allreduce)


def draw(path: str, results: Sequence[Row]) -> None:
    """Draw the ratios of `rows` as a chart of squares."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    ratios = np.array([row.baseline / row.value for row in results if row.baseline]).reshape(len(RATES), len(SIZES)).T
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    panel = figure.subplots()
    image = panel.imshow(ratios, cmap="YlGnBu", norm=LogNorm(1, 40), origin="lower", aspect="auto")
    for (row, column), ratio in np.ndenumerate(ratios):
        panel.text(column, row, f"{ratio:.1f} x" if ratio < 10 else f"{ratio:.0f} x", ha="center", va="center",
                   color="white" if ratio > 8 else "black", fontsize=9)
    panel.set(title="step time: hierarchical allreduce / islands", xlabel="rate between the zones",
              ylabel="parameters")
    panel.set_xticks(range(len(RATES)), [*RATES])
    panel.set_yticks(range(len(SIZES)), [*SIZES])
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)
    image.set_clim(1, 40)
    figure.savefig(path)
