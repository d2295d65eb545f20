"""Plan a step from its context: rank map, zone costs, command, warnings and explanation. Pure: no I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from slurmdl import units
from slurmdl.dl_options import OPTIONS, DlOptions
from slurmdl.errors import PlacementError
from slurmdl.launch import launchers, step_command
from slurmdl.launch.launchers import AdaptedCommand
from slurmdl.launch.rankmap_formats import RankMapInput
from slurmdl.launch.step_command import StepCommand
from slurmdl.launch.submission_record import SubmissionRecord
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.iteration_cost import NetworkLinks, network_links
from slurmdl.placement.rank_orders import best_rank_map
from slurmdl.placement.result import MIN_GAIN, RankMap, format_zone_counts
from slurmdl.placement.traffic import Traffic
from slurmdl.plan import COMM_PATTERNS, Plan
from slurmdl.slurm.step_layout import StepLayout
from slurmdl.text import pluralize
from slurmdl.topology.topology import Topology

if TYPE_CHECKING:
    from slurmdl.launch.step_context import StepContext
    from slurmdl.launch.traffic_file import Matrix

#: maximum number of leaf zones in a plan with zone costs
MAX_ZONES = 64



@dataclass(frozen=True)
class StepPlan:
    """A mapped step.

    Attributes:
        command: what starts it; without argv if only the rank map is printed.
        plan, rank_map: the ranks with their nodes and roles, and the cost.
        score_report: lines on the decisive link scores, for --dl-explain.
        assumptions: what the predictions are based on, for --dl-explain.
        launcher_changes: changes of the launcher's command.
    """

    command: StepCommand
    plan: Plan
    rank_map: RankMap
    topology_source: str
    warnings: tuple[str, ...] = ()
    score_report: tuple[str, ...] = ()
    assumptions: str = ""
    launcher_changes: tuple[str, ...] = ()


def plan_step(context: StepContext) -> StepPlan:
    """Map the ranks of a step and build its command. PlacementError if the step cannot be mapped."""
    dl, topology, scores = context.dl, context.topology, context.link_scores
    plan, rank_map = build_plan(context.layout, topology, scores, dl, context.traffic_matrices,
                                context.ranks_per_task)
    warnings = []
    launch = _adapt_launcher(context, plan)
    if launch and launch.reason_map_not_kept:
        warnings.append(launch.reason_map_not_kept)
    master = _conflicting_master_addr(context, plan)
    if master:
        warnings.append(f"MASTER_ADDR={master}: expected the node of rank 0, {plan.nodes[0]}")
    if context.no_zones_reason:
        warnings.append(f"{context.no_zones_reason}; ranks in the order of the node names")
    addresses = _node_addresses(context, plan)
    changes = launch.changes if launch else ()
    if addresses:
        changes = ("PET_LOCAL_ADDR set: if the program starts a c10d rendezvous, this numbers the nodes as planned",)
    step = StepPlan(_step_command(context, plan, launch, addresses), plan, rank_map, topology.source,
                    tuple(warnings), launcher_changes=changes)
    if not dl.explain:
        return step
    from slurmdl.placement import explain

    report: tuple[str, ...] = ()
    if scores.link_count:
        decisive = explain.decisive_step_scores(rank_map, context.job_nodes, topology, scores)
        report = tuple(" ".join(line.split()) for line in explain.format_score_report(decisive, scores))
    return replace(step, score_report=report, assumptions=explain.format_assumptions(dl, topology, scores))


def build_plan(step_layout: StepLayout, topology: Topology, link_scores: LinkScores, dl: DlOptions,
               traffic_matrices: tuple[Matrix, ...] = (), ranks_per_task: int = 1) -> tuple[Plan, RankMap]:
    """Map the ranks of a step; with several ranks per task, those of a task are consecutive.

    Raises PlacementError if no task would be left for a worker, or for parameter servers with several ranks per task.
    """
    if dl.ps >= step_layout.ntasks:
        raise PlacementError(f"--dl-ps={dl.ps}: the step has {pluralize(step_layout.ntasks, 'task')}, and at least "
                             "one must be a worker")
    traffic = Traffic.from_options(dl, traffic_matrices)
    slots = [(node, count * ranks_per_task) for node, count in step_layout.node_tasks]
    rank_map = best_rank_map(slots, topology, link_scores, traffic, dl.rank0, node_by_node=ranks_per_task > 1)
    zones = {node: topology.path_of(node) for node, _ in step_layout.node_tasks}
    costs = compute_zone_costs(network_links(list(zones), topology, link_scores))
    pattern = dl.comm_pattern if dl.comm_pattern in COMM_PATTERNS[dl.strategy] else ""
    return Plan(dl.strategy, rank_map.nodes, rank_map.roles, zones, costs, pattern, dl.mesh,
                dl.groups, dl.islands), rank_map


def broken_promise(record: SubmissionRecord, step: StepPlan, dl: DlOptions) -> str:
    """How much worse the step's nodes are than the submission has promised, or ""; "" too for other ranks or traffic.
    """
    promise, plan, seconds = record.promise, step.plan, step.rank_map.cost.seconds
    if promise is None or promise.ranks != len(plan) or seconds <= promise.seconds * (1 + MIN_GAIN) or \
            any(getattr(dl, entry.field) != getattr(record.options, entry.field) for entry in OPTIONS
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


def _adapt_launcher(context: StepContext, plan: Plan) -> AdaptedCommand | None:
    """The launcher's command with the changes that keep the rank map; None without a launcher."""
    if context.launcher is None:
        return None
    rank0, this_node = plan.nodes[0], context.environ.get("SLURMD_NODENAME", "")

    def is_rank0_host(host: str) -> bool:
        name = host.partition(".")[0]
        if name in (rank0, rank0.partition(".")[0]):
            return True
        if "$" in host or "`" in host or (name not in context.job_nodes and this_node != rank0):
            return rank0 == context.job_nodes[0]  # scripts take the first node
        return host in context.local_hosts and this_node == rank0

    return launchers.keep_map(context.launcher, rank0, is_rank0_host)


