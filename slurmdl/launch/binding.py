"""Decide how a job is bound to the nodes chosen for it. Pure: `sbatch --test-only` is a parameter."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING

from slurmdl.dl_options import DlOptions
from slurmdl.errors import PlacementError, UsageError
from slurmdl.job_request import JobRequest, resolve_job_size
from slurmdl.launch.job_start import REJECTED, PredictedStart
from slurmdl.launch.submission import Submission, SubmitCommand, build_submit_command
from slurmdl.launch.submission_record import Promise, RequestedSize
from slurmdl.launch.zone_preference import exact_zone_features, leaf_zones, placement_zones_text, prefer_zones

if TYPE_CHECKING:
    from slurmdl.cluster.snapshot import ClusterSnapshot
    from slurmdl.launch.cluster_state import ClusterState
    from slurmdl.launch.traffic_file import Matrix
    from slurmdl.placement.result import Placement
    from slurmdl.topology.topology import Topology

#: longest option, bytes (execve(2), MAX_ARG_STRLEN)
MAX_OPTION_BYTES = 128 * 1024 - 1
#: zones of --dl-zone in a message
_MAX_SHOWN_ZONES = 8


@dataclass(frozen=True)
class Decision:
    """How a job is bound to the nodes chosen for it.

    Attributes:
        binding_options: options for sbatch, placed after the user's options.
        placement: the chosen nodes, or None.
        reason: why Slurm chooses the nodes; "" if the choice is binding or none was requested.
        failed: something is missing or broken, or --dl-zone is not applied; otherwise the reason is a normal outcome.
        explanation: the text of --dl-explain.
        revert_field: job field to clear if the job does not start at once (see job_start), or "".
        requested_size: what the user requested, if the options request more nodes.
        promise: the predicted outcome, with which the job compares its nodes; None if nothing is promised.
        is_outdated: the state of the cluster is too old for this decision.
    """

    binding_options: tuple[str, ...] = ()
    placement: Placement | None = None
    reason: str = ""
    failed: bool = False
    explanation: str = ""
    revert_field: str = ""
    requested_size: RequestedSize | None = None
    promise: Promise | None = None
    is_outdated: bool = False

    def submit_command(self, program: str, job: Submission, environ: Mapping[str, str]) -> SubmitCommand:
        return build_submit_command(program, job, environ, self.binding_options, self.requested_size, self.promise)

    def summary(self, dl: DlOptions) -> str:
        """One line for users."""
        if self.failed:
            return f"submitted as written: {self.reason}"
        options = f"{' '.join(self.binding_options)}: " if self.binding_options else ""
        if self.reason:
            zones = f" in {_format_zones(dl, ', ')}" if self.binding_options else ""
            return f"{options}Slurm chooses the nodes{zones}: {self.reason}"
        if self.placement is None:
            return "Slurm chooses the nodes: " + ("--dl-node-binding=off" if dl.node_binding == "off" else
                                                  "the job has only one")
        return f"{options}{self.placement.reason}"


#: Slurm's prediction for a job that is bound by a decision
PredictStart = Callable[[Decision], PredictedStart]


def decide_binding(job: Submission, state: ClusterState, traffic_matrices: tuple[Matrix, ...], *, inside_job: bool,
                   predict_start: PredictStart) -> Decision:
    """Choose nodes for a job, and how strictly the choice binds Slurm.

    The zones of --dl-zone apply in any case: all other nodes are excluded. Raises UsageError if the user named an
    unknown zone, PlacementError if the site named one.

    Args:
        traffic_matrices: result of `load_traffic_matrices`.
        inside_job: the submission runs in a job.
        predict_start: queries Slurm.
    """
    dl = job.request.dl
    if dl.zone and job.request.unrestrictable_reason:
        return Decision(reason=zone_not_applied_reason(dl, job.request.unrestrictable_reason), failed=True)
    try:
        zone_options = _zone_limit_options(job, state) if dl.zone else ()
    except UsageError as error:
        if job.names_zones:
            raise
        raise PlacementError(f"slurmdl.yaml: {error}") from error  # a site's setting never rejects a job
    if any(len(option) > MAX_OPTION_BYTES for option in zone_options):
        return Decision(reason=zone_not_applied_reason(dl, "the list of excluded nodes is too long for sbatch"),
                        failed=True)

    def predict_start_in_zones(decision: Decision) -> PredictedStart:
        return predict_start(replace(decision, binding_options=(*zone_options, *decision.binding_options)))

    try:
        decision = _choose_binding(job, state, traffic_matrices, inside_job, predict_start_in_zones)
    except PlacementError as error:
        decision = Decision(reason=str(error), is_outdated=bool(state.age_text))
    return replace(decision, binding_options=(*zone_options, *decision.binding_options))


def decide_without_cluster(job: Submission) -> Decision | None:
    """The decision about a job on which the state of the cluster has no influence; None for other jobs.

    Raises PlacementError if no nodes can be chosen for any state of the cluster.
    """
    request, dl = job.request, job.request.dl
    if dl.node_binding == "off":
        if dl.zone:
            raise PlacementError("--dl-node-binding=off")
        return Decision()
    if dl.zone:
        return None  # nodes outside the zones are excluded in any case
    if request.unplaceable_reason:
        raise PlacementError(request.unplaceable_reason)
    if dl.mesh or dl.groups or dl.comm_pattern:
        return None  # placement checks them
    nodes = resolve_job_size(request).nodes
    if dl.node_binding != "auto" or dl.explain or dl.strict:
        return None
    if request.start_unknown_reason:
        return Decision(reason=_no_start_reason(request))
    return Decision() if nodes == 1 else None


def _no_start_reason(request: JobRequest) -> str:
    return f"{request.start_unknown_reason}, so no nodes are bound"


def zone_not_applied_reason(dl: DlOptions, reason: str) -> str:
    """Add to a reason that the zones of --dl-zone are not applied, if the user named zones."""
    return f"--dl-zone={_format_zones(dl, ',')} is not applied: {reason}" if dl.zone else reason


def _format_zones(dl: DlOptions, separator: str) -> str:
    return separator.join(dl.zone[:_MAX_SHOWN_ZONES] + ("...",) * (len(dl.zone) > _MAX_SHOWN_ZONES))


def _zone_limit_options(job: Submission, state: ClusterState) -> tuple[str, ...]:
    """The option that excludes all nodes outside the zones of --dl-zone, if there are any.

    Excluding nodes leaves the user's own --constraint unchanged.
    """
    from slurmdl.placement.candidate_nodes import snapshot_nodes_in_zones
    from slurmdl.slurm.hostlist import fold_hostlist

    is_inside = snapshot_nodes_in_zones(state.cluster, state.topology, job.request.dl.zone)
    outside = [name for name, inside in zip(state.cluster.names, is_inside.tolist(), strict=True) if not inside]
    return (f"--exclude={fold_hostlist([*outside, *job.request.exclude])}",) if outside else ()


def _choose_binding(job: Submission, state: ClusterState, traffic_matrices: tuple[Matrix, ...], inside_job: bool,
                    predict_start: PredictStart) -> Decision:
    """Choose nodes, and how strictly the choice binds Slurm.

    `auto` never delays a start. It prefers the zone; else it gives the node list if the job can neither be requeued
    nor vary in its number of nodes; else nothing. It binds only if the nodes are free now, and better than those that
    Slurm would choose itself. If placement does not model all that the job requests, Slurm must confirm that the job
    starts on these nodes now. Raises PlacementError if no nodes can be chosen.
    """
    from slurmdl.placement.place import place_job
    from slurmdl.placement.result import MIN_GAIN
    from slurmdl.slurm.hostlist import fold_hostlist

    request = job.request
    placement = place_job(request, state.cluster, state.topology, state.scores, traffic_matrices)
    if not placement.nodes:
        return Decision(reason=placement.reason or "no nodes fit")
    if request.dl.node_binding == "nodelist":
        return Decision((_nodelist_option(placement),), placement)
    if request.dl.node_binding == "zone":
        return Decision(_zone_options(job, state, placement, predict_start), placement)
    if request.dl.node_binding == "late":
        return _late_decision(job, placement)
    if request.start_unknown_reason:
        return Decision((), placement, _no_start_reason(request))
    if not placement.free_now:
        if state.age_text and predict_start(Decision()).is_now:
            return Decision((), placement, f"{state.age_text}; Slurm would start the job now", is_outdated=True)
        return Decision((), placement, f"{placement_zones_text(placement)} would fit, but not now")
    allowed_zones = leaf_zones(state.topology, request.dl.zone)
    if len(allowed_zones) == 1 and allowed_zones != leaf_zones(state.topology):
        return Decision((), placement)  # the excluded nodes leave Slurm only this zone

    def place_on(nodes: Collection[str]) -> Placement | None:
        """The job on exactly these nodes; None if it does not fit there."""
        others = set(state.cluster.names).difference(nodes)
        try:
            placed = place_job(replace(request, exclude=(*request.exclude, *others)), state.cluster, state.topology,
                               state.scores, traffic_matrices)
        except PlacementError:
            return None  # a node that placement would not use
        return placed if set(placed.nodes) == set(nodes) else None

    bindings, problem = _automatic_bindings(job, state, placement, inside_job, place_on)
    if not bindings:
        return Decision((), placement, problem)
    start = predict_start(Decision())
    own_choice = place_on(start.nodes) if start.is_now else None
    # Slurm 22.05 predicts by the power states at the last start of a job
    if own_choice and own_choice.boots > placement.boots:
        own_choice = None
    own_text = f"Slurm itself would choose {fold_hostlist(own_choice.nodes)}" if own_choice else ""
    if own_choice and not _drawback(own_choice, placement):
        reason = f"no binding is needed: {own_text}, and no other nodes are more than {MIN_GAIN:.0%} better"
        return Decision((), replace(own_choice, reason=reason))
    for decision, worst in bindings:
        drawback = _drawback(own_choice, worst) if own_choice else ""
        if own_choice and not drawback:
            continue
        reason = f"{placement.reason}; {own_text}, which {drawback}" if own_choice else placement.reason
        if slowdown := _drawback(worst, placement):
            reason += f" (Slurm may choose nodes of these zones on which the job {slowdown})"
        decision = replace(decision, placement=replace(placement, reason=reason), promise=_promise(worst))
        unknown = unpredictable_start_reason(request, state.cluster, placement.nodes) or state.age_text
        if not unknown:
            return decision
        on_these_nodes = Decision((_nodelist_option(placement),), placement)
        failure = predict_start(on_these_nodes).not_starting_reason(placement.nodes)
        if failure:
            return Decision((), placement, f"{unknown}, and {failure}", is_outdated=bool(state.age_text))
        return decision
    return Decision((), placement, f"Slurm may choose slower nodes of {placement_zones_text(placement)}; {problem}")


def _promise(worst: Placement) -> Promise | None:
    from slurmdl.placement.result import format_zone_counts

    if worst.rank_map is None:
        return None
    seconds = float(f"{worst.rank_map.cost.seconds:.6g}")
    return Promise(seconds, len(worst.rank_map.nodes), format_zone_counts(worst.nodes_per_zone))


def _drawback(own: Placement, best: Placement) -> str:
    """Why Slurm's own choice is not good enough beside the best one, or ""."""
    from slurmdl.placement.result import MIN_GAIN, is_good_enough

    if own.rank_map is None or best.rank_map is None:
        return ""
    cost, best_cost = own.rank_map.cost, best.rank_map.cost
    if is_good_enough(cost.sort_key, best_cost.sort_key):
        return ""
    if cost.seconds <= best_cost.seconds * (1 + MIN_GAIN):
        return "sends more bytes between zones"
    return f"takes {cost.seconds / best_cost.seconds:.2f} times as long" if best_cost.seconds else "takes longer"


