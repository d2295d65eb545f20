"""`slurmdl sbatch`: decide how a job is bound to nodes, and submit it by sbatch.

The result is never worse than plain sbatch: if no nodes can be chosen, the job is submitted as written, and one line
on stderr says why. The steps: SbatchCall -> Submission with its JobRequest -> ClusterState -> Binding with its
Placement -> SubmitCommand.

An automatic binding (node list or preferred zone) is reverted if the job does not start with it. Observed with Slurm
22.05 and default SchedulerParameters: before sbatch gets its answer, the controller has tried the new job against its
nodes once. If they are free, the job's reason is None, and it starts at the next scheduling pass, 0.4 to 2.2 s
later (slurm.conf(5), batch_sched_delay: 3 s); no update of the job advances that pass. If the nodes were taken
meanwhile, the reason is Resources or ReqNodeNotAvail; Priority if other jobs go first. So one check directly after
the submission is enough: a job that is pending for a reason loses its binding. A node list would wait for its nodes.
A preference costs a pass of the backfill scheduler, 24 to 30 s; without it the job starts after 1.8 s, like others.

A job with reason None can still lose its nodes before that pass. So a shell that outlives this process clears the
field after the pass; the controller rejects that for a running job, so no further check is needed.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from slurmdl import config, dl_options
from slurmdl.dl_options import DlOptions
from slurmdl.errors import (
    InputError,
    PlacementError,
    SlurmdlError,
    UnavailableError,
    UsageError,
    debug,
    internal_error_text,
    print_stderr,
    print_traceback,
    report_error,
    warn,
)
from slurmdl.launch import binding as bindings
from slurmdl.launch import submission_record
from slurmdl.launch.binding import Binding, PredictedStart
from slurmdl.launch.submission import SbatchCall, Submission, SubmitCommand, parse_submission
from slurmdl.slurm import process
from slurmdl.slurm.hostlist import expand_hostlist, fold_hostlist
from slurmdl.text import print_escaped

if TYPE_CHECKING:
    from slurmdl.cluster.load import ClusterQuery
    from slurmdl.launch.cluster_state import ClusterState

_START_PATTERN = re.compile(r"\bto start at (\S+) (?:a )?using \d+ processors on nodes (\S+)")
#: time limit of the check after the submission, and of the update
_CHECK_TIMEOUT_S = 1.0
#: the next scheduling pass is over by then: batch_sched_delay and a tick of the controller's clock
_SCHEDULER_PASS_S = 4.0


def run_sbatch(argv: Sequence[str]) -> int:
    """Run `slurmdl sbatch ARGV`; return the exit status unless this process became sbatch.

    Raises UsageError for an unknown --dl-* option or an invalid value, UnavailableError if sbatch is missing, and
    with --dl-strict SlurmdlError if no nodes can be chosen; then nothing is submitted.
    """
    call = SbatchCall.from_argv(argv, find_sbatch(os.environ), _read_stdin)
    if call.requests_help:
        if call.line.has_option("help"):
            print(f"usage: slurmdl sbatch [--dl-*] [sbatch options] script [args]\n\n{dl_options.help_text()}")
        process.exec_program([call.program, *argv], os.environ)
    attempt = SubmissionAttempt(call)
    try:
        attempt.read_submission()
        if attempt.decide_without_cluster():
            attempt.print_messages()
        else:
            # memory limits and crashes of libraries may end the process that decides; this one submits in any case
            attempt.receive(process.run_in_child(attempt.choose_nodes))
    except Exception as error:
        if attempt.options.strict or isinstance(error, UsageError):
            raise
        attempt.fall_back_to_unbound(error)
    if attempt.options.dry_run:
        attempt.end_dry_run()
    if attempt.output:
        print_escaped(attempt.output)
    return attempt.submit() if attempt.status is None else attempt.status


class SubmissionAttempt:
    """One submission and its state so far: a later failure keeps what earlier steps achieved.

    Attributes:
        plain_command: the user's arguments alone.
        recorded_command: also passes the submission record to the job; None until the submission is parsed.
        bound_command: also binds the job to the chosen nodes; None until nodes are chosen.
        options: the --dl-* options; those of the command line alone until the submission is parsed.
        submission: None until it is parsed.
        status, output: if nothing is to be submitted, after an error or a dry run; otherwise None and "".
    """

    def __init__(self, call: SbatchCall) -> None:
        self.call, line = call, call.line
        environ = {name: value for name, value in os.environ.items() if name != submission_record.ENV_VARIABLE}
        self.plain_command = SubmitCommand((call.program, *call.sbatch_args()), environ, stdin=call.stdin)
        self.recorded_command: SubmitCommand | None = None
        self.bound_command: SubmitCommand | None = None
        self.options = DlOptions(strict=line.has_option("dl-strict"), dry_run=line.has_option("dl-dry-run"))
        self.quiet, self.is_parsable = line.has_option("quiet"), line.has_option("parsable")
        self.submission: Submission | None = None
        self.binding = Binding()
        self.status: int | None = None
        self.output = ""
        self._query: ClusterQuery | None = None

    def read_submission(self) -> None:
        """Read the configuration, the script and the environment.

        Raises UsageError if an option of the user is wrong, InputError if the configuration is.
        """
        self.config, config_error = config.Config(), None
        try:
            self.config = config.load_config()
        except SlurmdlError as error:
            config_error = error
        submission = parse_submission(self.call, os.environ, self.config.options)
        self.options, self.quiet = submission.request.options, submission.quiet
        self.is_parsable = "parsable" in submission.settings
        self._set_submission(submission)
        if config_error:
            raise config_error

    def _set_submission(self, submission: Submission) -> None:
        self.recorded_command = Binding().submit_command(submission, os.environ)
        self.submission = submission

    def decide_without_cluster(self) -> bool:
        """Decide about a job on which the state of the cluster has no influence; return whether it is one.

        Raises PlacementError if no nodes can be chosen for any state of the cluster.
        """
        assert self.submission
        if self._may_know_bad_nodes:
            return False
        decided = bindings.decide_without_cluster(self.submission.request)
        self.binding = decided or self.binding
        return decided is not None

    @property
    def _may_know_bad_nodes(self) -> bool:
        return self.config.bad_nodes != config.BadNodesConfig() or os.path.exists(config.exclusions_file(os.environ))

    def choose_nodes(self, send: Callable[[dict[str, Any]], None]) -> None:
        """Choose nodes and print the messages, in another process; send each progress for `receive`."""
        def send_progress() -> None:
            send({"status": self.status, "output": self.output, "revert_field": self.binding.revert_field,
                  "recorded": _to_json(self.recorded_command), "bound": _to_json(self.bound_command)})

        try:
            if self._may_know_bad_nodes:
                self._exclude_bad_nodes()
                send_progress()
            self._choose_binding()
            self.print_messages()
        except Exception as error:
            if self.options.strict or isinstance(error, UsageError):
                self.status = report_error(error)
            else:
                self.fall_back_to_unbound(error)
        if self.options.dry_run:
            self.end_dry_run()
        send_progress()

    def receive(self, result: process.ChildResult) -> None:
        """Continue with what `choose_nodes` has sent. UnavailableError if its process failed."""
        if result.sent:
            self.status, self.output = result.sent["status"], result.sent["output"]
            self.bound_command, self.recorded_command = (
                command and SubmitCommand(tuple(command[0]), command[1], stdin=self.call.stdin)
                for command in (result.sent["bound"], result.sent["recorded"]))
            self.binding = Binding(revert_field=result.sent["revert_field"])
        if result.failure:
            raise UnavailableError(f"the choice of nodes {result.failure}")

    @property
    def commands(self) -> list[SubmitCommand]:
        """The commands that can submit the job, the preferred one first."""
        return [command for command in (self.bound_command, self.recorded_command, self.plain_command) if command]

    def _cluster_query(self) -> ClusterQuery:
        """The query of the cluster, started once: its answer arrives while this process imports modules."""
        from slurmdl.launch import cluster_state

        if self._query is None:
            # only `auto` has Slurm confirm that the nodes are free
            max_age_s = self.config.nodes_max_age if self.options.node_binding in ("auto", "off") else 0.0
            self._query = cluster_state.start_query(self.config, max_age_s)
        return self._query

    def _warn(self, message: str) -> None:
        if not self.quiet:
            warn(message)

    def _exclude_bad_nodes(self) -> None:
        """Exclude the nodes that the user's jobs or the site's checks found to be bad. A failure is a warning."""
        from slurmdl.health import exclusions, site_checks

        submission = self.submission
        assert submission
        try:
            remembered, warning = exclusions.load_active_exclusions(os.environ)
        except SlurmdlError as error:
            remembered, warning = {}, f"{error}; no remembered node is excluded"
        if warning:
            self._warn(warning)
        has_records = self.config.cluster_backend != "pyslurm"
        site_reasons = site_checks.load_site_reasons(
            self.config, self._warn, (lambda: self._cluster_query().answer[1]) if has_records else None)
        if not (remembered or site_reasons) or self.call.is_heterogeneous:
            return
        other_cluster = submission.settings.get("clusters") or submission.settings.get("cluster-constraint")

        def without(nodes: Sequence[str]) -> Submission:
            return replace(submission, request=replace(submission.request, exclude=tuple(nodes)),
                           extra_options=(f"--exclude={fold_hostlist(nodes)}",))

        def rejection_reason(nodes: Sequence[str]) -> str:
            start = predict_start(Binding().submit_command(without(nodes), os.environ))
            return start.failure if start.is_rejected else ""

        try:
            query = self._cluster_query()
            cluster = query.answer[0]
            query.keep()
            if other_cluster and other_cluster != cluster.name:
                return  # its nodes may have the same names
            excluded, messages = exclusions.choose_exclusions(submission.request, remembered, site_reasons, cluster,
                                                              rejection_reason)
        except SlurmdlError as error:
            self._warn(f"{error}; no bad node is excluded")
            return
        for message in messages:
            self._warn(message)
        if excluded:
            self._set_submission(without(excluded))

    def _choose_binding(self) -> None:
        """Choose nodes, and how strictly they bind. SlurmdlError if no nodes can be chosen."""
        submission = self.submission
        assert submission
        if decided := bindings.decide_without_cluster(submission.request):
            self.binding = decided
            return
        if not self.options.dry_run:
            # concurrent submitters see the same cluster; different seeds make them choose different equal nodes
            seed = 1 + (time.time_ns() ^ os.getpid()) % 2**32
            submission = replace(submission, request=replace(submission.request, seed=seed))
        state, binding = self._decide_with_cluster(submission)
        if binding.is_outdated:
            debug("Slurm is queried again: %s", binding.reason)
            self._query = None
            state, binding = self._decide_with_cluster(submission)
        if binding.reason and self.options.strict:
            raise PlacementError(binding.reason)
        if self.options.explain and binding.placement is not None:
            from slurmdl.placement.explain import explain_placement

            text = explain_placement(binding.placement, state.topology, state.cluster, state.scores, self.options)
            age = f"\nnote       {state.age_text} (nodes_max_age of slurmdl.yaml)" if state.age_text else ""
            binding = replace(binding, explanation=text + age)
        self.bound_command = binding.submit_command(submission, os.environ)
        self.binding = binding
        if not (self.quiet or self.options.dry_run):
            _warn_of_missing_features(submission, binding, state)

    def _decide_with_cluster(self, submission: Submission) -> tuple[ClusterState, Binding]:
        query = self._cluster_query()
        from slurmdl.launch import cluster_state

        state = cluster_state.load_cluster_state(self.config, self.options.link_scores, submission.request.partitions,
                                                 self._warn, self.options.strict, query)
        binding = decide_with_slurm(submission, state)
        # a job that starts changes the state of the nodes
        if binding.is_outdated or (binding.placement and binding.placement.free_now):
            query.forget()
        elif binding.placement:
            query.keep()
        return state, binding

    def fall_back_to_unbound(self, error: Exception) -> None:
        """Drop the binding because of an error, and print the reason."""
        self.bound_command = None
        reason = str(error)
        if not isinstance(error, SlurmdlError):
            print_traceback(error)
            reason = f"{internal_error_text(error)} (SLURMDL_DEBUG=1 shows where)"
        failed = bool(self.options.zone) or not isinstance(error, PlacementError)
        self.binding = Binding(reason=bindings.zone_not_applied_reason(self.options, reason), failed=failed)
        self.print_messages()

    def print_messages(self) -> None:
        """Print the decision and warnings on stderr; nothing with -Q."""
        debug("decision: %s", self.binding.summary(self.options))
        if self.quiet:
            return
        if self.options.explain and self.binding.explanation:
            print_stderr(self.binding.explanation)
        if self.options.explain or self.binding.reason:
            warn(self.binding.summary(self.options))
        misplaced = dl_options.misplaced_option_warning(self.call.line.operands, "script")
        if misplaced:
            warn(misplaced)
        if self.submission and self.submission.uses_slurmdl_srun is False:
            warn("the script has no `slurmdl srun`, so its ranks will not be mapped")
        if self.submission and (problem := self.submission.missing_program_warning()):
            warn(problem)

    def end_dry_run(self) -> None:
        """Nothing is submitted: set the output, unless there is an error or already an output."""
        if self.status is None:
            self.status = 0
            self.output = format_dry_run(self.submission, self.binding, self.commands[0])

    def submit(self) -> int:
        """Submit by the first command that can be run: the added arguments may exceed the kernel's limit.

        Raises UnavailableError if sbatch cannot be run; with --dl-strict, if not with the added arguments.
        """
        commands = self.commands
        while True:
            command = commands.pop(0)
            is_bound = command is self.bound_command
            try:
                if is_bound and self.binding.revert_field:
                    return process.run_passthrough(command.argv, command.env, command.stdin, self._on_output_line)
                # SIGPIPE stays ignored: munged closes a connection that is silent for 2 s, as under heavy load, and
                # sbatch then tries again; by the default action it would end without a message. Jobs get the default.
                process.exec_program(command.argv, command.env, command.stdin, restore_signals=False)
            except UnavailableError as error:
                if not commands or self.options.strict:
                    raise
                reason = bindings.zone_not_applied_reason(self.options, str(error))
                self._warn(f"submitted as written: {reason}" if is_bound else
                           f"the job does not receive its --dl-* options: {error}")

    def _on_output_line(self, line: bytes) -> bool:
        """Whether a line of sbatch's stdout has the job ID; if so, revert the binding unless the job starts."""
        from slurmdl.slurm import jobs

        job_id = jobs.parse_job_id(line, self.is_parsable)
        if job_id:
            try:
                revert_unless_started(job_id, self.binding.revert_field)
            except Exception as error:  # the job is submitted: the exit status must be sbatch's
                warn(f"job {job_id} keeps its choice of nodes: {type(error).__name__}: {error}")
        return bool(job_id)


