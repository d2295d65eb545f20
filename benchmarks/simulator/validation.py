"""Simulation compared with measurements: the random placements of benchmarks.cost_model, measured and simulated.

Each case is simulated message by message, with the same gossip partners. The metrics are its communication time and
its order relative to the other cases. A pair of cases counts if the measurement separates them: every block of steps
of one is shorter than every block of the other. The negative control is the simulation of other placements: the
shuffled values of each strategy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from benchmarks import cost_model, placement_comm_time
from benchmarks.cost_model import FloatArray, Job
from benchmarks.results import Row, make_row
from slurmdl.placement.iteration_cost import network_links
from slurmdl.plan import COMM_PATTERNS
from slurmdl.sandbox import lifecycle
from slurmdl.sandbox.spec import SandboxSpec, round_robin_topology
from slurmdl.simulate.predict import step_end_times
from slurmdl.simulate.workload import TrainingWorkload
from slurmdl.topology.topology import Topology
from slurmdl.traffic import Traffic

#: maximum error of a case, and minimum share of pairs in the right order
ERROR, ORDER = 0.2, 0.95
SHUFFLES = 20


def rows(quick: bool = False) -> Iterator[Row]:
    """Measure the placements on a sandbox and simulate them (`quick`: only those before the links first change)."""
    topology = round_robin_topology(9, 3)
    jobs = cost_model.draw(topology)
    if quick:
        jobs = jobs[:cost_model.PLACEMENTS_PER_SETTING * len(cost_model.PATTERNS)]
    sandbox = lifecycle.sandbox_up(SandboxSpec("simulate", topology, node_rate=cost_model.NODE_RATE))
    try:
        measured = cost_model.measure(sandbox, jobs)
    finally:
        lifecycle.sandbox_down("simulate")
    yield from evaluate(jobs, np.array([simulate(job, topology) for job in jobs]), measured)


def simulate(job: Job, topology: Topology) -> float:
    """Simulate communication seconds per iteration over the measured steps; return the median of the blocks."""
    names = sorted(job.nodes)
    place = np.array([names.index(node) for node in job.nodes])
    steps = cost_model.STEPS[job.pattern]
    strategy = cost_model.PATTERNS[job.pattern]
    traffic = Traffic(strategy, 4 * cost_model.PARAMETERS, job.ps, COMM_PATTERNS[strategy][0])
    training = TrainingWorkload(traffic, seed=placement_comm_time.SEED)
    network = network_links(names, topology, cost_model.shaped_link_scores(job, topology))
    ended = step_end_times(training, network, place, cost_model.WARM_UP + cost_model.BLOCKS * steps)[job.ps:]
    blocks = np.diff(ended[:, cost_model.WARM_UP - 1::steps], axis=1) / steps
    return float(np.median(blocks.max(axis=0)))


def evaluate(jobs: Sequence[Job], simulated: FloatArray, measured: FloatArray) -> Iterator[Row]:
    """Yield errors and pair order of each strategy, pair order across strategies on the same links, and controls.

    Args:
        simulated: shape (jobs,). measured : shape (jobs, blocks).
    """
    pattern = np.array([job.pattern for job in jobs])
    same_links = np.array([[first.rates == second.rates for second in jobs] for first in jobs])
    for name in cost_model.PATTERNS:
        selected = pattern == name
        seconds, simulated_seconds = np.median(measured[selected], axis=1), simulated[selected]
        errors = np.abs(simulated_seconds / seconds - 1)
        yield make_row(f"{name}: error of the simulation, per case", errors.tolist(), "share",
                       target=f"at most {ERROR} in each case", met=bool((errors <= ERROR).all()))
        yield make_row(f"{name}: share of the cases within {ERROR}", [float((errors <= ERROR).mean())], "share")
        yield make_row(f"{name}: simulated / measured seconds", (simulated_seconds / seconds).tolist(), "times",
                       baseline=1.0)
        yield from _order(f"{name}: pairs of placements", simulated_seconds, measured[selected],
                          np.ones((len(seconds), len(seconds)), bool))
    yield from _order("pairs of strategies on the same links", simulated, measured,
                      same_links & (pattern[:, None] != pattern[None]))


def _order(label: str, simulated: FloatArray, measured: FloatArray, wanted: npt.NDArray[np.bool_]) -> Iterator[Row]:
    """Yield the share of correctly simulated orders among the pairs that the measurement separates.

    Args:
        wanted: shape (cases, cases), symmetric.
    """
    shorter = (measured.max(axis=1)[:, None] < measured.min(axis=1)[None]) & wanted
    if not shorter.any():
        return

    def right(values: FloatArray) -> float:
        return float((values[:, None] < values[None])[shorter].mean())

    random = np.random.default_rng(cost_model.SEED)
    shuffled = [right(random.permutation(simulated)) for _ in range(SHUFFLES)]
    share = right(simulated)
    yield make_row(f"{label} in the right order, of {int(shorter.sum())}", [share], "share",
                   baseline=float(np.median(shuffled)), target=f"at least {ORDER}", met=share >= ORDER)
    yield make_row(f"{label}: the same, simulations shuffled (control)", shuffled, "share", baseline=share,
                   target=f"below {ORDER}", met=float(np.median(shuffled)) < min(share, ORDER))
