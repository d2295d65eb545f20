"""`slurmdl sbatch`: decide how a job binds to its nodes, and hand it to sbatch.

Nothing may get worse than plain sbatch: where no choice can be made the job is submitted as it was written,
and one line on stderr says why.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from slurmdl import config, dl_options
from slurmdl.errors import PlacementError, SlurmdlError, UnavailableError, UsageError, print_stderr, warn
from slurmdl.launch import revert_binding, submission, submission_record
from slurmdl.launch.submission import ParsedArgv, Submission, SubmitCommand
from slurmdl.slurm import process
from slurmdl.text import print_escaped

if TYPE_CHECKING:
    from slurmdl.launch.cluster_state import ClusterState
    from slurmdl.placement.result import Placement
    from slurmdl.topology.topology import Topology

#: longest option, bytes (execve(2), MAX_ARG_STRLEN)
MAX_OPTION_BYTES = 128 * 1024 - 1
#: zones of --dl-zone that a message names
_MAX_SHOWN_ZONES = 8


@dataclass(frozen=True)
class Decision:
    """How a job binds to the nodes that were chosen for it.

    Attributes
    ----------
    argv : options for sbatch, put behind the user's own.
    placement : what was chosen, None where nothing was.
    reason : why Slurm chooses the nodes, "" where the choice binds or nothing was asked for.
    failed : whether something is missing or broken, or a zone that the user named is not applied; else the reason is
        a normal outcome.
    explanation : the choice in full, for --dl-explain.
    releases : what is taken back where the job does not start with it (see release), "" for nothing.
    asked : what the user asked for, where the options ask for more nodes.
    """

    binding_options: tuple[str, ...] = ()
    placement: Placement | None = None
    reason: str = ""
    failed: bool = False
    explanation: str = ""
    revert_field: str = ""
    requested_size: submission_record.RequestedSize | None = None


def run_sbatch(argv: Sequence[str]) -> int:
    """Run `slurmdl sbatch ARGV`; return the exit status, unless this process became sbatch.

    Raises
    ------
    UsageError : an unknown --dl-* option or a value that is not valid; nothing is submitted.
    UnavailableError : there is no sbatch.
    SlurmdlError : with --dl-strict: why no choice can be made; nothing is submitted.
    """
    program = find_sbatch(os.environ)
    words = ParsedArgv.from_argv(argv)
    if words.requests_help:
        if words.command_line.has_option("help"):
            print(f"usage: slurmdl sbatch [--dl-*] [sbatch options] script [args]\n\n{dl_options.help_text()}")
        process.exec_program([program, *argv], os.environ)
    attempt = SubmissionAttempt(program, words, _read_stdin() if words.reads_stdin else None)
    try:
        attempt.choose_binding()
        attempt.print_messages()
    except UsageError:
        raise
    except Exception as error:
        if attempt.dl.strict:
            raise
        attempt.fall_back_to_unbound(error)
    if attempt.dl.dry_run:
        print_escaped(format_dry_run(attempt.job, attempt.decision, attempt.commands[-1]))
        return 0
    return attempt.submit()


class SubmissionAttempt:
    """One submission, and what is known of it so far: what fails later costs nothing of that.

    Attributes
    ----------
    commands : those that submit it, the weakest first: the user's words alone, with the mark for the job, bound to
        the chosen nodes.
    dl : the --dl-* options, those on the command line alone before `job` is known.
    job : what was read, None before.
    """

    def __init__(self, program: str, parsed_argv: ParsedArgv, stdin: bytes | None) -> None:
        self.program, self.parsed_argv, self.stdin = program, parsed_argv, stdin
        environ = {name: value for name, value in os.environ.items() if name != submission_record.ENV_VARIABLE}
        self.commands = [SubmitCommand((program, *parsed_argv.sbatch_args()[0]), environ, stdin=stdin)]
        self.dl = dl_options.DlOptions(strict=parsed_argv.command_line.has_option(
            "dl-strict"), dry_run=parsed_argv.command_line.has_option("dl-dry-run"))
        self.quiet = parsed_argv.command_line.has_option("quiet")
        self.job: Submission | None = None
        self.decision = Decision()

    def choose_binding(self) -> None:
        """Read the submission and the configuration, and choose nodes.

        Raises
        ------
        UsageError : an option of the user is wrong.
        SlurmdlError : no choice can be made.
        """
        job = submission.parse_submission(self.parsed_argv.argv, os.environ, {}, stdin=self.stdin,
                              has_plugin=partial(_sbatch_has_plugin, self.program))
        self._update_job(job)
        site = config.load_config()
        if site.options:
            job = job.with_defaults(site.options)
            self._update_job(job)
        if self.dl.node_binding == "off":
            if self.dl.zone:
                raise PlacementError("--dl-node-binding=off")
            return
        if job.request.unplaceable_reason and not self.dl.zone:
            raise PlacementError(job.request.unplaceable_reason)
        from slurmdl.launch import cluster_state

        if not job.request.dl.dry_run:
            # many who submit at once see the same cluster; they should not all choose the same of equal nodes
            seed = 1 + (time.time_ns() ^ os.getpid()) % 2**32
            job = replace(job, request=replace(job.request, seed=seed))
        say: Callable[[str], None] = (lambda _: None) if self.quiet else warn
        seen = cluster_state.load_cluster_state(site, self.dl.link_scores, job.request.partitions, say, self.dl.strict)
        decision = decide_binding(job, seen, self.program)
        if decision.reason and self.dl.strict:
            raise PlacementError(decision.reason)
        if self.dl.explain and decision.placement is not None:
            from slurmdl.placement.explain import explain_placement

            text = explain_placement(decision.placement, seen.topology, seen.cluster, seen.scores, self.dl)
            decision = replace(decision, explanation=text)
        self.commands.append(build_submit_command(self.program, job, decision, os.environ))
        self.decision = decision

    def _update_job(self, job: Submission) -> None:
        self.job, self.dl, self.quiet = job, job.request.dl, job.quiet
        self.commands[1:] = [build_submit_command(self.program, job, Decision(), os.environ)]

    def fall_back_to_unbound(self, error: Exception) -> None:
        """Bind nothing, since this went wrong, and say so."""
        del self.commands[2:]
        if isinstance(error, SlurmdlError):
            reason = str(error)
        else:
            if os.environ.get("SLURMDL_DEBUG") == "1":
                import traceback

                traceback.print_exception(error)
            reason = f"internal error: {type(error).__name__}: {error} (SLURMDL_DEBUG=1 shows where)"
        failed = bool(self.dl.zone) or not isinstance(error, PlacementError)
        self.decision = Decision(reason=zone_not_applied_reason(self.dl, reason), failed=failed)
        self.print_messages()

    def print_messages(self) -> None:
        """What users should know, on stderr; nothing with -Q."""
        if self.quiet:
            return
        if self.dl.explain and self.decision.explanation:
            print_stderr(self.decision.explanation)
        if self.dl.explain or self.decision.reason:
            warn(decision_summary(self.dl, self.decision))
        misplaced = dl_options.misplaced_option_warning(self.parsed_argv.command_line.operands, "script")
        if misplaced:
            warn(misplaced)
        if self.job and self.job.maps_ranks is False:
            warn("the script has no `slurmdl srun`, so its ranks will not be mapped")

    def submit(self) -> int:
        """Submit by the strongest command that can be run: what is added may be too long for the system.

        Raises
        ------
        UnavailableError : sbatch cannot be run; with --dl-strict: not with what is added.
        """
        while True:
            command = self.commands.pop()
            bound = len(self.commands) == 2
            try:
                if bound and self.decision.revert_field:
                    return process.run_passthrough(command.argv, command.env, command.stdin, self._on_output_line)
                process.exec_program(command.argv, command.env, command.stdin)
            except UnavailableError as error:
                if not self.commands or self.dl.strict:
                    raise
                if not self.quiet:
                    warn(f"submitted as written: {zone_not_applied_reason(self.dl, str(error))}" if bound else
                         f"the job is not told its --dl-* options: {error}")

    def _on_output_line(self, line: bytes) -> bool:
        """Whether sbatch names the job on this line of its stdout, which is looked after then."""
        assert self.job is not None
        number = revert_binding.parse_job_id(line, "parsable" in self.job.settings)
        if number:
            try:
                revert_binding.revert_unless_started(number, self.decision.revert_field)
            except Exception as error:  # the job is submitted: the exit status is sbatch's
                warn(f"job {number} keeps its choice of nodes: {type(error).__name__}: {error}")
        return bool(number)


def _read_stdin() -> bytes | None:
    """What standard input holds, None where it cannot be read (closed, a directory); sbatch says so then."""
    try:
        return sys.stdin.buffer.read() if sys.stdin is not None else None
    except OSError:
        return None


def _sbatch_has_plugin(program: str) -> bool:
    """Whether sbatch has the options of the plugin. Where it does not say, it is left to sbatch to refuse them."""
    try:
        return "--dl-" in process.check_output([program, "--help"])
    except UnavailableError:
        return True


def zone_not_applied_reason(dl: dl_options.DlOptions, reason: str) -> str:
    """The reason, and that zones which the user named do not hold."""
    return f"--dl-zone={_format_zones(dl, ',')} is not applied: {reason}" if dl.zone else reason


def _format_zones(dl: dl_options.DlOptions, separator: str) -> str:
    """The zones of --dl-zone, the first of many."""
    return separator.join(dl.zone[:_MAX_SHOWN_ZONES] + ("...",) * (len(dl.zone) > _MAX_SHOWN_ZONES))


def decide_binding(job: Submission, state: ClusterState, program: str = "") -> Decision:
    """Choose nodes for a job, and how hard the choice binds Slurm.

    Zones that the user named hold in any case: nodes outside of them are excluded.

    Parameters
    ----------
    program : the sbatch to ask, "" where Slurm cannot be asked.

    Raises
    ------
    InputError : a file of matrices is malformed.
    UsageError : the user named a zone that there is not.
    PlacementError : the site did.
    """
    dl = job.request.dl
    if dl.zone and job.request.unrestrictable_reason:
        return Decision(reason=zone_not_applied_reason(dl, job.request.unrestrictable_reason), failed=True)
    try:
        limit = _zone_limit_options(job, state) if dl.zone else ()
    except UsageError as error:
        if job.names_zones:
            raise
        raise PlacementError(f"slurmdl.yaml: {error}") from error  # nothing that a site sets refuses a job
    if any(len(option) > MAX_OPTION_BYTES for option in limit):
        return Decision(reason=zone_not_applied_reason(dl, "sbatch takes no list of so many nodes"), failed=True)
    try:
        decision = _choose_binding(job, state, program)
    except PlacementError as error:
        decision = Decision(reason=str(error))
    return replace(decision, binding_options=(*limit, *decision.binding_options))


def _zone_limit_options(job: Submission, state: ClusterState) -> tuple[str, ...]:
    """The option that keeps the job out of all nodes outside of the zones of --dl-zone; () where there are none.

    Nodes are excluded, whatever features they carry, so the user's own --constraint stays as it is.
    """
    from slurmdl.placement.candidate_nodes import snapshot_nodes_in_zones
    from slurmdl.slurm.hostlist import fold_hostlist

    inside = snapshot_nodes_in_zones(state.cluster, state.topology, job.request.dl.zone)
    outside = [name for name, here in zip(state.cluster.names, inside.tolist(), strict=True) if not here]
    return (f"--exclude={fold_hostlist([*outside, *job.request.exclude])}",) if outside else ()


def _choose_binding(job: Submission, state: ClusterState, program: str) -> Decision:
    """Choose nodes, and how hard the choice binds Slurm.

    `auto` never costs a start: first the zone as a preference, then the node list where the job can neither be
    requeued nor differ in its number of nodes, else nothing; and neither unless the nodes are free now. Where
    placement does not see all that the job asks for, Slurm is asked whether it starts on these nodes now.

    Raises
    ------
    PlacementError, InputError : nothing can be chosen.
    """
    from slurmdl.launch import sbatch_test_only as doubts
    from slurmdl.launch import traffic_file
    from slurmdl.placement.place import place_job

    placement = place_job(
    job.request,
    state.cluster,
    state.topology,
    state.scores,
    traffic_file.load_traffic_matrices(
        job.request.dl))
    if not placement.nodes:
        return Decision(reason=placement.reason or "no nodes fit")
    bind = job.request.dl.node_binding
    if bind == "nodelist":
        return Decision((_nodelist_option(placement),), placement)
    if bind == "zone":
        return Decision((_zone_option(job, state, placement),), placement)
    if bind == "late":
        return _late_decision(job, placement)
    if job.request.start_unknown_reason:
        return Decision(
            (), placement, f"{job.request.start_unknown_reason}, so the nodes that are free now bind nothing")
    if not placement.free_now:
        return Decision((), placement, f"{_placement_zones_text(placement)} would fit, but not now")
    decision = _automatic_decision(job, state, placement)
    doubt = doubts.unpredictable_start_reason(
    job.request,
    state.cluster,
     placement.nodes) if decision.binding_options else ""
    if doubt:
        sure = Decision((_nodelist_option(placement),), placement)
        why = doubts.not_starting_reason(
    build_submit_command(
        program,
        job,
        sure,
        os.environ),
         placement.nodes) if program else "Slurm is not asked"
        if why:
            return Decision((), placement, f"{doubt}, and {why}")
    return decision


def _late_decision(job: Submission, placement: Placement) -> Decision:
    """A few nodes more than the job needs, the worst of which `slurmdl srun` drops."""
    if job.request.unmodelled_reason:
        raise PlacementError(f"--dl-node-binding=late: {job.request.unmodelled_reason}")
    if not job.maps_ranks:
        raise PlacementError("--dl-node-binding=late: the script has no `slurmdl srun` that could drop nodes")
    from slurmdl.launch import late_binding

    options, asked = late_binding.overallocation_options(job.request)
    return Decision(options, placement, requested_size=asked)


def _automatic_decision(job: Submission, state: ClusterState, placement: Placement) -> Decision:
    """The softest way to bind a job to nodes that are free now."""
    zones = job.request.dl.zone
    if zones and set(placement.nodes_per_zone) == _leaf_zones(state.topology, zones) != _leaf_zones(state.topology):
        # no other zone is left to Slurm
        return Decision((), placement)
    numbered = not job.quiet and "test-only" not in job.settings
    feature = _preferred_features(job, state, placement)
    if feature:
        return Decision((f"--prefer={feature}",), placement, revert_field="Prefer" if numbered else "")
    # what looks after the job later would end with the job that this is
    inside = "SLURM_JOB_ID" in os.environ
    certain = job.request.nodes is not None and job.request.nodes[0] == job.request.nodes[1]
    if certain and not job.request.requeue and not job.quiet and not inside:
        return Decision((_nodelist_option(placement),), placement, revert_field="ReqNodeList" if numbered else "")
    return Decision((), placement, f"{_no_preference_reason(state, placement)}, and for a node list "
                                   f"{_no_nodelist_reason(job, certain, inside)}")


def _no_preference_reason(state: ClusterState, placement: Placement) -> str:
    if set(placement.nodes_per_zone) == _leaf_zones(state.topology):
        return "every zone is needed"
    return f"{_placement_zones_text(placement)} would fit, but no feature of the nodes can name it"


def _no_nodelist_reason(job: Submission, has_fixed_node_count: bool, inside_job: bool) -> str:
    if not has_fixed_node_count:
        return "the number of nodes is not given (-N)"
    if job.request.requeue:
        return "the job may be requeued (--no-requeue)"
    return "this is inside of a job" if inside_job else "-Q hides the job's number"


def _placement_zones_text(placement: Placement) -> str:
    from slurmdl.placement.result import MAX_NAMED_ZONES

    names = list(placement.nodes_per_zone)
    return " + ".join(names) if len(names) <= MAX_NAMED_ZONES else f"{len(names)} zones"


def _nodelist_option(placement: Placement) -> str:
    from slurmdl.slurm.hostlist import fold_hostlist

    return f"--nodelist={fold_hostlist(placement.nodes)}"


def _zone_option(job: Submission, state: ClusterState, placement: Placement) -> str:
    features = _zone_features(state, job.request.dl.zone or tuple(placement.nodes_per_zone))
    both = _join_constraint(job.request.constraint, features) if features else None
    if both:
        return f"--constraint={both}"
    if state.topology.kind != "tree":
        raise PlacementError("--dl-node-binding=zone: the nodes carry no features that name the zones, and --switches "
                             "is for trees only")
    return f"--switches={len(placement.nodes_per_zone)}"


def _preferred_features(job: Submission, state: ClusterState, placement: Placement) -> str | None:
    """The value of --prefer for the zones of a placement, None where they cannot be named or leave none out."""
    if set(placement.nodes_per_zone) == _leaf_zones(state.topology):
        return None
    features = _zone_features(state, tuple(placement.nodes_per_zone))
    return _join_constraint(job.request.constraint, features) if features else None


def _leaf_zones(topology: Topology, zones: Sequence[str] = ()) -> set[str]:
    """Zones that hold nodes themselves, and are among the named ones or below them; all where none is named."""
    from slurmdl.placement.candidate_nodes import nodes_in_zones

    return {topology.zones[leaf] for leaf in set(topology.leaf[nodes_in_zones(topology, zones)].tolist())}


def _zone_features(state: ClusterState, zones: Iterable[str]) -> tuple[str, ...]:
    """For each zone a feature that exactly its nodes carry, the zone's own name first; () if one has none."""
    import numpy as np

    from slurmdl.placement.candidate_nodes import topology_index

    cluster, topology = state.cluster, state.topology
    where = topology_index(cluster, topology)
    # index in the cluster of each node of the topology; what the cluster does not have is left out below
    number = np.full(len(topology.nodes) + 1, -1, np.int64)
    number[where] = np.arange(len(where))
    order = np.argsort(cluster.profile_index, kind="stable")
    ends = np.cumsum(np.bincount(cluster.profile_index, minlength=len(cluster.profiles)))
    alike = np.split(order, ends[:-1])
    carriers: dict[str, list[int]] = {}
    for kind, shared in enumerate(cluster.profiles):
        for feature in set(shared.features):
            carriers.setdefault(feature, []).append(kind)
    carried = {feature: int(sum(len(alike[kind]) for kind in kinds)) for feature, kinds in carriers.items()}
    found = []
    for zone in zones:
        nodes = number[topology.indices_below(topology.zone_index[zone])]
        nodes = np.sort(nodes[nodes >= 0])
        # what all nodes of the zone carry, its first node carries
        features = cluster.profiles[cluster.profile_index[nodes[0]]].features if len(nodes) else ()
        names = [name for name in features if carried[name] == len(nodes)
                 and np.array_equal(np.sort(np.concatenate([alike[kind] for kind in carriers[name]])), nodes)]
        if not names:
            return ()
        found.append(min(names, key=lambda name: (name != zone, name)))
    return tuple(found)