def decide_with_slurm(submission: Submission, state: ClusterState) -> Binding:
    """Decide as `binding.decide_binding`, with the environment of this process and the traffic of the job.

    Slurm is queried with `sbatch --test-only` if the call has a program.
    """
    def predict_with(options: Sequence[str]) -> PredictedStart:
        if not submission.call.program:
            return PredictedStart(failure="Slurm is not queried")
        start = predict_start(Binding(tuple(options)).submit_command(submission, os.environ))
        debug("prediction with %s: %s", " ".join(options) or "no binding", start)
        return start

    traffic = submission.request.options.traffic
    if submission.request.options.comm_pattern:
        from slurmdl.launch.traffic_file import load_traffic

        traffic = load_traffic(submission.request.options)
    return bindings.decide_binding(submission, state, traffic, inside_job="SLURM_JOB_ID" in os.environ,
                                   predict_start=predict_with)


def predict_start(command: SubmitCommand) -> PredictedStart:
    """Query Slurm with `sbatch --test-only` about the job that a command submits."""
    program, *args = command.argv
    try:
        result = process.run_command([program, "--test-only", *args], env=command.env,
                                     stdin=(command.stdin or b"").decode(errors="replace"))
    except UnavailableError as error:
        return PredictedStart(failure=str(error))
    start = parse_test_only(result.stderr)
    if start is None:
        return PredictedStart(failure=f"{bindings.REJECTED}: {result.first_error or 'no message'}")
    start_time, nodes = start
    return PredictedStart(tuple(nodes), max(0.0, start_time - time.time()))


