"""The rank map of a step and its command, from its inputs. Pure: no I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

import numpy as np

from slurmdl import units
from slurmdl.dl_options import OPTIONS, DlOptions
from slurmdl.errors import PlacementError
from slurmdl.launch import launchers, step_command
from slurmdl.launch.launchers import AdaptedCommand
from slurmdl.launch.step_command import StepCommand
from slurmdl.launch.step_inputs import StepInputs
from slurmdl.launch.submission_record import SubmissionRecord
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.iteration_cost import NetworkLinks, network_links
from slurmdl.placement.rank_orders import best_rank_map
from slurmdl.placement.result import MIN_GAIN, RankMap, format_zone_counts
from slurmdl.plan import COMM_PATTERNS, Plan
from slurmdl.slurm.step_layout import StepLayout
from slurmdl.text import pluralize
from slurmdl.topology.topology import Topology
from slurmdl.traffic import Traffic

#: maximum number of leaf zones in a plan with zone costs
MAX_ZONES = 64


@dataclass(frozen=True)
class StepPlan:
    """A mapped step.

    Attributes:
        command: what starts it; without argv if only the rank map is printed.
        plan, rank_map: the ranks with their nodes and roles, and the cost.
        explanation: lines for --dl-explain; () without it.
    """

    command: StepCommand
    plan: Plan
    rank_map: RankMap
    warnings: tuple[str, ...] = ()
    explanation: tuple[str, ...] = ()


def plan_step(inputs: StepInputs) -> StepPlan:
    """Map the ranks of a step and build its command. PlacementError if the step cannot be mapped."""
    options, record, topology = inputs.call.options, inputs.call.record, inputs.topology
    plan, rank_map = build_plan(inputs.layout, topology, inputs.link_scores, options, inputs.traffic,
                                inputs.ranks_per_task)
    nodes = list(dict.fromkeys(plan.nodes))
    adapted = launchers.keep_map(inputs.launcher, nodes[0], partial(_is_host_of_rank0, inputs, nodes[0])) \
        if inputs.launcher else None
    # if the program starts torchrun with a c10d rendezvous, that numbers the nodes by these addresses
    addresses = inputs.resolve_nodes(nodes) if inputs.resolve_nodes and nodes != sorted(nodes) else ()
    warnings = [adapted.reason_map_not_kept if adapted else "",
                _master_addr_conflict(inputs, nodes[0]),
                f"{inputs.no_zones_reason}; ranks in the order of the node names" if inputs.no_zones_reason else "",
                broken_promise(record, plan, rank_map, options) if record else ""]
    explanation: list[str] = []
    if options.explain:
        changes = adapted.changes if adapted else ()
        if addresses:
            changes = ("PET_LOCAL_ADDR set: if the program starts a c10d rendezvous, this numbers the nodes as "
                       "planned",)
        explanation = explain_step(plan, rank_map, options, topology, inputs.link_scores, inputs.allocation.nodes,
                                   changes)
    return StepPlan(_step_command(inputs, plan, adapted, addresses), plan, rank_map, tuple(filter(None, warnings)),
                    tuple(explanation))


def build_plan(step_layout: StepLayout, topology: Topology, link_scores: LinkScores, options: DlOptions,
               traffic: Traffic | None = None, ranks_per_task: int = 1) -> tuple[Plan, RankMap]:
    """Map the ranks of a step; with several ranks per task, those of a task are consecutive.

    `traffic` is that of the options if it is None.

    Raises PlacementError if no task would be left for a worker, or for parameter servers with several ranks per task.
    """
    traffic = traffic or options.traffic
    if traffic.ps >= step_layout.ntasks:
        raise PlacementError(f"--dl-ps={traffic.ps}: the step has {pluralize(step_layout.ntasks, 'task')}, and at "
                             "least one must be a worker")
    slots = [(node, count * ranks_per_task) for node, count in step_layout.node_tasks]
    rank_map = best_rank_map(slots, topology, link_scores, traffic, options.rank0, node_by_node=ranks_per_task > 1)
    zones = {node: topology.path_of(node) for node, _ in step_layout.node_tasks}
    costs = compute_zone_costs(network_links(list(zones), topology, link_scores))
    pattern = traffic.pattern if traffic.pattern in COMM_PATTERNS[traffic.strategy] else ""
    return Plan(traffic.strategy, rank_map.nodes, rank_map.roles, zones, costs, pattern, options.mesh, options.groups,
                traffic.islands), rank_map


def broken_promise(record: SubmissionRecord, plan: Plan, rank_map: RankMap, options: DlOptions) -> str:
    """How much worse the step's nodes are than the submission has promised, or ""; "" too for other ranks or traffic.
    """
    promise, seconds = record.promise, rank_map.cost.seconds
    if promise is None or promise.ranks != len(plan) or seconds <= promise.seconds * (1 + MIN_GAIN) or \
            any(getattr(options, entry.field) != getattr(record.options, entry.field) for entry in OPTIONS
                if entry.group == "traffic" or entry.name == "rank0"):
        return ""
    zones = format_zone_counts(Counter(plan.zones[node][-1] if plan.zones[node] else "no zone"
                                       for node in dict.fromkeys(plan.nodes)))
    cause = "links have become slower since the submission" if zones == promise.zones else \
        f"Slurm gave the job other nodes than the submission promised: {zones} instead of {promise.zones}"
    ratio = f", {seconds / promise.seconds:.2f} times the promised time" if promise.seconds else ""
    return f"{cause}{ratio}"


def _median(values: np.ndarray) -> float:
    """np.median, whose first call imports numpy.ma (8 ms)."""
    ordered = np.sort(values)
    return float((ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2)


def compute_zone_costs(network: NetworkLinks) -> dict[str, float]:
    """Seconds per byte over the slowest link between each two leaf zones; training weights its partners by it.

    A measured inter-leaf path counts if it is slower than its links. The node links of a zone count with their
    median, so that one slow node does not represent its zone. The result maps "leafA|leafB" (names sorted) to s/byte,
    and "leaf|leaf" within a zone, with three significant digits. It is empty if there are more than MAX_ZONES leaf
    zones, or a node has none.
    """
    leaves, first_node = np.unique(network.leaf, return_index=True)
    if not len(leaves) or len(leaves) > MAX_ZONES or leaves[0] < 0:
        return {}
    node_capacity = np.array([_median(network.node_capacity[network.leaf == leaf]) for leaf in leaves])
    path = network.ancestors[first_node]
    uplink = np.append(network.zone_capacity, np.inf)
    shared = (path[:, None, :, None] == path[None, :, None, :]) & (path >= 0)[:, None, :, None]
    # the slowest uplink of each zone's path that is not on the other zone's path
    uplinks = np.where(shared.any(axis=3), np.inf, uplink[path][:, None, :]).min(axis=2)
    slowest = np.minimum(np.minimum(uplinks, uplinks.T), np.minimum(node_capacity[:, None], node_capacity))
    if len(network.leaf_capacity):
        np.fill_diagonal(slowest, network.leaf_capacity[0])
    pair_index = np.searchsorted(leaves, network.slow_paths.leaf_pairs)
    for (i, j), capacity in zip(pair_index.tolist(), network.slow_paths.capacity.tolist(), strict=True):
        slowest[i, j] = slowest[j, i] = min(slowest[i, j], capacity)
    names = [network.zones[leaf] for leaf in leaves]
    return {"|".join(sorted((names[i], names[j]))): float(f"{1 / slowest[i, j]:.3g}")
            for i in range(len(names)) for j in range(i, len(names))}


def _is_host_of_rank0(inputs: StepInputs, rank0_node: str, host: str) -> bool:
    """Whether a host name or address in the launcher's command belongs to the node of rank 0."""
    job_nodes, this_node = inputs.allocation.nodes, inputs.call.environ.get("SLURMD_NODENAME", "")
    name = host.partition(".")[0]
    if name in (rank0_node, rank0_node.partition(".")[0]):
        return True
    if "$" in host or "`" in host or (name not in job_nodes and this_node != rank0_node):
        return rank0_node == job_nodes[0]  # scripts take the first node
    return host in inputs.local_hosts and this_node == rank0_node