def _join_constraint(constraint: str | None, features: Sequence[str]) -> str | None:
    """The user's constraint and one of `features`; None where the two cannot be joined.

    --prefer stands in for --constraint while it is tried (sbatch(1)), so it must hold both. Only names with
    `&` between are joined: brackets, counts and alternatives do not nest in every release.
    """
    if not constraint:
        return "|".join(features)
    if len(features) == 1 and re.fullmatch(r"[\w.:=+-]+(&[\w.:=+-]+)*", constraint):
        return f"{constraint}&{features[0]}"
    return None


def build_submit_command(program: str, job: Submission, decision: Decision,
                         environ: Mapping[str, str]) -> SubmitCommand:
    """The command that submits: the user's own words, the choice behind their options, and our mark."""
    added = list(decision.binding_options)
    if not _export_keeps_record(program, job.settings.get("export", "ALL")):
        added.append(f"--export={job.settings['export']},{submission_record.ENV_VARIABLE}")
    # to the plugin the environment is stronger than the script, as what was typed is
    env = {**submission_record.environ_without_inherited(environ), **job.plugin_environ}
    removed = tuple(sorted(set(environ) - set(env) - {submission_record.ENV_VARIABLE}))
    env[submission_record.ENV_VARIABLE] = submission_record.new_record(job.request.dl,
    {**job.directive_environ,
    **environ,
    **job.plugin_environ},
     decision.requested_size).to_env_value()
    stdin = job.script.body if job.script and job.script.from_stdin else None
    return SubmitCommand((program, *job.argv[:job.options_end], *added, * \
                         job.argv[job.options_end:]), env, removed, stdin)