def parse_test_only(text: str) -> tuple[float, list[str]] | None:
    """The start (seconds since the epoch) and nodes in the stderr of `sbatch --test-only`; None if there is none."""
    match = _START_PATTERN.search(text)
    try:
        return (time.mktime(time.strptime(match[1], "%Y-%m-%dT%H:%M:%S")),
                expand_hostlist(match[2])) if match else None
    except (ValueError, OverflowError, InputError):
        return None


def revert_unless_started(job_id: str, field: str) -> None:
    """Clear a field of a submitted job unless the job starts at once.

    `field` is a key of `scontrol update`: ReqNodeList or Prefer.
    """
    from slurmdl.slurm import jobs

    update = ["scontrol", "update", f"JobId={job_id}", f"{field}="]
    try:
        states = jobs.query_states(job_id, timeout=_CHECK_TIMEOUT_S)
        debug("job %s: state and reason %s", job_id, states)
        if ("PENDING", "None") in states:
            process.run_detached_after(update, _SCHEDULER_PASS_S)
        elif all(state == "PENDING" for state, _ in states):
            process.run_command(update, timeout=_CHECK_TIMEOUT_S)
    except UnavailableError as error:
        process.run_detached_after(update, _SCHEDULER_PASS_S)
        warn(f"job {job_id} keeps its choice of nodes for {_SCHEDULER_PASS_S:g} s: {error}")


