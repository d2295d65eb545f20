"""Predict the time of a training step with SimGrid: message by message, or as concurrent flows.

A ring is one flow per pair of neighbors with the bytes of all turns, plus the latency of all turns. All ranks start a
phase together. Workers on identical nodes of one leaf zone without a server can be merged into one flow.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.errors import UnavailableError, UsageError
from slurmdl.placement.arrays import FloatArray, IntArray
from slurmdl.placement.iteration_cost import NetworkLinks
from slurmdl.simulate.workload import TrainingWorkload, message_count, rank_programs
from slurmdl.slurm import process
from slurmdl.traffic import Phase, gather_phases, ring_of_groups, shard_phase

SIMGRID_PYTHON = "/usr/bin/python3"  # the Python of Debian's python3-simgrid
ENGINE_PATH = Path(__file__).with_name("simgrid_engine.py")
SIMGRID_TIMEOUT_S = 600.0
#: number of messages up to which "auto" simulates single messages, and largest number of flows of a phase
MAX_MESSAGES, MAX_FLOWS = 10_000, 400_000
MERGE_ABOVE = 20_000  # flows of a phase above which identical nodes are merged


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
        granularity: "messages", "flows", or "auto" for messages if there are few.
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
        seconds = float(step_end_times(workload, links, node_of_rank, steps)[workload.traffic.ps:, -1].max()) / steps
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


class SimulatedNetwork:
    """Routes between nodes: up from the leaf zone to the lowest common zone, and down again.

    Links are full duplex, with the capacities and latencies of the cost model. A slow inter-leaf path is an
    additional link. Nodes without a zone are connected by their own links alone.
    """

    def __init__(self, links: NetworkLinks) -> None:
        self.links = links
        zones, first, leaf = np.unique(links.leaf, return_index=True, return_inverse=True)
        self.leaf: IntArray = leaf.astype(np.int64)  # shape (nodes,), index among the leaf zones that have a node
        self._ancestors = [[zone for zone in row if zone >= 0] for row in links.ancestors[first].tolist()]
        leaf_index = {zone: i for i, zone in enumerate(zones.tolist())}
        #: pair of leaves -> index of the slow path, and the leaf at its lower end
        self._inter_leaf = {frozenset(leaf_index[zone] for zone in pair): (i, leaf_index[pair[0]])
                            for i, pair in enumerate(links.slow_paths.leaf_pairs.tolist())}

    def latency(self, source: IntArray, target: IntArray) -> FloatArray:
        """One-way latency in s between nodes, 0 inside a node; source and target are broadcast."""
        source, target = np.broadcast_arrays(source, target)
        count = len(self._ancestors)
        pairs, inverse = np.unique(self.leaf[source] * count + self.leaf[target], return_inverse=True)
        between = np.array([self._leaf_latency(*divmod(int(pair), count)) for pair in pairs])
        node = self.links.node_latency
        return np.asarray(np.where(source == target, 0.0,
                                   node[source] + node[target] + between[inverse].reshape(source.shape)))

    def _leaf_latency(self, left: int, right: int) -> float:
        up, down = self._uplinks_on_path(left, right)
        uplinks_s = float(self.links.zone_latency[up + down].sum())
        path = self._inter_leaf.get(frozenset((left, right)))
        return max(uplinks_s, float(self.links.slow_paths.latency[path[0]]) if path and left != right else 0.0)

    def _uplinks_on_path(self, left: int, right: int) -> tuple[list[int], list[int]]:
        """Zones whose uplinks are crossed upward, then downward, in order."""
        left_zones, right_zones = self._ancestors[left], self._ancestors[right]
        return ([zone for zone in left_zones if zone not in right_zones],
                [zone for zone in reversed(right_zones) if zone not in left_zones])

    def _route(self, left: int, right: int) -> list[int]:
        """Links from leaf zone to leaf zone, numbered as in simgrid_engine."""
        nodes, zones = len(self.links.nodes), len(self.links.zones)
        up, down = self._uplinks_on_path(left, right)
        route = [2 * (nodes + zone) for zone in up]
        if path := self._inter_leaf.get(frozenset((left, right))):
            route.append(2 * (nodes + zones + path[0]) + (path[1] != left))
        return route + [2 * (nodes + zone) + 1 for zone in down]

    def platform_spec(self, pairs: Iterable[tuple[int, int]], multiplicity: npt.ArrayLike = 1) -> dict[str, Any]:
        """Platform in the format of simgrid_engine, with the routes between these pairs of nodes.

        `multiplicity` has shape (nodes,): the number of identical nodes that each node represents.
        """
        links = self.links
        capacity = np.concatenate([links.node_capacity * np.asarray(multiplicity), links.zone_capacity,
                                   links.slow_paths.capacity])
        leaf_pairs = {tuple(sorted((int(self.leaf[left]), int(self.leaf[right])))) for left, right in pairs}
        return {"links": capacity.tolist(), "zones": len(self._ancestors),
                "hosts": [[leaf, node] for node, leaf in enumerate(self.leaf.tolist())],
                "routes": [[left, right, self._route(left, right)] for left, right in sorted(leaf_pairs)
                           if left != right]}


@dataclass(frozen=True, eq=False)
class FlowPhase:
    """Flows between different nodes that start together.

    Attributes:
        source, target, size: shape (flows,); nodes and bytes.
        latency_s: of the sequential messages of a flow.
        inter_zone_bytes: bytes between leaf zones.
        multiplicity: shape (nodes,), number of identical nodes that each node represents.
    """

    source: IntArray
    target: IntArray
    size: FloatArray
    latency_s: float
    inter_zone_bytes: float
    multiplicity: IntArray


def flow_phases(workload: TrainingWorkload, network: SimulatedNetwork, node_of_rank: IntArray, zones: Sequence[str],
                exchange_count: int) -> tuple[list[FlowPhase], list[FlowPhase]]:
    """Phases of the allreduce of the gradients of one step (for the whole model), and of the exchanges of models.

    Args:
        node_of_rank: shape (ranks,).
        zones: leaf zones of the ranks.
        exchange_count: exchanges of gossip or between islands.
    """
    def inter_node(phases: Iterable[Phase]) -> list[FlowPhase]:
        return [_inter_node_flows(network, node_of_rank, phase) for phase in phases]

    if workload.traffic.strategy == "ps":
        return [], _ps_phases(workload, network, node_of_rank)
    if not workload.is_periodic:
        traffic = replace(workload.sent_traffic, pattern=workload.pattern)
        return inter_node(traffic.phases(len(node_of_rank), network.leaf[node_of_rank])), []
    islands = workload.islands(zones)
    gather = [*gather_phases(islands, workload.traffic.model_bytes)]
    return inter_node(gather * 2), inter_node(_exchanges(workload, islands, zones, exchange_count, gather))


def _exchanges(workload: TrainingWorkload, islands: Sequence[Sequence[int]], zones: Sequence[str], count: int,
               gather: Sequence[Phase]) -> Iterator[Phase]:
    """Exchanges of shards between the islands; each is gathered in each island."""
    size = float(workload.wire_bytes(workload.parameters))
    graph = workload.make_graph(zones) if workload.is_gossip else None
    for index in range(count if len(islands) > 1 else 0):
        yield shard_phase(islands, graph.round(index).target.tolist(), size) if graph else \
            ring_of_groups(islands, size)
        yield from gather


def _inter_node_flows(network: SimulatedNetwork, node_of_rank: IntArray, phase: Phase) -> FlowPhase:
    source, target = node_of_rank[phase.source], node_of_rank[phase.target]
    is_remote = source != target
    size = np.broadcast_to(np.asarray(phase.bytes_per_pair, float), source.shape)[is_remote]
    source, target = source[is_remote], target[is_remote]
    latency_s = phase.rounds * float(network.latency(source, target).max(initial=0.0))
    inter_zone_bytes = float(size.sum(where=network.leaf[source] != network.leaf[target]))
    return FlowPhase(source, target, size, latency_s, inter_zone_bytes, np.ones(len(network.leaf), np.int64))


def _ps_phases(workload: TrainingWorkload, network: SimulatedNetwork, node_of_rank: IntArray) -> list[FlowPhase]:
    """All workers push their gradients, then all pull the parameters."""
    servers = node_of_rank[:workload.traffic.ps]
    workers, tasks = np.unique(node_of_rank[workload.traffic.ps:], return_counts=True)
    latency_s = float(network.latency(servers[:, None], workers[None]).max(initial=0.0))
    shard_bytes = np.array(workload.shard_bytes(), float)[:, None]
    is_inter_zone = network.leaf[servers][:, None] != network.leaf[workers][None]
    inter_zone_bytes = float((shard_bytes * tasks * is_inter_zone).sum())
    multiplicity = np.ones(len(network.leaf), np.int64)
    if len(servers) * len(workers) > MERGE_ABOVE:
        workers, tasks, counts = _merge_identical(network.links, servers, workers, tasks)
        multiplicity[workers] = counts
    server, worker = (axis.ravel() for axis in np.broadcast_arrays(servers[:, None], workers[None]))
    sizes, is_remote = (shard_bytes * tasks).ravel(), server != worker
    server, worker, sizes = server[is_remote], worker[is_remote], sizes[is_remote]
    return [FlowPhase(source, target, sizes, latency_s, inter_zone_bytes, multiplicity)
            for source, target in ((worker, server), (server, worker))]


def _merge_identical(links: NetworkLinks, servers: IntArray, workers: IntArray,
                     tasks: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """For each group of identical nodes: its first node, the tasks on all of them, and their number."""
    server_node = np.where(np.isin(workers, servers), workers, -1)  # nodes with a server are not merged
    key = np.stack([links.leaf[workers], links.node_capacity[workers], tasks, server_node], axis=1)
    _, first, inverse, counts = np.unique(key, axis=0, return_index=True, return_inverse=True, return_counts=True)
    return workers[first], np.bincount(inverse.ravel(), tasks).astype(np.int64), counts