def _export_keeps_record(program: str, export: str) -> bool:
    """Whether the job finds our mark under this value of --export (see slurmdl.launch.submission_record)."""
    names = export.upper().split(",")
    if names == ["NIL"]:
        # behind a name newer releases would load the user's login environment, which NIL is there to avoid
        try:
            version = re.search(r"([0-9]+)\.([0-9]+)", process.check_output([program, "--version"]))
        except UnavailableError:
            return True
        return version is None or (int(version[1]), int(version[2])) >= (23, 11)
    return "ALL" in names or names == ["NONE"]


def format_dry_run(job: Submission | None, decision: Decision, command: SubmitCommand) -> str:
    """What a dry run prints: the command line, the environment that changes, and the decision."""
    lines = [f"command: {shlex.join(command.argv)}"]
    if job:
        added = {submission_record.ENV_VARIABLE: command.env[submission_record.ENV_VARIABLE], **job.plugin_environ}
        lines += [f"environment: {name}={shlex.quote(value)}" for name, value in added.items()]
    lines += [f"environment: without {name}" for name in command.removed_variables]
    if command.stdin is not None:
        lines.append(f"standard input: the script, {len(command.stdin)} bytes")
    lines.append(f"decision: {decision_summary(job.request.dl if job else dl_options.DlOptions(), decision)}")
    if decision.placement and decision.placement.nodes:
        lines.append(f"nodes: {' '.join(decision.placement.nodes)}")
    return "\n".join(lines)