def _warn_of_missing_features(submission: Submission, binding: Binding, state: ClusterState) -> None:
    """Say once per user and cluster that jobs which may be requeued get no nodes, because no feature names a zone."""
    from slurmdl.launch.zone_options import exact_zone_features, leaf_zones

    request, placement = submission.request, binding.placement
    if request.options.node_binding != "auto" or not request.requeue or not (placement and placement.nodes):
        return
    if len(leaf_zones(state.topology)) < 2 or exact_zone_features(state, placement.nodes_per_zone):
        return
    from slurmdl.health import exclusions

    mark = exclusions.cluster_mark_path("zone-features", state.cluster.name, os.environ)
    if os.path.exists(mark):
        return
    warn("no node feature identifies a zone of this cluster: nodes can be chosen only with --no-requeue (by default "
         "jobs may be requeued), or when the administrator adds the features that `slurmdl topology features` "
         "prints; this is said once")
    with suppress(OSError):  # then the next submission says it again
        exclusions.write_mark(mark)


def _to_json(command: SubmitCommand | None) -> object:
    return command and [command.argv, dict(command.env)]


def _read_stdin() -> bytes | None:
    """The content of standard input; None if it cannot be read (closed, a directory), which sbatch reports."""
    try:
        return sys.stdin.buffer.read() if sys.stdin is not None else None
    except OSError:
        return None


