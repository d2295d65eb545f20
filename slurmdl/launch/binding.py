"""Decide how a job is bound to the nodes chosen for it. Pure: `sbatch --test-only` is a parameter."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from slurmdl.dl_options import DlOptions
from slurmdl.errors import PlacementError, UsageError
from slurmdl.job_request import JobRequest, resolve_job_size
from slurmdl.launch.submission import Submission, SubmitCommand, build_submit_command
from slurmdl.launch.submission_record import Promise, RequestedSize, overallocated_count
from slurmdl.slurm.hostlist import fold_hostlist

if TYPE_CHECKING:
    from slurmdl.cluster.snapshot import ClusterSnapshot
    from slurmdl.launch.cluster_state import ClusterState
    from slurmdl.placement.result import Placement
    from slurmdl.traffic import Traffic

#: longest option, bytes (execve(2), MAX_ARG_STRLEN)
MAX_OPTION_BYTES = 128 * 1024 - 1
#: zones of --dl-zone in a message
_MAX_SHOWN_ZONES = 8
#: start of a reason: sbatch does not accept the job
REJECTED = "Slurm rejects it"
#: a start within this time is now: offset of the clocks, and duration of the query
_NOW_TOLERANCE_S = 5.0


@dataclass(frozen=True)
class Binding:
    """How a job is bound to the nodes chosen for it.

    Attributes:
        options: options for sbatch, placed after the user's options.
        placement: the chosen nodes, or None.
        reason: why Slurm chooses the nodes; "" if the choice is binding or none was requested.
        failed: something is missing or broken, or --dl-zone is not applied; otherwise the reason is a normal outcome.
        explanation: the text of --dl-explain.
        revert_field: job field to clear if the job does not start at once (`sbatch.revert_unless_started`), or "".
        requested_size: what the user requested, if the options request more nodes.
        promise: the predicted outcome, with which the job compares its nodes; None if nothing is promised.
        is_outdated: the state of the cluster is too old for this decision.
    """

    options: tuple[str, ...] = ()
    placement: Placement | None = None
    reason: str = ""
    failed: bool = False
    explanation: str = ""
    revert_field: str = ""
    requested_size: RequestedSize | None = None
    promise: Promise | None = None
    is_outdated: bool = False

    def submit_command(self, submission: Submission, environ: Mapping[str, str]) -> SubmitCommand:
        return build_submit_command(submission, environ, self.options, self.requested_size, self.promise)

    def summary(self, options: DlOptions) -> str:
        """One line for users."""
        if self.failed:
            return f"submitted as written: {self.reason}"
        bound = f"{' '.join(self.options)}: " if self.options else ""
        if self.reason:
            zones = f" in {_format_zones(options, ', ')}" if self.options else ""
            return f"{bound}Slurm chooses the nodes{zones}: {self.reason}"
        if self.placement is None:
            return "Slurm chooses the nodes: " + ("--dl-node-binding=off" if options.node_binding == "off" else
                                                  "the job has only one")
        return f"{bound}{self.placement.reason}"


@dataclass(frozen=True)
class PredictedStart:
    """Slurm's prediction for a job that is not submitted yet.

    Attributes:
        nodes: that Slurm would choose.
        wait_s: until the start.
        failure: why there is no prediction, or "".
    """

    nodes: tuple[str, ...] = ()
    wait_s: float = 0.0
    failure: str = ""

    def __str__(self) -> str:
        return self.failure or f"{fold_hostlist(self.nodes)} in {self.wait_s:.0f} s"

    @property
    def is_now(self) -> bool:
        return not self.failure and self.wait_s <= _NOW_TOLERANCE_S

    @property
    def is_rejected(self) -> bool:
        return self.failure.startswith(REJECTED)

    def not_starting_reason(self, nodes: Sequence[str]) -> str:
        """Why the job does not start now on exactly these nodes, or ""."""
        if self.failure:
            return self.failure
        if set(self.nodes) != set(nodes):
            return f"Slurm would choose {fold_hostlist(self.nodes)}"
        return "" if self.is_now else f"Slurm would start it there in {self.wait_s:.0f} s"


#: Slurm's prediction for a job that gets these options
PredictStart = Callable[[Sequence[str]], PredictedStart]


def decide_binding(submission: Submission, state: ClusterState, traffic: Traffic, *, inside_job: bool,
                   predict_start: PredictStart) -> Binding:
    """Choose nodes for a job, and how strictly the choice binds Slurm.

    The zones of --dl-zone apply in any case: all other nodes are excluded. Raises UsageError if the user named an
    unknown zone, PlacementError if the site named one.

    Args:
        traffic: result of `load_traffic`.
        inside_job: the submission runs in a job.
        predict_start: queries Slurm.
    """
    from slurmdl.launch import zone_options
    from slurmdl.placement.place import place_job

    def place(request: JobRequest) -> Placement:
        return place_job(request, state.cluster, state.topology, state.scores, traffic)

    options = submission.request.options
    if options.zone and submission.request.unrestrictable_reason:
        return Binding(reason=zone_not_applied_reason(options, submission.request.unrestrictable_reason), failed=True)
    try:
        exclude = zone_options.exclude_option(submission.request, state) if options.zone else ()
    except UsageError as error:
        if submission.names_zones:
            raise
        raise PlacementError(f"slurmdl.yaml: {error}") from error  # a site's setting never rejects a job
    if any(len(option) > MAX_OPTION_BYTES for option in exclude):
        return Binding(reason=zone_not_applied_reason(options, "the list of excluded nodes is too long for sbatch"),
                       failed=True)
    try:
        binding = _choose_binding(submission, state, place, inside_job,
                                  lambda others: predict_start((*exclude, *others)))
    except PlacementError as error:
        binding = Binding(reason=str(error), is_outdated=bool(state.age_text))
    return replace(binding, options=(*exclude, *binding.options))


def decide_without_cluster(request: JobRequest) -> Binding | None:
    """The binding of a job on which the state of the cluster has no influence; None for other jobs.

    Raises PlacementError if no nodes can be chosen for any state of the cluster.
    """
    options = request.options
    if options.node_binding == "off":
        if options.zone:
            raise PlacementError("--dl-node-binding=off")
        return Binding()
    if options.zone:
        return None  # nodes outside the zones are excluded in any case
    if request.unplaceable_reason:
        raise PlacementError(request.unplaceable_reason)
    if options.mesh or options.groups or options.comm_pattern:
        return None  # placement checks them
    nodes = resolve_job_size(request).nodes
    if options.node_binding != "auto" or options.explain or options.strict:
        return None
    if request.start_unknown_reason:
        return Binding(reason=f"{request.start_unknown_reason}, so no nodes are bound")
    return Binding() if nodes == 1 else None


def zone_not_applied_reason(options: DlOptions, reason: str) -> str:
    """Add to a reason that the zones of --dl-zone are not applied, if the user named zones."""
    return f"--dl-zone={_format_zones(options, ',')} is not applied: {reason}" if options.zone else reason


def _format_zones(options: DlOptions, separator: str) -> str:
    return separator.join(options.zone[:_MAX_SHOWN_ZONES] + ("...",) * (len(options.zone) > _MAX_SHOWN_ZONES))


def _choose_binding(submission: Submission, state: ClusterState, place: Callable[[JobRequest], Placement],
                    inside_job: bool, predict_start: PredictStart) -> Binding:
    """Choose nodes, and how strictly the choice binds Slurm. PlacementError if no nodes can be chosen."""
    from slurmdl.launch import zone_options

    request = submission.request
    placement = place(request)
    if not placement.nodes:
        return Binding(reason=placement.reason or "no nodes fit")
    if request.options.node_binding == "nodelist":
        return Binding((_nodelist_option(placement),), placement)
    if request.options.node_binding == "zone":
        segment = zone_options.segment_option(request, state.topology, placement)
        if segment and predict_start((segment,)).is_rejected:
            segment = ""  # before Slurm 24.05, or more nodes than a base block
        return Binding(zone_options.zone_options(request, state, placement, segment), placement)
    if request.options.node_binding == "late":
        return _late_binding(submission, placement)
    if request.start_unknown_reason:
        return Binding((), placement, f"{request.start_unknown_reason}, so no nodes are bound")
    if not placement.free_now:
        if state.age_text and predict_start(()).is_now:
            return Binding((), placement, f"{state.age_text}; Slurm would start the job now", is_outdated=True)
        return Binding((), placement, f"{zone_options.placement_zones_text(placement)} would fit, but not now")
    allowed_zones = zone_options.leaf_zones(state.topology, request.options.zone)
    if len(allowed_zones) == 1 and allowed_zones != zone_options.leaf_zones(state.topology):
        return Binding((), placement)  # the excluded nodes leave Slurm only this zone
    return _bind_automatically(submission, state, placement, place, inside_job, predict_start)


def _bind_automatically(submission: Submission, state: ClusterState, placement: Placement,
                        place: Callable[[JobRequest], Placement], inside_job: bool,
                        predict_start: PredictStart) -> Binding:
    """Bind a job to nodes that are free now, without a delay of its start.

    Prefers the zone; else gives the node list if the job can neither be requeued nor vary in its number of nodes;
    else nothing. It binds only if the nodes are better than those that Slurm would choose itself. If placement does
    not model all that the job requests, Slurm must confirm that the job starts on these nodes now.
    """
    from slurmdl.launch.zone_options import placement_zones_text
    from slurmdl.placement.result import MIN_GAIN

    request = submission.request

    def place_on(nodes: Collection[str]) -> Placement | None:
        """The job on exactly these nodes; None if it does not fit there."""
        others = set(state.cluster.names).difference(nodes)
        try:
            placed = place(replace(request, exclude=(*request.exclude, *others)))
        except PlacementError:
            return None  # a node that placement would not use
        return placed if set(placed.nodes) == set(nodes) else None

    bindings, problem = _automatic_bindings(submission, state, placement, inside_job, place_on)
    if not bindings:
        return Binding((), placement, problem)
    start = predict_start(())
    slurms_choice = place_on(start.nodes) if start.is_now else None
    # Slurm 22.05 predicts by the power states at the last start of a job
    if slurms_choice and slurms_choice.boots > placement.boots:
        slurms_choice = None
    slurms_text = f"Slurm itself would choose {fold_hostlist(slurms_choice.nodes)}" if slurms_choice else ""
    if slurms_choice and not _why_worse(slurms_choice, placement):
        reason = f"no binding is needed: {slurms_text}, and no other nodes are more than {MIN_GAIN:.0%} better"
        return Binding((), replace(slurms_choice, reason=reason))
    for binding, worst in bindings:
        why_worse = _why_worse(slurms_choice, worst) if slurms_choice else ""
        if slurms_choice and not why_worse:
            continue
        unknown = unpredictable_start_reason(request, state.cluster, placement.nodes) or state.age_text
        failure = unknown and predict_start((_nodelist_option(placement),)).not_starting_reason(placement.nodes)
        if failure:
            return Binding((), placement, f"{unknown}, and {failure}", is_outdated=bool(state.age_text))
        reason = f"{placement.reason}; {slurms_text}, which {why_worse}" if slurms_choice else placement.reason
        if slowdown := _why_worse(worst, placement):
            reason += f" (Slurm may choose nodes of these zones on which the job {slowdown})"
        return replace(binding, placement=replace(placement, reason=reason), promise=_promise(worst))
    return Binding((), placement, f"Slurm may choose slower nodes of {placement_zones_text(placement)}; {problem}")


def _promise(worst: Placement) -> Promise | None:
    from slurmdl.placement.result import format_zone_counts

    if worst.rank_map is None:
        return None
    seconds = float(f"{worst.rank_map.cost.seconds:.6g}")
    return Promise(seconds, len(worst.rank_map.nodes), format_zone_counts(worst.nodes_per_zone))


def _why_worse(choice: Placement, best: Placement) -> str:
    """Why one choice is not good enough beside a better one, or ""."""
    from slurmdl.placement.result import MIN_GAIN, is_good_enough

    if choice.rank_map is None or best.rank_map is None:
        return ""
    cost, best_cost = choice.rank_map.cost, best.rank_map.cost
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


def _late_binding(submission: Submission, placement: Placement) -> Binding:
    """Request one node more for each eight nodes or part of eight; `slurmdl srun` drops the worst ones.

    Slurm allocates no more nodes than tasks, and CPUs only for the requested tasks. So `-n` is raised to the number
    of nodes if it is less, and every node gets CPUs for its tasks. The job's steps keep the requested task count.
    """
    request = submission.request
    if request.unmodelled_reason:
        raise PlacementError(f"--dl-node-binding=late: {request.unmodelled_reason}")
    if not submission.uses_slurmdl_srun:
        raise PlacementError("--dl-node-binding=late: the script has no `slurmdl srun` that could drop nodes")
    nodes, max_nodes = request.nodes or (0, None)
    if not nodes or nodes != max_nodes:
        raise PlacementError("--dl-node-binding=late: the number of nodes is not given (-N)")
    larger = overallocated_count(nodes)
    options = [f"--nodes={nodes}-{larger}"]
    if request.ntasks is not None:
        per_node = max(request.ntasks_per_node or 0, -(-max(request.ntasks, larger) // nodes))
        options += [f"--ntasks={max(request.ntasks, larger)}", f"--ntasks-per-node={per_node}"]
    return Binding(tuple(options), placement,
                   requested_size=RequestedSize(nodes, request.ntasks, request.ntasks_per_node))


def _automatic_bindings(submission: Submission, state: ClusterState, placement: Placement, inside_job: bool,
                        place_on: Callable[[Collection[str]], Placement | None],
                        ) -> tuple[list[tuple[Binding, Placement]], str]:
    """The bindings that cannot delay the start, the least strict first, each with its worst outcome.

    Also returns why there is no other one.
    """
    from slurmdl.launch.zone_options import placement_zones_text, prefer_zones

    request, bindings = submission.request, []
    prints_job_id = not submission.quiet and "test-only" not in submission.settings
    problem = ""
    try:
        preference = prefer_zones(request, state, placement)
        outcomes = [placement, *map(place_on, preference.outcomes)]
        known = [(outcome.rank_map.cost.sort_key, outcome) for outcome in outcomes if outcome and outcome.rank_map]
        if len(known) < len(outcomes):
            raise PlacementError(f"the time on other nodes of {placement_zones_text(placement)} is unknown")
        worst = max(known, key=lambda item: item[0])[1]
        if preference.uncounted and _why_worse(worst, placement):
            raise PlacementError(preference.uncounted)
        bindings.append((Binding((f"--prefer={preference.value}",), placement,
                                  revert_field="Prefer" if prints_job_id else ""), worst))
    except PlacementError as error:
        problem = f"{error}; "
    # inside a job: the process that reverts the binding later would end with that job
    is_fixed_size = request.nodes is not None and request.nodes[0] == request.nodes[1]
    unbindable = "the number of nodes is not given (-N)" if not is_fixed_size else \
        "the job may be requeued; add --no-requeue to allow a node list" if request.requeue else \
        "the submission runs in a job" if inside_job else "-Q hides the job ID" if submission.quiet else ""
    if unbindable:
        return bindings, f"{problem}no node list is bound because {unbindable}"
    bindings.append((Binding((_nodelist_option(placement),), placement,
                             revert_field="ReqNodeList" if prints_job_id else ""), placement))
    return bindings, problem


def _nodelist_option(placement: Placement) -> str:
    return f"--nodelist={fold_hostlist(placement.nodes)}"
