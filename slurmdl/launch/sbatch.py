"""`slurmdl sbatch`: decide how a job is bound to nodes, and submit it by sbatch.

The result is never worse than plain sbatch: if no nodes can be chosen, the job is submitted as written, and one line
on stderr says why.
"""

from __future__ import annotations

import functools
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from slurmdl import config, dl_options, records
from slurmdl.dl_options import DlOptions
from slurmdl.errors import (
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
from slurmdl.launch import binding, submission, submission_record
from slurmdl.launch.binding import Decision
from slurmdl.launch.submission import ParsedArgv, Submission, SubmitCommand, build_submit_command
from slurmdl.launch.zone_preference import exact_zone_features, leaf_zones
from slurmdl.slurm import getopt, process
from slurmdl.slurm.hostlist import fold_hostlist
from slurmdl.text import pluralize, print_escaped
from slurmdl.units import format_coarse_duration

if TYPE_CHECKING:
    from slurmdl.cluster.load import ClusterQuery
    from slurmdl.cluster.snapshot import ClusterSnapshot
    from slurmdl.health.exclusions import Exclusion
    from slurmdl.launch.cluster_state import ClusterState


def run_sbatch(argv: Sequence[str]) -> int:
    """Run `slurmdl sbatch ARGV`; return the exit status unless this process became sbatch.

    Raises UsageError for an unknown --dl-* option or an invalid value, UnavailableError if sbatch is missing, and
    with --dl-strict SlurmdlError if no nodes can be chosen; then nothing is submitted.
    """
    program = find_sbatch(os.environ)
    parsed_argv = ParsedArgv.from_argv(argv, partial(getopt.plugin_options, program))
    if parsed_argv.requests_help:
        if parsed_argv.command_line.has_option("help"):
            print(f"usage: slurmdl sbatch [--dl-*] [sbatch options] script [args]\n\n{dl_options.help_text()}")
        process.exec_program([program, *argv], os.environ)
    attempt = SubmissionAttempt(program, parsed_argv, _read_stdin() if parsed_argv.reads_stdin else None)
    # memory limits and crashes of libraries may end the process that decides; this one submits whatever happens
    try:
        attempt.receive(process.run_in_child(attempt.decide))
    except Exception as error:
        if attempt.dl.strict:
            raise
        attempt.fall_back_to_unbound(error)
    if attempt.dl.dry_run and attempt.status is None:
        attempt.status, attempt.output = 0, format_dry_run(None, attempt.decision, attempt.plain_command)
    if attempt.output:
        print_escaped(attempt.output)
    return attempt.submit() if attempt.status is None else attempt.status


class SubmissionAttempt:
    """One submission and its state so far: a later failure keeps what earlier steps achieved.

    Attributes:
        plain_command: the user's arguments alone.
        recorded_command: also passes the submission record to the job; None until the submission is parsed.
        bound_command: also binds the job to the chosen nodes; None until nodes are chosen.
        dl: the --dl-* options; those of the command line alone until the submission is parsed.
        job: the parsed submission, or None.
        status, output: if nothing is to be submitted, after an error or a dry run; otherwise None and "".
    """

    def __init__(self, program: str, parsed_argv: ParsedArgv, stdin: bytes | None) -> None:
        self.program, self.parsed_argv, self.stdin = program, parsed_argv, stdin
        environ = {name: value for name, value in os.environ.items() if name != submission_record.ENV_VARIABLE}
        self.plain_command = SubmitCommand((program, *parsed_argv.sbatch_args()[0]), environ, stdin=stdin)
        self.recorded_command: SubmitCommand | None = None
        self.bound_command: SubmitCommand | None = None
        line = parsed_argv.command_line
        self.dl = DlOptions(strict=line.has_option("dl-strict"), dry_run=line.has_option("dl-dry-run"))
        self.quiet = line.has_option("quiet")
        self.is_parsable = line.has_option("parsable")
        self.job: Submission | None = None
        self.decision = Decision()
        self.status: int | None = None
        self.output = ""
        self._on_progress: Callable[[], None] = lambda: None

    def decide(self, send: Callable[[dict[str, Any]], None]) -> None:
        """Decide how to submit, print the messages, and send each progress for `receive`."""
        def send_progress() -> None:
            send({"status": self.status, "output": self.output, "options": records.to_json(self.dl),
                  "quiet": self.quiet, "is_parsable": self.is_parsable, "bound": _to_json(self.bound_command),
                  "recorded": _to_json(self.recorded_command), "revert_field": self.decision.revert_field})

        self._on_progress = send_progress
        try:
            self.choose_binding()
            self.print_messages()
        except Exception as error:
            if self.dl.strict or isinstance(error, UsageError):
                self.status = report_error(error)
            else:
                self.fall_back_to_unbound(error)
        if self.dl.dry_run and self.status is None:
            self.status, self.output = 0, format_dry_run(self.job, self.decision, self.commands[0])
        send_progress()

    def receive(self, result: process.ChildResult) -> None:
        """Continue with what `decide` has sent from another process. UnavailableError if that process failed."""
        if result.sent:
            self.status, self.output = result.sent["status"], result.sent["output"]
            self.dl = records.from_json(DlOptions, result.sent["options"])
            self.quiet, self.is_parsable = result.sent["quiet"], result.sent["is_parsable"]
            self.bound_command, self.recorded_command = (
                command and SubmitCommand(tuple(command[0]), command[1], stdin=self.stdin)
                for command in (result.sent["bound"], result.sent["recorded"]))
            self.decision = Decision(revert_field=result.sent["revert_field"])
        if result.failure:
            raise UnavailableError(f"the choice of nodes {result.failure}")

    @property
    def commands(self) -> list[SubmitCommand]:
        """The commands that can submit the job, the preferred one first."""
        return [command for command in (self.bound_command, self.recorded_command, self.plain_command) if command]

    def choose_binding(self) -> None:
        """Read the submission and the configuration, and choose nodes.

        Raises UsageError if an option of the user is wrong, SlurmdlError if no nodes can be chosen.
        """
        site_config, config_error = config.Config(), None
        try:
            site_config = config.load_config()
        except SlurmdlError as error:
            config_error = error
        job = submission.parse_submission(self.parsed_argv.argv, os.environ, stdin=self.stdin,
                                          has_plugin=partial(_sbatch_has_plugin, self.program),
                                          plugin_options=partial(getopt.plugin_options, self.program),
                                          defaults=site_config.options)
        self._update_job(job)
        if config_error:
            raise config_error
        on_warning: Callable[[str], None] = (lambda _: None) if self.quiet else warn
        # only `auto` has Slurm confirm that the nodes are free
        max_age_s = site_config.nodes_max_age if self.dl.node_binding in ("auto", "off") else 0.0

        @functools.cache
        def get_query() -> ClusterQuery:
            from slurmdl.launch import cluster_state

            return cluster_state.start_query(site_config, max_age_s)

        job = self._leave_out_bad_nodes(job, site_config, get_query, on_warning)
        if decision := binding.decide_without_cluster(job):
            self.decision = decision
            return
        if not job.request.dl.dry_run:
            # concurrent submitters see the same cluster; different seeds make them choose different equal nodes
            seed = 1 + (time.time_ns() ^ os.getpid()) % 2**32
            job = replace(job, request=replace(job.request, seed=seed))
        state, decision = self._decide_with_cluster(job, site_config, get_query(), on_warning)
        if decision.is_outdated:
            debug("Slurm is queried again: %s", decision.reason)
            get_query.cache_clear()
            state, decision = self._decide_with_cluster(job, site_config, get_query(), on_warning)
        if decision.reason and self.dl.strict:
            raise PlacementError(decision.reason)
        if self.dl.explain and decision.placement is not None:
            from slurmdl.placement.explain import explain_placement

            text = explain_placement(decision.placement, state.topology, state.cluster, state.scores, self.dl)
            age = f"\nnote       {state.age_text} (nodes_max_age of slurmdl.yaml)" if state.age_text else ""
            decision = replace(decision, explanation=text + age)
        self.bound_command = decision.submit_command(self.program, job, os.environ)
        self.decision = decision
        if not (self.quiet or self.dl.dry_run):
            _warn_of_missing_features(job, decision, state)

    def _decide_with_cluster(self, job: Submission, site_config: config.Config, query: ClusterQuery,
                             on_warning: Callable[[str], None]) -> tuple[ClusterState, Decision]:
        from slurmdl.launch import cluster_state

        state = cluster_state.load_cluster_state(site_config, self.dl.link_scores, job.request.partitions, on_warning,
                                                 self.dl.strict, query)
        decision = decide_with_slurm(job, state, self.program)
        # a job that starts changes the state of the nodes
        if decision.is_outdated or (decision.placement and decision.placement.free_now):
            query.forget()
        elif decision.placement:
            query.keep()
        return state, decision

    def _leave_out_bad_nodes(self, job: Submission, site_config: config.Config, get_query: Callable[[], ClusterQuery],
                             on_warning: Callable[[str], None]) -> Submission:
        """Exclude the nodes that the user's jobs or the site's checks found to be bad. A failure is a warning."""
        from slurmdl.health import exclusions, site_checks

        try:
            remembered, warning = exclusions.load_active_exclusions(os.environ)
        except SlurmdlError as error:
            remembered, warning = {}, f"{error}; no remembered node is excluded"
        if warning:
            on_warning(warning)
        site_reasons = site_checks.load_site_reasons(site_config, on_warning)
        if not (remembered or site_reasons) or self.parsed_argv.is_heterogeneous:
            return job
        from slurmdl.launch import job_start

        other_cluster = job.settings.get("clusters") or job.settings.get("cluster-constraint")

        def rejection_reason(restricted: Submission) -> str:
            command = build_submit_command(self.program, restricted, os.environ)
            reason = job_start.predict_start(command).failure
            return reason if reason.startswith(job_start.REJECTED) else ""

        try:
            cluster = get_query().answer[0]
            get_query().keep()
            if other_cluster and other_cluster != cluster.name:
                return job  # its nodes may have the same names
            job, messages = leave_out_nodes(job, remembered, site_reasons, cluster, rejection_reason)
        except SlurmdlError as error:
            on_warning(f"{error}; no bad node is excluded")
            return job
        for message in messages:
            on_warning(message)
        self._update_job(job)
        return job

    def _update_job(self, job: Submission) -> None:
        self.job, self.dl, self.quiet = job, job.request.dl, job.quiet
        self.is_parsable = "parsable" in job.settings
        self.recorded_command = build_submit_command(self.program, job, os.environ)
        self._on_progress()

    def fall_back_to_unbound(self, error: Exception) -> None:
        """Drop the binding because of an error, and print the reason."""
        self.bound_command = None
        reason = str(error)
        if not isinstance(error, SlurmdlError):
            print_traceback(error)
            reason = f"{internal_error_text(error)} (SLURMDL_DEBUG=1 shows where)"
        failed = bool(self.dl.zone) or not isinstance(error, PlacementError)
        self.decision = Decision(reason=binding.zone_not_applied_reason(self.dl, reason), failed=failed)
        self.print_messages()

    def print_messages(self) -> None:
        """Print the decision and warnings on stderr; nothing with -Q."""
        debug("decision: %s", self.decision.summary(self.dl))
        if self.quiet:
            return
        if self.dl.explain and self.decision.explanation:
            print_stderr(self.decision.explanation)
        if self.dl.explain or self.decision.reason:
            warn(self.decision.summary(self.dl))
        misplaced = dl_options.misplaced_option_warning(self.parsed_argv.command_line.operands, "script")
        if misplaced:
            warn(misplaced)
        if self.job and self.job.maps_ranks is False:
            warn("the script has no `slurmdl srun`, so its ranks will not be mapped")
        if self.job and (problem := self.job.missing_program_warning(_own_program())):
            warn(problem)

    def submit(self) -> int:
        """Submit by the first command that can be run: the added arguments may exceed the kernel's limit.

        Raises UnavailableError if sbatch cannot be run; with --dl-strict, if not with the added arguments.
        """
        commands = self.commands
        while True:
            command = commands.pop(0)
            is_bound = command is self.bound_command
            try:
                if is_bound and self.decision.revert_field:
                    return process.run_passthrough(command.argv, command.env, command.stdin, self._on_output_line)
                # SIGPIPE stays ignored: munged closes a connection that is silent for 2 s, as under heavy load, and
                # sbatch then tries again; by the default action it would end without a message. Jobs get the default.
                process.exec_program(command.argv, command.env, command.stdin, restore_signals=False)
            except UnavailableError as error:
                if not commands or self.dl.strict:
                    raise
                if not self.quiet:
                    warn(f"submitted as written: {binding.zone_not_applied_reason(self.dl, str(error))}" if is_bound
                         else f"the job does not receive its --dl-* options: {error}")

    def _on_output_line(self, line: bytes) -> bool:
        """Whether a line of sbatch's stdout has the job ID; if so, revert the binding unless the job starts."""
        from slurmdl.launch import job_start
        from slurmdl.slurm import jobs

        job_id = jobs.parse_job_id(line, self.is_parsable)
        if job_id:
            try:
                job_start.revert_unless_started(job_id, self.decision.revert_field)
            except Exception as error:  # the job is submitted: the exit status must be sbatch's
                warn(f"job {job_id} keeps its choice of nodes: {type(error).__name__}: {error}")
        return bool(job_id)


def leave_out_nodes(job: Submission, remembered: Mapping[str, Exclusion], site_reasons: Mapping[str, str],
                    cluster: ClusterSnapshot,
                    rejection_reason: Callable[[Submission], str]) -> tuple[Submission, Sequence[str]]:
    """Exclude nodes from a submission; return it, and messages for the user.

    Nodes that the user requires stay, as do those beyond the cap of `limit_exclusions`. If the job could not run
    without the nodes, none is excluded.

    Args:
        remembered: exclusions of the user, the newest entry first.
        site_reasons: node -> verdict of the site.
        rejection_reason: why Slurm would reject a submission, or "".
    """
    from slurmdl.health import exclusions
    from slurmdl.placement.eligibility import candidate_partitions, is_in_service

    request = job.request
    partitions = set(candidate_partitions(request, cluster))
    candidates = {node.name: node for node in cluster.nodes
                  if partitions & set(node.partitions) and node.name not in {*request.nodelist, *request.exclude}}
    nodes, beyond_cap = exclusions.limit_exclusions({**site_reasons, **remembered}, candidates)
    messages = []
    if beyond_cap:
        messages.append(f"{fold_hostlist(beyond_cap)} may be used, though bad: at most "
                        f"{exclusions.MAX_PARTITION_SHARE:.0%} of the partition's nodes are left out")
    if not nodes:
        return job, messages
    restricted = _with_excluded(job, nodes)
    min_nodes = (request.nodes or (1, None))[0]
    remaining = sum(is_in_service(node) for name, node in candidates.items() if name not in nodes)
    reason = f"it needs {pluralize(min_nodes, 'node')}, and {remaining} others are in service" \
        if remaining < min_nodes else rejection_reason(restricted)
    if reason:
        return job, [*messages, f"{fold_hostlist(nodes)} may be used, though bad: {reason}"]
    shown = "; ".join(f"{node} ({site_reasons[node]})" if node in site_reasons else _remembered_text(remembered[node])
                      for node in nodes)
    hint = "" if set(nodes) <= set(site_reasons) else "; `slurmdl preflight --forget NODES` ends that"
    return restricted, [*messages, f"left out: {shown}{hint}"]


def _remembered_text(entry: Exclusion) -> str:
    return f"{entry.node} ({entry.reason}, {format_coarse_duration(time.time() - entry.time)} ago)"


def _with_excluded(job: Submission, nodes: Sequence[str]) -> Submission:
    exclude = tuple(dict.fromkeys([*job.request.exclude, *nodes]))
    return replace(job, request=replace(job.request, exclude=exclude),
                   extra_options=(f"--exclude={fold_hostlist(exclude)}",))


def decide_with_slurm(job: Submission, state: ClusterState, program: str = "") -> Decision:
    """Decide as `binding.decide_binding`, with the environment of this process and the traffic matrices of the job.

    `program` is sbatch for `--test-only`; "" if Slurm cannot be queried.
    """
    from slurmdl.launch import job_start, traffic_file

    def predict_start(decision: Decision) -> job_start.PredictedStart:
        if not program:
            return job_start.PredictedStart(failure="Slurm is not queried")
        start = job_start.predict_start(decision.submit_command(program, job, os.environ))
        debug("prediction with %s: %s", " ".join(decision.binding_options) or "no binding", start)
        return start

    return binding.decide_binding(job, state, traffic_file.load_traffic_matrices(job.request.dl),
                                  inside_job="SLURM_JOB_ID" in os.environ,
                                  predict_start=predict_start)


def _warn_of_missing_features(job: Submission, decision: Decision, state: ClusterState) -> None:
    """Say once per user and cluster that jobs which may be requeued get no nodes, because no feature names a zone."""
    placement = decision.placement
    if job.request.dl.node_binding != "auto" or not job.request.requeue or not (placement and placement.nodes):
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


def _sbatch_has_plugin(program: str) -> bool:
    """Whether sbatch has the plugin's options; True if unknown, so that sbatch itself rejects them."""
    try:
        return "--dl-" in process.check_output([program, "--help"])
    except UnavailableError:
        return True


def format_dry_run(job: Submission | None, decision: Decision, command: SubmitCommand) -> str:
    """The output of a dry run: the command line, the changes of the environment, and the decision."""
    lines = [f"command: {shlex.join(command.argv)}"]
    if job:
        added = {submission_record.ENV_VARIABLE: command.env[submission_record.ENV_VARIABLE], **job.plugin_environ}
        lines += [f"environment: {name}={shlex.quote(value)}" for name, value in added.items()]
    lines += [f"environment: without {name}" for name in command.removed_variables]
    if command.stdin is not None:
        lines.append(f"standard input: the script, {len(command.stdin)} bytes")
    lines.append(f"decision: {decision.summary(job.request.dl if job else DlOptions())}")
    if decision.placement and decision.placement.nodes:
        lines.append(f"nodes: {' '.join(decision.placement.nodes)}")
    return "\n".join(lines)


def _own_program() -> str:
    """Absolute path of slurmdl for scripts of jobs."""
    import shutil

    return os.path.abspath(shutil.which("slurmdl") or os.path.join(os.path.dirname(sys.argv[0]), "slurmdl"))


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