def _node_addresses(context: StepContext, plan: Plan) -> Sequence[str]:
    """The addresses by which a c10d rendezvous in a program that cannot be read keeps the planned order.

    Empty if it keeps the order anyway, or cannot.
    """
    nodes = list(dict.fromkeys(plan.nodes))
    return context.resolve_nodes(nodes) if context.resolve_nodes and nodes != sorted(nodes) else ()


def _step_command(context: StepContext, plan: Plan, launch: AdaptedCommand | None,
                  addresses: Sequence[str]) -> StepCommand:
    variables = step_command.task_variables(plan, context.master_port)
    line, task, environ = context.args.line, context.task, context.environ
    if context.launcher or context.ranks_per_task > 1:
        variables["SLURMDL_RANKS_PER_TASK"] = str(context.ranks_per_task)
    if context.dl.on_slow != "warn":
        variables["SLURMDL_ON_SLOW"] = context.dl.on_slow
    variables.update(context.rank_check_variables)
    if launch:
        variables.update(launch.environ)
    if task is None:
        return StepCommand((), variables)
    if context.args.step_starter == "mpirun":
        return step_command.mpirun_command(line, plan, task, variables, environ, context.has_ulfm)
    if launch:
        task = replace(task, program=launch.program)
    if addresses:
        task = replace(task, script=f"_dl_addresses='{' '.join(addresses)}'\n{task.script}")
    return step_command.srun_command(line, plan, task, context.extra_options, variables, environ,
                                     context.ranks_per_task)


def rank_map_input(context: StepContext, plan: Plan, variables: Mapping[str, str]) -> RankMapInput:
    """The input of `rankmap_formats.format_rank_map`."""
    nodes = [node for node, _ in context.layout.node_tasks]
    return RankMapInput(plan, nodes, context.cpus_per_task, context.master_port, context.job_id, variables)


def _conflicting_master_addr(context: StepContext, plan: Plan) -> str:
    """The user's MASTER_ADDR if it is a node of the job other than that of rank 0, else ""."""
    master = context.environ.get("MASTER_ADDR", "")
    if "MASTER_ADDR" in context.environ.get("SLURMDL_EXPORTED", "").split():
        return ""
    other_nodes = {node.partition(".")[0] for node in context.job_nodes} - {plan.nodes[0].partition(".")[0]}
    return master if master.partition(".")[0] in other_nodes else ""


def explanation_lines(step: StepPlan) -> list[str]:
    """The explanation of --dl-explain: order, cost, ranks by node, decisive link scores."""
    plan, rank_map, cost = step.plan, step.rank_map, step.rank_map.cost
    zone_bytes, node_bytes = units.format_bytes(cost.inter_zone_bytes), units.format_bytes(cost.inter_node_bytes)
    lines = [f"{pluralize(len(plan), 'task')} on {pluralize(len(set(plan.nodes)), 'node')}, "
             f"order {rank_map.order or 'alphabetical'}, "
             f"zones from {step.topology_source}",
             f"an iteration of {plan.strategy} ({step.assumptions}): {zone_bytes} across zones, {node_bytes} across "
             f"nodes, {units.format_duration(cost.seconds)}, busiest: {cost.bottleneck_link or 'none'}"]
    if rank_map.rank0_slowdown and rank_map.any_rank0_cost:
        lines.append(f"rank 0 stays on {plan.nodes[0]}, the first node: with --dl-rank0=any an iteration takes "
                     f"{units.format_duration(rank_map.any_rank0_cost.seconds)}")
    for (node, role), run in groupby(range(len(plan)), key=lambda rank: (plan.nodes[rank], plan.roles[rank])):
        ranks = list(run)
        zone = plan.leaf_zone(ranks[0]) or "none"
        lines.append(f"rank {step_command.fold_ranks(ranks)}: {node}, zone {zone}, {role}")
    return [*lines, *(f"launcher: {change}" for change in step.launcher_changes), *step.score_report]