def _master_addr_conflict(inputs: StepInputs, rank0_node: str) -> str:
    """A warning if the user's MASTER_ADDR is a node of the job other than that of rank 0, else ""."""
    environ = inputs.call.environ
    if "MASTER_ADDR" in environ.get("SLURMDL_EXPORTED", "").split():
        return ""
    master = environ.get("MASTER_ADDR", "")
    other_nodes = {node.partition(".")[0] for node in inputs.allocation.nodes} - {rank0_node.partition(".")[0]}
    return f"MASTER_ADDR={master}: expected the node of rank 0, {rank0_node}" \
        if master.partition(".")[0] in other_nodes else ""


def _step_command(inputs: StepInputs, plan: Plan, adapted: AdaptedCommand | None,
                  addresses: Sequence[str]) -> StepCommand:
    call, task = inputs.call, inputs.task
    variables = step_command.task_variables(plan, inputs.master_port)
    if inputs.launcher or inputs.ranks_per_task > 1:
        variables["SLURMDL_RANKS_PER_TASK"] = str(inputs.ranks_per_task)
    if call.options.on_slow != "warn":
        variables["SLURMDL_ON_SLOW"] = call.options.on_slow
    variables.update(inputs.rank_check_variables)
    if adapted:
        variables.update(adapted.environ)
    if task is None:
        return StepCommand((), variables)
    if call.args.step_starter == "mpirun":
        return step_command.mpirun_command(call.args, plan, task, variables, call.environ, inputs.has_ulfm)
    if adapted:
        task = replace(task, program=adapted.program)
    if addresses:
        task = replace(task, script=f"_dl_addresses='{' '.join(addresses)}'\n{task.script}")
    return step_command.srun_command(call.args, plan, task, variables, call.environ, inputs.extra_options,
                                     inputs.ranks_per_task)