def decision_summary(dl: dl_options.DlOptions, decision: Decision) -> str:
    """What users are told of a decision, in one line."""
    if decision.failed:
        return f"submitted as written: {decision.reason}"
    options = f"{' '.join(decision.binding_options)}: " if decision.binding_options else ""
    if decision.reason:
        where = f" in {_format_zones(dl, ', ')}" if decision.binding_options else ""
        return f"{options}Slurm chooses the nodes{where}: {decision.reason}"
    if decision.placement is None:
        return "Slurm chooses the nodes: --dl-node-binding=off"
    return f"{options}{decision.placement.reason}"


def find_sbatch(environ: Mapping[str, str]) -> str:
    """The sbatch on PATH that is not this program under its name.

    Raises
    ------
    UnavailableError : there is none, or the one that is there has called this program.
    """
    own = os.path.dirname(os.path.realpath(sys.argv[0]))
    ours = {os.path.realpath(sys.argv[0]), os.path.join(own, "dlsbatch"), os.path.join(own, "slurmdl")}
    if submission_record.is_recursive_call(environ):
        raise UnavailableError("sbatch: the sbatch on PATH calls slurmdl, which calls it again; "
                               "put Slurm's own before it on PATH")
    for directory in environ.get("PATH", os.defpath).split(os.pathsep):
        path = os.path.join(directory or ".", "sbatch")
        if os.path.isfile(path) and os.access(path, os.X_OK) and os.path.realpath(path) not in ours:
            return path
    raise UnavailableError("sbatch: not found on PATH; install Slurm's client commands")