def unpredictable_start_reason(request: JobRequest, cluster: ClusterSnapshot, nodes: Sequence[str]) -> str:
    """Why only Slurm knows whether the job starts now on these free nodes, or ""."""
    if request.unmodelled_reason:
        return request.unmodelled_reason
    if 0 < request.segment < len(nodes):
        return "before Slurm 25.11 several segments and a node list exclude each other"
    for reservation in cluster.reservations:
        if not (reservation.active or reservation.name == request.reservation
                or set(reservation.nodes).isdisjoint(nodes)):
            return f"the reservation {reservation.name} will hold some of the nodes"
    return ""


def _late_decision(job: Submission, placement: Placement) -> Decision:
    """Request a few nodes more than the job needs; `slurmdl srun` drops the worst ones."""
    if job.request.unmodelled_reason:
        raise PlacementError(f"--dl-node-binding=late: {job.request.unmodelled_reason}")
    if not job.maps_ranks:
        raise PlacementError("--dl-node-binding=late: the script has no `slurmdl srun` that could drop nodes")
    from slurmdl.launch import late_binding

    options, requested_size = late_binding.overallocation_options(job.request)
    return Decision(options, placement, requested_size=requested_size)


def _automatic_bindings(job: Submission, state: ClusterState, placement: Placement, inside_job: bool,
                        place_on: Callable[[Collection[str]], Placement | None],
                        ) -> tuple[list[tuple[Decision, Placement]], str]:
    """The bindings that cannot delay the start, the least strict first, each with its worst outcome.

    Also returns why there is no other one.
    """
    request, bindings = job.request, []
    prints_job_id = not job.quiet and "test-only" not in job.settings
    problem = ""
    try:
        preference = prefer_zones(request, state, placement)
        outcomes = [placement, *map(place_on, preference.outcomes)]
        known = [(outcome.rank_map.cost.sort_key, outcome) for outcome in outcomes if outcome and outcome.rank_map]
        if len(known) < len(outcomes):
            raise PlacementError(f"the time on other nodes of {placement_zones_text(placement)} is unknown")
        worst = max(known, key=lambda item: item[0])[1]
        if preference.uncounted and _drawback(worst, placement):
            raise PlacementError(preference.uncounted)
        bindings.append((Decision((f"--prefer={preference.value}",), placement,
                                  revert_field="Prefer" if prints_job_id else ""), worst))
    except PlacementError as error:
        problem = f"{error}; "
    # inside a job: the process that reverts the binding later would end with that job
    is_fixed_size = request.nodes is not None and request.nodes[0] == request.nodes[1]
    if is_fixed_size and not request.requeue and not job.quiet and not inside_job:
        bindings.append((Decision((_nodelist_option(placement),), placement,
                                  revert_field="ReqNodeList" if prints_job_id else ""), placement))
    else:
        problem += f"no node list is bound because {_no_nodelist_reason(job, is_fixed_size, inside_job)}"
    return bindings, problem