def explain_step(plan: Plan, rank_map: RankMap, options: DlOptions, topology: Topology, scores: LinkScores,
                 job_nodes: Sequence[str], launcher_changes: Sequence[str] = ()) -> list[str]:
    """The explanation of --dl-explain: order, cost, ranks by node, changes of the launcher, decisive link scores."""
    from slurmdl.placement import explain

    cost = rank_map.cost
    zone_bytes, node_bytes = units.format_bytes(cost.inter_zone_bytes), units.format_bytes(cost.inter_node_bytes)
    lines = [f"{pluralize(len(plan), 'task')} on {pluralize(len(set(plan.nodes)), 'node')}, "
             f"order {rank_map.order or 'alphabetical'}, zones from {topology.source}",
             f"an iteration of {plan.strategy} ({explain.format_assumptions(options, topology, scores)}): "
             f"{zone_bytes} across zones, {node_bytes} across nodes, {units.format_duration(cost.seconds)}, busiest: "
             f"{cost.bottleneck_link or 'none'}"]
    if rank_map.rank0_slowdown and rank_map.any_rank0_cost:
        lines.append(f"rank 0 stays on {plan.nodes[0]}, the first node: with --dl-rank0=any an iteration takes "
                     f"{units.format_duration(rank_map.any_rank0_cost.seconds)}")
    for (node, role), run in groupby(range(len(plan)), key=lambda rank: (plan.nodes[rank], plan.roles[rank])):
        ranks = list(run)
        lines.append(f"rank {step_command.fold_ranks(ranks)}: {node}, zone {plan.leaf_zone(ranks[0]) or 'none'}, "
                     f"{role}")
    lines += [f"launcher: {change}" for change in launcher_changes]
    if scores.link_count:
        decisive = explain.decisive_step_scores(rank_map, job_nodes, topology, scores)
        lines += [" ".join(line.split()) for line in explain.format_score_report(decisive, scores)]
    return lines
