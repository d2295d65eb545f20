"""Predict the time of a training step from its messages and the links."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slurmdl.errors import UnavailableError, UsageError
from slurmdl.placement.arrays import FloatArray, IntArray
from slurmdl.placement.iteration_cost import NetworkLinks
from slurmdl.simulate.network_flows import FlowPhase, SimulatedNetwork, flow_phases
from slurmdl.simulate.workload import TrainingWorkload, message_count, rank_programs
from slurmdl.slurm import process

SIMGRID_PYTHON = "/usr/bin/python3"  # the Python of Debian's python3-simgrid
ENGINE_PATH = Path(__file__).with_name("simgrid_engine.py")
SIMGRID_TIMEOUT_S = 600.0
#: number of messages up to which "auto" simulates single messages, and largest number of flows of a phase
MAX_MESSAGES, MAX_FLOWS = 10_000, 400_000


@dataclass(frozen=True)
class Prediction:
    """Predicted step.

    Attributes:
        step_seconds: of the slowest worker, mean over the steps.
        exposed_comm_fraction: fraction of the step without computation, 0 to 1.
        inter_zone_bytes: bytes between leaf zones of all ranks, mean over the steps.
        granularity: "messages" or "flows".
    """

    step_seconds: float
    exposed_comm_fraction: float
    inter_zone_bytes: float
    steps: int
    granularity: str


def predict_step(workload: TrainingWorkload, links: NetworkLinks, node_of_rank: IntArray,
                 steps: int = 0, granularity: str = "auto") -> Prediction:
    """Predict the step of one placement.

    Raises UsageError if the workload cannot be simulated, UnavailableError if SimGrid is missing or fails.

    Args:
        node_of_rank: shape (ranks,), indices in `links.nodes`.
        steps: number of simulated steps, a multiple of the gossip period; 0 for one cycle of the workload.
        granularity: "messages", "flows" (see network_flows), or "auto" for messages if there are few.
    """
    workload.check_supported(len(node_of_rank))
    zones = zones_of_ranks(links, node_of_rank)
    steps = steps or workload.cycle_length(zones) * workload.period
    if steps % workload.period:
        raise UsageError(f"--steps {steps}: expected a multiple of --period {workload.period}")
    if granularity == "auto":
        granularity = "messages" if message_count(workload, len(node_of_rank), steps) <= MAX_MESSAGES else "flows"
    network = SimulatedNetwork(links)
    flow_steps = steps if workload.is_periodic else 1  # without a period all steps are alike
    gradients, exchanges = flow_phases(workload, network, node_of_rank, zones, flow_steps // workload.period)
    inter_zone_bytes = (sum(phase.inter_zone_bytes for phase in gradients)
                        + sum(phase.inter_zone_bytes for phase in exchanges) / flow_steps)
    if granularity == "messages":
        seconds = float(step_end_times(workload, links, node_of_rank, steps)[workload.ps:, -1].max()) / steps
    else:
        exchange_seconds = _transfer_seconds(network, exchanges).sum() + sum(phase.latency_s for phase in exchanges)
        seconds = _compute_seconds(workload, network, gradients) + float(exchange_seconds) / flow_steps
    exposed = max(0.0, 1 - workload.compute_seconds / seconds) if seconds else 0.0
    return Prediction(seconds, exposed, inter_zone_bytes, steps, granularity)


def zones_of_ranks(links: NetworkLinks, node_of_rank: IntArray) -> list[str]:
    """Leaf zone of each rank, or "" if its node has none."""
    return ["" if leaf < 0 else links.zones[leaf] for leaf in links.leaf[node_of_rank].tolist()]


def step_end_times(workload: TrainingWorkload, links: NetworkLinks, node_of_rank: IntArray, steps: int) -> FloatArray:
    """Simulated end of each step in s, message by message; shape (ranks, steps)."""
    network = SimulatedNetwork(links)
    nodes = node_of_rank.tolist()
    used: set[tuple[int, int]] = set()

    def encode(rank: int, action: Any) -> Any:
        if isinstance(action, float):
            return action
        sends, receives = action
        used.update((nodes[rank], nodes[peer]) for peer, _ in sends)
        latency = network.latency(node_of_rank[receives], node_of_rank[[rank]]).max(initial=0.0) if receives else 0.0
        return [sends, receives, float(latency)]

    programs = [[[encode(rank, action) for action in step] for step in program] for rank, program in enumerate(
        rank_programs(workload, nodes, zones_of_ranks(links, node_of_rank), steps))]
    return np.array(_run_engine({**network.platform_spec(used), "rank_hosts": nodes, "programs": programs}), float)


def _compute_seconds(workload: TrainingWorkload, network: SimulatedNetwork, gradients: Sequence[FlowPhase]) -> float:
    """Seconds of the computation of a step, and of an allreduce that overlaps with it, bucket by bucket."""
    transfers = _transfer_seconds(network, gradients)
    latencies = np.array([phase.latency_s for phase in gradients])
    now = 0.0
    for _, elements, ready in workload.gradient_buckets():
        now = max(now, ready) + float((transfers * elements / workload.parameters + latencies).sum())
    return max(now, workload.compute_seconds)


def _transfer_seconds(network: SimulatedNetwork, phases: Sequence[FlowPhase]) -> FloatArray:
    """Seconds of each phase without latency; all phases have the same multiplicity."""
    if not phases:
        return np.zeros(0)
    flow_count = max(len(phase.size) for phase in phases)
    if flow_count > MAX_FLOWS:
        raise UsageError(f"too many concurrent flows: {flow_count}; expected at most {MAX_FLOWS}, use fewer ranks or "
                         "a smaller --ps")
    flows = [list(zip(phase.source.tolist(), phase.target.tolist(), np.rint(phase.size).astype(int).tolist(),
                      strict=True)) for phase in phases]
    used = {(source, target) for phase in flows for source, target, _ in phase}
    return np.array(_run_engine({**network.platform_spec(used, phases[0].multiplicity), "phases": flows}), float)


def _run_engine(spec: Mapping[str, Any]) -> Any:
    """Output of simgrid_engine, in a process of its own."""
    result = process.run_command([SIMGRID_PYTHON, "-I", str(ENGINE_PATH)],
                                 stdin=json.dumps(spec), timeout=SIMGRID_TIMEOUT_S)
    if "No module named 'simgrid'" in result.stderr:
        raise UnavailableError(f"{SIMGRID_PYTHON} has no SimGrid; install it: apt install python3-simgrid")
    if result.returncode:
        lines = result.stderr.strip().splitlines() or ["no message"]
        raise UnavailableError(f"SimGrid: exit status {result.returncode}: {lines[-1]}")
    return json.loads(result.stdout)