def format_dry_run(submission: Submission | None, binding: Binding, command: SubmitCommand) -> str:
    """The output of a dry run: the command line, the changes of the environment, and the decision."""
    import shlex

    lines = [f"command: {shlex.join(command.argv)}"]
    if submission:
        record = command.env[submission_record.ENV_VARIABLE]
        added = {submission_record.ENV_VARIABLE: record, **submission.plugin_environ}
        lines += [f"environment: {name}={shlex.quote(value)}" for name, value in added.items()]
    lines += [f"environment: without {name}" for name in command.removed_variables]
    if command.stdin is not None:
        lines.append(f"standard input: the script, {len(command.stdin)} bytes")
    lines.append(f"decision: {binding.summary(submission.request.options if submission else DlOptions())}")
    if binding.placement and binding.placement.nodes:
        lines.append(f"nodes: {' '.join(binding.placement.nodes)}")
    return "\n".join(lines)


def find_sbatch(environ: Mapping[str, str]) -> str:
    """Find Slurm's sbatch on PATH, skipping this program under the same name.

    Raises UnavailableError if sbatch is missing, or the one on PATH has called this program.
    """
    bin_dir = os.path.dirname(os.path.realpath(sys.argv[0]))
    own_paths = {os.path.realpath(sys.argv[0]), os.path.join(bin_dir, "dlsbatch"), os.path.join(bin_dir, "slurmdl")}
    if submission_record.is_recursive_call(environ):
        raise UnavailableError("sbatch: the sbatch on PATH calls slurmdl, which calls it again; "
                               "put Slurm's own before it on PATH")
    for directory in environ.get("PATH", os.defpath).split(os.pathsep):
        path = os.path.join(directory or ".", "sbatch")
        if os.path.isfile(path) and os.access(path, os.X_OK) and os.path.realpath(path) not in own_paths:
            return path
    raise UnavailableError("sbatch: not found on PATH; install Slurm's client commands")
