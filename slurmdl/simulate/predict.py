"""Seconds of a training step, from what is sent and from the links that it is sent over."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.errors import UnavailableError, UsageError
from slurmdl.placement.arrays import FloatArray, IntArray
from slurmdl.placement.iteration_cost import NetworkLinks
from slurmdl.simulate.message_programs import message_count, rank_programs
from slurmdl.simulate.network_flows import FlowPhase, SimulatedNetwork, flow_phases
from slurmdl.simulate.workload import TrainingWorkload
from slurmdl.slurm import process

#: the Python that Debian's python3-simgrid is for
SIMGRID_PYTHON = "/usr/bin/python3"
INSTALL_COMMAND = "apt install python3-simgrid"
ENGINE_PATH = Path(__file__).with_name("engine.py")
#: seconds that SimGrid may take
SIMGRID_TIMEOUT_S = 600.0
#: messages up to which each is simulated, where nothing else is asked for; and flows of a phase at most
MAX_MESSAGES, MAX_FLOWS = 10_000, 400_000


@dataclass(frozen=True)
class Prediction:
    """What a step takes.

    Attributes
    ----------
    seconds : of a step, mean over the steps, of the slowest worker.
    communication : share of them in which it does not compute, 0 to 1.
    inter_zone_bytes : sent from one leaf zone to another, mean over the steps, all ranks together.
    steps : that were simulated.
    detail : "messages" or "flows".
    """

    step_seconds: float
    exposed_comm_fraction: float
    inter_zone_bytes: float
    steps: int
    granularity: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def predict_step(workload: TrainingWorkload, links: NetworkLinks, node_of_rank: IntArray,
                 steps: int = 0, granularity: str = "auto") -> Prediction:
    """The step time of one placement.

    Parameters
    ----------
    place : shape (ranks,), entry i is the index in `links.nodes` of the node of rank i.
    steps : that are simulated, whole periods of gossip; 0 for as many as say enough.
    detail : "messages", "flows" or "auto": message by message, phase by phase (see flows), or what is possible.

    Raises
    ------
    UsageError : this cannot be simulated; the text names the option.
    UnavailableError : SimGrid is not there, or fails.
    """
    workload.check_supported(len(node_of_rank))
    zones = zones_of_ranks(links, node_of_rank)
    steps = steps or workload.cycle_length(zones) * workload.period
    if steps % workload.period:
        raise UsageError(f"--steps {steps}: an exchange comes in every {workload.period}th step; "
                         f"valid: multiples of {workload.period}")
    if granularity == "auto":
        granularity = "messages" if message_count(workload, len(node_of_rank), steps) <= MAX_MESSAGES else "flows"
    network = SimulatedNetwork(links)
    exchanges = steps // workload.period if workload.is_gossip else 1
    sent = flow_phases(workload, links, network, node_of_rank, zones, exchanges)
    across = sum(phase.inter_zone_bytes for phase in sent) / (steps if workload.is_gossip else 1)
    seconds = float(step_end_times(workload, links, node_of_rank, steps)[workload.ps:, -1].max()) / steps \
        if granularity == "messages" else _flow_step_time(workload, network, sent, steps)
    return Prediction(seconds, max(0.0, 1 - workload.compute_seconds / seconds)
                      if seconds else 0.0, across, steps, granularity)


def zones_of_ranks(links: NetworkLinks, node_of_rank: IntArray) -> list[str]:
    """Leaf zone of each rank, "" where its node has none."""
    return ["" if leaf < 0 else links.zones[leaf] for leaf in links.leaf[node_of_rank].tolist()]


def step_end_times(workload: TrainingWorkload, links: NetworkLinks, node_of_rank: IntArray, steps: int) -> FloatArray:
    """Seconds at the end of each step, message by message; shape (ranks, steps)."""
    network = SimulatedNetwork(links)
    nodes = node_of_rank.tolist()
    told: list[list[list[Any]]] = []
    used: set[tuple[int, int]] = set()
    for rank, program in enumerate(rank_programs(workload, nodes, zones_of_ranks(links, node_of_rank), steps)):
        told.append([])
        for step in program:
            told[rank].append([])
            for action in step:
                if isinstance(action, float):
                    told[rank][-1].append(action)
                    continue
                sends, receives = action
                used |= {(nodes[rank], nodes[peer]) for peer, _ in sends}
                delay = network.latency(node_of_rank[receives],
     node_of_rank[[rank]]).max(initial=0.0) if receives else 0.0
                told[rank][-1].append([sends, receives, float(delay)])
    return np.array(_run_engine({**network.platform_spec(used), "places": nodes, "programs": told}), float)


def _flow_step_time(workload: TrainingWorkload, network: SimulatedNetwork,
                    phases: Sequence[FlowPhase], steps: int) -> float:
    """Seconds of a step, mean over the steps, phase by phase."""
    moving = [
    _transfer_seconds(
        network, list(alike)) for _, alike in groupby(
            phases, key=lambda phase: phase.multiplicity.tobytes())]
    lasts = np.concatenate([np.zeros(0), *moving])
    delays = np.array([phase.latency_s for phase in phases])
    if workload.is_gossip:
        return workload.compute_seconds + float((lasts + delays).sum()) / steps
    if workload.strategy == "ps":
        return workload.compute_seconds + float((lasts + delays).sum())
    now = 0.0
    for _, elements, ready in workload.gradient_buckets():
        now = max(now, ready) + float((lasts * elements / workload.parameters + delays).sum())
    return max(now, workload.compute_seconds)


def _transfer_seconds(network: SimulatedNetwork, phases: Sequence[FlowPhase]) -> npt.NDArray[np.float64]:
    """Seconds of each phase without the delays of its messages; the phases stand for the same nodes."""
    most = max(len(phase.size) for phase in phases)
    if most > MAX_FLOWS:
        raise UsageError(f"{most} flows at once are too many; valid: up to {MAX_FLOWS}, by fewer --ps or ranks")
    flows = [list(zip(phase.source.tolist(), phase.target.tolist(), np.rint(phase.size).astype(int).tolist(),
                      strict=True)) for phase in phases]
    used = {(source, target) for phase in flows for source, target, _ in phase}
    return np.array(_run_engine({**network.platform_spec(used, phases[0].multiplicity), "phases": flows}), float)


def simgrid_version() -> str:
    """Of SimGrid."""
    return process.check_output(
        [SIMGRID_PYTHON, "-I", "-c", "import simgrid; print(simgrid.simgrid_version)"], timeout=60).strip()


def _run_engine(work: Mapping[str, Any]) -> Any:
    """The answer of `engine`, in a process of its own."""
    answer = process.run_command([SIMGRID_PYTHON, "-I", str(ENGINE_PATH)],
                                 stdin=json.dumps(work), timeout=SIMGRID_TIMEOUT_S)
    if "No module named 'simgrid'" in answer.stderr:
        raise UnavailableError(f"{SIMGRID_PYTHON} has no SimGrid; install it: {INSTALL_COMMAND}")
    if answer.returncode:
        lines = answer.stderr.strip().splitlines() or ["no message"]
        raise UnavailableError(f"SimGrid: exit status {answer.returncode}: {lines[-1]}")
    return json.loads(answer.stdout)
