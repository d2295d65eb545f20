"""Plan a step from its context: rank map, command, warnings and explanation. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from slurmdl import units
from slurmdl.launch import step_command
from slurmdl.launch.plan_builder import build_plan
from slurmdl.launch.rankmap_formats import RankMapInput
from slurmdl.launch.step_command import StepCommand
from slurmdl.placement import score_report
from slurmdl.placement.result import RankMap
from slurmdl.plan import Plan

if TYPE_CHECKING:
    from slurmdl.launch.step_context import StepContext


@dataclass(frozen=True)
class StepPlan:
    """A mapped step.

    Attributes
    ----------
    command : what starts it; without argv if only the rank map is printed.
    plan, rank_map : the ranks with their nodes and roles, and the cost.
    topology_source : where the zones come from.
    warnings : for the user.
    score_report : lines on the decisive link scores, for --dl-explain.
    assumptions : what the predictions are based on, for --dl-explain.
    """

    command: StepCommand
    plan: Plan
    rank_map: RankMap
    topology_source: str
    warnings: tuple[str, ...] = ()
    score_report: tuple[str, ...] = ()
    assumptions: str = ""


def plan_step(context: StepContext) -> StepPlan:
    """Map the ranks of a step and build its command. PlacementError if the step cannot be mapped."""
    dl, topology, scores = context.dl, context.topology, context.link_scores
    plan, rank_map = build_plan(context.layout, topology, scores, dl, context.traffic_matrices)
    warnings = []
    master = _conflicting_master_addr(context, plan)
    if master:
        warnings.append(f"MASTER_ADDR={master}: expected the node of rank 0, {plan.nodes[0]}")
    if context.no_zones_reason:
        warnings.append(f"{context.no_zones_reason}; ranks in the order of the node names")
    step = StepPlan(_step_command(context, plan), plan, rank_map, topology.source, tuple(warnings))
    if not dl.explain:
        return step
    report: tuple[str, ...] = ()
    if scores.link_count:
        decisive = score_report.decisive_step_scores(rank_map, context.job_nodes, topology, scores)
        report = tuple(" ".join(line.split()) for line in score_report.format_score_report(decisive, scores))
    return replace(step, score_report=report, assumptions=score_report.format_assumptions(dl, topology, scores))


def _step_command(context: StepContext, plan: Plan) -> StepCommand:
    variables = step_command.task_variables(plan, context.master_port)
    line, task, environ = context.args.line, context.task, context.environ
    if task is None:
        return StepCommand((), variables)
    if context.args.launcher == "mpirun":
        return step_command.mpirun_command(line, plan, task, variables, environ, context.has_ulfm)
    return step_command.srun_command(line, plan, task, context.extra_options, variables, environ)


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
    lines = [f"{len(plan)} tasks on {len(set(plan.nodes))} nodes, order {rank_map.order or 'alphabetical'}, "
             f"zones from {step.topology_source}",
             f"an iteration of {plan.strategy} ({step.assumptions}): {zone_bytes} across zones, {node_bytes} across "
             f"nodes, {units.format_duration(cost.seconds)}, busiest: {cost.bottleneck_link or 'none'}"]
    if rank_map.rank0_slowdown and rank_map.any_rank0_cost:
        lines.append(f"rank 0 stays on {plan.nodes[0]}, the first node: with --dl-rank0=any an iteration takes "
                     f"{units.format_duration(rank_map.any_rank0_cost.seconds)}")
    first = 0
    for rank in range(1, len(plan) + 1):
        if rank == len(plan) or plan.nodes[rank] != plan.nodes[first] or plan.roles[rank] != plan.roles[first]:
            ranks = str(first) if rank == first + 1 else f"{first}-{rank - 1}"
            lines.append(f"rank {ranks}: {plan.nodes[first]}, zone {plan.leaf_zone(first) or 'none'}, "
                         f"{plan.roles[first]}")
            first = rank
    return [*lines, *step.score_report]
