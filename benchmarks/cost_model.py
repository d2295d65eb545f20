"""Cost model compared with measurements: communication times of random placements on shaped links.

Nine nodes in three zones. The links change several times: each zone's uplink gets its own rate, and some nodes get a
degraded link. The model gets the rates as link scores. For each pattern, random nodes get random ranks, so parameter
servers can be anywhere; the trainer's strategies run on these placements, and the measured communication seconds per
iteration are compared with the predicted ones. The metric is Spearman's rank correlation, because a choice among
placements needs only their order. The negative control, shuffled predictions, must have a low correlation.

C. Spearman: The proof and measurement of association between two things. Am. J. Psychol. 15 (1904).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import results, sandbox_mpi
from benchmarks.results import make_row
from benchmarks.suite import run_repeated, start
from slurmdl.links.link_scores import LinkScore, LinkScores
from slurmdl.placement.iteration_cost import network_links, predict_cost
from slurmdl.sandbox import lifecycle
from slurmdl.sandbox.spec import SandboxSpec, round_robin_topology
from slurmdl.topology.topology import Topology
from slurmdl.traffic import Traffic

SEED = 4
PLACEMENTS, RANKS, SERVERS = 40, 6, 2
#: pattern -> strategy
PATTERNS = {"ring": "allreduce", "ps": "ps", "gossip": "gossip"}
#: warm-up steps of a placement, and blocks of STEPS steps; gossip partners differ from step to step
WARM_UP, BLOCKS = 1, 3
STEPS = {"ring": 2, "ps": 2, "gossip": 6}
#: placements of each pattern that run before the links change
PLACEMENTS_PER_SETTING = 4
#: elements of the model: a message is much larger than the 70 KB burst of a link's token bucket
PARAMETERS = 400_000
TARGET = 0.9
#: bits/s, for ZONE_RATES and DEGRADED_RATES lowest and highest; two CPUs move far more, so links are the bottleneck
NODE_RATE = 3e8
ZONE_RATES = (3e7, 3e8)
DEGRADED_RATES = (1.5e7, 1.5e8)
#: share of the nodes that have a degraded link
DEGRADED = 0.25
#: payload share of a rate: frames of 9,000 bytes with 66 bytes of Ethernet, IP and TCP headers
PAYLOAD = 0.99

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Job:
    """One placement: entry i of `nodes` is the node of rank i, of `zones` its zone; the first `ps` ranks are servers.

    `rates` : node or zone -> bits/s of its link.
    """

    pattern: str
    nodes: tuple[str, ...]
    zones: tuple[str, ...]
    rates: Mapping[str, float]

    @property
    def traffic(self) -> Traffic:
        return Traffic(PATTERNS[self.pattern], PARAMETERS * 4, self.ps)

    @property
    def ps(self) -> int:
        return SERVERS if self.pattern == "ps" else 0

    def to_json(self) -> dict[str, Any]:
        return {"strategy": PATTERNS[self.pattern], "ps": self.ps, "nodes": self.nodes, "zones": self.zones,
                "warm_up": WARM_UP, "blocks": BLOCKS, "steps": STEPS[self.pattern]}


def run(repeats: int = 1, results_file: str | None = None, name: str = "model") -> None:
    """Run all placements `repeats` times on a sandbox, and print and write the correlations."""
    topology = round_robin_topology(9, 3)
    jobs = draw(topology)
    sandbox = lifecycle.sandbox_up(SandboxSpec(name, topology, node_rate=NODE_RATE))
    try:
        version = sandbox_mpi.call(sandbox, ["sbatch", "--version"]).strip()
        measured = np.concatenate([measure(sandbox, jobs) for _ in range(repeats)], axis=1)
    finally:
        lifecycle.sandbox_down(name)
    rows = evaluate(jobs, predict(jobs, topology), measured)
    for row in rows:
        print(f"{row.metric}: {row.value:.3f}{f' {row.unit}' if row.unit else ''}"
              f"{f' (target: {row.target})' if row.target else ''}")
    if results_file:
        results.write(results_file, rows, seed=SEED, versions={"slurm": version},
                      command=f"python -m benchmarks.cost_model --repeats {repeats} --results {results_file}")


def draw(topology: Topology) -> list[Job]:
    """Draw random placements with random links, reproducibly; jobs with the same links are adjacent."""
    random = np.random.default_rng(SEED)
    jobs = []
    for _ in range(PLACEMENTS // PLACEMENTS_PER_SETTING):
        rates = {zone: _log_uniform(random, *ZONE_RATES) for zone in topology.zones if zone != "core"}
        rates |= {node: _log_uniform(random, *DEGRADED_RATES) if random.random() < DEGRADED else NODE_RATE
                  for node in topology.nodes}
        for pattern in np.repeat([*PATTERNS], PLACEMENTS_PER_SETTING).tolist():
            nodes = [str(node) for node in random.permutation(topology.nodes)[:RANKS]]
            zones = [topology.zones[topology.leaf[topology.node_index[node]]] for node in nodes]
            jobs.append(Job(pattern, tuple(nodes), tuple(zones), rates))
    return jobs


def _log_uniform(random: np.random.Generator, low: float, high: float) -> float:
    """Draw a log-uniform number."""
    return float(np.exp(random.uniform(np.log(low), np.log(high))))


def predict(jobs: Sequence[Job], topology: Topology) -> FloatArray:
    """Predict communication seconds per iteration, with the shaped rates as link scores; shape (jobs,)."""
    seconds = []
    for job in jobs:
        names = sorted(job.nodes)
        place = np.array([names.index(node) for node in job.nodes])
        network = network_links(names, topology, shaped_link_scores(job, topology))
        seconds.append(predict_cost(job.traffic.phases(RANKS), network, place).seconds)
    return np.array(seconds)


def shaped_link_scores(job: Job, topology: Topology) -> LinkScores:
    """Return the shaped rates of the links as link scores."""
    payload = {name: LinkScore(rate / 8 * PAYLOAD) for name, rate in job.rates.items()}
    return LinkScores(nodes={name: score for name, score in payload.items() if name in topology.node_index},
                      zones={name: score for name, score in payload.items() if name in topology.zone_index})


def measure(sandbox: lifecycle.Sandbox, jobs: Sequence[Job]) -> FloatArray:
    """Measure communication seconds per iteration; shape (jobs, blocks)."""
    seconds: list[list[float]] = []
    batch_size = PLACEMENTS_PER_SETTING * len(PATTERNS)
    for batch in (jobs[i:i + batch_size] for i in range(0, len(jobs), batch_size)):
        for link, rate in batch[0].rates.items():
            sandbox.shape_link(link, rate=rate)
        work = {"parameters": PARAMETERS, "jobs": [job.to_json() for job in batch]}
        seconds += sandbox_mpi.run_program(sandbox, "placement_comm_time", work)
    return np.array(seconds)


def evaluate(jobs: Sequence[Job], predicted: FloatArray, measured: FloatArray) -> list[results.Row]:
    """Return the rows of each pattern: correlation, negative control, median ratio, and spread of the predictions.

    Args:
        predicted: shape (jobs,). measured : shape (jobs, blocks); the median of its blocks counts for a placement.
    """
    rows = []
    for pattern in PATTERNS:
        selected = np.array([job.pattern == pattern for job in jobs])
        seconds = np.median(measured[selected], axis=1)
        correlation = spearman(predicted[selected], seconds)
        shuffled = [spearman(np.random.default_rng(SEED + i).permutation(predicted[selected]), seconds)
                    for i in range(20)]
        ratios = (seconds / predicted[selected]).tolist()
        rows += [
            make_row(f"{pattern}: rank correlation of predicted with measured seconds", [correlation], "",
                     target=f"at least {TARGET}", met=correlation >= TARGET),
            make_row(f"{pattern}: the same, predictions shuffled (control)", shuffled, "", baseline=correlation,
                     target=f"below {TARGET}", met=max(shuffled) < min(correlation, TARGET)),
            make_row(f"{pattern}: measured / predicted seconds", ratios, ""),
            make_row(f"{pattern}: largest / smallest predicted seconds",
                     [float(predicted[selected].max() / predicted[selected].min())], "",
                     target="at least 4", met=bool(predicted[selected].max() >= 4 * predicted[selected].min())),
            make_row(f"{pattern}: measured seconds per iteration", seconds.tolist(), "s"),
            make_row(f"{pattern}: predicted seconds per iteration", predicted[selected].tolist(), "s")]
    return rows


def spearman(x: Sequence[float] | FloatArray, y: Sequence[float] | FloatArray) -> float:
    """Return the rank correlation; equal values share their mean rank. 0 if all values of one side are equal."""
    x_ranks, y_ranks = _ranks(np.asarray(x, float)), _ranks(np.asarray(y, float))
    if not np.ptp(x_ranks) or not np.ptp(y_ranks):
        return 0.0
    return float(np.corrcoef(x_ranks, y_ranks)[0, 1])


def _ranks(values: FloatArray) -> FloatArray:
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[group], float)


def main(argv: list[str]) -> None:
    run_repeated("cost_model",
                 "Predicted and measured communication times of random placements on a sandbox (needs root).",
                 run, 1, argv)


if __name__ == "__main__":
    start(main)