def _no_nodelist_reason(job: Submission, is_fixed_size: bool, inside_job: bool) -> str:
    if not is_fixed_size:
        return "the number of nodes is not given (-N)"
    if job.request.requeue:
        return "the job may be requeued; add --no-requeue to allow a node list"
    return "the submission runs in a job" if inside_job else "-Q hides the job ID"


def _nodelist_option(placement: Placement) -> str:
    from slurmdl.slurm.hostlist import fold_hostlist

    return f"--nodelist={fold_hostlist(placement.nodes)}"


def _zone_options(job: Submission, state: ClusterState, placement: Placement,
                  predict_start: PredictStart) -> tuple[str, ...]:
    """Options that keep the job in its zones: features, on blocks also or only segments, on trees also --switches."""
    segment = _segment_option(job, state.topology, placement)
    if segment and predict_start(Decision((segment,))).failure.startswith(REJECTED):
        segment = ""  # before Slurm 24.05, or more nodes than a base block
    if segment and not exact_zone_features(state, tuple(placement.nodes_per_zone)):
        return (segment,)
    return (_zone_option(job, state, placement), *filter(None, [segment]))


def _segment_option(job: Submission, topology: Topology, placement: Placement) -> str:
    """The largest --segment of which this choice consists; "" without blocks, for single nodes, or if it is given."""
    if topology.kind != "block" or job.request.segment:
        return ""
    common = gcd(*placement.nodes_per_zone.values())
    base = topology.block_sizes[0] if topology.block_sizes else common
    size = max(size for size in range(1, common + 1) if common % size == 0 and size <= base)
    return f"--segment={size}" if size > 1 else ""


def _zone_option(job: Submission, state: ClusterState, placement: Placement) -> str:
    zones = job.request.dl.zone or tuple(placement.nodes_per_zone)
    constraint = _join_constraint(job.request.constraint, exact_zone_features(state, zones))
    if constraint:
        return f"--constraint={constraint}"
    if state.topology.kind != "tree":
        raise PlacementError("--dl-node-binding=zone: no node features identify the zones, and --switches "
                             "is for trees only")
    return f"--switches={len(placement.nodes_per_zone)}"


def _join_constraint(constraint: str | None, features: Sequence[str]) -> str | None:
    """The user's constraint and one of `features`; None if there are none, or the two cannot be joined.

    --prefer replaces --constraint while Slurm tries it (sbatch(1)), so it must hold both. Only names joined by `&`
    are supported: brackets, counts and alternatives do not nest in every release.
    """
    if not constraint:
        return "|".join(features) or None
    if len(features) == 1 and re.fullmatch(r"[\w.:=+-]+(&[\w.:=+-]+)*", constraint):
        return f"{constraint}&{features[0]}"
    return None
